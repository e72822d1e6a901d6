# "make help" lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

GO_TOOL := CGO_ENABLED=0 go tool -modfile=tools/go.mod
REDOCLY := npx --yes @redocly/cli@2.77.0
TSC := npx --yes -p typescript@5.9.3 tsc

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

.PHONY: build
build: ## build bin/dlqd
	go build -o bin/dlqd ./cmd/dlqd

.PHONY: demo
demo: install-postgres build ## run the main job on a few hundred messages, in twenty seconds
	./bin/dlqd demo

.PHONY: demo-alerts
demo-alerts: install-postgres build ## watch a destination break: Prometheus and Alertmanager beside the demo, and what they send to whom
	@scripts/install.sh prometheus alertmanager
	./bin/dlqd demo --alerts

.PHONY: run
run: install-postgres build ## serve until stopped, on an embedded Postgres
	./bin/dlqd serve

RACE ?= -race
# The packages that take longest begin first: one that runs alone at the end leaves processors idle.
LONGEST := ./internal/server ./internal/console ./cmd/dlqd ./internal/postgres ./deploy ./internal/worker \
	./internal/host ./internal/deadletter
PACKAGES ?= $(LONGEST) ./...

.PHONY: test
test: install-postgres ## run all tests, with the race detector (PACKAGES=…, RACE= for some, without); "make lint" vets them
	@scripts/install.sh cc curl chromium prometheus alertmanager pgbouncer
	@# Without the setting, each program built with the race detector sleeps for a second before it exits.
	GORACE=atexit_sleep_ms=50 go run ./internal/postgres/postgrestest/withpostgres \
		go test $(RACE) -vet=off -ldflags=-w -timeout 30m $(PACKAGES)

.PHONY: trial-capture
trial-capture: install-postgres ## switch, lock, restore and purge around an application at random (TRIAL=10m), and count its failures
	DLQD_TRIAL=$(or $(TRIAL),10m) go run ./internal/postgres/postgrestest/withpostgres go test -count=1 -timeout 0 -v -run TestHost_trial ./internal/host

.PHONY: model
model: ## check the model of the protocol with two jobs (TRIAL=1h, at most STATES=20000000): docs/protocol.md
	DLQD_MODEL=$(or $(TRIAL),1h) DLQD_MODEL_STATES=$(STATES) go test -count=1 -timeout 0 -v -run 'TestProtocol_KeepsInvariantsForLong$$' ./internal/protocol

.PHONY: trial-kills
trial-kills: install-postgres ## kill, stop and cut off processes that deliver 10,000 messages in order, and look for what is lost or repeated
	DLQD_TRIAL=1 go run ./internal/postgres/postgrestest/withpostgres go test -count=1 -timeout 0 -v -run TestServe_OrderThroughKills ./cmd/dlqd

.PHONY: check
check: fmt-check lint generate-check openapi-lint script-check vulnerabilities ## format, lint, drift of generated files, OpenAPI, the console's script, known vulnerabilities

.PHONY: fmt
fmt: ## format the code
	$(GO_TOOL) golangci-lint fmt

.PHONY: fmt-check
fmt-check:
	$(GO_TOOL) golangci-lint fmt --diff

.PHONY: lint
lint: ## run the linters
	$(GO_TOOL) golangci-lint run

.PHONY: generate
generate: build ## generate internal/*/internal/dbsqlc, openapi/ and config/schemas/
	$(GO_TOOL) sqlc generate
	./bin/dlqd openapi > openapi/openapi.yaml
	./bin/dlqd openapi --json > openapi/openapi.json
	for file in retry-policies circuit-breaker dlq-routing worker-pool monitoring access; do ./bin/dlqd config schema $$file > config/schemas/$$file.schema.json; done

.PHONY: generate-check
generate-check: build
	$(GO_TOOL) sqlc diff
	./bin/dlqd openapi | diff -u openapi/openapi.yaml -
	./bin/dlqd openapi --json | diff -q openapi/openapi.json -

.PHONY: freeze
freeze: ## at a release: from now on its migrations (LAST=00007: up to this one) stay as they are, and upgrades from it are tested
	last=$(or $(LAST),$$(ls db/migrations | tail -n 1 | cut -d _ -f 1)); \
	for file in db/migrations/*.sql; do \
		file=$${file#db/}; number=$${file#migrations/}; \
		[ "$${number%%_*}" -gt "$$last" ] || grep -qs "  $$file$$" db/frozen.sum || (cd db && sha256sum "$$file" >> frozen.sum); \
	done; \
	code=internal/postgres/testdata/frozen/$$last.sql.gz; \
	[ -e "$$code" ] || cat db/code/*.sql db/triggers.sql db/river_triggers.sql | gzip -9n > "$$code"

.PHONY: openapi-lint
openapi-lint: ## run a public linter over the OpenAPI document (needs npm)
	REDOCLY_TELEMETRY=off $(REDOCLY) lint --config openapi/redocly.yaml openapi/openapi.yaml

.PHONY: script-check
script-check: ## check the types of the console's script (needs npm)
	$(TSC) --allowJs --checkJs --noEmit --strict --target es2022 --module esnext --lib dom,dom.iterable,es2022 internal/console/static/console.js

.PHONY: trial-incidents
trial-incidents: install-postgres ## click through three incidents, from the alert's link to the report: prints clicks and seconds, and fails above 60 s
	@scripts/install.sh chromium
	DLQD_TRIAL=1 go run ./internal/postgres/postgrestest/withpostgres go test -v -count=1 -parallel 1 -run TestIncident_ ./internal/console

.PHONY: screenshots
screenshots: install-postgres ## make docs/images/ afresh: the console in light and dark, on a desktop and on a phone
	@scripts/install.sh chromium
	DLQD_SCREENSHOTS=$(CURDIR)/docs/images go run ./internal/postgres/postgrestest/withpostgres go test -count=1 -run TestScreenshots ./internal/console

.PHONY: vulnerabilities
vulnerabilities: build ## look for known vulnerabilities in what bin/dlqd is made of, where their database can be reached
	@scripts/vulnerabilities.sh bin/dlqd

.PHONY: sbom
sbom: build ## list what bin/dlqd is made of, in bin/dlqd.cdx.json (CycloneDX)
	cd tools && CGO_ENABLED=0 go run ./sbom ../bin/dlqd > ../bin/dlqd.cdx.json

.PHONY: install-postgres
install-postgres:
	@scripts/install.sh postgres
