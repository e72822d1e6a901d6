package main

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/source"
)

// trialTimeout limits the test of a source.
const trialTimeout = time.Minute

func newTopicSources() *cobra.Command {
	var list client
	cmd := &cobra.Command{
		Use:   "sources",
		Short: "List, pause and rewind the topics whose dead letters dlqd reads",
		Args:  cobra.NoArgs,
	}
	partitions := &cobra.Command{
		Use:   "list",
		Short: "List the partitions of topics that dlqd reads, with position and lag, and the feeds",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			out, err := call(cmd, &list, api.ListSources, api.None{})
			if err != nil || list.asJSON {
				return err
			}
			if err := printPartitions(cmd, out.Partitions); err != nil || len(out.Feeds) == 0 {
				return err
			}
			return printFeeds(cmd, out.Feeds)
		},
	}
	addDefaultList(cmd, partitions, &list, "partitions", "source")
	cmd.AddCommand(newShowSource(), newTrySource(), newRewindSource())

	send := func(operation api.Operation[api.SourceActionInput, api.SourceOutputBody]) sendAction {
		return func(cmd *cobra.Command, c *client, name string, body *api.Action) (state string, err error) {
			out, err := call(cmd, c, operation, api.SourceActionInput{SourceInput: api.SourceInput{Name: name}, Body: body})
			if err == nil {
				state = out.State
			}
			return state, err
		}
	}
	cmd.AddCommand(
		newPauseOrResume("pause", "Stop the reading of a source in all processes", send(api.PauseSource)),
		newPauseOrResume("resume", "Continue the reading of a source", send(api.ResumeSource)),
	)
	return cmd
}

// sendAction sends a request that pauses or resumes a source or a feed, and returns its state after that.
type sendAction func(cmd *cobra.Command, c *client, name string, body *api.Action) (state string, err error)

func newPauseOrResume(verb, short string, send sendAction) *cobra.Command {
	var c client
	var in api.Action
	cmd := &cobra.Command{
		Use:   verb + " NAME",
		Short: short,
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			state, err := send(cmd, &c, args[0], &in)
			if err != nil || c.asJSON {
				return err
			}
			printSafef(cmd.OutOrStdout(), "%s is %s\n", args[0], state)
			return nil
		},
	}
	c.register(cmd)
	addActor(cmd, &in.Actor, &in.Note)
	return cmd
}

func printPartitions(cmd *cobra.Command, partitions []source.PartitionStatus) error {
	w, row := table(cmd, "SOURCE\tTOPIC\tPARTITION\tSTATE\tNEXT\tLAG\tRECORDS\tLOST\tSEEN\tERROR")
	number := func(n *int64) string {
		if n == nil {
			return "-"
		}
		return strconv.FormatInt(*n, 10)
	}
	for i := range partitions {
		p := &partitions[i]
		partition := "-"
		if p.Partition >= 0 {
			partition = strconv.Itoa(int(p.Partition))
		}
		row(p.Source, p.Topic, partition, p.State, number(p.Next), number(p.Lag), p.Records, p.Lost, ago(p.At), p.Error)
	}
	return w.Flush()
}

func printFeeds(cmd *cobra.Command, feeds []source.FeedStatus) error {
	w, row := table(cmd, "FEED\tCLUSTER\tTOPIC\tSTATE\tPUBLISHED\tWAITING\tFAILED\tERROR")
	for i := range feeds {
		f := &feeds[i]
		row(f.Name, f.Cluster, f.Topic, f.State, f.Published, f.Waiting, f.Failed, f.Error)
	}
	return w.Flush()
}

func newShowSource() *cobra.Command {
	var c client
	cmd := &cobra.Command{
		Use:   "show NAME",
		Short: "Show a source and its partitions",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			out, err := call(cmd, &c, api.GetSource, api.SourceInput{Name: args[0]})
			if err != nil || c.asJSON {
				return err
			}
			printSafef(cmd.OutOrStdout(), "%s: %s, cluster %s, queue %s, lag %d, %d records, %d lost\n", out.Name, out.State,
				out.Cluster, out.Queue, out.Lag, out.Records, out.Lost)
			if out.PausedAt != nil {
				printSafef(cmd.OutOrStdout(), "paused by %s %s\n", out.PausedBy, ago(*out.PausedAt))
			}
			if out.Error != "" {
				printSafef(cmd.OutOrStdout(), "error: %s\n", out.Error)
			}
			return printPartitions(cmd, out.Topics)
		},
	}
	c.register(cmd)
	return cmd
}

