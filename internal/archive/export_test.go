package archive

import (
	"context"
	"encoding/json"
)

// Batches calls each with all entries of a unit, batch by batch.
func (a *Archive) Batches(ctx context.Context, m *Manifest, each func([]json.RawMessage) error) error {
	return a.batches(ctx, m, func([]byte) (bool, error) { return true, nil }, each)
}
