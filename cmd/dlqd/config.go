package main

import (
	"archive/tar"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"

	"github.com/dlqd/dlqd/internal/delivery"
	"github.com/dlqd/dlqd/internal/message"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/riverdlq"
	"github.com/dlqd/dlqd/internal/strategy"
)

// defaultDestination is the address of the practice receiver.
const defaultDestination = "http://127.0.0.1:9090/"

// policyFlags are the flags that name a policy.
type policyFlags struct{ dir, env, destination string }

func (f *policyFlags) register(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringVar(&f.dir, "config-dir", "", "directory of the policy's files ("+strings.Join(policy.Files(), ", ")+
		"); built-in defaults if empty")
	flags.StringVar(&f.env, "env", "", "environment: a folder in environments/ of the directory, merged over the policy")
	flags.StringVar(&f.destination, "destination", cmp.Or(os.Getenv("DLQD_DESTINATION"), defaultDestination),
		"URL to deliver to, for a policy that defines no queues ($DLQD_DESTINATION)")
	flags.Lookup("destination").DefValue = defaultDestination // help must not print a token
}

func (f *policyFlags) source() policy.Source {
	return policy.Source{Dir: f.dir, Env: f.env, Destination: f.destination}
}

func newConfig() *cobra.Command {
	cmd := &cobra.Command{Use: "config", Short: "Check, show and compare policies, and test their rules"}
	cmd.AddCommand(newConfigCheck(), newConfigShow(), newConfigDiff(), newConfigTest(), newConfigSchema())
	return cmd
}

// check rejects --destination unless a destination of the policy has that URL: a policy that names its destinations
// does not use the flag.
func (f *policyFlags) check(cmd *cobra.Command, p *policy.Policy) error {
	for _, d := range p.Destinations {
		if d.URL == f.destination {
			return nil
		}
	}
	return rejectFlags(cmd, "if the policy names its destinations", "destination")
}

// loadPlanner loads a policy and compiles the rules of the policy, to check or compare them. loadPlanner does not read
// files with secrets: the files are not in Git, so a reviewer and CI do not have them.
func loadPlanner(source policy.Source) (*strategy.Planner, error) {
	source.SecretsElsewhere = true
	p, err := policy.Load(source)
	if err != nil {
		return nil, err
	}
	return strategy.NewPlanner(p, nil)
}

func newConfigCheck() *cobra.Command {
	var env string
	cmd := &cobra.Command{
		Use:   "check [DIR]",
		Short: "Check a policy; print each error with file and line",
		Long: "Check reads DIR (default: the current directory) as serve does, for one environment or, without --env, " +
			"for each.\n" +
			"It warns of missing files with secrets, which only serve needs, and of names of queues that the policy does not\n" +
			"define. A warning does not fail the check.",
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			dir := "."
			if len(args) > 0 {
				dir = args[0]
			}
			envs := []string{env}
			if env == "" {
				found, err := filepath.Glob(filepath.Join(dir, policy.EnvironmentsDir, "*"))
				if err != nil {
					return err
				}
				for _, path := range found {
					envs = append(envs, filepath.Base(path))
				}
			}
			var errs []error
			printed := map[string]bool{} // print a mistake in the base files once, not for each environment
			for _, e := range envs {
				name := dir
				if e != "" {
					name += " --env " + e
				}
				planner, err := loadPlanner(policy.Source{Dir: dir, Env: e, Destination: defaultDestination})
				known := func(text string) bool { // whether text was printed for an earlier environment
					before := printed[text]
					printed[text] = true
					return before
				}
				if err != nil {
					lines := strings.Split(strings.TrimPrefix(err.Error(), "policy "+dir+": "), "\n")
					if lines = slices.DeleteFunc(lines, known); len(lines) > 0 {
						errs = append(errs, fmt.Errorf("%s: %s", name, strings.Join(lines, "\n")))
					}
					continue
				}
				p := planner.Policy()
				for _, warning := range slices.DeleteFunc(slices.Clone(p.Warnings()), known) {
					printSafef(cmd.ErrOrStderr(), "warning: %s\n", warning)
				}
				_, _ = fmt.Fprintf(cmd.OutOrStdout(), "%s: ok, version %s: %d queues, %d destinations, %d rules\n", name,
					p.Version(), len(p.Queues), len(p.Destinations), len(p.Routing.Rules))
			}
			return errors.Join(errs...)
		},
	}
	cmd.Flags().StringVar(&env, "env", "", "only this environment")
	return cmd
}