func newRewindSource() *cobra.Command {
	var c client
	var in api.RewindAction
	var offset int64
	var at string
	cmd := &cobra.Command{
		Use:   "rewind NAME",
		Short: "Read the records of a partition again",
		Long: "A record that has an entry does not become a second one. A record whose entry was deleted becomes an entry\n" +
			"again.",
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if cmd.Flags().Changed("offset") {
				in.Offset = &offset
			}
			if at != "" {
				var err error
				if in.Time, err = time.Parse(time.RFC3339, at); err != nil {
					return &usageError{fmt.Errorf("--time %q: not a time such as 2026-11-28T08:00:00Z", at)}
				}
			}
			out, err := call(cmd, &c, api.RewindSource, api.RewindInput{SourceInput: api.SourceInput{Name: args[0]}, Body: in})
			if err != nil || c.asJSON {
				return err
			}
			printSafef(cmd.OutOrStdout(), "the position was %d; it is now %d\n", out.Before, out.Next)
			return nil
		},
	}
	c.register(cmd)
	cmd.Flags().StringVar(&in.Topic, "topic", "", "name of the topic")
	cmd.Flags().Int32Var(&in.Partition, "partition", 0, "partition of the topic")
	cmd.Flags().Int64Var(&offset, "offset", 0, "the offset to read next")
	cmd.Flags().StringVar(&at, "time", "", "the time of the record to read next, such as 2026-11-28T08:00:00Z")
	cmd.Flags().BoolVar(&in.Skip, "skip", false, "allow an offset above the position: the records in between are skipped")
	addActor(cmd, &in.Actor, &in.Note)
	_ = cmd.MarkFlagRequired("topic")
	return cmd
}

// newTrySource returns the command sources test. The command connects to the clusters itself, so it needs neither a
// running dlqd nor a database.
func newTrySource() *cobra.Command {
	var records int
	var asJSON bool
	var env string
	cmd := &cobra.Command{
		Use:   "test FILE",
		Short: "Connect to the clusters of a sources.yaml, and show topics, permissions and some records",
		Long: "The last records of each topic are decoded as they would be stored. Nothing is stored or published, and no\n" +
			"offset is written. The other files of the policy are read from the directory of FILE.",
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if filepath.Base(args[0]) != "sources.yaml" {
				return fmt.Errorf("%s: must be a file named sources.yaml", args[0])
			}
			p, err := policy.Load(policy.Source{Dir: filepath.Dir(args[0]), Env: env, Destination: defaultDestination})
			if err != nil {
				return err
			}
			if err := openSources.Check(p); err != nil {
				return err
			}
			broker, err := openSources(p)
			if err != nil {
				return err
			}
			defer broker.Close()
			return trySources(cmd, p, broker, records, asJSON)
		},
	}
	cmd.Flags().IntVar(&records, "records", 5, "records of each topic to decode")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	cmd.Flags().StringVar(&env, "env", "", "environment of the policy")
	return cmd
}

func trySources(cmd *cobra.Command, p *policy.Policy, broker source.Broker, records int, asJSON bool) error {
	problems := 0
	var trials []*source.Trial
	for _, name := range p.SourceNames() {
		trial, err := source.TryWithin(cmd.Context(), broker, p.Sources.Sources[name], records, trialTimeout)
		if err != nil {
			return fmt.Errorf("source %s: %w", name, err)
		}
		trials = append(trials, trial)
		for i := range trial.Topics {
			if trial.Topics[i].Error != "" {
				problems++
			}
		}
		if len(trial.Topics) == 0 {
			problems++
		}
	}
	var err error
	if asJSON {
		err = json.NewEncoder(cmd.OutOrStdout()).Encode(map[string]any{"sources": trials})
	} else {
		err = printTrials(cmd, trials)
	}
	if err == nil && problems > 0 {
		err = fmt.Errorf("%d problems: topics that cannot be read, or sources without a topic", problems)
	}
	return err
}

func printTrials(cmd *cobra.Command, trials []*source.Trial) error {
	w, row := table(cmd, "SOURCE\tTOPIC\tPARTITIONS\tOFFSETS\tALLOWED\tERROR")
	for _, trial := range trials {
		if len(trial.Topics) == 0 {
			row(trial.Source, "-", "-", "-", "-", "no topic matches, or this user may not describe the topics")
		}
		for i := range trial.Topics {
			t := &trial.Topics[i]
			row(trial.Source, t.Topic, t.Partitions, t.Offsets, fmt.Sprint(t.Allowed), t.Error)
		}
	}
	if err := w.Flush(); err != nil {
		return err
	}
	w, row = table(cmd, "TOPIC\tPARTITION\tOFFSET\tKIND\tFORM\tBYTES\tREPLAY TO\tERROR")
	for _, trial := range trials {
		for i := range trial.Topics {
			for j := range trial.Topics[i].Records {
				r := &trial.Topics[i].Records[j]
				problem := r.Error
				switch {
				case r.Malformed != "":
					problem = "malformed: " + r.Malformed
				case r.NotDecoded != "":
					problem = "not decoded: " + r.NotDecoded
				}
				row(trial.Topics[i].Topic, r.Partition, r.Offset, r.Kind, r.Form, r.Size, r.ReplayTo, problem)
			}
		}
	}
	return w.Flush()
}
