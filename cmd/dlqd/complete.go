package main

import (
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/approval"
	"github.com/dlqd/dlqd/internal/breaker"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/group"
	"github.com/dlqd/dlqd/internal/replay"
	"github.com/dlqd/dlqd/internal/riverdlq"
)

// completionTimeout limits a request for values while a shell waits for the values.
const completionTimeout = 2 * time.Second

// completer returns the completions of a flag or an argument. typed is the text that the user has typed of the flag or
// argument. before has the arguments that come before.
type completer func(c *client, cmd *cobra.Command, before []string, typed string) ([]cobra.Completion,
	cobra.ShellCompDirective)

// addCompletions makes a shell complete the values of the flags and arguments of all commands that call the API. If no
// API answers, a shell completes only fixed values.
func addCompletions(cmd *cobra.Command) {
	for _, sub := range cmd.Commands() {
		addCompletions(sub)
	}
	if cmd.Flags().Lookup("api-url") == nil {
		return
	}
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		complete := flagValues(cmd, f)
		if complete == nil {
			return
		}
		// An error is impossible: the flag exists and does not have a completion function yet.
		_ = cmd.RegisterFlagCompletionFunc(f.Name, func(cmd *cobra.Command, before []string, typed string) (
			[]cobra.Completion, cobra.ShellCompDirective,
		) {
			given, last := "", typed
			if i := strings.LastIndexByte(typed, ','); i >= 0 && strings.HasSuffix(f.Value.Type(), "Slice") {
				given, last = typed[:i+1], typed[i+1:]
			}
			values, directive := complete(clientOf(cmd), cmd, before, last)
			for i := range values {
				values[i] = given + values[i]
			}
			return values, directive
		})
	})
	if arguments := argumentValues(cmd); len(arguments) > 0 {
		cmd.ValidArgsFunction = func(cmd *cobra.Command, before []string, typed string) ([]cobra.Completion,
			cobra.ShellCompDirective,
		) {
			if len(before) >= len(arguments) {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			return arguments[len(before)](clientOf(cmd), cmd, before, typed)
		}
	}
}

// clientOf returns a client for the flags of a command line that is being completed.
func clientOf(cmd *cobra.Command) *client {
	c := &client{timeout: completionTimeout, completing: true}
	c.base, _ = cmd.Flags().GetString("api-url")
	c.tokenFile, _ = cmd.Flags().GetString("token-file")
	c.plainHTTP, _ = cmd.Flags().GetBool("plain-http")
	return c
}

// flagValues returns the completer of a flag, or nil if dlqd does not complete the flag.
func flagValues(cmd *cobra.Command, f *pflag.Flag) completer {
	ofGroups := strings.HasPrefix(cmd.CommandPath(), "dlqd groups")
	switch f.Name {
	case "output":
		if out, ok := f.Value.(*output); ok {
			return fixed(out.formats()...)
		}
	case "status":
		if ofGroups {
			return fixed(group.Open, group.Fixed, group.Regressed, group.Muted)
		}
		return fixed("dlq_pending", "dlq_processing", "dlq_manual", "dlq_returned", "dlq_resolved", "dlq_failed",
			"dlq_archived")
	case "from", "to":
		if cmd.Name() == "audit" {
			return fixed("dlq_pending", "dlq_processing", "dlq_manual", "dlq_returned", "dlq_resolved", "dlq_failed",
				"dlq_archived")
		}
	case "error-class", "class":
		var classes []string
		for _, class := range riverdlq.Classes() {
			classes = append(classes, string(class))
		}
		return fixed(classes...)
	case "state":
		return fixed("requested", "approved", "done", "failed", "refused", "expired", "withdrawn")
	case "order":
		if ofGroups {
			return fixed("latest", "open", "failures", "newest", "status", "owner")
		}
		return fixed("newest", "oldest")
	case "has-open":
		return fixed("true", "false")
	case "format":
		return fixed("ndjson", "csv")
	case "queue", "to-queue":
		return queueNames
	case "view":
		return viewNames
	case "kind":
		return filterValues("kind")
	case "error-type":
		return filterValues("type")
	case "error-code":
		return filterValues("code")
	case "destination", "to-destination":
		return filterValues("destination")
	case "source":
		return filterValues("source")
	case "fingerprint":
		return filterValues("group")
	case "tag":
		if cmd.Flags().Lookup("fingerprint") != nil {
			return filterValues("tag")
		}
	}
	return nil
}

// argumentValues returns a completer for each argument of a command, or nil if dlqd completes none of them.
func argumentValues(cmd *cobra.Command) []completer {
	_, arguments, _ := strings.Cut(cmd.Use, " ")
	switch parent := cmd.Parent().Name(); {
	case arguments == "[FILTER]" || arguments == "[ID | FILTER]":
		return []completer{filterTerms}
	case strings.HasPrefix(arguments, "QUEUE GROUP"):
		return []completer{queueNames, groupNames}
	case arguments == "QUEUE":
		return []completer{queueNames}
	case arguments == "NAME" && parent == "breakers":
		return []completer{breakerNames}
	case strings.HasPrefix(arguments, "NAME") && parent == "views":
		return []completer{viewNames}
	case arguments == "ID" && parent == "replays":
		return []completer{runIDs}
	case arguments == "ID" && parent == "approvals":
		return []completer{approvalIDs}
	case arguments == "ID" && parent == "dlqd":
		return []completer{entryIDs}
	}
	return nil
}

