package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
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
type archiveFlag struct{ value string }

func (f *archiveFlag) register(cmd *cobra.Command) {
	cmd.Flags().StringVar(&f.value, "archive", "", "archive for what retention removes from the database: a directory, "+
		"s3://BUCKET?region=R&prefix=P/, or \"none\" to delete without archiving (default: archive in --data-dir)")
}

// location returns the location of the archive, or "" if there is no archive.
func (f *archiveFlag) location(database *databaseFlags) string {
	switch {
	case f.value == noArchive:
		return ""
	case f.value != "":
		return f.value
	case database.dataDir == "":
		return ""
	}
	return filepath.Join(database.dataDir, "archive")
}

// with opens the archive, calls fn with it, and closes it. If there is no archive, with returns a usage error.
func (f *archiveFlag) with(cmd *cobra.Command, database *databaseFlags, fn func(*archive.Archive) error) error {
	ctx := cmd.Context()
	if f.value != "" && cmd.Flags().Lookup("database-url") == nil {
		if err := rejectFlags(cmd, "if --archive names the archive", "data-dir"); err != nil {
			return err
		}
	}
	location := f.location(database)
	if location == "" {
		return &usageError{errors.New("--archive is required: the archive's directory or s3:// URL")}
	}
	a, err := archive.Open(ctx, location)
	if err != nil {
		return err
	}
	return errors.Join(fn(a), a.Close())
}

func newArchive() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "archive",
		Short: "List, verify and restore what retention moved out of the database",
		Long: "Retention archives in units: a month of closed dead letters with their moves, a batch of single dead " +
			"letters, or\n" +
			"a month of the audit trail. A unit is a folder with gzipped NDJSON files and a manifest.",
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
				units, incomplete, err := a.Units(cmd.Context())
				if err != nil {
					return err
				}
				printIncomplete(cmd.ErrOrStderr(), incomplete)
				if asJSON {
					_, err := fmt.Fprintln(cmd.OutOrStdout(), string(mustJSON(map[string]any{"units": units})))
					return err
				}
				w, row := table(cmd, "UNIT\tENTRIES\tMOVES\tFROM\tTO\tBYTES\tERASURES")
				for _, m := range units {
					row(m.Unit, lines(m.Entries), lines(m.Audit), m.From.Format(time.DateOnly), m.To.Format(time.DateOnly),
						size(m.Entries)+size(m.Audit), len(m.Erasures))
				}
				return w.Flush()
			})
		},
	}
	flag.register(cmd)
	database.registerDataDir(cmd)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the manifests as JSON")
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

// printIncomplete prints a line for each incomplete unit. It returns the number of units whose manifest cannot be read.
// The other incomplete units have no manifest: dlqd is still writing them, or was interrupted while writing them.
func printIncomplete(w io.Writer, incomplete []error) (bad int) {
	for _, err := range incomplete {
		if errors.Is(err, archive.ErrUnreadable) {
			bad++
			_, _ = fmt.Fprintln(w, "BAD ", err)
			continue
		}
		_, _ = fmt.Fprintln(w, "incomplete ", err)
	}
	return bad
}

func newArchiveVerify() *cobra.Command {
	var flag archiveFlag
	var database databaseFlags
	cmd := &cobra.Command{
		Use: "verify [UNIT…]", Short: "Check units, or all units, against their manifests and the database",
		Long: "Without UNIT, verify also looks for units that the database says were archived and that the archive does " +
			"not have.\n" +
			"It skips that if neither --database-url nor --data-dir names the database.",
		RunE: func(cmd *cobra.Command, args []string) error {
			if flag.value == "" {
				database.allowedWithURL = []string{"data-dir"} // locates the archive
			}
			return flag.with(cmd, &database, func(a *archive.Archive) error {
				units, incomplete, err := unitsByName(cmd.Context(), a, args)
				if err != nil {
					return err
				}
				out := cmd.OutOrStdout()
				looked, bad := len(units)+len(incomplete), printIncomplete(out, incomplete)
				for _, m := range units {
					if err := a.Verify(cmd.Context(), &m); err != nil {
						bad++
						_, _ = fmt.Fprintln(out, "BAD ", err)
						continue
					}
					_, _ = fmt.Fprintf(out, "ok    %s: %d entries, %d moves\n", m.Unit, lines(m.Entries), lines(m.Audit))
				}
				var errs []error
				if bad > 0 {
					errs = append(errs, fmt.Errorf("%d of %d units do not match their manifests", bad, looked))
				}
				if len(args) > 0 {
					return errors.Join(errs...)
				}
				missing, err := missingUnits(cmd, &flag, &database, a, units)
				for _, err := range missing {
					_, _ = fmt.Fprintln(out, "BAD ", err)
				}
				if len(missing) > 0 {
					errs = append(errs, fmt.Errorf("the archive lacks %d units or partitions that were archived", len(missing)))
				}
				return errors.Join(append(errs, err)...)
			})
		},
	}
	flag.register(cmd)
	database.register(cmd)
	return cmd
}

