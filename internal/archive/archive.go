// Package archive is cold storage. Data that retention removes from the database is first written
// to a directory or an object store, read back and checked.
//
// A unit is the data that was removed together: a month of closed entries, a batch of single
// entries, or a month of the audit trail. It is a folder of gzipped NDJSON files, which any tool can
// read, and a manifest. The manifest is written last: a unit without one is incomplete and is
// written again.
package archive

import (
	"bufio"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	"gocloud.dev/blob"
	_ "gocloud.dev/blob/fileblob" // file://
	_ "gocloud.dev/blob/s3blob"   // s3://
	"gocloud.dev/gcerrors"

	"github.com/dlqd/dlqd/internal/redact"
)

const (
	manifestName = "manifest.json"
	entriesName  = "entries"
	auditName    = "audit"

	// maxLine is the longest line that is read; jsonb cannot hold a larger value.
	maxLine = 256 << 20
)

// ErrNoUnit means that a unit does not exist.
var ErrNoUnit = errors.New("there is no such unit")

// Manifest describes a unit.
type Manifest struct {
	Unit      string    `json:"unit" doc:"Name of the unit."`
	Partition string    `json:"partition" doc:"Partition that the unit contains, completely or in part."`
	WrittenAt time.Time `json:"writtenAt" doc:"Time at which the unit was written."`
	WrittenBy string    `json:"writtenBy" doc:"Host and process that wrote the unit."`
	Schema    int64     `json:"schema" doc:"Version of the database schema."`
	Policy    string    `json:"policy" doc:"Version of the policy whose retention ended."`
	From      time.Time `json:"from" doc:"Time at which the first row was closed (entries) or written (audit trail)."`
	To        time.Time `json:"to" doc:"Time at which the last row was closed or written."`
	Entries   *File     `json:"entries,omitempty" doc:"File of the entries, one row of dead_letter_queue per line."`
	Audit     *File     `json:"audit,omitempty" doc:"File of the moves of these entries, or of all moves of a month, one row of dead_letter_transitions per line."`
	Erasures  []Erasure `json:"erasures,omitempty" doc:"Erasures from the unit since it was written."`
}

// File describes a file of a unit.
type File struct {
	Name   string `json:"name" doc:"File name in the unit's folder."`
	Lines  int64  `json:"lines" doc:"Number of rows."`
	Bytes  int64  `json:"bytes" doc:"Compressed size in bytes."`
	SHA256 string `json:"sha256" doc:"SHA-256 of the compressed file."`
}

// Erasure records that data was erased from a unit.
type Erasure struct {
	ID      uuid.UUID `json:"id" doc:"Id of the erasure in dlq.erasures."`
	At      time.Time `json:"at" doc:"Time of the erasure."`
	Entries int64     `json:"entries" doc:"Number of erased entries."`
}

// Archive is a directory or an object store.
type Archive struct {
	bucket *blob.Bucket
	url    string
}

// Open opens the archive at a URL (s3://bucket?region=…&prefix=…/, file:///path) or in a directory,
// which it creates if it is missing.
func Open(ctx context.Context, at string) (*Archive, error) {
	url := at
	if !strings.Contains(at, "://") {
		dir, err := filepath.Abs(at)
		if err != nil {
			return nil, err
		}
		url = "file://" + filepath.ToSlash(dir) + "?create_dir=true&metadata=skip&no_tmp_dir=true"
	}
	bucket, err := blob.OpenBucket(ctx, url)
	if err != nil {
		if url == at { // the error repeats the URL
			err = errors.New(redact.Hide(err.Error(), redact.Secrets(url, false)...))
		}
		return nil, fmt.Errorf("archive %s: %w", withoutCredentials(at), err)
	}
	return &Archive{bucket: bucket, url: withoutCredentials(at)}, nil
}

// withoutCredentials returns an archive's location without user and query, which may contain secrets.
func withoutCredentials(at string) string {
	at, _, _ = strings.Cut(at, "?")
	if scheme, rest, ok := strings.Cut(at, "://"); ok {
		return scheme + "://" + rest[strings.LastIndex(rest, "@")+1:]
	}
	return at
}

// String returns the archive's location.
func (a *Archive) String() string { return a.url }

// Close releases the archive.
func (a *Archive) Close() error { return a.bucket.Close() }

// Units returns the manifests of all complete units, by name.
func (a *Archive) Units(ctx context.Context) ([]Manifest, error) {
	units := []Manifest{}
	list := a.bucket.List(nil)
	for {
		object, err := list.Next(ctx)
		if errors.Is(err, io.EOF) {
			return units, nil
		}
		if err != nil {
			return nil, fmt.Errorf("archive %s: %w", a, err)
		}
		if path.Base(object.Key) != manifestName {
			continue
		}
		m, err := a.Manifest(ctx, path.Dir(object.Key))
		if err != nil {
			return nil, err
		}
		units = append(units, *m)
	}
}

// Manifest reads a unit's manifest. It returns ErrNoUnit if there is none.
func (a *Archive) Manifest(ctx context.Context, unit string) (*Manifest, error) {
	raw, err := a.bucket.ReadAll(ctx, path.Join(unit, manifestName))
	if gcerrors.Code(err) == gcerrors.NotFound {
		return nil, fmt.Errorf("archive %s: %w: %s", a, ErrNoUnit, unit)
	}
	if err != nil {
		return nil, fmt.Errorf("archive %s: %s: %w", a, unit, err)
	}
	var m Manifest
	if err := json.Unmarshal(raw, &m); err != nil {
		return nil, fmt.Errorf("archive %s: %s: manifest: %w", a, unit, err)
	}
	return &m, nil
}

