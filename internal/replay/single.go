package replay

import (
	"context"
	"encoding/json"
	"errors"

	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/replay/internal/dbsqlc"
)

// Single describes the replay of one entry.
type Single struct {
	Payload     json.RawMessage // replaces the entry's payload
	Patch       Patch           // applied to the entry's payload if Payload is nil
	Destination string          // overrides the destination
	// Checkpoint is [deadletter.Resume] or [deadletter.Discard]. An edit requires it if the entry has a
	// checkpoint.
	Checkpoint string
	Force      bool
	Act        deadletter.Act
}

// Replay redelivers an entry now. It returns the new job's id and the changes of an edit, if any.
func (r *Replayer) Replay(ctx context.Context, id uuid.UUID, in *Single) (job int64, changes []Change, err error) {
	if err := r.checkDestination(in.Destination); err != nil {
		return 0, nil, err
	}
	payload := in.Payload
	if payload != nil || in.Patch.JSONPatch != nil || in.Patch.MergePatch != nil {
		if payload, changes, err = r.edit(ctx, id, in); err != nil {
			return 0, nil, err
		}
	}
	job, err = r.Store.ReplayTo(ctx, id, in.Act, payload, in.Destination, in.Checkpoint, in.Force)
	return job, changes, err
}

// edit returns the edited payload of an entry, and the changes as the viewer may see them. If there
// is no such entry, it returns in.Payload and no changes.
func (r *Replayer) edit(ctx context.Context, id uuid.UUID, in *Single) (json.RawMessage, []Change, error) {
	invalid := func(err error) error { return &deadletter.MoveError{Kind: deadletter.ErrInvalid, Detail: err.Error()} }
	if err := in.Patch.Validate(); err != nil {
		return nil, nil, invalid(err)
	}
	events, err := dbsqlc.New(r.Store.DB()).Events(ctx, []uuid.UUID{id})
	if err != nil || len(events) == 0 {
		return in.Payload, nil, err
	}
	before, err := Payload(events[0].JobKind, events[0].Event)
	if err != nil {
		return nil, nil, err
	}
	queries := dbsqlc.New(r.Store.DB())
	if in.Payload != nil {
		sample := Sample{Changes: Changes(before, in.Payload)}
		masked, err := queries.IsMasked(ctx)
		if err == nil && masked {
			err = sample.mask(ctx, queries, events[0].JobKind)
		}
		return in.Payload, sample.Changes, err
	}
	after, err := in.Patch.apply(before)
	if err != nil && !in.Patch.hasTests() {
		return nil, nil, invalid(err)
	}
	sample, maskErr := in.Patch.visibleSample(ctx, queries, &events[0])
	if maskErr != nil {
		return nil, nil, maskErr
	}
	if sample.Problem != "" {
		err = errors.New(sample.Problem)
	}
	if err != nil {
		return nil, nil, invalid(err)
	}
	return after, sample.Changes, nil
}