// missingUnits returns an error for each unit that the database records and that is not in the archive. If there is no
// database to compare the archive with, missingUnits returns no errors.
func missingUnits(cmd *cobra.Command, flag *archiveFlag, database *databaseFlags, a *archive.Archive,
	units []archive.Manifest,
) (missing []error, err error) {
	if database.url == "" {
		// If --archive names the archive, the database in the default data directory may have another archive. missingUnits
		// then compares only if --data-dir is given, too.
		named := flag.value == "" || cmd.Flags().Changed("data-dir")
		if _, err := os.Stat(filepath.Join(database.dataDir, "pgdata")); err != nil || !named {
			_, _ = fmt.Fprintln(cmd.ErrOrStderr(),
				"not compared with the database; to compare, set --database-url or --data-dir")
			return nil, nil //nolint:nilerr // there is no database to compare with
		}
	}
	err = database.withMigrator(cmd, func(mig *postgres.Migrator) error {
		if err := mig.Check(cmd.Context()); err != nil {
			return err
		}
		store := deadletter.NewStore(mig.Pool, mig.Schemas)
		recorded, err := a.Recorded(cmd.Context(), store)
		if err != nil {
			return err
		}
		if len(recorded.Elsewhere) > 0 {
			_, _ = fmt.Fprintf(cmd.ErrOrStderr(), "not checked: units that the database records in other archives, with their "+
				"number: %s\n", strings.Join(recorded.Elsewhere, ", "))
		}
		if recorded.Units == 0 && len(recorded.Elsewhere) > 0 {
			return fmt.Errorf("archive %s: the database names no unit in it: if this is one of the other archives, set "+
				"--archive to the location that the database records", a)
		}
		missing, err = a.Missing(cmd.Context(), store, units)
		return err
	})
	return missing, err
}

// unitsByName returns the units with the given names. Without names, it returns all units, and an error for each
// incomplete one.
func unitsByName(ctx context.Context, a *archive.Archive, names []string) (units []archive.Manifest,
	incomplete []error, err error,
) {
	if len(names) == 0 {
		return a.Units(ctx)
	}
	for _, name := range names {
		m, err := a.Manifest(ctx, name)
		switch {
		case err == nil:
			units = append(units, *m)
		case errors.Is(err, archive.ErrUnreadable):
			incomplete = append(incomplete, err)
		default:
			return nil, nil, err
		}
	}
	return units, incomplete, nil
}

func newArchiveShow() *cobra.Command {
	var flag archiveFlag
	var database databaseFlags
	var audit bool
	cmd := &cobra.Command{
		Use: "show UNIT", Short: "Print a unit's entries or moves as NDJSON", Args: cobra.ExactArgs(1),
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
	cmd.Flags().BoolVar(&audit, "audit", false, "print moves instead of entries")
	return cmd
}

// defaultRestoreLife is the default time for which retention leaves restored entries in the database.
const defaultRestoreLife = 7 * 24 * time.Hour

func newArchiveRestore() *cobra.Command {
	var flag archiveFlag
	var database databaseFlags
	var only, note string
	var keep time.Duration
	cmd := &cobra.Command{
		Use: "restore UNIT", Short: "Restore a unit's entries, or one of them, to the database", Args: cobra.ExactArgs(1),
		Long: "Restored entries are closed, as they were. Retention does not remove them again before the time in " +
			"--keep has\n" +
			"passed. Restore does not restore moves: \"dlqd archive show --audit\" prints them.",
		RunE: func(cmd *cobra.Command, args []string) error {
			id := uuid.Nil
			if only != "" {
				var err error
				if id, err = uuid.Parse(only); err != nil {
					return &usageError{fmt.Errorf("--id %q: %w", only, err)}
				}
			}
			if flag.value == "" {
				database.allowedWithURL = []string{"data-dir"} // locates the archive
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
					n, err := a.Restore(cmd.Context(), deadletter.NewStore(mig.Pool, mig.Schemas), m, id, time.Now().Add(keep),
						deadletter.Act{Actor: actor(), Note: note})
					_, _ = fmt.Fprintf(cmd.OutOrStdout(), "restored %d entries of %s, for %s\n", n, m.Unit, keep)
					return err
				})
			})
		},
	}
	flag.register(cmd)
	database.register(cmd)
	cmd.Flags().StringVar(&only, "id", "", "restore only this entry")
	cmd.Flags().StringVar(&note, "note", "", "reason")
	cmd.Flags().DurationVar(&keep, "keep", defaultRestoreLife, "how long the entries stay in the database")
	return cmd
}
