package console

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/policy"
)

func TestRecordCopies_AreQuoted(t *testing.T) {
	t.Parallel()
	p := &policy.Policy{Sources: policy.Sources{Clusters: map[string]*policy.Cluster{
		"main": {Brokers: []string{"a:9092", "$(id):1"}},
	}}}
	got := recordCopies(p, &deadletter.Record{Cluster: "main", Topic: "dlt'; rm -rf /", Partition: 3, Offset: 812})
	require.Equal(t, []copyText{
		{"kcat", `kcat -C -b 'a:9092,$(id):1' -t 'dlt'\''; rm -rf /' -p 3 -o 812 -c 1`},
		{"Kafka", `kafka-console-consumer.sh --bootstrap-server 'a:9092,$(id):1' --topic 'dlt'\''; rm -rf /' ` +
			`--partition 3 --offset 812 --max-messages 1`},
	}, got)
	require.Contains(t, recordCopies(p, &deadletter.Record{Cluster: "gone", Topic: "dlt"})[0].Text, `-b "$BROKERS"`)
	require.Nil(t, recordCopies(p, nil))
}
