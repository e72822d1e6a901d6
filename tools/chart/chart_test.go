// Package chart tests deploy/helm, deploy/kubernetes and deploy/compose.yaml with the libraries of Helm, Kubernetes,
// prometheus-operator and Compose. It is a separate module, because these libraries have hundreds of dependencies.
package chart

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/compose-spec/compose-go/v2/loader"
	"github.com/compose-spec/compose-go/v2/types"
	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	"github.com/stretchr/testify/require"
	helmloader "helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	"helm.sh/helm/v3/pkg/lint"
	"helm.sh/helm/v3/pkg/lint/support"
	apps "k8s.io/api/apps/v1"
	batch "k8s.io/api/batch/v1"
	core "k8s.io/api/core/v1"
	networking "k8s.io/api/networking/v1"
	policy "k8s.io/api/policy/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/validation"
	security "k8s.io/pod-security-admission/api"
	securitypolicy "k8s.io/pod-security-admission/policy"
	"sigs.k8s.io/yaml"
)

const (
	deploy    = "../../deploy"
	directory = deploy + "/helm/dlqd"
	namespace = "dlqd"
)

// values are the settings of an installation, as in a file for helm install --values.
type values = map[string]any

// installations are the installations that tests render, by name.
func installations() map[string]values {
	image := values{"repository": "registry.example.com/dlqd-full"}
	return map[string]values{
		"plain": {
			"image": image, "archive": "s3://dlqd-archive?region=eu-central-1", "serviceMonitor": values{"enabled": true},
			"prometheusRule": values{"enabled": true},
		},
		"small": {
			"image": image, "archive": "none", "replicas": 1,
			"migration": values{"enabled": false}, "networkPolicy": values{"enabled": false},
			"podDisruptionBudget": values{"enabled": false},
		},
		"roles": {
			"archive": "s3://b?region=r", "existingPolicy": "policy", "environment": "prod", "logFormat": "text",
			"database": values{"mode": "attached", "schema": "dead", "riverSchema": "river", "replicaKey": "replica"},
			"roles": values{
				"api": values{}, "process": values{"replicas": 3, "maxConnections": 10},
				"dlq-workers": values{"replicas": 0, "resources": values{"limits": values{"memory": "1Gi"}}},
			},
			"secrets":        []any{values{"name": "signing.keys"}},
			"hosts":          []any{"dlqd.example.com"},
			"extraArgs":      []any{"--rate-limit=100/s"},
			"extraEnv":       []any{values{"name": "AWS_REGION", "value": "eu-central-1"}},
			"serviceAccount": values{"name": "archive"}, "imagePullSecrets": []any{values{"name": "registry"}},
			"image":          values{"repository": "dlqd", "digest": "sha256:" + strings.Repeat("a", 64)},
			"nodeSelector":   values{"disk": "fast"},
			"tolerations":    []any{values{"key": "spot", "operator": "Exists"}},
			"affinity":       values{"nodeAffinity": values{}},
			"serviceMonitor": values{"enabled": true, "tokenSecret": "", "labels": values{"release": "monitoring"}},
			"prometheusRule": values{"enabled": true, "labels": values{"release": "monitoring"}},
			"networkPolicy": values{
				"from":   []any{values{"namespaceSelector": values{"matchLabels": values{"name": "monitoring"}}}},
				"egress": []any{values{"ports": []any{values{"port": 5432}}}},
			},
		},
	}
}

// render returns the manifests that the chart renders, by template.
func render(t *testing.T, release string, set values) (map[string]string, error) {
	t.Helper()
	chart, err := helmloader.Load(directory)
	require.NoError(t, err)
	capabilities := chartutil.DefaultCapabilities.Copy()
	all, err := chartutil.ToRenderValues(chart, set, chartutil.ReleaseOptions{
		Name: release, Namespace: namespace, Revision: 1, IsInstall: true,
	}, capabilities)
	if err != nil {
		return nil, err
	}
	files, err := engine.Engine{Strict: true}.Render(chart, all)
	if err != nil {
		return nil, err
	}
	byName := map[string]string{}
	for path, text := range files {
		byName[filepath.Base(path)] = text
	}
	return byName, nil
}

// objects has decoded manifests by kind.
type objects struct {
	deployments []*apps.Deployment
	jobs        []*batch.Job
	services    []*core.Service
	configMaps  []*core.ConfigMap
	budgets     []*policy.PodDisruptionBudget
	networks    []*networking.NetworkPolicy
	monitors    []*monitoring.ServiceMonitor
	rules       []*monitoring.PrometheusRule
}

// into returns a function that decodes a manifest and appends it to a list.
func into[T any](t *testing.T, list *[]*T) func(string) {
	t.Helper()
	return func(text string) {
		t.Helper()
		object := new(T)
		require.NoError(t, yaml.UnmarshalStrict([]byte(text), object), text)
		*list = append(*list, object)
	}
}

