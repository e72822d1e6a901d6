//go:build !nokafka

package main

import (
	"github.com/dlqd/dlqd/internal/kafka"
	"github.com/dlqd/dlqd/internal/source"
)

// openSources connects to the Kafka clusters of sources.
var openSources source.Open = kafka.Open