func newConfigShow() *cobra.Command {
	var source policyFlags
	cmd := &cobra.Command{
		Use:   "show",
		Short: "Print every value in force and its origin",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			planner, err := loadPlanner(source.source())
			if err != nil {
				return err
			}
			if err := source.check(cmd, planner.Policy()); err != nil {
				return err
			}
			w, row := table(cmd, "VALUE\tFROM")
			for _, s := range planner.Policy().Settings() {
				row(s, s.Origin)
			}
			row("version "+planner.Policy().Version(), "")
			return w.Flush()
		},
	}
	source.register(cmd)
	return cmd
}

func newConfigDiff() *cobra.Command {
	var env string
	cmd := &cobra.Command{
		Use:   "diff OLD NEW",
		Short: "Compare two policies: their values, and how they handle errors",
		Long: "OLD and NEW are directories, or REVISION:DIRECTORY in the Git repository around the current directory:\n" +
			"dlqd config diff origin/main:config config",
		Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			planners := make([]*strategy.Planner, 2)
			for i, name := range args {
				dir, remove, err := checkout(cmd, name)
				if err != nil {
					return err
				}
				planners[i], err = loadPlanner(policy.Source{Dir: dir, Env: env, Destination: defaultDestination})
				remove()
				if err != nil { // name the revision, because the directory is gone
					return fmt.Errorf("%s: %s", name, strings.ReplaceAll(err.Error(), dir, name))
				}
			}
			out := cmd.OutOrStdout()
			old, next := planners[0], planners[1]
			changes, behaviour := policy.Diff(old.Policy(), next.Policy()), strategy.BehaviourDiff(old, next)
			if len(changes)+len(behaviour) == 0 {
				_, _ = fmt.Fprintln(out, "no difference")
				return nil
			}
			_, _ = fmt.Fprintln(out, "Values:")
			for _, c := range changes {
				_, _ = fmt.Fprintln(out, " ", c)
			}
			_, _ = fmt.Fprintln(out, "Behaviour:")
			for _, line := range behaviour {
				_, _ = fmt.Fprintln(out, " ", line)
			}
			if len(behaviour) == 0 {
				_, _ = fmt.Fprintln(out, "  no change")
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&env, "env", "", "environment of both policies")
	return cmd
}

// checkout returns the directory with a policy. If name is REVISION:DIRECTORY, checkout reads that directory from Git
// into a temporary directory. remove deletes the temporary directory.
func checkout(cmd *cobra.Command, name string) (dir string, remove func(), err error) {
	revision, path, ok := strings.Cut(name, ":")
	if _, err := os.Stat(name); err == nil {
		return name, func() {}, nil
	}
	if !ok {
		return "", nil, &usageError{fmt.Errorf("%s: there is no such directory; name one, or REVISION:DIRECTORY", name)}
	}
	archive, err := exec.CommandContext(cmd.Context(), "git", "archive", "--end-of-options", revision, path).Output() //nolint:gosec // what the operator names
	if err != nil {
		if exit, ok := errors.AsType[*exec.ExitError](err); ok {
			err = errors.New(strings.TrimSpace(string(exit.Stderr)))
		}
		return "", nil, fmt.Errorf("%s: %w", name, err)
	}
	if dir, err = os.MkdirTemp("", "dlqd-config-"); err != nil {
		return "", nil, err
	}
	remove = func() { _ = os.RemoveAll(dir) }
	root, err := os.OpenRoot(dir)
	if err != nil {
		remove()
		return "", nil, err
	}
	defer func() { _ = root.Close() }()
	for files := tar.NewReader(bytes.NewReader(archive)); ; {
		header, err := files.Next()
		if errors.Is(err, io.EOF) {
			return filepath.Join(dir, path), remove, nil
		}
		if err == nil && header.Typeflag == tar.TypeDir {
			err = root.MkdirAll(filepath.Clean(header.Name), 0o700)
		} else if err == nil && header.Typeflag == tar.TypeReg {
			var raw []byte
			if raw, err = io.ReadAll(files); err == nil {
				err = root.MkdirAll(filepath.Dir(header.Name), 0o700)
			}
			if err == nil {
				err = root.WriteFile(header.Name, raw, 0o600)
			}
		}
		if err != nil {
			remove()
			return "", nil, err
		}
	}
}

// sample is a failure to test rules with, and the expected outcome. The failure is an answer to the delivery of a
// message, or an error that an application's worker reports.
type sample struct {
	Name   string           `yaml:"name"`
	Answer *delivery.Answer `yaml:"answer"`
	Error  struct {
		Type    string         `yaml:"type"`
		Code    string         `yaml:"code"`
		Message string         `yaml:"message"`
		Panic   bool           `yaml:"panic"`
		Class   string         `yaml:"class"`
		Context map[string]any `yaml:"context"`
	} `yaml:"error"`
	Kind    string            `yaml:"kind"`
	Queue   string            `yaml:"queue"`
	Source  string            `yaml:"source"`
	Payload any               `yaml:"payload"` // of the message; for a job, the args
	Headers map[string]string `yaml:"headers"`
	Expect  struct {
		Class    string `yaml:"class"`
		Rule     string `yaml:"rule"`
		Strategy string `yaml:"strategy"`
	} `yaml:"expect"`
}

func newConfigTest() *cobra.Command {
	var source policyFlags
	cmd := &cobra.Command{
		Use:   "test FILE...",
		Short: "Run sample errors through the rules; print class, rule and strategy",
		Long:  "The command fails if a sample's class, rule or strategy differs from what the sample expects.",
		Args:  cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			planner, err := loadPlanner(source.source())
			if err != nil {
				return err
			}
			if err := source.check(cmd, planner.Policy()); err != nil {
				return err
			}
			w, row := table(cmd, "SAMPLE\tCLASS\tRULE\tSTRATEGY\t")
			total, mismatches := 0, 0
			for _, file := range args {
				samples, err := readSamples(file)
				if err != nil {
					return err
				}
				for i := range samples {
					s := &samples[i]
					facts, err := s.facts(cmd.Context(), planner.Policy())
					if err != nil {
						return fmt.Errorf("%s: %s: %w", file, s.Name, err)
					}
					d := planner.Decide(&strategy.Entry{Facts: facts, LastFailedAt: time.Now()}, time.Now())
					remark := s.remark(&d)
					total++
					if remark != "" {
						mismatches++
					}
					row(s.Name, d.Class, d.Rule, d.Strategy, remark)
				}
			}
			if err := w.Flush(); err != nil {
				return err
			}
			if mismatches > 0 {
				return fmt.Errorf("%d of %d samples have an unexpected class, rule or strategy", mismatches, total)
			}
			_, _ = fmt.Fprintf(cmd.OutOrStdout(), "%d samples\n", total)
			return nil
		},
	}
	source.register(cmd)
	return cmd
}

