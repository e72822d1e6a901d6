//go:build nokafka

// The build tag nokafka leaves Kafka out. A release builds the program dlqd with this tag, and dlqd-full without it.

package main

import "github.com/dlqd/dlqd/internal/source"

// openSources is nil, so processes refuse a policy with sources.
var openSources source.Open
