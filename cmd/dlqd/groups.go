package main

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/group"
	"github.com/dlqd/dlqd/internal/policy"
)

func newGroups() *cobra.Command {
	cmd := &cobra.Command{
		Use: "groups", Args: cobra.NoArgs,
		Short: "List failure groups (dead letters with the same cause); assign, annotate, mute and fix them",
	}
	var c client
	var in api.GroupsInput
	list := &cobra.Command{
		Use: "list", Short: "List failure groups, most recent failure first", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			page, err := call(cmd, &c, api.ListGroups, in)
			if err != nil || c.asJSON {
				return err
			}
			w, row := table(cmd, "QUEUE\tGROUP\tSTATUS\tOPEN\tFAILURES\tTREND\tCLASS\tOWNER\tFIRST SEEN\tLAST SEEN\tERROR")
			for i := range page.Groups {
				g := &page.Groups[i]
				row(g.Queue, g.Fingerprint, g.Status, g.Open, g.Failures, sparkline(g.Trend, add), text(g.ErrorClass),
					text(g.Owner), ago(g.FirstSeen)+" ago", ago(g.LastSeen)+" ago", text(g.Title))
			}
			if len(page.Groups) == 0 {
				c.noteUnknownQueues(cmd, "", in.Queue)
			}
			if err := w.Flush(); err != nil || page.Next == "" {
				return err
			}
			_, err = fmt.Fprintln(cmd.ErrOrStderr(), "more: --cursor", page.Next)
			return err
		},
	}
	addDefaultList(cmd, list, &c, "groups", "queue", "fingerprint")
	for _, f := range []*cobra.Command{cmd, list} {
		f.Flags().StringSliceVar(&in.Status, "status", nil, "only these statuses: open, fixed, regressed, muted")
		f.Flags().IntVar(&in.Limit, "limit", 50, "groups per page, at most 200")
		for _, flag := range []struct {
			into       *string
			name, help string
		}{
			{&in.Queue, "queue", "only this queue"},
			{&in.ErrorClass, "error-class", "only this error class"},
			{&in.Owner, "owner", "only this owner; \"nobody\" for groups without an owner"},
			{&in.HasOpen, "has-open", "only groups with open dead letters (true) or without (false)"},
			{&in.Order, "order", "first: the most recent failure (latest), the most open dead letters (open), the most " +
				"failures (failures), the newest; or by status or owner"},
			{&in.Over, "over", "period of the trend, such as 24h or 30d"},
			{&in.Cursor, "cursor", "cursor that the previous page printed"},
		} {
			f.Flags().StringVar(flag.into, flag.name, "", flag.help)
		}
	}
	cmd.AddCommand(newShowGroup(), newAssignGroup(), newNoteGroup(), newMuteGroup(),
		newSetGroup("unmute", "Unmute a failure group: send its notifications again",
			func(_ *cobra.Command, in *api.GroupChange, now *group.Group) {
				in.Status = group.Open
				if now.FixedAt != nil {
					in.Status = group.Fixed
				}
			}),
		newFixedGroup(),
		newSetGroup("reopen", "Set a fixed or muted failure group to open again",
			func(_ *cobra.Command, in *api.GroupChange, _ *group.Group) { in.Status = group.Open }))
	return cmd
}

func groupInput(args []string) api.GroupInput {
	return api.GroupInput{Queue: args[0], Fingerprint: args[1]}
}

func newShowGroup() *cobra.Command {
	var c client
	var over string
	cmd := &cobra.Command{
		Use: "show QUEUE GROUP", Short: "Show a failure group, the origins of its dead letters, and the newest of them",
		Long: "GROUP is the fingerprint, or a prefix of at least four characters that is unique in the queue.",
		Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			g, err := call(cmd, &c, api.GetGroup, api.GetGroupInput{GroupInput: groupInput(args), Over: over})
			if err != nil || c.asJSON {
				return err
			}
			if err := printGroup(cmd, &g.Group); err != nil {
				return err
			}
			if len(g.Former) > 0 {
				printSafef(cmd.OutOrStdout(), "formerly %s\n", strings.Join(g.Former, ", "))
			}
			if g.Fix != nil {
				printFix(cmd, g.Fix)
			}
			if g.WorkerLost > 0 {
				printSafef(cmd.OutOrStdout(), "%s\n", workerLost(g.WorkerLost))
			}
			w, row := table(cmd, "\nBY\tNAME\tENTRIES\tSHARE")
			for _, s := range g.Shares {
				row(s.By, s.Name, s.Entries, percent(&s.Share))
			}
			if err := w.Flush(); err != nil {
				return err
			}
			w, row = table(cmd, "\nID\tSTATUS\tKIND\tFAILED\tERROR\tNEXT")
			for _, e := range g.Entries {
				row(e.ID, strings.TrimPrefix(string(e.Status), "dlq_"), e.Kind, ago(e.LastFailedAt)+" ago",
					text(e.ErrorMessage), text(e.Next))
			}
			return w.Flush()
		},
	}
	c.registerNamed(cmd, "", "queue", "fingerprint")
	cmd.Flags().StringVar(&over, "over", "24h", "period of the trend, such as 24h or 30d")
	return cmd
}

