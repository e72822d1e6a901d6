package replay

import "time"

// SetOutcomesAtOnce changes how many outcomes of a progressive run one transaction counts.
func (r *Runner) SetOutcomesAtOnce(n int32) { r.outcomesAtOnce = n }

// SetClock changes the clock of paces.
func (r *Runner) SetClock(now func() time.Time) { r.now = now }
