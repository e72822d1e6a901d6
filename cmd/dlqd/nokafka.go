//go:build nokafka

// The build tag nokafka leaves out Kafka. In a release, the program dlqd is built with this tag, and dlqd-full without
// it.

package main

import (
	"errors"

	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/source"
)

var errNoKafka = errors.New("sources.yaml: this program has no Kafka: use dlqd-full of the same release")

// openSources says which program can connect to the clusters of sources.
func openSources(*policy.Policy) (source.Broker, error) { return nil, errNoKafka }

// checkSources returns an error if the policy has sources. A process that works their queues and cannot publish
// would fail each redelivery.
func checkSources(p *policy.Policy) error {
	if len(p.Sources.Sources) == 0 {
		return nil
	}
	return errNoKafka
}
