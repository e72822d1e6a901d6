package protocol

import ("testing";"fmt";"context";"time")

func TestZZ(t *testing.T) {
	m := &Model{Bounds: Bounds{Jobs: 2, Failures: 4, Workers: 2, Moves: 4, Retries: 3, Misses: 1, Deletes: 2, Attempts: 1, Sent: 2, Isolated: 1, Keys: true}}
	x := &Explorer{Model: m, Procs: 2}
	ctx, c := context.WithTimeout(t.Context(), 400*time.Second); defer c()
	n, f := x.Wander(ctx, 60)
	fmt.Println(n, f.Wrong)
	s := Start()
	for i, st := range f.Trace {
		s, _, _ = m.Apply(s, st)
		fmt.Printf("%d %s\n", i+1, st)
		for j := range s.NJobs { jj := s.Jobs[j]; fmt.Printf("    job%d id%d %v of%d mark%d done%v errs%d fail%d entry%d keyed%v\n", j, jj.ID, jj.State, jj.Of, jj.Mark, jj.Done, jj.Errors, jj.Failure, jj.Entry, jj.Keyed) }
		for e := range s.NFailures { en := s.Entries[e]; if en.Status != Unfiled { fmt.Printf("    entry%d %v job%d waits%d byriver%v decided%v dt%v acted%d\n", e, en.Status, en.Job, en.Waits, en.ByRiver, en.Decided, en.DoneTwice, en.Acted) } }
		for q := range s.NFacts { fmt.Printf("    fact %v job%d e%d f%d\n", s.Facts[q].Kind, s.Facts[q].Job, s.Facts[q].Entry, s.Facts[q].Failure) }
	}
}
