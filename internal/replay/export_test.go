package replay

// SetOutcomesAtOnce changes how many outcomes of a progressive run one transaction counts.
func (r *Runner) SetOutcomesAtOnce(n int32) { r.outcomesAtOnce = n }
