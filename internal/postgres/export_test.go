package postgres

// Abandon leaves the server running and lets go of the data directory, as a killed process does.
func (e *Embedded) Abandon() error { return e.lock.Unlock() }

// OpenLimited is [Open] with a limit of a test's.
var OpenLimited = openLimited