// decode decodes manifests. Unknown fields and repeated keys are errors.
func decode(t *testing.T, texts ...string) (all objects) {
	t.Helper()
	kinds := map[string]func(string){
		"apps/v1 Deployment":                      into(t, &all.deployments),
		"batch/v1 Job":                            into(t, &all.jobs),
		"v1 Service":                              into(t, &all.services),
		"v1 ConfigMap":                            into(t, &all.configMaps),
		"policy/v1 PodDisruptionBudget":           into(t, &all.budgets),
		"networking.k8s.io/v1 NetworkPolicy":      into(t, &all.networks),
		"monitoring.coreos.com/v1 ServiceMonitor": into(t, &all.monitors),
		"monitoring.coreos.com/v1 PrometheusRule": into(t, &all.rules),
	}
	for _, document := range strings.Split(strings.Join(texts, "\n---\n"), "\n---") {
		var kind meta.TypeMeta
		require.NoError(t, yaml.Unmarshal([]byte(document), &kind), document)
		id := kind.APIVersion + " " + kind.Kind
		if id == " " { // comments
			continue
		}
		require.Contains(t, kinds, id, document)
		kinds[id](document)
	}
	return all
}

// manifests renders an installation and decodes its manifests.
func manifests(t *testing.T, release string, set values) objects {
	t.Helper()
	files, err := render(t, release, set)
	require.NoError(t, err)
	delete(files, "NOTES.txt")
	return decode(t, slices.Collect(maps.Values(files))...)
}

func TestChart_Lints(t *testing.T) {
	t.Parallel()
	for name, set := range installations() {
		for _, message := range lint.All(directory, set, namespace, true).Messages {
			require.Less(t, message.Severity, support.WarningSev, "%s: %s", name, message)
		}
	}
}

// The pods of the processes and of the migration satisfy the restricted Pod Security Standard, and read their secrets
// from files. Kubernetes restarts a running process only if the process does not answer /livez.
func TestChart_PodsAreRestricted(t *testing.T) {
	t.Parallel()
	evaluator, err := securitypolicy.NewEvaluator(securitypolicy.DefaultChecks(), nil)
	require.NoError(t, err)
	for name, set := range installations() {
		all := manifests(t, "dlqd", set)
		pods := map[string]core.PodTemplateSpec{}
		for _, d := range all.deployments {
			pods[d.Name] = d.Spec.Template
			container := d.Spec.Template.Spec.Containers[0]
			require.Equal(t, "/livez", container.LivenessProbe.HTTPGet.Path)
			require.Equal(t, "/livez", container.StartupProbe.HTTPGet.Path)
			require.Equal(t, "/readyz", container.ReadinessProbe.HTTPGet.Path)
			stop := container.Lifecycle.PreStop.Sleep.Seconds + 30
			require.Contains(t, container.Args, "--stop-timeout=30s")
			require.Greater(t, *d.Spec.Template.Spec.TerminationGracePeriodSeconds, stop)
		}
		for _, j := range all.jobs {
			pods[j.Name] = j.Spec.Template
			require.Equal(t, "pre-install,pre-upgrade", j.Annotations["helm.sh/hook"])
			require.Empty(t, j.Spec.Template.Spec.Volumes[0].ConfigMap, "a hook runs before the chart's ConfigMap exists")
		}
		for pod, template := range pods {
			restricted := security.LevelVersion{Level: security.LevelRestricted, Version: security.LatestVersion()}
			for _, result := range evaluator.EvaluatePod(restricted, &template.ObjectMeta, &template.Spec) {
				require.True(t, result.Allowed, "%s, %s: %s", name, pod, result.ForbiddenDetail)
			}
			require.Empty(t, validation.IsDNS1123Label(pod))
			require.Len(t, template.Spec.Containers, 1)
			container := template.Spec.Containers[0]
			require.True(t, *container.SecurityContext.ReadOnlyRootFilesystem)
			require.False(t, *template.Spec.AutomountServiceAccountToken)
			require.NotEmpty(t, container.Resources.Limits.Memory())
			require.Contains(t, container.Args, "--database-url-file=/run/secrets/dlqd-database/url")
			volumes := map[string]bool{}
			for _, volume := range template.Spec.Volumes {
				require.Empty(t, validation.IsDNS1123Label(volume.Name))
				volumes[volume.Name] = true
			}
			for _, mount := range container.VolumeMounts {
				require.True(t, volumes[mount.Name], "%s mounts %s", pod, mount.Name)
			}
			for _, variable := range container.Env {
				require.Nil(t, variable.ValueFrom, "secrets are files")
			}
		}
	}
}