func (a *Archive) putManifest(ctx context.Context, m *Manifest) error {
	raw, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return err
	}
	return a.bucket.WriteAll(ctx, path.Join(m.Unit, manifestName), append(raw, '\n'), nil)
}

// Verify reads a unit's files and checks them against the manifest; every line must be JSON.
func (a *Archive) Verify(ctx context.Context, m *Manifest) error {
	for _, f := range []*File{m.Entries, m.Audit} {
		if f == nil {
			continue
		}
		if err := a.lines(ctx, m, f, func(line []byte) error {
			if !json.Valid(line) {
				return errors.New("contains a line that is not JSON")
			}
			return nil
		}); err != nil {
			return err
		}
	}
	return nil
}

// Entries calls each with every entry of a unit. It checks the file at the same time, so an error
// may follow the last entry.
func (a *Archive) Entries(ctx context.Context, m *Manifest, each func(line []byte) error) error {
	if m.Entries == nil {
		return nil
	}
	return a.lines(ctx, m, m.Entries, each)
}

// Audit calls each with every move of a unit.
func (a *Archive) Audit(ctx context.Context, m *Manifest, each func(line []byte) error) error {
	if m.Audit == nil {
		return nil
	}
	return a.lines(ctx, m, m.Audit, each)
}

// lines calls each with every line of a file and checks the file against the manifest.
func (a *Archive) lines(ctx context.Context, m *Manifest, f *File, each func(line []byte) error) error {
	inFile := func(err error) error { return fmt.Errorf("archive %s: %s/%s: %w", a, m.Unit, f.Name, err) }
	reader, err := a.bucket.NewReader(ctx, path.Join(m.Unit, f.Name), nil)
	if err != nil {
		return inFile(err)
	}
	defer func() { _ = reader.Close() }()
	sum := sha256.New()
	unzipped, err := gzip.NewReader(io.TeeReader(reader, sum))
	if err != nil {
		return inFile(err)
	}
	scanner := bufio.NewScanner(unzipped)
	scanner.Buffer(make([]byte, 64<<10), maxLine)
	n := int64(0)
	for scanner.Scan() {
		if err := each(scanner.Bytes()); err != nil {
			return inFile(err)
		}
		n++
	}
	if err := scanner.Err(); err != nil {
		return inFile(err)
	}
	if n != f.Lines {
		return inFile(fmt.Errorf("has %d lines; the manifest has %d", n, f.Lines))
	}
	// The scanner stops at the end of the compressed data; the file may be longer.
	if _, err := io.Copy(sum, reader); err != nil {
		return inFile(err)
	}
	if got := hex.EncodeToString(sum.Sum(nil)); got != f.SHA256 {
		return inFile(fmt.Errorf("has SHA-256 %s; the manifest has %s", got, f.SHA256))
	}
	return nil
}

// fileWriter writes the lines of one file.
type fileWriter struct {
	blob   *blob.Writer
	sum    hash.Hash
	gzip   *gzip.Writer
	cancel context.CancelFunc
	file   File
}

func (a *Archive) createFile(ctx context.Context, unit, name string) (*fileWriter, error) {
	ctx, cancel := context.WithCancel(ctx)
	w, err := a.bucket.NewWriter(ctx, path.Join(unit, name), &blob.WriterOptions{ContentType: "application/gzip"})
	if err != nil {
		cancel()
		return nil, fmt.Errorf("archive %s: %s/%s: %w", a, unit, name, err)
	}
	f := &fileWriter{blob: w, sum: sha256.New(), cancel: cancel, file: File{Name: name}}
	f.gzip = gzip.NewWriter(io.MultiWriter(w, f.sum, (*counter)(&f.file.Bytes)))
	return f, nil
}

type counter int64

func (c *counter) Write(p []byte) (int, error) {
	*c += counter(len(p))
	return len(p), nil
}

func (f *fileWriter) line(line string) error {
	f.file.Lines++
	_, err := io.WriteString(f.gzip, line+"\n")
	return err
}

func (f *fileWriter) close() (*File, error) {
	defer f.cancel()
	if err := errors.Join(f.gzip.Close(), f.blob.Close()); err != nil {
		return nil, err
	}
	f.file.SHA256 = hex.EncodeToString(f.sum.Sum(nil))
	return &f.file, nil
}

// abandon cancels the upload, which leaves no file behind.
func (f *fileWriter) abandon() {
	f.cancel()
	_ = f.blob.Close()
}

// freeName returns the first unused unit name: name, name~2 and so on. taken are the units before
// it.
func (a *Archive) freeName(ctx context.Context, name string) (free string, taken []Manifest, err error) {
	free = name
	for n := 2; ; n++ {
		m, err := a.Manifest(ctx, free)
		if errors.Is(err, ErrNoUnit) {
			return free, taken, nil
		}
		if err != nil {
			return "", nil, err
		}
		taken = append(taken, *m)
		free = name + "~" + strconv.Itoa(n)
	}
}