// workerLost describes n entries of a group: River rescued the jobs of these entries twice or more.
func workerLost(n int64) string {
	return fmt.Sprintf("rescued twice or more (rule worker-lost): %d. One of them may kill the worker; a replay run "+
		"sends one at a time", n)
}

func printGroup(cmd *cobra.Command, g *group.Group) error {
	w, row := table(cmd, "group\t"+printable(g.Fingerprint)+" of "+printable(g.Queue))
	row("error", text(g.Title))
	row("class, type", text(g.ErrorClass)+", "+text(g.ErrorType))
	status := g.Status
	if g.FixedAt != nil {
		status += ", marked as fixed by " + text(g.FixedBy) + " at " + stamp(*g.FixedAt)
	}
	if g.MutedAt != nil {
		status += ", muted by " + text(g.MutedBy)
		if g.MuteUntil != nil {
			status += " until " + stamp(*g.MuteUntil)
		}
		if g.MuteLeft != nil {
			status += fmt.Sprintf(" until %d more failures", *g.MuteLeft)
		}
	}
	row("status", status)
	row("owner", text(g.Owner))
	row("note", text(g.Note))
	row("open, failures", fmt.Sprintf("%d, %d", g.Open, g.Failures))
	row("seen", stamp(g.FirstSeen)+" to "+stamp(g.LastSeen))
	row("trend", sparkline(g.Trend, add))
	return w.Flush()
}

// newSetGroup returns a command that changes a failure group. fill takes the change from the flags. For the verb unmute
// only, now is the current state of the group.
func newSetGroup(verb, short string, fill func(cmd *cobra.Command, in *api.GroupChange,
	now *group.Group),
) *cobra.Command {
	var c client
	var in api.GroupChange
	cmd := &cobra.Command{
		Use: verb + " QUEUE GROUP", Short: short, Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			in.Actor = actor()
			now := &api.GroupDetail{}
			if verb == "unmute" { // fill chooses the new status by the current one
				var err error
				if now, _, err = fetch(cmd, &c, api.GetGroup, api.GetGroupInput{GroupInput: groupInput(args)}); err != nil {
					return err
				}
			}
			fill(cmd, &in, &now.Group)
			return c.setGroup(cmd, args, &in)
		},
	}
	c.register(cmd)
	cmd.Flags().StringVar(&in.Why, "why", "", "reason, for the audit trail")
	return cmd
}

func (c *client) setGroup(cmd *cobra.Command, args []string, in *api.GroupChange) error {
	c.timeout = bulkTimeout
	changed, err := call(cmd, c, api.SetGroup, api.SetGroupInput{GroupInput: groupInput(args), Body: *in})
	if err != nil || c.asJSON {
		return err
	}
	if in.Owner != nil {
		if *in.Owner == "" {
			printSafef(cmd.OutOrStdout(), "removed the assignee of %d dead letters\n", changed.Assigned)
		} else {
			printSafef(cmd.OutOrStdout(), "assigned %d dead letters to %s\n", changed.Assigned, *in.Owner)
		}
		printUndo(cmd, changed.Undo)
	}
	return printGroup(cmd, &changed.Group)
}

func newFixedGroup() *cobra.Command {
	var version string
	cmd := newSetGroup("fixed", "Mark a failure group as fixed; the next failure marks it as regressed",
		func(_ *cobra.Command, in *api.GroupChange, _ *group.Group) {
			in.Status, in.FixedIn = group.Fixed, version
		})
	cmd.Flags().StringVar(&version, "in", "",
		"version with the fix: failures count from when it is deployed (dlqd deployed)")
	return cmd
}

