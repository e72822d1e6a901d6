// Package retention removes closed dead letters and the audit trail after their retention period. Entries in dlq_failed
// first move to dlq_archived. Whole months are dropped as partitions. Entries of queues with a shorter period are
// deleted one by one. If there is an archive, the data is written to it before it is removed. Retention removes no open
// entries.
package retention

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/dlqd/dlqd/internal/archive"
	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/retention/internal/dbsqlc"
)

const (
	// batchSize is the maximum number of entries that one step handles. A step that archives entries holds them in
	// memory.
	batchSize = 1000
	// maxSteps is the maximum number of steps of each kind in one round. It bounds how long other writers of the archive
	// wait.
	maxSteps = 1000
	// interval is the time between two rounds, and timeout bounds one round. A round that failed is repeated after retry.
	// retry is long, because a partition that cannot be archived now can usually not be archived a second later either.
	interval = time.Hour
	timeout  = 12 * time.Hour
	retry    = 10 * time.Minute
)

// Keeper enforces the policy's retention. Any number may run; one works at a time.
type Keeper struct {
	Store   *deadletter.Store
	Archive *archive.Archive // nil: removed entries are not archived
	Policy  func() *policy.Policy
	Logger  *slog.Logger
	// Observe, if not nil, is called after each round with each count of [Done]: aged_out, deleted, partitions, archived.
	Observe func(what string, n int)
	Now     func() time.Time // nil means time.Now
}

// Done counts the results of a round.
type Done struct {
	AgedOut  int // entries that moved from dlq_failed to dlq_archived
	Deleted  int // entries that were deleted one by one
	Dropped  int // partitions that were dropped
	Archived int // entries and moves that this round wrote to the archive
}

// Loop returns the loop that enforces the retention.
func (k *Keeper) Loop() *background.Loop {
	return background.New(background.Config{
		Name: "retention", Interval: interval, Timeout: timeout, Retry: retry, Patience: timeout, OneProcess: true,
		Failing: "enforcing the retention failed",
		Once: background.Each(func(ctx context.Context) error {
			_, err := k.Run(ctx)
			return err
		}),
	})
}

// Run enforces the retention once. If a partition cannot be archived or dropped, the next round tries again. The round
// continues with the other partitions, unless the failed one was locked. Run does nothing while another process
// enforces the retention, writes the archive or erases.
func (k *Keeper) Run(ctx context.Context) (done Done, err error) {
	_, err = archive.RunExclusive(ctx, k.Store, 0, func(ctx context.Context) error { return k.run(ctx, &done) })
	if k.Observe != nil {
		k.Observe("aged_out", done.AgedOut)
		k.Observe("deleted", done.Deleted)
		k.Observe("partitions", done.Dropped)
		k.Observe("archived", done.Archived)
	}
	return done, err
}

func (k *Keeper) run(ctx context.Context, done *Done) error {
	now := time.Now()
	if k.Now != nil {
		now = k.Now()
	}
	rules := k.Policy()
	periods, err := periodsOf(rules)
	if err != nil {
		return err
	}
	if err := dbsqlc.New(k.Store.DB()).PublishRetention(ctx, dbsqlc.PublishRetentionParams{
		Periods: periods, Audit: rules.Data.AuditRetention,
	}); err != nil {
		return err
	}
	if err := k.steps(func() (int, error) {
		aged, err := dbsqlc.New(k.Store.DB()).AgeOut(ctx,
			dbsqlc.AgeOutParams{Periods: periods, MaxEntries: batchSize, Now: now})
		done.AgedOut += int(aged)
		return int(aged), err
	}); err != nil {
		return err
	}

	if err := k.steps(func() (int, error) {
		forgotten, err := dbsqlc.New(k.Store.DB()).ForgetOld(ctx, dbsqlc.ForgetOldParams{MaxEntries: batchSize, Now: now})
		return int(forgotten), err
	}); err != nil {
		return err
	}

	if err := k.dropEmptyMonths(ctx, periods, now); err != nil {
		return err
	}
	partitions, err := dbsqlc.New(k.Store.DB()).ExpiredPartitions(ctx, dbsqlc.ExpiredPartitionsParams{
		Periods: periods, Audit: rules.Data.AuditRetention, Now: now,
	})
	if err != nil {
		return err
	}
	var errs []error
	for _, p := range partitions {
		archived, err := k.archiveAndDrop(ctx, p.Name, p.OfAudit, rules.Version())
		if err != nil {
			errs = append(errs, fmt.Errorf("partition %s not dropped; the next round retries: %w", p.Name, err))
			// A session that reads this partition for a long time, such as a dump, probably reads the others, too. Each
			// attempt to lock a partition makes all other sessions wait.
			if postgres.IsLocked(err) {
				break
			}
			continue
		}
		done.Dropped++
		done.Archived += int(archived)
		k.Logger.Info("retention: partition dropped", "partition", p.Name, "archived", archived)
	}

	errs = append(errs, k.steps(func() (int, error) {
		looked, deleted, archived, err := k.archiveAndDelete(ctx, periods, now, rules.Version())
		done.Deleted += deleted
		done.Archived += archived
		if deleted == 0 {
			return 0, err // all entries of the batch have changed meanwhile
		}
		return looked, err
	}))
	return errors.Join(errs...)
}

