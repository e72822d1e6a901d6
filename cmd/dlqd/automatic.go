package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/automatic"
)

func newAutomatic() *cobra.Command {
	var c client
	cmd := &cobra.Command{
		Use:   "automatic",
		Short: "Show which dead letters dlqd redelivers automatically; switch it on and off",
		Long: "On an application's River, dlqd only observes until automatic redelivery is switched on: it classifies and " +
			"lists\n" +
			"dead letters, and redelivers none of them automatically. The switches do not affect replays by an operator.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			status, err := call(cmd, &c, api.GetAutomatic, api.None{})
			if err != nil || c.asJSON {
				return err
			}
			return printAutomatic(cmd, status)
		},
	}
	c.registerTable(cmd)
	cmd.AddCommand(
		newSwitch("on", "Switch automatic redelivery on: waiting dead letters are redelivered at the rate of their queue"),
		newSwitch("off", "Switch automatic redelivery off: dead letters are only observed"),
		newSwitch("reset", "Remove a switch, so that the policy decides again"),
		newStop("stop", "Stop all automatic redelivery in all processes immediately, until it is resumed"),
		newStop("resume", "Resume automatic redelivery"),
	)
	return cmd
}

func printAutomatic(cmd *cobra.Command, status *automatic.Overview) error {
	printStop(cmd.OutOrStdout(), status.Stopped)
	w, row := table(cmd, "SWITCH\tSTATE\tINCLUDES\tSET BY\tSINCE\tNOTE")
	for i := range status.Switches {
		s := &status.Switches[i]
		setBy, since := s.Source, "-"
		if s.At != nil {
			setBy, since = s.Actor, ago(*s.At)
		}
		row(s.String(), onOff(s.Enabled), strings.Join(s.Include, ", "), setBy, since, s.Note)
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
			what = map[bool]string{true: "held", false: "resumed"}[change.Enabled != nil]
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

// printStop prints the stop of all automatic redelivery, if there is one.
func printStop(w io.Writer, stop *automatic.Stop) {
	if stop != nil {
		printSafef(w, "%s\n", stop.String())
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
			selected := 0
			if all {
				in.Scope, selected = automatic.ScopeAll, 1
			}
			for scope, name := range names {
				if *name != "" {
					in.Scope, in.Name = scope, *name
					selected++
				}
			}
			if selected != 1 {
				return &usageError{errors.New("one of --all, --queue, --kind and --class is required")}
			}
			done := strings.TrimSpace(in.Scope+" "+in.Name) + ": " + map[string]string{
				"on": "on", "off": "off", "reset": "removed, the policy decides",
			}[verb]
			if verb == "reset" {
				return changeAutomatic(cmd, &c, api.ResetAutomatic, api.ResetAutomaticInput{Body: in.SwitchAction}, done)
			}
			return changeAutomatic(cmd, &c, api.SetAutomatic, api.SetAutomaticInput{Body: in}, done)
		},
	}
	c.registerAutomatic(cmd, &in.AutomaticAction)
	flags := cmd.Flags()
	flags.BoolVar(&all, "all", false, "for all dead letters that no other switch matches")
	names[automatic.ScopeQueue] = flags.String(automatic.ScopeQueue, "", "for a queue")
	names[automatic.ScopeKind] = flags.String(automatic.ScopeKind, "", "for a kind of message or job; * matches any text")
	names[automatic.ScopeClass] = flags.String(automatic.ScopeClass, "", "for an error class")
	if verb == "on" {
		flags.StringSliceVar(&in.Include, "include", nil, "also redeliver what otherwise waits for an operator: "+
			"backfilled, single-attempt")
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
			done := map[string]string{
				"stop":   "all automatic redelivery is stopped; resume it with: dlqd automatic resume",
				"resume": "automatic redelivery is resumed; the switches apply again",
			}[verb]
			operation := api.StopAutomatic
			if verb == "resume" {
				operation = api.ResumeAutomatic
			}
			return changeAutomatic(cmd, &c, operation, api.AutomaticInput{Body: &in}, done)
		},
	}
	c.registerAutomatic(cmd, &in)
	return cmd
}

func (c *client) registerAutomatic(cmd *cobra.Command, in *api.AutomaticAction) {
	c.registerTable(cmd)
	addActor(cmd, &in.Actor, &in.Note)
	cmd.Flags().BoolVar(&in.DryRun, "dry-run", false, "only show which dead letters would be redelivered, and which not")
}

// changeAutomatic changes automatic redelivery and prints which entries are then redelivered and which stay.
func changeAutomatic[In any](cmd *cobra.Command, c *client, operation api.Operation[In, api.AutomaticChanged],
	input In, done string,
) error {
	out, err := call(cmd, c, operation, input)
	if err != nil || c.asJSON {
		return err
	}
	if len(out.Goes) > 0 {
		w, row := table(cmd, "REDELIVERED\tDUE NOW\tQUEUE\tKIND\tCLASS\tRATE\tUNTIL")
		for _, g := range out.Goes {
			rate, until := "no limit", "-"
			if g.PerSecond > 0 {
				rate = fmt.Sprintf("%g a second", g.PerSecond)
			}
			if g.Until != nil {
				until = stamp(*g.Until)
			}
			row(g.Entries, g.Due, g.Queue, g.Kind, g.ErrorClass, rate, until)
		}
		if err := w.Flush(); err != nil {
			return err
		}
	}
	if len(out.Stays) > 0 {
		w, row := table(cmd, "NOT REDELIVERED\tQUEUE\tKIND\tCLASS\tBECAUSE")
		for _, s := range out.Stays {
			row(s.Entries, s.Queue, s.Kind, s.ErrorClass, s.Why)
		}
		if err := w.Flush(); err != nil {
			return err
		}
	}
	if out.Stopped != nil && !strings.HasPrefix(done, "all automatic") {
		printStop(cmd.OutOrStdout(), out.Stopped)
	}
	if out.DryRun {
		done = "nothing was changed (--dry-run)"
	}
	printSafef(cmd.OutOrStdout(), "%s\n", done)
	return nil
}
