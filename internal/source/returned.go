package source

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/source/internal/dbsqlc"
)

const (
	// returnedInterval is the time between two checks of the offsets of consumer groups.
	returnedInterval = 5 * time.Second
	// returnedTimeout limits one check of all groups.
	returnedTimeout = time.Minute
	// committedTimeout limits the request for the offsets of one group.
	committedTimeout = 5 * time.Second
	// maxMarked and maxResolved are the limits of dlq.mark_read and dlq.resolve_returned.
	maxMarked   = 5000
	maxResolved = 500
)

// ReturnedLoop returns the background loop that resolves returned entries. It reads the committed offsets of the
// consumer groups that failed, one group after another, and changes no offset. Only one process runs it at a time.
func (c *Client) ReturnedLoop() *background.Loop {
	holder := uuid.New()
	return background.New(background.Config{
		Name: "returned", Interval: returnedInterval, Timeout: returnedTimeout, OneProcess: true,
		Failing: "reading the offsets of consumer groups failed; entries of their records stay returned",
		Once: func(ctx context.Context) (time.Duration, error) {
			if len(c.Policy().Sources.Sources) == 0 {
				return 0, nil
			}
			queries := dbsqlc.New(c.Store.DB)
			taken, err := queries.TakeDuty(ctx, dbsqlc.TakeDutyParams{
				Name: "returned", Holder: holder, During: 2 * returnedTimeout,
			})
			if err != nil || !taken {
				return 0, err
			}
			resolveMore, err := c.resolveReturned(ctx, queries) // resolve first: resolving needs no cluster
			markMore, failed := c.markRead(ctx, queries)
			if err = errors.Join(err, failed); err == nil && (markMore || resolveMore) {
				return background.More, nil
			}
			return 0, err
		},
	})
}

// markRead records which consumer groups have read past the records that dlqd published. It returns true if more may be
// left. An error of one group does not stop the others; a cluster that does not answer is asked once.
func (c *Client) markRead(ctx context.Context, queries *dbsqlc.Queries) (more bool, err error) {
	groups, err := queries.UnreadGroups(ctx)
	if err != nil {
		return false, err
	}
	silent := map[string]bool{}
	for _, group := range groups {
		if c.Policy().Sources.Clusters[group.Cluster] == nil || silent[group.Cluster] {
			continue
		}
		committed, failed := c.committed(ctx, group.Cluster, group.ConsumerGroup)
		if failed != nil {
			silent[group.Cluster] = errors.Is(failed, context.DeadlineExceeded)
			err = errors.Join(err, fmt.Errorf("cluster %s, consumer group %s: %w", group.Cluster, group.ConsumerGroup, failed))
			continue
		}
		params := dbsqlc.MarkReadParams{Cluster: group.Cluster, ConsumerGroup: group.ConsumerGroup}
		for _, at := range committed {
			params.Topics = append(params.Topics, at.Topic)
			params.Partitions = append(params.Partitions, at.Partition)
			params.Offsets = append(params.Offsets, at.Offset)
		}
		marked, failed := queries.MarkRead(ctx, params)
		if failed != nil {
			return more, errors.Join(err, failed)
		}
		more = more || marked == maxMarked
	}
	return more, err
}

func (c *Client) committed(ctx context.Context, cluster, group string) ([]Committed, error) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	if c.broker == nil { // [Client.Loop] connects, and reports a failure to connect
		return nil, nil
	}
	ctx, cancel := context.WithTimeout(ctx, committedTimeout)
	defer cancel()
	committed, err := c.broker.Committed(ctx, cluster, group)
	if err != nil && ctx.Err() != nil {
		err = fmt.Errorf("%w: %w", ctx.Err(), err)
	}
	return committed, err
}

// resolveReturned resolves the returned entries whose waiting time is over, of all sources. It returns true if more may
// be left. An error of one queue does not stop the others.
func (c *Client) resolveReturned(ctx context.Context, queries *dbsqlc.Queries) (more bool, err error) {
	p := c.Policy()
	for _, name := range p.SourceNames() {
		s := p.Sources.Sources[name]
		resolved, failed := queries.ResolveReturned(ctx, dbsqlc.ResolveReturnedParams{
			Queue: s.Queue, Quiet: s.Quiet, ReturnedFor: s.ReturnedFor,
		})
		if failed != nil {
			err = errors.Join(err, fmt.Errorf("queue %s: %w", s.Queue, failed))
			continue
		}
		more = more || resolved >= maxResolved
	}
	return more, err
}

// groupsTimeout limits the request for the consumer groups of topics.
const groupsTimeout = 5 * time.Second

// Groups asks a cluster of the policy for the consumer groups of topics (see [Broker]). It connects for this request.
func (open Open) Groups(ctx context.Context, p *policy.Policy, cluster string, topics []string) (map[string][]string,
	error,
) {
	if err := open.Check(p); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, groupsTimeout)
	defer cancel()
	broker, err := open(p)
	if err != nil {
		return nil, err
	}
	defer broker.Close()
	return broker.Groups(ctx, cluster, topics)
}