// steps repeats step until step handles less than a full batch, at most maxSteps times.
func (k *Keeper) steps(step func() (int, error)) error {
	for range maxSteps {
		if n, err := step(); err != nil || n < batchSize {
			return err
		}
	}
	return nil
}

// dropTries is the number of attempts to drop a locked partition, and dropPause the average pause between two attempts.
// Each attempt makes other sessions wait for at most a tenth of a second.
const (
	dropTries = 5
	dropPause = time.Second
)

func (k *Keeper) retryLocked(ctx context.Context, drop func() error) error {
	for try := 1; ; try++ {
		err := drop()
		if !postgres.IsLocked(err) || try == dropTries {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(dropPause/2 + rand.N(dropPause)):
		}
	}
}

// dropEmptyMonths drops empty months of failed entries. A locked month is kept until the next round.
func (k *Keeper) dropEmptyMonths(ctx context.Context, periods json.RawMessage, now time.Time) error {
	for {
		var name string
		err := k.retryLocked(ctx, func() (err error) {
			name, err = dbsqlc.New(k.Store.DB()).DropEmptyMonth(ctx, dbsqlc.DropEmptyMonthParams{Periods: periods, Now: now})
			return err
		})
		if postgres.IsLocked(err) || err == nil && name == "" {
			return nil
		}
		if err != nil {
			return err
		}
		k.Logger.Info("retention: empty partition dropped", "partition", name)
	}
}

// archiveAndDrop writes rows of a partition that are not in the archive to the archive, and drops the partition. If
// there is no archive, it only drops the partition.
func (k *Keeper) archiveAndDrop(ctx context.Context, partition string, isAudit bool,
	policyVersion string,
) (archived int64, err error) {
	if k.Archive == nil {
		return 0, k.dropPartition(ctx, dbsqlc.DropPartitionParams{Name: partition})
	}
	m, err := k.manifest(ctx, partition, partition, policyVersion)
	if err != nil {
		return 0, err
	}
	content, err := k.Archive.Partition(ctx, k.Store, m, isAudit)
	if err != nil {
		return 0, err
	}
	if err := dbsqlc.New(k.Store.DB()).NoteArchived(ctx, dbsqlc.NoteArchivedParams{
		Name: partition, ArchivedRows: content.Rows, Hash: content.Hash, Archive: k.Archive.String(),
	}); err != nil {
		return 0, err
	}
	return content.Written, k.dropPartition(ctx, dbsqlc.DropPartitionParams{
		Name: partition, ArchivedRows: &content.Rows, Hash: &content.Hash,
	})
}

func (k *Keeper) dropPartition(ctx context.Context, partition dbsqlc.DropPartitionParams) error {
	return deadletter.AsMoveError(
		k.retryLocked(ctx, func() error { return dbsqlc.New(k.Store.DB()).DropPartition(ctx, partition) }))
}

// archiveAndDelete takes a batch of entries whose retention has ended, writes them to the archive, if there is one, and
// deletes those that have not changed meanwhile.
func (k *Keeper) archiveAndDelete(ctx context.Context, periods json.RawMessage, now time.Time,
	policyVersion string,
) (looked, deleted, archived int, err error) {
	q := dbsqlc.New(k.Store.DB())
	ids, err := q.ExpiredEntries(ctx, dbsqlc.ExpiredEntriesParams{Periods: periods, MaxEntries: batchSize, Now: now})
	if err != nil || len(ids) == 0 {
		return 0, 0, 0, err
	}
	looked = len(ids)
	var hashes []int64
	if k.Archive != nil {
		m, err := k.manifest(ctx, "entries_"+ids[0].String(), "dead_letter_queue", policyVersion)
		if err != nil {
			return 0, 0, 0, err
		}
		if ids, hashes, err = k.Archive.Rows(ctx, k.Store, m, ids); err != nil {
			return 0, 0, 0, err
		}
		archived = len(ids)
	}
	n, err := q.DeleteEntries(ctx, dbsqlc.DeleteEntriesParams{Ids: ids, Hashes: hashes})
	return looked, int(n), archived, err
}

func (k *Keeper) manifest(ctx context.Context, unit, partition, policyVersion string) (archive.Manifest, error) {
	schema, err := k.Store.SchemaVersion(ctx)
	return archive.Manifest{
		Unit: unit, Partition: partition, WrittenAt: time.Now().UTC(),
		WrittenBy: postgres.ProcessName(), Schema: schema, Policy: policyVersion,
	}, err
}

// periodsOf returns the policy's retention periods in the form that dlq.expired_partitions reads.
func periodsOf(p *policy.Policy) (json.RawMessage, error) {
	of := func(r policy.Retention) map[string]string {
		seconds := func(d time.Duration) string { return fmt.Sprintf("%d seconds", int64(d.Seconds())) }
		return map[string]string{
			"resolved": seconds(r.Resolved), "failed": seconds(r.Failed), "archived": seconds(r.Archived),
		}
	}
	queues := map[string]map[string]string{}
	for name, q := range p.Queues {
		queues[name] = of(q.Retention)
	}
	return json.Marshal(map[string]any{"defaults": of(p.Defaults.Retention), "queues": queues})
}
