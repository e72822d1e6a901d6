#!/bin/bash
# Tests riverdlq with River 0.39 (the first that it supports), 0.42, 0.45 and the last four releases,
# each by a go.mod of its own (-modfile): on this Go and, if that River allows it, on Go 1.25. If all succeed, "dlqd
# version" names them.
set -eu -o pipefail
: "${DLQD_TEST_DATABASE_URL:?is not set: run \"make riverdlq-matrix\"}"
cd "$(dirname "$0")/../riverdlq"

river=github.com/riverqueue/river
oldest=${OLDEST_GO:-go1.25.7} # downloaded by the go command, from the module proxy
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

read -ra released <<< "$(go list -m -versions $river)" # the module's path comes first
failed=0
tested=()
for version in $(printf '%s\n' v0.39.0 v0.42.0 v0.45.0 "${released[@]: -4}" | sort -uV); do
	cp go.mod go.sum "$work"
	export GOTOOLCHAIN=local
	modfile="-modfile=$work/go.mod"
	if ! { go get "$modfile" $river@"$version" $river/riverdriver/riverpgxv5@"$version" $river/rivertype@"$version" &&
		go mod tidy "$modfile"; } &> "$work/log"; then
		cat "$work/log"
		printf 'river %-8s cannot be required\n' "$version"
		failed=1
		continue
	fi
	tested+=("${version#v}")
	modules=$(go list "$modfile" -m all | tail -n +2 | wc -l)
	toolchains=local
	! grep -q '^go 1\.25' "$work/go.mod" || toolchains="local $oldest"
	for toolchain in $toolchains; do
		export GOTOOLCHAIN=$toolchain
		outcome=ok
		go test "$modfile" -count=1 ./... &> "$work/log" || { outcome=failed; failed=1; cat "$work/log"; }
		printf 'river %-8s %-9s %3d modules  %s\n' "$version" "$(go env GOVERSION)" "$modules" "$outcome"
	done
done
[ $failed = 1 ] || printf '%s\n' "${tested[@]}" > ../internal/version/river.txt
exit $failed
