package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

	"github.com/spf13/cobra"

	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/automatic"
)

func newAutomatic() *cobra.Command {
	var c client
	cmd := &cobra.Command{
		Use:   "automatic",
		Short: "Say for what dead letters are redelivered by themselves; switch it on and off",
		Long: "Where an application owns River, dlqd observes until it is told otherwise: dead letters are judged and shown, and none is redelivered by\n" +
			"itself. What a person replays goes on, whatever is switched.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var status automatic.Overview
			if err := c.call(cmd, http.MethodGet, "/api/dlq/automatic", nil, &status); err != nil || c.asJSON {
				return err
			}
			return printAutomatic(cmd, &status)
		},
	}
	c.register(cmd)
	cmd.AddCommand(
		newSwitch("on", "Switch automatic redelivery on: what waits goes at the pace of its queue"),
		newSwitch("off", "Switch automatic redelivery off: dead letters are observed"),
		newSwitch("reset", "Take a switch away, so that the policy counts again"),
		newStop("stop", "Stop all automatic redelivery at once, over all processes, until it is resumed"),
		newStop("resume", "Go on with automatic redelivery"),
	)
	return cmd
}

func printAutomatic(cmd *cobra.Command, status *automatic.Overview) error {
	sayStopped(cmd.OutOrStdout(), status.Stopped)
	w, row := table(cmd, "SWITCH\tIS\tINCLUDES\tFROM\tSINCE\tNOTE")
	for i := range status.Switches {
		s := &status.Switches[i]
		from, since := s.Source, "-"
		if s.At != nil {
			from, since = s.Actor, ago(*s.At)
		}
		row(s.String(), onOff(s.Enabled), strings.Join(s.Include, ", "), from, since, s.Note)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	if len(status.Observed) > 0 {
		w, row = table(cmd, "\nOBSERVED\tDUE\tQUEUE\tKIND\tCLASS\tAUTOMATIC")
		for _, g := range status.Observed {
			row(g.Entries, g.Due, g.Queue, g.Kind, g.ErrorClass, onOff(g.On))
		}
		if err := w.Flush(); err != nil {
			return err
		}
	}
	if len(status.Changes) == 0 {
		return nil
	}
	w, row = table(cmd, "\nAT\tCHANGE\tBY\tNOTE")
	for _, change := range status.Changes {
		what := "reset"
		switch {
		case change.Scope == automatic.ScopeStop && change.Enabled != nil:
			what = "stopped"
		case change.Scope == automatic.ScopeStop:
			what = "resumed"
		case change.Enabled != nil:
			what = onOff(*change.Enabled)
		}
		name := strings.TrimSpace(change.Scope + " " + change.Name)
		if change.Name == "restored" && change.Scope == automatic.ScopeStop {
			what = map[bool]string{true: "held", false: "goes on"}[change.Enabled != nil]
		}
		if change.Scope == automatic.ScopeStop {
			name = cmp.Or(change.Name, automatic.ScopeAll)
		}
		row(stamp(change.At), name+": "+what, change.Actor, text(change.Note))
	}
	return w.Flush()
}

func onOff(on bool) string {
	if on {
		return "on"
	}
	return "off"
}

// sayStopped prints the stop of all automatic redelivery, if there is one.
func sayStopped(w io.Writer, stop *automatic.Stop) {
	if stop != nil {
		sayf(w, "%s\n", stop.String())
	}
}

// newSwitch returns the command on, off or reset.
func newSwitch(verb, short string) *cobra.Command {
	var c client
	in := api.SetAction{Enabled: verb == "on"}
	names := map[string]*string{}
	all := false
	cmd := &cobra.Command{
		Use:   verb + " (--all | --queue NAME | --kind PATTERN | --class NAME)",
		Short: short,
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			chosen := 0
			if all {
				in.Scope, chosen = automatic.ScopeAll, 1
			}
			for scope, name := range names {
				if *name != "" {
					in.Scope, in.Name = scope, *name
					chosen++
				}
			}
			if chosen != 1 {
				return &usageError{errors.New("say for what, with one of --all, --queue, --kind and --class")}
			}
			path, body := "/api/dlq/automatic/set", any(in)
			if verb == "reset" {
				path, body = "/api/dlq/automatic/reset", in.SwitchAction
			}
			done := strings.TrimSpace(in.Scope+" "+in.Name) + ": " + map[string]string{"on": "on", "off": "off", "reset": "as the policy says"}[verb]
			return c.changeAutomatic(cmd, path, body, done)
		},
	}
	c.registerAutomatic(cmd, &in.AutomaticAction)
	flags := cmd.Flags()
	flags.BoolVar(&all, "all", false, "for what no other switch is for")
	names[automatic.ScopeQueue] = flags.String(automatic.ScopeQueue, "", "for a queue")
	names[automatic.ScopeKind] = flags.String(automatic.ScopeKind, "", "for a kind of message or job; * stands for any text")
	names[automatic.ScopeClass] = flags.String(automatic.ScopeClass, "", "for a class of error")
	if verb == "on" {
		flags.StringSliceVar(&in.Include, "include", nil, "what stays a person's otherwise: backfilled, single-attempt")
	}
	return cmd
}

