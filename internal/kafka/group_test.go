package kafka

import (
	"testing"

	"github.com/twmb/franz-go/pkg/kadm"
)

// A member that loses a partition may have stored records whose offset it has not committed. The next member commits
// the position when it begins, even if no further record arrives.
func TestReader_WritesThePositionWhereItBegins(t *testing.T) {
	t.Parallel()
	b := setupTopics(t, 1, "dlq.a")
	producer := b.producer(t)
	produce(t, producer, numbered("dlq.a", 0, 0, 10)...)
	b.ledger.positions[b.partition(t, "dlq.a", 0)] = 10
	b.read(t)
	offsets := kadm.NewClient(producer)
	eventually(t, func() bool {
		committed, err := offsets.FetchOffsets(t.Context(), "dlqd")
		if err != nil { // the reader has not created the group yet
			return false
		}
		offset, ok := committed.Lookup("dlq.a", 0)
		return ok && offset.At == 10
	}, "the group does not have the position")
}