// Each selector matches the objects for which it is intended, and no other object of the release.
func TestChart_SelectorsMatch(t *testing.T) {
	t.Parallel()
	for name, set := range installations() {
		all := manifests(t, "dlqd", set)
		matching := func(selector map[string]string) (found []string) {
			for _, d := range all.deployments {
				require.True(t, labels.SelectorFromSet(d.Spec.Selector.MatchLabels).Matches(
					labels.Set(d.Spec.Template.Labels)), name)
				if labels.SelectorFromSet(selector).Matches(labels.Set(d.Spec.Template.Labels)) {
					found = append(found, d.Name)
				}
			}
			slices.Sort(found)
			return found
		}
		everything, front := []string{"dlqd"}, []string{"dlqd"}
		if set["roles"] != nil {
			everything, front = []string{"dlqd-api", "dlqd-dlq-workers", "dlqd-process"}, []string{"dlqd-api"}
		}
		for _, d := range all.deployments {
			require.Equal(t, []string{d.Name}, matching(d.Spec.Selector.MatchLabels))
		}
		for _, b := range all.budgets {
			require.Equal(t, []string{b.Name}, matching(b.Spec.Selector.MatchLabels))
		}
		for _, n := range all.networks {
			require.Equal(t, everything, matching(n.Spec.PodSelector.MatchLabels))
		}
		require.Len(t, all.services, 2)
		for _, s := range all.services {
			want := front
			if s.Spec.ClusterIP == core.ClusterIPNone {
				want = everything
			}
			require.Equal(t, want, matching(s.Spec.Selector), s.Name)
			require.Equal(t, "http", s.Spec.Ports[0].TargetPort.StrVal)
		}
		for _, m := range all.monitors {
			var found []string
			for _, s := range all.services {
				if labels.SelectorFromSet(m.Spec.Selector.MatchLabels).Matches(labels.Set(s.Labels)) {
					found = append(found, s.Name)
				}
			}
			require.Equal(t, []string{"dlqd-processes"}, found)
		}
	}
}

// Without roles, each process runs every part. With roles, each part has separate processes with separate settings.
func TestChart_DeploysByRole(t *testing.T) {
	t.Parallel()
	found := map[string]*apps.Deployment{}
	for _, d := range manifests(t, "prod", installations()["roles"]).deployments {
		found[d.Name] = d
	}
	require.Len(t, found, 3)
	arguments := func(name string) []string { return found[name].Spec.Template.Spec.Containers[0].Args }
	require.Contains(t, arguments("dlqd-prod-api"), "--api")
	require.Contains(t, arguments("dlqd-prod-process"), "--process")
	require.Contains(t, arguments("dlqd-prod-dlq-workers"), "--dlq-workers")
	require.Contains(t, arguments("dlqd-prod-api"), "--max-conns=20")
	require.Contains(t, arguments("dlqd-prod-api"), "--allowed-host=dlqd.example.com")
	require.Contains(t, arguments("dlqd-prod-api"), "--allowed-host=dlqd-prod.dlqd.svc")
	require.Contains(t, arguments("dlqd-prod-process"), "--max-conns=10")
	const replica = "--replica-url-file=/run/secrets/dlqd-database/replica-url"
	require.Contains(t, arguments("dlqd-prod-api"), replica)
	require.NotContains(t, arguments("dlqd-prod-process"), replica, "it has no API")
	require.EqualValues(t, 2, *found["dlqd-prod-api"].Spec.Replicas)
	require.EqualValues(t, 3, *found["dlqd-prod-process"].Spec.Replicas)
	require.EqualValues(t, 0, *found["dlqd-prod-dlq-workers"].Spec.Replicas)

	all := manifests(t, "dlqd", installations()["plain"])
	require.Len(t, all.deployments, 1)
	for _, argument := range all.deployments[0].Spec.Template.Spec.Containers[0].Args {
		require.NotContains(t, []string{"--api", "--process", "--dlq-workers"}, argument)
	}
	require.Equal(t, []string{"migrate", "up"}, all.jobs[0].Spec.Template.Spec.Containers[0].Args[:2])
	require.Equal(t, "attach",
		manifests(t, "dlqd", installations()["roles"]).jobs[0].Spec.Template.Spec.Containers[0].Args[0])
}

// The rendered alerts equal deploy/prometheus/rules.yaml, with links to the console that the values set.
func TestChart_AlertsAreTheFiles(t *testing.T) {
	t.Parallel()
	raw, err := os.ReadFile(deploy + "/prometheus/rules.yaml")
	require.NoError(t, err)
	text := strings.ReplaceAll(string(raw), "{{ $externalLabels.dlqd_url }}", "https://dlqd.example.com")
	var want monitoring.PrometheusRuleSpec
	require.NoError(t, yaml.UnmarshalStrict([]byte(text), &want))
	require.NotEmpty(t, want.Groups)
	rules := manifests(t, "dlqd", values{
		"image": values{"repository": "dlqd"}, "archive": "none", "url": "https://dlqd.example.com", "prometheusRule": values{"enabled": true},
	}).rules
	require.Len(t, rules, 1)
	require.Equal(t, want, rules[0].Spec)
}

