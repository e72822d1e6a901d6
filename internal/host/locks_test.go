package host_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

var lockModes = []string{"ACCESS SHARE", "ROW SHARE", "ROW EXCLUSIVE", "SHARE UPDATE EXCLUSIVE", "SHARE", "SHARE ROW EXCLUSIVE", "EXCLUSIVE", "ACCESS EXCLUSIVE"}

// Any lock on any relation of schema dlq, in a session that has captured before and in one that has not.
func TestHost_locks(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	var statements []string
	for _, table := range h.strings("SELECT c.oid::regclass::text FROM pg_class c WHERE c.relnamespace = 'dlq'::regnamespace AND c.relkind IN ('r', 'p') ORDER BY 1") {
		for _, mode := range lockModes {
			statements = append(statements, fmt.Sprintf("LOCK TABLE ONLY %s IN %s MODE", table, mode))
		}
	}
	for _, view := range h.strings("SELECT c.oid::regclass::text FROM pg_class c WHERE c.relnamespace = 'dlq'::regnamespace AND c.relkind IN ('v', 'm') ORDER BY 1") {
		statements = append(statements, fmt.Sprintf("LOCK TABLE %s IN ACCESS EXCLUSIVE MODE", view)) // of what it reads, too
	}
	for _, sequence := range h.strings("SELECT c.oid::regclass::text FROM pg_class c WHERE c.relnamespace = 'dlq'::regnamespace AND c.relkind = 'S' ORDER BY 1") {
		statements = append(statements, fmt.Sprintf("ALTER SEQUENCE %s INCREMENT 1", sequence))
	}
	h.holds(statements)
}

// holds has the application end jobs and retry one while each of the statements is in an open transaction.
func (h *host) holds(statements []string) {
	h.Helper()
	batches := h.prepare(2*len(statements) + 1)
	warm := h.application()
	require.Empty(h, warm.does(batches[0], "nothing is wrong"))
	require.True(h, h.captured(batches[0]))
	gaveWay := 0
	for i, statement := range statements {
		h.while(statement, func() {
			for n, app := range map[int]*application{1: warm, 2: h.application()} {
				batch := batches[2*i+n]
				warnings := app.does(batch, statement)
				if len(warnings) > 0 {
					gaveWay++
				}
				h.Cleanup(func() {})
				if n == 2 {
					app.Close()
				}
				_ = batch
			}
		})
	}
	h.Logf("%d statements, %d times gave way", len(statements), gaveWay)
}