func newDeployed() *cobra.Command {
	var c client
	var in api.Deploy
	cmd := &cobra.Command{
		Use: "deployed VERSION", Short: "Report a deploy, for failure groups that are fixed in a version",
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			in.Version, in.Actor = args[0], actor()
			_, err := call(cmd, &c, api.RecordDeploy, api.DeployInput{Body: in})
			return err
		},
	}
	c.register(cmd)
	cmd.Flags().StringSliceVar(&in.Queues, "queue", nil, "queues that the version works; all without the flag")
	cmd.Flags().StringVar(&in.Note, "note", "", "note, for the audit trail")
	return cmd
}

// printFix prints the version that fixes a group, the version that runs now, and the replay run of the group's earlier
// dead letters: the run or request that the policy made, or the command that starts a run.
func printFix(cmd *cobra.Command, f *group.Fix) {
	out := cmd.OutOrStdout()
	switch {
	case f.DeployedAt == nil && f.Deployed == "":
		printSafef(out, "fixed in %s; no deploy was reported (dlqd deployed)\n", f.FixedIn)
	case f.DeployedAt == nil:
		printSafef(out, "fixed in %s; %s runs\n", f.FixedIn, f.Deployed)
	default:
		printSafef(out, "fixed in %s; %s runs since %s\n", f.FixedIn, f.Deployed, stamp(*f.DeployedAt))
	}
	switch {
	case f.Run != nil:
		printSafef(out, "the policy started replay run %s\n", f.Run)
	case f.Request != nil:
		printSafef(out, "the policy requested a replay run: approval %s\n", f.Request)
	case f.Waiting > 0:
		printSafef(out, "%d dead letters from before the fix; to replay them: dlqd replay --progressive '%s'\n", f.Waiting,
			f.Query)
	}
}

func newAssignGroup() *cobra.Command {
	var to string
	const short = "Assign a failure group, with its open and future dead letters, to a user"
	cmd := newSetGroup("assign", short, func(_ *cobra.Command, in *api.GroupChange, _ *group.Group) { in.Owner = &to })
	cmd.Flags().StringVar(&to, "to", "", "user to assign it to; empty removes the assignment")
	return cmd
}

func newNoteGroup() *cobra.Command {
	var c client
	var in api.GroupChange
	cmd := &cobra.Command{
		Use: "note QUEUE GROUP TEXT", Short: "Write a note on a failure group", Args: cobra.ExactArgs(3),
		RunE: func(cmd *cobra.Command, args []string) error {
			in.Actor, in.Note = actor(), &args[2]
			return c.setGroup(cmd, args[:2], &in)
		},
	}
	c.register(cmd)
	cmd.Flags().StringVar(&in.Why, "why", "", "reason, for the audit trail")
	return cmd
}

func newMuteGroup() *cobra.Command {
	var c client
	var in api.GroupChange
	var during, until string
	var failures int64
	cmd := &cobra.Command{
		Use: "mute QUEUE GROUP", Short: "Mute a failure group: send no notifications until a time or a number of failures",
		Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			in.Actor, in.Status = actor(), group.Muted
			switch {
			case during != "" && until != "":
				return &usageError{errors.New("--for and --until cannot be combined")}
			case during != "":
				d, err := policy.ParseDuration(during)
				if err != nil {
					return &usageError{fmt.Errorf("--for %s: %s", during, mistakes["duration"])}
				}
				at := time.Now().Add(d)
				in.MuteUntil = &at
			case until != "":
				at, err := time.Parse(time.RFC3339, until)
				if err != nil {
					return &usageError{fmt.Errorf("--until %s: must be a time, such as 2026-11-21T08:00:00Z", until)}
				}
				in.MuteUntil = &at
			}
			if cmd.Flags().Changed("failures") {
				in.MuteFailures = &failures
			}
			return c.setGroup(cmd, args, &in)
		},
	}
	c.register(cmd)
	cmd.Flags().StringVar(&in.Why, "why", "", "reason, for the audit trail")
	cmd.Flags().StringVar(&during, "for", "", "how long, such as 4h or 7d")
	cmd.Flags().StringVar(&until, "until", "", "until this time (RFC 3339)")
	cmd.Flags().Int64Var(&failures, "failures", 0, "until this many further failures")
	return cmd
}
