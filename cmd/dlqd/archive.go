package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/google/uuid"
	"github.com/spf13/cobra"

	"github.com/dlqd/dlqd/internal/archive"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/postgres"
)

// noArchive is the value of --archive with which retention deletes data without archiving it.
const noArchive = "none"

// archiveFlag is the flag that names the archive.
type archiveFlag struct{ at string }

func (f *archiveFlag) register(cmd *cobra.Command) {
	cmd.Flags().StringVar(&f.at, "archive", "", "where retention puts what it takes out of the database: a directory, or s3://BUCKET?region=R&prefix=P/; \"none\" for nowhere (default: archive in --data-dir)")
}

// location returns the location of the archive, or "" for none.
func (f *archiveFlag) location(database *databaseFlags) string {
	switch {
	case f.at == noArchive:
		return ""
	case f.at != "":
		return f.at
	case database.dataDir == "":
		return ""
	}
	return filepath.Join(database.dataDir, "archive")
}

// with runs fn on the archive.
func (f *archiveFlag) with(cmd *cobra.Command, database *databaseFlags, fn func(*archive.Archive) error) error {
	ctx := cmd.Context()
	if f.at != "" && cmd.Flags().Lookup("database-url") == nil {
		if err := ignores(cmd, "where --archive says where the archive is", "data-dir"); err != nil {
			return err
		}
	}
	at := f.location(database)
	if at == "" {
		return &usageError{errors.New("--archive: say where the archive is")}
	}
	a, err := archive.Open(ctx, at)
	if err != nil {
		return err
	}
	return errors.Join(fn(a), a.Close())
}

func newArchive() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "archive",
		Short: "See, check and bring back what retention took out of the database",
		Long: "A unit of the archive is what went together: a month of closed dead letters with their moves, a batch of single ones, or\n" +
			"a month of the audit trail. Each is a folder with gzipped NDJSON and a manifest.",
	}
	cmd.AddCommand(newArchiveList(), newArchiveVerify(), newArchiveShow(), newArchiveRestore())
	return cmd
}

func newArchiveList() *cobra.Command {
	var flag archiveFlag
	var database databaseFlags
	var asJSON bool
	cmd := &cobra.Command{
		Use: "list", Short: "List the units of the archive", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return flag.with(cmd, &database, func(a *archive.Archive) error {
				units, err := a.Units(cmd.Context())
				if err != nil {
					return err
				}
				if asJSON {
					_, err := fmt.Fprintln(cmd.OutOrStdout(), string(mustJSON(map[string]any{"units": units})))
					return err
				}
				w, row := table(cmd, "UNIT\tENTRIES\tMOVES\tFROM\tTO\tBYTES\tERASURES")
				for _, m := range units {
					row(m.Unit, lines(m.Entries), lines(m.Audit), m.From.Format(time.DateOnly), m.To.Format(time.DateOnly), size(m.Entries)+size(m.Audit), len(m.Erasures))
				}
				return w.Flush()
			})
		},
	}
	flag.register(cmd)
	database.registerDataDir(cmd)
	cmd.Flags().BoolVar(&asJSON, "json", false, "the manifests, as JSON")
	return cmd
}

func lines(f *archive.File) int64 {
	if f == nil {
		return 0
	}
	return f.Lines
}

func size(f *archive.File) int64 {
	if f == nil {
		return 0
	}
	return f.Bytes
}

