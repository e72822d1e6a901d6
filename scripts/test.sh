#!/bin/sh
# test.sh "PACKAGES" FLAGS...: runs "go test". It repeats a failed test once, alone: one failure of thousands of tests on
# a busy machine does not fail the run if the test passes then; a data race, a panic or a timeout does. bin/flaky prints
# such tests last. "make test" builds both programs. -count=1, because go would take the pass of a repeated test from its
# cache.
set -eu
packages=$1
shift
exec bin/gotestsum --format=standard-quiet --hide-summary=skipped --jsonfile=bin/test.json --post-run-command=bin/flaky \
	--rerun-fails=1 --rerun-fails-run-root-test --rerun-fails-max-failures=8 --rerun-fails-abort-on-data-race \
	--packages="$packages" -- -count=1 -vet=off -ldflags=-w "$@"
