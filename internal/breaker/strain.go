package breaker

import "time"

// Strain is how a destination takes the deliveries of a replay run.
type Strain struct {
	PerSecond float64   // deliveries a second
	Closed    time.Time // deliveries before this time are all counted; zero if there are none
	Reason    string    // how the run strains it; "" if it does not, or if it is not known
}
