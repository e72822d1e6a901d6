package api

import (
	"net/http"
	"strings"

	"github.com/dlqd/dlqd/internal/door"
	"github.com/dlqd/dlqd/runbooks"
)

// runbooksPath is the path of the runbooks. They require no authentication, so that links in alerts work. They contain
// no secrets.
const runbooksPath = "/runbooks/"

// runbook serves a runbook as plain text. The runbook README lists all runbooks.
func runbook(w http.ResponseWriter, r *http.Request) {
	text, err := runbooks.Files.ReadFile(strings.TrimSuffix(r.PathValue("name"), ".md") + ".md")
	if err != nil {
		door.Problem(w, http.StatusNotFound, "runbook not found; "+runbooksPath+"README lists them")
		return
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	_, _ = w.Write(text) //nolint:gosec // an embedded file, as text
}
