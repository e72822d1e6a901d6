# "make help" lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# Only the race detector needs cgo. Without it, the linters, dlqd and withpostgres share what the compiler wrote.
WITH_POSTGRES := CGO_ENABLED=0 go run ./internal/postgres/postgrestest/withpostgres env -u CGO_ENABLED
GO_TOOL := CGO_ENABLED=0 go tool -modfile=$(CURDIR)/tools/go.mod
REDOCLY := npx --yes @redocly/cli@2.77.0
TSC := npx --yes -p typescript@5.9.3 tsc

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

.PHONY: build
build: ## build bin/dlqd
	CGO_ENABLED=0 go build -o bin/dlqd ./cmd/dlqd

.PHONY: demo
demo: install-postgres build ## send a few hundred messages to a receiver with faults, in twenty seconds
	./bin/dlqd demo

.PHONY: demo-alerts
demo-alerts: install-postgres build ## break a destination, with Prometheus and Alertmanager; print alerts and notifications
	@scripts/install.sh prometheus alertmanager
	./bin/dlqd demo --alerts

.PHONY: demo-kafka
demo-kafka: install-postgres ## break a node of a pipeline on topics (of kfake, which is no broker), and replay its documents to it alone
	CGO_ENABLED=0 go run ./bench/pipeline

.PHONY: run
run: install-postgres build ## run dlqd with an embedded Postgres until stopped
	./bin/dlqd serve

RACE ?= -race
# The slowest packages start first: a slow one at the end would leave processors idle.
LONGEST := ./internal/server ./internal/console ./internal/protocol ./cmd/dlqd ./internal/postgres ./deploy \
	./internal/worker ./internal/host ./internal/deadletter
PACKAGES ?= $(LONGEST) ./...

.PHONY: test
test: install-postgres ## run all tests with the race detector (PACKAGES=… selects packages, RACE= disables the detector); "make lint" runs vet
	@scripts/install.sh cc curl chromium prometheus alertmanager pgbouncer
	$(WITH_POSTGRES) go -C riverdlq test $(RACE) -vet=off ./...
	cd tools && CGO_ENABLED=0 go test ./mutate ./release ./flaky
	cd tools && CGO_ENABLED=0 go build -o ../bin/ ./flaky gotest.tools/gotestsum
	@# Without GORACE, each program built with the race detector sleeps for a second before it exits. Most of the
	@# time, tests wait for a server, so -p and -parallel run more packages and tests at once than there are
	@# processors.
	GORACE=atexit_sleep_ms=50 GOGC=400 $(WITH_POSTGRES) \
		scripts/test.sh "$(PACKAGES)" $(RACE) -p 3 -parallel 3 -timeout 40m

.PHONY: riverdlq-matrix
riverdlq-matrix: install-postgres ## test riverdlq with River 0.39, 0.42, 0.45 and the last four releases (needs the module proxy)
	$(WITH_POSTGRES) scripts/riverdlq-matrix.sh

.PHONY: trial-capture
trial-capture: install-postgres ## disturb an application at random for a while (TRIAL=10m), and check that each failure has one dead letter
	DLQD_TRIAL=$(or $(TRIAL),10m) $(WITH_POSTGRES) go test -count=1 -timeout 0 -v -run TestHost_SurvivesRandomFaults ./internal/host

.PHONY: trial-team
trial-team: install-postgres ## have four operators decide about dead letters in the console (TRIAL=10m); count refusals and contradictions
	DLQD_TRIAL=$(or $(TRIAL),10m) $(WITH_POSTGRES) go test -count=1 -timeout 0 -v -run TestTeam_FourOperators ./internal/server

.PHONY: trial-proxy
trial-proxy: install-postgres ## use the console through a real nginx, as docs/proxies.md configures it
	@scripts/install.sh nginx
	$(WITH_POSTGRES) go test -count=1 -v -run TestProxy_Nginx ./internal/server

.PHONY: trial-archive
trial-archive: install-postgres ## fill a small file system with the archive, as root; then list, verify, erase and restore
	DLQD_TRIAL=1 $(WITH_POSTGRES) go test -count=1 -v -run TestArchive_SurvivesFullDisk ./internal/retention

.PHONY: model
model: ## check the protocol model with two jobs (TRIAL=1h, at most STATES=20000000); see docs/protocol.md
	DLQD_MODEL=$(or $(TRIAL),1h) DLQD_MODEL_STATES=$(STATES) go test -count=1 -timeout 0 -v -run 'TestProtocol_KeepsInvariantsForLong$$' ./internal/protocol

.PHONY: trial-kills
trial-kills: install-postgres ## kill, stop and disconnect processes that deliver 10,000 ordered messages; check for lost and repeated ones
	DLQD_TRIAL=1 $(WITH_POSTGRES) go test -count=1 -timeout 0 -v -run TestServe_KeepsOrderThroughKills ./cmd/dlqd

