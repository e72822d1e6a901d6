//go:build nokafka

// The build tag nokafka leaves out Kafka. In a release, the program dlqd is built with this tag, and dlqd-full without
// it.

package main

import "github.com/dlqd/dlqd/internal/source"

// openSources is nil, so that processes refuse a policy with sources.
var openSources source.Open
