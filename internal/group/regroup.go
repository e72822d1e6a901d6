package group

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/group/internal/dbsqlc"
	"github.com/dlqd/dlqd/internal/strategy"
)

const (
	// regroupInterval is the pause between two searches for entries in groups of an earlier grouping method. Such entries
	// can appear at any time, because processes of an earlier version may still file entries.
	regroupInterval = 5 * time.Second
	// regroupTimeout bounds one turn, which moves one batch or records the aliases of all groups.
	regroupTimeout = time.Minute
	// regroupBatch is the maximum number of entries that one statement moves. The pause after a full batch is as long as
	// the batch took.
	regroupBatch = 500
	// aliasInterval is the pause between two searches for groups of an earlier method that have no alias. An alias is the
	// fingerprint of the group that replaces such a group. A group without entries never gets an alias.
	aliasInterval = time.Minute
	// aliasPage is the number of groups that one statement reads.
	aliasPage = 100
	// aliasEntries is the number of last entries that are read of a muted or fixed group. Of other groups, one entry is
	// read.
	aliasEntries = 20
	// markedTimeout bounds how long the first filing waits for [Regrouper.AliasMarked].
	markedTimeout = 5 * time.Second
)

// Regrouper moves open entries from groups of an earlier grouping method to groups of [strategy.GroupingMethod]. The
// new groups inherit the counts, owners and notes. Regrouper does not store its progress: an entry's fingerprint shows
// which method computed it.
type Regrouper struct {
	Store  *Store
	Logger *slog.Logger
	Actor  string // in the audit trail

	aliased    time.Time // when the aliases of all groups were last recorded
	afterGroup string    // the group and the id of the last entry that a batch read
	afterID    uuid.UUID
}

// Loop returns the loop in which one process at a time moves entries.
func (r *Regrouper) Loop() *background.Loop {
	return background.New(background.Config{
		Name: "regrouping", Interval: regroupInterval, Timeout: regroupTimeout, Patience: 3 * regroupTimeout,
		Finish: true, OneProcess: true, Once: r.Once,
		Failing: "moving open entries from former failure groups failed",
	})
}

// Once moves one batch of entries. If aliasInterval has passed, it first records the aliases of former groups. It
// returns the time until the next turn, or 0 for the loop's interval.
func (r *Regrouper) Once(ctx context.Context) (time.Duration, error) {
	if time.Since(r.aliased) >= aliasInterval {
		if err := r.recordAliases(ctx, false); err != nil {
			return 0, fmt.Errorf("record aliases of former failure groups: %w", err)
		}
		r.aliased = time.Now()
	}
	start := time.Now()
	page := dbsqlc.FormerEntriesParams{AfterGroup: r.afterGroup, AfterID: r.afterID, Most: regroupBatch}
	rows, err := r.Store.queries().FormerEntries(ctx, page)
	if err != nil {
		return 0, fmt.Errorf("find entries of former failure groups: %w", err)
	}
	if len(rows) > 0 {
		if err := r.move(ctx, rows); err != nil {
			return 0, err
		}
	}
	if len(rows) < regroupBatch {
		r.afterGroup, r.afterID = "", uuid.Nil // the next turn finds entries that another session had locked
		return 0, nil
	}
	last := &rows[len(rows)-1]
	r.afterGroup, r.afterID = last.Former, last.ID
	return time.Since(start), nil
}

// AliasMarked records aliases of former groups with an owner, a note, a mute or a mark as fixed. DLQ workers call it
// before they file their first entry, so that an entry of a muted former group joins a muted group.
func (r *Regrouper) AliasMarked(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, markedTimeout)
	defer cancel()
	return r.recordAliases(ctx, true)
}