func TestChart_RefusesWrongValues(t *testing.T) {
	t.Parallel()
	for name, set := range map[string]values{
		"no archive":      {},
		"no image":        {"archive": "none", "image": values{"tag": "1"}},
		"a directory":     {"archive": "/archive"}, // the chart has no volume
		"unknown value":   {"archive": "none", "replica": 1},
		"unknown role":    {"archive": "none", "roles": values{"worker": values{}}},
		"unknown mode":    {"archive": "none", "database": values{"mode": "shared"}},
		"few connections": {"archive": "none", "maxConnections": 1},
		"a path in a URL": {"archive": "none", "url": "https://example.com/dlqd"},
		"a file":          {"archive": "none", "policy": values{"../x": ""}},
	} {
		if _, has := set["image"]; !has {
			set["image"] = values{"repository": "dlqd"}
		}
		_, err := render(t, "dlqd", set)
		require.Error(t, err, name)
	}
	for name, set := range installations() {
		files, err := render(t, "dlqd", set)
		require.NoError(t, err, name)
		require.Contains(t, files["NOTES.txt"], "dlqd tokens create", name)
	}
}

// digest returns the hash of the chart's files. deploy/deploy_test.go computes the same hash.
func digest(t *testing.T) string {
	t.Helper()
	hash := sha256.New()
	require.NoError(t, filepath.WalkDir(directory, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		raw, err := os.ReadFile(path)
		_, _ = fmt.Fprintf(hash, "%s %d\n%s", strings.TrimPrefix(filepath.ToSlash(path), directory+"/"), len(raw), raw)
		return err
	}))
	return hex.EncodeToString(hash.Sum(nil))
}

// TestManifests_MatchTheChart compares deploy/kubernetes with the manifests that the chart renders. With
// DLQD_MANIFESTS=write it writes the files.
func TestManifests_MatchTheChart(t *testing.T) {
	t.Parallel()
	files, err := render(t, "dlqd", installations()["plain"])
	require.NoError(t, err)
	for name, templates := range map[string][]string{
		"migration.yaml":  {"migration.yaml"},
		"dlqd.yaml":       {"policy.yaml", "deployment.yaml", "service.yaml", "networkpolicy.yaml"},
		"monitoring.yaml": {"monitoring.yaml"},
	} {
		text := fmt.Sprintf("# Rendered from deploy/helm/dlqd by \"make manifests\". DO NOT EDIT.\n# chart: %s\n", digest(t))
		for _, template := range templates {
			text += "---\n" + strings.TrimSpace(strings.TrimPrefix(strings.TrimSpace(files[template]), "---")) + "\n"
		}
		text = strings.ReplaceAll(text, "app.kubernetes.io/managed-by: Helm\n", "app.kubernetes.io/managed-by: kubectl\n")
		text = regexp.MustCompile(`(?m) +$`).ReplaceAllString(text, "")
		path := filepath.Join(deploy, "kubernetes", name)
		if os.Getenv("DLQD_MANIFESTS") == "write" {
			require.NoError(t, os.WriteFile(path, []byte(text), 0o644))
		}
		raw, err := os.ReadFile(path)
		require.NoError(t, err)
		require.Equal(t, text, string(raw), "make manifests")
		decode(t, text)
	}
}

// TestCompose_Loads reads the compose file as Compose does. Its mounts exist, its configs have content, and its ports
// are open on 127.0.0.1 only.
func TestCompose_Loads(t *testing.T) {
	t.Parallel()
	raw, err := os.ReadFile(deploy + "/compose.yaml")
	require.NoError(t, err)
	project, err := loader.LoadWithContext(context.Background(), types.ConfigDetails{
		WorkingDir:  deploy,
		ConfigFiles: []types.ConfigFile{{Filename: "compose.yaml", Content: raw}},
		Environment: types.Mapping{"DLQD_IMAGE": "dlqd/dlqd:0.2.0"},
	})
	require.NoError(t, err)
	require.ElementsMatch(t, []string{"postgres", "migrate", "dlqd", "prometheus", "alertmanager", "grafana"},
		project.ServiceNames())
	for name, service := range project.Services {
		for _, volume := range service.Volumes {
			if volume.Type == types.VolumeTypeBind {
				require.FileExists(t, volume.Source, name)
			}
		}
		for _, port := range service.Ports {
			require.Equal(t, "127.0.0.1", port.HostIP, name)
		}
		for _, config := range service.Configs {
			require.NotEmpty(t, project.Configs[config.Source].Content, name)
		}
	}
}
