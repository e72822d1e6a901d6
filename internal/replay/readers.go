package replay

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/replay/internal/dbsqlc"
)

// Readers has the consumer groups that read a topic to which a run would publish records.
type Readers struct {
	Cluster string   `json:"cluster" doc:"Name of the cluster in the policy."`
	Topic   string   `json:"topic" doc:"The topic that records would be published to; empty if it is not known."`
	Failed  []string `json:"failed" doc:"Consumer groups in which the records failed; empty if they are not known."`
	Groups  []string `json:"groups" doc:"Consumer groups of the topic, at least these: those with a member, or with an offset that the broker has not forgotten (by default, it forgets those of a group without members after 7 days)."`
	Problem string   `json:"problem,omitempty" doc:"Why the consumer groups are not known."`
	Refusal string   `json:"refusal,omitempty" doc:"Why the replay is refused without otherGroups; absent if it is not."`
}

// Text describes the readers of a topic in one sentence.
func (r *Readers) Text() string {
	failed := "it is not known which one failed"
	if len(r.Failed) > 0 {
		failed = strings.Join(r.Failed, ", ") + " failed"
	}
	switch {
	case r.Topic == "":
		return fmt.Sprintf("the topics of the records are not known (%s)", r.Problem)
	case r.Problem != "":
		return fmt.Sprintf("topic %s: its consumer groups are not known (%s)", r.Topic, r.Problem)
	case len(r.Groups) == 0:
		return fmt.Sprintf("topic %s: no consumer group reads it; %s", r.Topic, failed)
	}
	return fmt.Sprintf("topic %s: at least these consumer groups read it: %s; %s", r.Topic, strings.Join(r.Groups, ", "),
		failed)
}

// judge sets Refusal if other consumer groups read the topic, or may. It allows a retry topic: the policy names this
// topic for the consumers that failed.
func (r *Readers) judge(retryTopic bool) {
	all := slices.Concat(r.Groups, r.Failed)
	slices.Sort(all)
	if !retryTopic && (r.Problem != "" || len(slices.Compact(all)) > 1) {
		r.Refusal = r.Text()
	}
}

const (
	// originsTime limits the query for the origins of a filter's entries.
	originsTime = 10 * time.Second
	// maxOrigins is the limit of dlq.record_origins.
	maxOrigins = 1000
)

// readersOf returns the readers of each topic to which a run would publish the records of a filter's entries. It
// returns nil if the policy has no sources. If looking up the entries' topics takes longer than originsTime, or finds
// maxOrigins, it returns one element, whose Problem says so.
func (r *Replayer) readersOf(ctx context.Context, filter json.RawMessage, queue, destination string) (
	[]Readers, error,
) {
	if len(r.Planner().Policy().Sources.Sources) == 0 {
		return nil, nil
	}
	unknown := func(problem string) []Readers {
		of := Readers{Failed: []string{}, Groups: []string{}, Problem: problem}
		of.judge(false)
		return []Readers{of}
	}
	var origins []dbsqlc.RecordOriginsRow
	err := inTx(ctx, r.Store, func(tx transaction) error {
		if err := tx.LimitStatements(ctx, strconv.FormatInt(originsTime.Milliseconds(), 10)); err != nil {
			return err
		}
		var err error
		origins, err = tx.RecordOrigins(ctx, filter)
		return err
	})
	switch {
	case err != nil && postgres.IsCancelled(err):
		return unknown(fmt.Sprintf("looking them up took longer than %s", originsTime)), nil
	case err != nil:
		return nil, err
	case len(origins) >= maxOrigins:
		return unknown(fmt.Sprintf("they failed in %d or more topics and groups", maxOrigins)), nil
	}
	readers := r.readers(ctx, origins, queue, destination)
	for i := range readers { // mask the texts that brokers returned
		of := &readers[i]
		if of.Problem == "" {
			continue
		}
		if of.Problem, err = dbsqlc.New(r.Store.DB()).MaskText(ctx, of.Problem); err != nil {
			return nil, err
		}
		if of.Refusal != "" {
			of.Refusal = of.Text()
		}
	}
	return readers, nil
}

