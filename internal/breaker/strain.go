package breaker

import "time"

// Strain says whether and how the deliveries of a replay run strain a destination.
type Strain struct {
	PerSecond float64   // deliveries a second
	Closed    time.Time // all deliveries before this time are counted; zero if there are none
	Taken     float64   // deliveries a second in the last 10 s before Closed
	Reason    string    // how the run strains the destination; "" if it does not, or if that is not known
}