func newArchiveVerify() *cobra.Command {
	var flag archiveFlag
	var database databaseFlags
	cmd := &cobra.Command{
		Use: "verify [UNIT…]", Short: "Read units, all if none is named, and compare them to their manifests",
		RunE: func(cmd *cobra.Command, args []string) error {
			return flag.with(cmd, &database, func(a *archive.Archive) error {
				units, err := named(cmd.Context(), a, args)
				if err != nil {
					return err
				}
				bad := 0
				for _, m := range units {
					if err := a.Verify(cmd.Context(), &m); err != nil {
						bad++
						_, _ = fmt.Fprintln(cmd.OutOrStdout(), "BAD ", err)
						continue
					}
					_, _ = fmt.Fprintf(cmd.OutOrStdout(), "ok    %s: %d entries, %d moves\n", m.Unit, lines(m.Entries), lines(m.Audit))
				}
				if bad > 0 {
					return fmt.Errorf("%d of %d units are not what their manifests say", bad, len(units))
				}
				return nil
			})
		},
	}
	flag.register(cmd)
	database.registerDataDir(cmd)
	return cmd
}

// named returns the units with the given names, or all units.
func named(ctx context.Context, a *archive.Archive, names []string) ([]archive.Manifest, error) {
	if len(names) == 0 {
		return a.Units(ctx)
	}
	var units []archive.Manifest
	for _, name := range names {
		m, err := a.Manifest(ctx, name)
		if err != nil {
			return nil, err
		}
		units = append(units, *m)
	}
	return units, nil
}

func newArchiveShow() *cobra.Command {
	var flag archiveFlag
	var database databaseFlags
	var audit bool
	cmd := &cobra.Command{
		Use: "show UNIT", Short: "Print a unit's entries, or its moves, as NDJSON", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return flag.with(cmd, &database, func(a *archive.Archive) error {
				m, err := a.Manifest(cmd.Context(), args[0])
				if err != nil {
					return err
				}
				show := a.Entries
				if audit {
					show = a.Audit
				}
				return show(cmd.Context(), m, func(line []byte) error {
					_, err := fmt.Fprintf(cmd.OutOrStdout(), "%s\n", line)
					return err
				})
			})
		},
	}
	flag.register(cmd)
	database.registerDataDir(cmd)
	cmd.Flags().BoolVar(&audit, "audit", false, "its moves")
	return cmd
}

// defaultKeep is how long retention leaves restored entries in the database by default.
const defaultKeep = 7 * 24 * time.Hour

func newArchiveRestore() *cobra.Command {
	var flag archiveFlag
	var database databaseFlags
	var only, note string
	var keep time.Duration
	cmd := &cobra.Command{
		Use: "restore UNIT", Short: "Bring a unit's entries back into the database, or one of them", Args: cobra.ExactArgs(1),
		Long: "Entries come back closed, as they were, and retention leaves their month alone until --keep is over. Moves are not brought\n" +
			"back: \"dlqd archive show --audit\" prints them.",
		RunE: func(cmd *cobra.Command, args []string) error {
			id := uuid.Nil
			if only != "" {
				var err error
				if id, err = uuid.Parse(only); err != nil {
					return &usageError{fmt.Errorf("--id %q: %w", only, err)}
				}
			}
			if flag.at == "" {
				database.besideURL = []string{"data-dir"} // locates the archive
			}
			return flag.with(cmd, &database, func(a *archive.Archive) error {
				m, err := a.Manifest(cmd.Context(), args[0])
				if err != nil {
					return err
				}
				return database.withMigrator(cmd, func(mig *postgres.Migrator) error {
					if err := mig.Check(cmd.Context()); err != nil {
						return err
					}
					n, err := a.Restore(cmd.Context(), deadletter.NewStore(mig.Pool, mig.Schemas), m, id, time.Now().Add(keep), deadletter.Act{Actor: actor(), Note: note})
					_, _ = fmt.Fprintf(cmd.OutOrStdout(), "%d entries of %s are back, for %s\n", n, m.Unit, keep)
					return err
				})
			})
		},
	}
	flag.register(cmd)
	database.register(cmd)
	cmd.Flags().StringVar(&only, "id", "", "this entry alone")
	cmd.Flags().StringVar(&note, "note", "", "why")
	cmd.Flags().DurationVar(&keep, "keep", defaultKeep, "how long they stay")
	return cmd
}
