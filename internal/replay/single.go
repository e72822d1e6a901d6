package replay

import (
	"context"
	"encoding/json"
	"errors"

	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/replay/internal/dbsqlc"
)

// Replay redelivers an entry now. If in has no payload, it applies the patch to the entry's payload. It returns the id
// of the new job and, if the payload was edited, the changes. Unless in.OtherGroups is set, it returns an error if
// consumer groups that did not fail would read the record.
func (r *Replayer) Replay(ctx context.Context, id uuid.UUID, in deadletter.Replay,
	patch Patch,
) (job int64, changes []Change, err error) {
	if err := r.checkDestination(in.Destination); err != nil {
		return 0, nil, err
	}
	if !in.OtherGroups {
		filter, err := json.Marshal(map[string][]uuid.UUID{"ids": {id}})
		if err != nil {
			return 0, nil, err
		}
		readers, err := r.readersOf(ctx, filter, "", in.Destination)
		if err != nil {
			return 0, nil, err
		}
		if err := refuseOthers(readers); err != nil {
			return 0, nil, err
		}
	}
	if in.Payload != nil || patch.JSONPatch != nil || patch.MergePatch != nil {
		if in.Payload, changes, err = r.edit(ctx, id, in.Payload, patch); err != nil {
			return 0, nil, err
		}
	}
	job, err = r.Store.Replay(ctx, id, in)
	return job, changes, err
}

// edit returns the edited payload of an entry: payload or, if that is nil, the entry's payload with the patch applied.
// It also returns the changes as the viewer may see them. If the entry does not exist, edit returns payload unchanged
// and no changes. If the patch is invalid or does not apply, it returns a MoveError.
func (r *Replayer) edit(ctx context.Context, id uuid.UUID, payload json.RawMessage,
	patch Patch,
) (json.RawMessage, []Change, error) {
	invalid := func(err error) error { return &deadletter.MoveError{Kind: deadletter.ErrInvalid, Detail: err.Error()} }
	if err := patch.Validate(); err != nil {
		return nil, nil, invalid(err)
	}
	events, err := dbsqlc.New(r.Store.DB()).Events(ctx, []uuid.UUID{id})
	if err != nil || len(events) == 0 {
		return payload, nil, err
	}
	before, err := Payload(events[0].JobKind, events[0].Event)
	if err != nil {
		return nil, nil, err
	}
	queries := dbsqlc.New(r.Store.DB())
	if payload != nil {
		sample := Sample{Changes: Changes(before, payload)}
		masked, err := queries.IsMasked(ctx)
		if err == nil && masked {
			err = sample.mask(ctx, queries, events[0].JobKind)
		}
		return payload, sample.Changes, err
	}
	after, err := patch.apply(before)
	if err != nil && !patch.hasTests() {
		return nil, nil, invalid(err)
	}
	sample, maskErr := patch.visibleSample(ctx, queries, &events[0])
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