// recordAliases records aliases for groups of earlier methods that have none. The aliases are the fingerprints that the
// current method computes for the last entry of a group or, if the group is muted or marked as fixed, for its last
// aliasEntries. With onlyMarked, it leaves out groups without marks.
func (r *Regrouper) recordAliases(ctx context.Context, onlyMarked bool) error {
	page := dbsqlc.FormerGroupsParams{OnlyMarked: onlyMarked, Most: aliasPage}
	for {
		groups, err := r.Store.queries().FormerGroups(ctx, page)
		if err != nil {
			return err
		}
		params := dbsqlc.LastGroupEntriesParams{}
		for _, g := range groups {
			most := int32(1)
			if g.Marked {
				most = aliasEntries
			}
			params.Queues = append(params.Queues, g.Queue)
			params.Fingerprints = append(params.Fingerprints, g.Fingerprint)
			params.Limits = append(params.Limits, most)
		}
		if len(groups) > 0 {
			rows, err := r.Store.queries().LastGroupEntries(ctx, params)
			if err != nil {
				return err
			}
			entries := make([]dbsqlc.FormerEntriesRow, len(rows))
			for i := range rows {
				entries[i] = dbsqlc.FormerEntriesRow(rows[i])
			}
			if err := r.recordPairs(ctx, entries, fingerprints(entries)); err != nil {
				return err
			}
		}
		if len(groups) < aliasPage {
			return nil
		}
		page.AfterQueue, page.AfterGroup = groups[len(groups)-1].Queue, groups[len(groups)-1].Fingerprint
	}
}

// fingerprints returns the fingerprints of entries, computed with the current method.
func fingerprints(rows []dbsqlc.FormerEntriesRow) []string {
	now := make([]string, len(rows))
	for i := range rows {
		now[i] = strategy.Fingerprint(failure(&rows[i]))
	}
	return now
}

func failure(row *dbsqlc.FormerEntriesRow) *strategy.Failure {
	return &strategy.Failure{
		Type: row.ErrorType, Code: row.ErrorCode, Title: row.ErrorTitle, Message: row.ErrorMessage,
		Trace: row.ErrorStackTrace, Context: row.ErrorContext,
	}
}

// recordPairs records the current groups of entries as aliases of their former groups. It commits before the entries
// move, so that a new group has its owner, note and mute before its first entry.
func (r *Regrouper) recordPairs(ctx context.Context, rows []dbsqlc.FormerEntriesRow, now []string) error {
	type pair struct{ queue, former, now string }
	seen := map[pair]bool{}
	params := dbsqlc.AliasGroupsParams{Actor: r.Actor}
	for i := range rows {
		p := pair{rows[i].Queue, rows[i].Former, now[i]}
		if seen[p] {
			continue
		}
		seen[p] = true
		params.Queues, params.Formers = append(params.Queues, p.queue), append(params.Formers, p.former)
		params.Fingerprints, params.Entries = append(params.Fingerprints, p.now), append(params.Entries, rows[i].ID)
		params.Titles = append(params.Titles, failure(&rows[i]).Headline())
	}
	if len(seen) == 0 {
		return nil
	}
	recorded, err := r.Store.queries().AliasGroups(ctx, params)
	if recorded > 0 {
		r.Logger.InfoContext(ctx, "recorded aliases of former failure groups", "groups", recorded)
	}
	return err
}

// move records aliases for a batch of entries, and then moves the entries to the groups of their current fingerprints.
func (r *Regrouper) move(ctx context.Context, rows []dbsqlc.FormerEntriesRow) error {
	now := fingerprints(rows)
	if err := r.recordPairs(ctx, rows, now); err != nil {
		return fmt.Errorf("record aliases of former failure groups: %w", err)
	}
	params := dbsqlc.RegroupParams{Actor: r.Actor, Fingerprints: now}
	for i := range rows {
		params.Ids, params.Formers = append(params.Ids, rows[i].ID), append(params.Formers, rows[i].Former)
		params.LastFailedAts = append(params.LastFailedAts, rows[i].LastFailedAt)
	}
	moved, err := r.Store.queries().Regroup(ctx, params)
	if err != nil {
		return fmt.Errorf("move entries from former failure groups: %w", err)
	}
	if moved > 0 {
		r.Logger.InfoContext(ctx, "moved open entries from former failure groups", "entries", moved)
	}
	return nil
}