// newStop returns the command stop or resume.
func newStop(verb, short string) *cobra.Command {
	var c client
	var in api.AutomaticAction
	cmd := &cobra.Command{
		Use: verb, Short: short, Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			done := map[string]string{"stop": "all automatic redelivery is stopped; dlqd automatic resume lifts that", "resume": "automatic redelivery goes on, as the switches say"}[verb]
			return c.changeAutomatic(cmd, "/api/dlq/automatic/"+verb, in, done)
		},
	}
	c.registerAutomatic(cmd, &in)
	return cmd
}

func (c *client) registerAutomatic(cmd *cobra.Command, in *api.AutomaticAction) {
	c.register(cmd)
	cmd.Flags().StringVar(&in.Actor, "actor", actor(), "who does it")
	cmd.Flags().StringVar(&in.Note, "note", "", "why")
	cmd.Flags().BoolVar(&in.DryRun, "dry-run", false, "only say what would go, and what would stay")
}

// changeAutomatic makes a change and prints which entries are redelivered and which stay.
func (c *client) changeAutomatic(cmd *cobra.Command, path string, body any, done string) error {
	var out api.AutomaticChanged
	if err := c.call(cmd, http.MethodPost, path, body, &out); err != nil || c.asJSON {
		return err
	}
	if len(out.Goes) > 0 {
		w, row := table(cmd, "GO\tOF THEM AT ONCE\tQUEUE\tKIND\tCLASS\tPACE\tUNTIL")
		for _, g := range out.Goes {
			pace, until := "no limit", "-"
			if g.PerSecond > 0 {
				pace = fmt.Sprintf("%g a second", g.PerSecond)
			}
			if g.Until != nil {
				until = stamp(*g.Until)
			}
			row(g.Entries, g.Due, g.Queue, g.Kind, g.ErrorClass, pace, until)
		}
		if err := w.Flush(); err != nil {
			return err
		}
	}
	if len(out.Stays) > 0 {
		w, row := table(cmd, "STAY\tQUEUE\tKIND\tCLASS\tBECAUSE")
		for _, s := range out.Stays {
			row(s.Entries, s.Queue, s.Kind, s.ErrorClass, s.Why)
		}
		if err := w.Flush(); err != nil {
			return err
		}
	}
	if out.Stopped != nil && !strings.HasPrefix(done, "all automatic") {
		sayStopped(cmd.OutOrStdout(), out.Stopped)
	}
	if out.DryRun {
		done = "nothing was changed (--dry-run)"
	}
	sayf(cmd.OutOrStdout(), "%s\n", done)
	return nil
}
