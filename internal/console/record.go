package console

import (
	"fmt"
	"strings"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/policy"
)

// recordCopies returns commands of common tools that read a record from its topic.
func recordCopies(p *policy.Policy, r *deadletter.Record) []copyText {
	if r == nil {
		return nil
	}
	brokers := `"$BROKERS"` // for a cluster that the policy no longer has
	if c := p.Sources.Clusters[r.Cluster]; c != nil {
		brokers = shellQuoted(strings.Join(c.Brokers, ","))
	}
	topic := shellQuoted(r.Topic)
	return []copyText{
		{"kcat", fmt.Sprintf("kcat -C -b %s -t %s -p %d -o %d -c 1", brokers, topic, r.Partition, r.Offset)},
		{"Kafka", fmt.Sprintf("kafka-console-consumer.sh --bootstrap-server %s --topic %s --partition %d --offset %d "+
			"--max-messages 1", brokers, topic, r.Partition, r.Offset)},
	}
}