// readers returns the readers of each topic to which records of these origins would be published. If a cluster does not
// answer, the readers of its topics have a Problem.
func (r *Replayer) readers(ctx context.Context, origins []dbsqlc.RecordOriginsRow,
	queue, destination string,
) []Readers {
	p := r.Planner().Policy()
	topics := map[[2]string]*Readers{} // by cluster and topic
	retry := map[[2]string]bool{}
	for _, o := range origins {
		d := p.DestinationOf(cmp.Or(queue, o.Queue))
		if destination != "" {
			d = p.Destinations[destination]
		}
		if d == nil || d.Source == nil {
			continue
		}
		topic, ok := p.TargetOf(d.Source, o.Topic, o.OriginalTopic)
		if !ok {
			continue
		}
		key := [2]string{d.Source.Cluster, topic}
		if topics[key] == nil {
			topics[key] = &Readers{Cluster: d.Source.Cluster, Topic: topic, Failed: []string{}, Groups: []string{}}
			retry[key] = true
		}
		retry[key] = retry[key] && !strings.Contains(d.Source.ReplayTo, "{original}")
		group := cmp.Or(o.ConsumerGroup, d.Source.GroupOf(o.Topic))
		if group != "" && !slices.Contains(topics[key].Failed, group) {
			topics[key].Failed = append(topics[key].Failed, group)
		}
	}
	byCluster := map[string][]string{}
	for key := range topics {
		byCluster[key[0]] = append(byCluster[key[0]], key[1])
	}
	for cluster, names := range byCluster {
		found, err := r.askGroups(ctx, p, cluster, names)
		for _, name := range names {
			of := topics[[2]string{cluster, name}]
			slices.Sort(of.Failed)
			if err != nil {
				of.Problem = err.Error()
			}
			of.Groups = append(of.Groups, found[name]...)
			of.judge(retry[[2]string{cluster, name}])
		}
	}
	list := make([]Readers, 0, len(topics))
	byName := func(a, b [2]string) int { return slices.Compare(a[:], b[:]) }
	for _, key := range slices.SortedFunc(maps.Keys(topics), byName) {
		list = append(list, *topics[key])
	}
	return list
}

func (r *Replayer) askGroups(ctx context.Context, p *policy.Policy, cluster string, topics []string) (
	map[string][]string, error,
) {
	if r.Groups == nil {
		return nil, errNoClusters
	}
	return r.Groups(ctx, p, cluster, topics)
}

// errNoClusters is the problem of a process that was built or started without a client for clusters.
var errNoClusters = errors.New("this process connects to no cluster")

// refuseOthers returns an error if consumer groups that did not fail would read the records of a run, or may.
// Request.Force does not override it; Request.OtherGroups does. If the preview failed (nil), refuseOthers looks the
// readers up itself.
func (r *Replayer) refuseOthers(ctx context.Context, in *Request, preview *Preview) error {
	if in.OtherGroups {
		return nil
	}
	if preview != nil {
		return refuseOthers(preview.Readers)
	}
	filter, err := dbsqlc.New(r.Store.DB()).Replayable(ctx, in.Filter)
	if err != nil {
		return deadletter.AsMoveError(err)
	}
	readers, err := r.readersOf(ctx, filter, in.Queue, in.Destination)
	if err != nil {
		return deadletter.AsMoveError(err)
	}
	return refuseOthers(readers)
}

func refuseOthers(readers []Readers) error {
	var why []string
	for i := range readers {
		if readers[i].Refusal != "" {
			why = append(why, readers[i].Refusal)
		}
	}
	if len(why) == 0 {
		return nil
	}
	return &deadletter.MoveError{
		Kind: deadletter.ErrUnhealthy, Detail: "other consumer groups may read the records again: " + strings.Join(why, "; "),
		Hint: "Publish to a retry topic (replayTo of the source), or replay with otherGroups (--other-groups).",
	}
}