.PHONY: trial-failover
trial-failover: install-postgres ## kill a primary under load and promote its standby, five times synchronous and five times asynchronous
	DLQD_TRIAL=1 $(WITH_POSTGRES) go test -count=1 -timeout 0 -parallel 5 -v -run TestServe_SurvivesFailover ./cmd/dlqd

# The cluster has to be one for tests: topics named dlq.* and orders, and the consumer group dlqd, are deleted.
.PHONY: trial-kafka
trial-kafka: install-postgres ## run the tests of sources and the pipeline of demo-kafka on a cluster for tests, BROKERS=host:port,host:port
	DLQD_TEST_KAFKA=$(or $(BROKERS),$(error BROKERS is required)) \
		go test -count=1 -timeout 0 -parallel 1 -v -run 'TestReader|TestPublisher' ./internal/kafka
	CGO_ENABLED=0 go run ./bench/pipeline -brokers $(BROKERS)

.PHONY: trial-replay
trial-replay: install-postgres ## replay 20,000 messages that died for five causes, at once and progressively; then 2,000 in twenty other shapes
	go run ./bench -rounds 1 incident
	go run ./bench -rounds 21 -scale 0.1 incident

.PHONY: bench
bench: install-postgres ## run the main benchmarks and print one table; "make bench-ingest" runs one of them; ROUNDS=1 SCALE=1
	CGO_ENABLED=0 go build -o bin/bench ./bench
	bin/bench -rounds $(or $(ROUNDS),1) -scale $(or $(SCALE),1) suite $(PATHS)

bench-%:
	@$(MAKE) --no-print-directory bench PATHS=$*

BENCH ?= replay
BASE ?= $(shell git describe --tags --abbrev=0 2>/dev/null)

# The base is measured with the benchmarks of this tree, or with its own if those do not compile there.
.PHONY: bench-compare
bench-compare: install-postgres ## run BENCH of this tree and of BASE (the last tag) in turn and print what changed; ROUNDS=3 SCALE=1 WRITE=true
	@test -n "$(BASE)" || { echo "there is no tag: set BASE to a commit"; exit 2; }
	rm -rf bin/base && mkdir -p bin/base && git archive $(BASE) | tar -x -C bin/base
	cp -r bin/base/bench bin/base/own && rm bin/base/bench/*.go && cp bench/*.go bin/base/bench
	cd bin/base && { CGO_ENABLED=0 go build -o ../bench-base ./bench || CGO_ENABLED=0 go build -o ../bench-base ./own; }
	rm -rf bin/base
	CGO_ENABLED=0 go build -o bin/bench ./bench
	bin/bench -beside bin/bench-base -rounds $(or $(ROUNDS),3) -scale $(or $(SCALE),1) -write=$(or $(WRITE),false) compare $(BENCH)

.PHONY: trial-growth
trial-growth: install-postgres ## measure the main paths and reads at 10,000 to 10,000,000 entries (SCALE=0.1: 1,000,000; ten million need 50 GB)
	go run ./bench -rounds 1 -scale $(or $(SCALE),1) growth

.PHONY: soak
soak: install-postgres ## keep dlqd under load for two hours (SCALE=0.1: 12 minutes), and print what changes with time
	go run ./bench -rounds 1 -scale $(or $(SCALE),1) soak

.PHONY: trial-upgrade
trial-upgrade: install-postgres ## upgrade from 0.1 (built from git) and run two versions beside each other, under load, with a ledger
	DLQD_TRIAL=1 $(WITH_POSTGRES) go test -count=1 -timeout 0 -v -run TestServe_UpgradesBeside ./cmd/dlqd

.PHONY: trial-chart
trial-chart: ## lint and render the Helm chart, decode what it renders, and load the compose file (takes minutes the first time)
	cd tools/chart && CGO_ENABLED=0 go test ./...

.PHONY: manifests
manifests: ## copy the alerts into the Helm chart, and render deploy/kubernetes/ from it
	cp deploy/prometheus/rules.yaml deploy/helm/dlqd/files/rules.yaml
	cd tools/chart && DLQD_MANIFESTS=write CGO_ENABLED=0 go test -count=1 -run TestManifests ./...

ROOMS ?= internal/strategy internal/breaker internal/facts internal/deadletter internal/access db/code
COUNT ?= 60
SEED ?= 1

.PHONY: mutate
mutate: install-postgres ## change the code of ROOMS in COUNT places each, one at a time, and list the changes that no test notices (resumes)
	cd tools && CGO_ENABLED=0 go build -o ../bin/mutate ./mutate
	$(WITH_POSTGRES) bin/mutate -seed $(SEED) -count $(COUNT) $(ROOMS)

.PHONY: check
check: fmt-check lint words generate-check openapi-lint script-check vulnerabilities ## check format, lint, words and width, generated files, OpenAPI, the console's script and known vulnerabilities

.PHONY: fmt
fmt: ## format the code
	$(GO_TOOL) golangci-lint fmt

.PHONY: fmt-check
fmt-check:
	$(GO_TOOL) golangci-lint fmt --diff

.PHONY: lint
lint: ## run the linters
	$(GO_TOOL) golangci-lint run
	cd riverdlq && $(GO_TOOL) golangci-lint run
	cd bench/peers && CGO_ENABLED=0 go vet .

.PHONY: words
words: ## look for words that docs/writing.md excludes, and for lines above 120 columns
	cd tools && CGO_ENABLED=0 go build -o ../bin/words ./words
	bin/words

.PHONY: generate
generate: build ## generate internal/*/internal/dbsqlc, openapi/, config/schemas/ and the copy of riverdlq
	$(GO_TOOL) sqlc generate
	./bin/dlqd openapi > openapi/openapi.yaml
	./bin/dlqd openapi --json > openapi/openapi.json
	(echo '// Code generated from riverdlq/riverdlq.go by "make generate". DO NOT EDIT.'; echo; cat riverdlq/riverdlq.go) \
		> internal/riverdlq/riverdlq.go
	DLQD_SCHEMAS=write CGO_ENABLED=0 go test -count=1 -run TestSchema_MatchesTypes ./internal/policy

