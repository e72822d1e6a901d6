package delivery

import "time"

// SetClock changes the clock of the process.
func (t *Traffic) SetClock(now func() time.Time) { t.now = now }