func readSamples(file string) ([]sample, error) {
	raw, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	decoder := yaml.NewDecoder(bytes.NewReader(raw))
	decoder.KnownFields(true)
	var samples []sample
	if err := decoder.Decode(&samples); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return samples, nil
}

// facts returns the input of the rules. For a message, it has the facts that a delivery with the sample's answer would
// report.
func (s *sample) facts(ctx context.Context, p *policy.Policy) (strategy.Facts, error) {
	payload := mustJSON(s.Payload)
	if s.Answer == nil {
		return strategy.Facts{
			Type: s.Error.Type, Code: s.Error.Code, Message: s.Error.Message,
			Panic: s.Error.Panic, Class: riverdlq.Class(s.Error.Class),
			Context: mustJSON(s.Error.Context), Kind: s.Kind, Queue: s.Queue,
			Source: s.Source, Payload: payload, Headers: s.Headers,
		}, nil
	}
	queue := p.Queues[s.Queue]
	if queue == nil {
		queue = &p.Defaults
	}
	destination := p.Destinations[queue.Destination]
	if destination == nil {
		destination = &policy.Destination{}
	}
	if destination.URL == "" { // the destination is unknown, or its URL is in a file that this command does not read
		known := *destination
		known.URL = defaultDestination
		destination = &known
	}
	sent := &message.Message{
		MessageID: "sample", Queue: s.Queue, EventKind: s.Kind, Source: s.Source, Payload: payload, Headers: s.Headers,
	}
	return delivery.FailureOf(ctx, &p.Data, queue, destination, sent, s.Answer)
}

// remark describes each difference between the expected and the actual decision.
func (s *sample) remark(d *strategy.Decision) string {
	var remarks []string
	for _, e := range []struct{ what, want, got string }{
		{"class", s.Expect.Class, string(d.Class)},
		{"rule", s.Expect.Rule, d.Rule},
		{"strategy", s.Expect.Strategy, d.Strategy},
	} {
		if e.want != "" && e.want != e.got {
			remarks = append(remarks, "expected "+e.what+" "+e.want)
		}
	}
	return strings.Join(remarks, "; ")
}

func newConfigSchema() *cobra.Command {
	return &cobra.Command{
		Use:       "schema FILE",
		Short:     "Print the JSON Schema of a policy file, for editors",
		Args:      cobra.MatchAll(cobra.ExactArgs(1), cobra.OnlyValidArgs),
		ValidArgs: policy.Files(),
		RunE: func(cmd *cobra.Command, args []string) error {
			raw, err := policy.Schema(args[0])
			if err != nil {
				return err
			}
			_, err = cmd.OutOrStdout().Write(raw)
			return err
		},
	}
}

func mustJSON(v any) json.RawMessage {
	raw, err := json.Marshal(v)
	if err != nil {
		return nil // YAML allows values that JSON does not, such as a map with a list as a key
	}
	return raw
}