.PHONY: generate-check
generate-check: build
	$(GO_TOOL) sqlc diff
	./bin/dlqd openapi | diff -u openapi/openapi.yaml -
	./bin/dlqd openapi --json | diff -q openapi/openapi.json -

.PHONY: freeze
freeze: ## at a release: freeze its migrations (LAST=00007: up to this one), and test upgrades from it
	last=$(or $(LAST),$$(ls db/migrations | tail -n 1 | cut -d _ -f 1)); \
	for file in db/migrations/*.sql; do \
		file=$${file#db/}; number=$${file#migrations/}; \
		[ "$${number%%_*}" -gt "$$last" ] || grep -qs "  $$file$$" db/frozen.sum || (cd db && sha256sum "$$file" >> frozen.sum); \
	done; \
	code=internal/postgres/testdata/frozen/$$last.sql.gz; \
	[ -e "$$code" ] || cat db/code/*.sql db/triggers.sql db/river_triggers.sql | gzip -9n > "$$code"; \
	[ -e "$${code%.sql.gz}.statements.gz" ] || \
		cat internal/*/internal/dbsqlc/*.sql.go | gzip -9n > "$${code%.sql.gz}.statements.gz"

.PHONY: openapi-lint
openapi-lint: ## lint the OpenAPI document with Redocly (needs npm)
	REDOCLY_TELEMETRY=off $(REDOCLY) lint openapi/openapi.yaml

.PHONY: script-check
script-check: ## type-check the console's script (needs npm)
	$(TSC) --allowJs --checkJs --noEmit --strict --target es2022 --module esnext --lib dom,dom.iterable,es2022 internal/console/static/console.js

.PHONY: trial-incidents
trial-incidents: install-postgres ## handle three incidents and four tasks in the console; print clicks and seconds, and fail above 60 s
	@scripts/install.sh chromium
	DLQD_TRIAL=1 $(WITH_POSTGRES) go test -v -count=1 -parallel 1 -run TestIncident_ ./internal/console

.PHONY: screenshots
screenshots: install-postgres ## regenerate docs/images/; with ALL=DIR, show every page at three widths in light and dark there instead
	@scripts/install.sh chromium
	$(if $(ALL),DLQD_SCREENSHOTS_ALL=$(abspath $(ALL)),DLQD_SCREENSHOTS=$(CURDIR)/docs/images) $(WITH_POSTGRES) \
		go test -count=1 -timeout 0 -run TestScreenshots ./internal/console

.PHONY: vulnerabilities
vulnerabilities: build ## check bin/dlqd for known vulnerabilities, if the database is reachable
	@scripts/vulnerabilities.sh bin/dlqd

.PHONY: sbom
sbom: build ## write the software bill of materials of bin/dlqd to bin/dlqd.cdx.json (CycloneDX)
	cd tools && CGO_ENABLED=0 go run ./sbom ../bin/dlqd > ../bin/dlqd.cdx.json

.PHONY: release
release: ## write the files of release VERSION=v… of the last commit to dist/, signed with KEY=… (docs/versions.md)
	cd tools && CGO_ENABLED=0 go run ./release -version "$(VERSION)" -key "$(KEY)"

.PHONY: trial-release
trial-release: install-postgres ## make a release twice and compare it; install, upgrade, remove and run it (as root, for half an hour; PLATFORMS=linux/amd64 limits it)
	@scripts/install.sh debootstrap rpm minisign
	$(WITH_POSTGRES) env DLQD_TRIAL=1 CGO_ENABLED=0 \
		go -C tools test -count=1 -timeout 0 -v -run TestTrial ./release

.PHONY: install-postgres
install-postgres:
	@scripts/install.sh postgres