func fixed(values ...string) completer {
	return func(*client, *cobra.Command, []string, string) ([]cobra.Completion, cobra.ShellCompDirective) {
		return values, cobra.ShellCompDirectiveNoFileComp
	}
}

// ask calls an operation. If the call fails, ask returns an empty answer, and the shell completes nothing.
func ask[In, Out any](c *client, cmd *cobra.Command, operation api.Operation[In, Out], input In) *Out {
	out, _, err := fetch(cmd, c, operation, input)
	if err != nil {
		return new(Out)
	}
	return out
}

// shellCharacters are the characters that can make a shell run another command. Senders and receivers of messages can
// put them into values such as error types. If several values begin alike, bash inserts the common beginning without
// quotes, and at the next completion cobra's script evaluates the line.
const shellCharacters = "`$;&|<>()\\"

// completions returns the completion of each item. of returns the value of an item and a description, which may be
// empty. completions leaves out values that a shell could take for a command and values that could control the
// terminal.
func completions[T any](items []T, of func(item *T) (value, description string)) []cobra.Completion {
	all := make([]cobra.Completion, 0, len(items))
	for i := range items {
		value, description := of(&items[i])
		if strings.ContainsAny(value, shellCharacters) || printable(value) != value {
			continue
		}
		all = append(all, cobra.CompletionWithDesc(value, printable(description)))
	}
	return all
}

func queueNames(c *client, cmd *cobra.Command, _ []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
	return completions(ask(c, cmd, api.ListQueues, api.QueuesInput{}).Queues, func(q *api.Queue) (string, string) {
		return q.Name, ""
	}), cobra.ShellCompDirectiveNoFileComp
}

func groupNames(c *client, cmd *cobra.Command, before []string, _ string) ([]cobra.Completion,
	cobra.ShellCompDirective,
) {
	out := ask(c, cmd, api.ListGroups, api.GroupsInput{Queue: before[0]})
	return completions(out.Groups, func(g *group.Group) (string, string) {
		return g.Fingerprint, text(g.Title)
	}), cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveKeepOrder
}

func breakerNames(c *client, cmd *cobra.Command, _ []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
	return completions(ask(c, cmd, api.ListBreakers, api.None{}).Breakers, func(b *breaker.Status) (string, string) {
		return strings.TrimPrefix(b.Name, breaker.DestinationPrefix), string(b.State)
	}), cobra.ShellCompDirectiveNoFileComp
}

func viewNames(c *client, cmd *cobra.Command, before []string, _ string) ([]cobra.Completion,
	cobra.ShellCompDirective,
) {
	if len(before) > 0 && cmd.Name() == "save" {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	out := ask(c, cmd, api.ListViews, api.ViewsInput{Actor: actor()})
	return completions(out.Views, func(v *deadletter.SavedView) (string, string) {
		return v.Name, v.Query
	}), cobra.ShellCompDirectiveNoFileComp
}

func runIDs(c *client, cmd *cobra.Command, _ []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
	return completions(ask(c, cmd, api.ListReplays, api.None{}).Runs, func(run **replay.Run) (string, string) {
		return (*run).ID.String(), (*run).Status + " " + text((*run).Note)
	}), cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveKeepOrder
}

func approvalIDs(c *client, cmd *cobra.Command, _ []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
	out := ask(c, cmd, api.ListApprovals, api.ApprovalsInput{State: "requested"})
	return completions(out.Approvals, func(a **approval.Approval) (string, string) {
		return (*a).ID.String(), (*a).Do() + " by " + (*a).Actor
	}), cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveKeepOrder
}

func entryIDs(c *client, cmd *cobra.Command, _ []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
	out := ask(c, cmd, api.ListEntries, api.ListInput{})
	return completions(out.Entries, func(e *deadletter.Summary) (string, string) {
		return e.ID.String(), e.Queue + " " + e.Kind + " " + text(e.ErrorType)
	}), cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveKeepOrder
}

// completeFilter asks the API for the completions of a filter.
func completeFilter(c *client, cmd *cobra.Command, filter string) *api.FilterReading {
	return ask(c, cmd, api.CompleteFilter, api.CompleteInput{Q: filter})
}

// filterValues completes values of a field of the filter language.
func filterValues(field string) completer {
	return func(c *client, cmd *cobra.Command, _ []string, typed string) ([]cobra.Completion,
		cobra.ShellCompDirective,
	) {
		return completions(completeFilter(c, cmd, field+":"+typed).Completions, func(f *api.Completion) (string, string) {
			return f.Name, f.Doc
		}), cobra.ShellCompDirectiveNoFileComp
	}
}

// filterTerms completes the last term of a filter.
func filterTerms(c *client, cmd *cobra.Command, before []string, typed string) ([]cobra.Completion,
	cobra.ShellCompDirective,
) {
	reading, runes := completeFilter(c, cmd, typed), []rune(typed)
	start := string(runes[:min(reading.From, len(runes))])
	values := completions(reading.Completions, func(f *api.Completion) (string, string) { return f.Insert, f.Doc })
	for i := range values {
		values[i] = start + values[i] // start, the text before the term, may have shell characters: the user typed it
	}
	return values, cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveNoSpace
}
