//go:build !nokafka

package main

import "github.com/dlqd/dlqd/internal/kafka"

// openSources connects to the clusters of sources.
var openSources = kafka.Open
