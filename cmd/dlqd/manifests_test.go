package main_test

import (
	"bytes"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"github.com/dlqd/dlqd/internal/postgres"
)

// manifest has the fields of a Kubernetes object that tests read.
type manifest struct {
	Kind string            `yaml:"kind"`
	Data map[string]string `yaml:"data"` // of a ConfigMap
	Spec struct {
		Template struct {
			Spec struct {
				Containers []struct {
					Args           []string `yaml:"args"`
					LivenessProbe  probe    `yaml:"livenessProbe"`
					ReadinessProbe probe    `yaml:"readinessProbe"`
				} `yaml:"containers"`
			} `yaml:"spec"`
		} `yaml:"template"`
	} `yaml:"spec"`
}

type probe struct {
	HTTPGet struct {
		Path string `yaml:"path"`
	} `yaml:"httpGet"`
}

// manifests returns the objects of a kind in a file of deploy/kubernetes.
func manifests(t *testing.T, file, kind string) (found []manifest) {
	t.Helper()
	raw, err := os.ReadFile("../../deploy/kubernetes/" + file)
	require.NoError(t, err)
	decoder := yaml.NewDecoder(bytes.NewReader(raw))
	for {
		var m manifest
		err := decoder.Decode(&m)
		if errors.Is(err, io.EOF) {
			return found
		}
		require.NoError(t, err)
		if m.Kind == kind {
			found = append(found, m)
		}
	}
}

// TestManifests_LiveWithoutPostgres runs the containers of deploy/kubernetes, with other paths: first the migration,
// then the processes. While Postgres is down, the liveness probe succeeds and the readiness probe fails. When Postgres
// runs again, the process continues.
func TestManifests_LiveWithoutPostgres(t *testing.T) {
	t.Parallel()
	dir := dataDir(t)
	require.NoError(t, os.Chmod(dir, 0o711))
	start := func() *postgres.Embedded {
		server, err := postgres.StartEmbedded(t.Context(), postgres.EmbeddedConfig{
			DataDir: filepath.Join(dir, "data"), BinDir: os.Getenv("DLQD_TEST_POSTGRES_BIN"), Throwaway: true,
			Logger: slog.New(slog.DiscardHandler),
		})
		require.NoError(t, err)
		return server
	}
	server := start()
	t.Cleanup(func() { _ = server.Stop() })
	url := filepath.Join(dir, "url")
	require.NoError(t, os.WriteFile(url, []byte(server.URL()), 0o600))
	config := filepath.Join(dir, "policy")
	require.NoError(t, os.Mkdir(config, 0o700))
	for _, m := range manifests(t, "dlqd.yaml", "ConfigMap") {
		for name, text := range m.Data {
			require.NoError(t, os.WriteFile(filepath.Join(config, name), []byte(text), 0o600))
		}
	}
	address := freePort(t)
	_, port, err := net.SplitHostPort(address)
	require.NoError(t, err)
	here := strings.NewReplacer("/run/secrets/dlqd-database/url", url, "/etc/dlqd", config,
		"s3://dlqd-archive?region=eu-central-1", filepath.Join(dir, "archive"), "0.0.0.0:7353", "0.0.0.0:"+port,
		"log-format=json", "log-format=text")
	arguments := func(file, kind string) []string {
		found := manifests(t, file, kind)
		require.Len(t, found, 1)
		var args []string
		for _, argument := range found[0].Spec.Template.Spec.Containers[0].Args {
			args = append(args, here.Replace(argument))
		}
		return args
	}
	ok(t, arguments("migration.yaml", "Job")...)
	args := arguments("dlqd.yaml", "Deployment")
	require.Equal(t, "serve", args[0])
	s := serveOnly(t, args[1:]...)
	container := manifests(t, "dlqd.yaml", "Deployment")[0].Spec.Template.Spec.Containers[0]
	status := func(p probe) int {
		t.Helper()
		response, err := http.Get("http://" + address + p.HTTPGet.Path)
		require.NoError(t, err)
		require.NoError(t, response.Body.Close())
		return response.StatusCode
	}
	becomesReady := func(want int) {
		t.Helper()
		require.Eventually(t, func() bool {
			require.Equal(t, http.StatusOK, status(container.LivenessProbe), s.log.String())
			return status(container.ReadinessProbe) == want
		}, 5*time.Minute, 20*time.Millisecond)
	}
	becomesReady(http.StatusOK)
	token := ok(t, "tokens", "create", "--role", "reader", "--database-url-file", url, "--name", "probe")
	require.Contains(t, token, "dlqd_")

	require.NoError(t, server.Stop())
	becomesReady(http.StatusServiceUnavailable)
	for range 50 {
		require.Equal(t, http.StatusOK, status(container.LivenessProbe), s.log.String())
		require.Equal(t, http.StatusServiceUnavailable, status(container.ReadinessProbe))
	}
	server = start()
	becomesReady(http.StatusOK)
	require.Zero(t, s.stop(syscall.SIGTERM), s.log.String())
}
