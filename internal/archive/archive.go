// Package archive is cold storage. Before retention removes closed entries and months of the audit trail from the
// database, it writes them to a directory or an object store, reads them back and checks them.
//
// A unit is the data that is removed together: a month of closed entries, a batch of single entries, or a month of the
// audit trail. It is a folder with gzipped NDJSON files, which any tool can read, and a manifest. The manifest is
// written last. If a unit has no readable manifest, it is incomplete and is written again, unless the database records
// that it was complete.
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
	neturl "net/url"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	"gocloud.dev/blob"
	_ "gocloud.dev/blob/fileblob" // file://
	"gocloud.dev/gcerrors"

	"github.com/dlqd/dlqd/internal/redact"
)

const (
	manifestName = "manifest.json"
	entriesName  = "entries"
	auditName    = "audit"
	dataSuffix   = ".ndjson.gz"

	// maxLine is the length, in bytes, of the longest line that is read. jsonb cannot hold a larger value.
	maxLine = 256 << 20
)

// ErrNoUnit means that a unit does not exist. ErrUnreadable means that the manifest of a unit cannot be read. A unit
// without a readable manifest counts as missing, so errors.Is(ErrUnreadable, ErrNoUnit) is true.
var (
	ErrNoUnit           = errors.New("there is no such unit")
	ErrUnreadable error = incompleteError("its manifest cannot be read")
	errNoManifest error = incompleteError("it has no manifest, so it is being written, or its writing was interrupted")
)

// incompleteError says why an existing unit counts as missing.
type incompleteError string

func (e incompleteError) Error() string { return string(e) }

func (incompleteError) Is(target error) bool { return target == ErrNoUnit }

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

// rows returns the number of rows in the unit's files.
func (m *Manifest) rows() (n int64) {
	for _, f := range []*File{m.Entries, m.Audit} {
		if f != nil {
			n += f.Lines
		}
	}
	return n
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
	// same has the normal form of url and, for a directory, also that of the path without symbolic links: see [isAt].
	same []string
}

// Open opens the archive at a URL (s3://bucket?region=…&prefix=…/, file:///path) or in a directory. It creates a
// missing directory. For s3 it returns an error, unless this program was built with object stores.
func Open(ctx context.Context, at string) (*Archive, error) {
	url, isURL := at, strings.Contains(at, "://")
	switch {
	case !isURL:
		dir, err := filepath.Abs(at)
		if err != nil {
			return nil, err
		}
		at = dir // the database records the location, and processes have different working directories
		url = "file://" + filepath.ToSlash(dir) + "?create_dir=true&metadata=skip&no_tmp_dir=true"
	case strings.HasPrefix(at, "file://"):
		// A file can be renamed only within its file system, so it is written in the directory of its final name. Without
		// metadata=skip, the attributes of the file would be in a second file. That file would not be synced, and if it
		// were empty, the first file could not be read.
		_, query, _ := strings.Cut(at, "?")
		url = strings.TrimSuffix(at, "?"+query) + "?" + strings.TrimPrefix(query+"&", "&") +
			"no_tmp_dir=true&metadata=skip"
	}
	if scheme, _, _ := strings.Cut(at, "://"); scheme == "s3" && !blob.DefaultURLMux().ValidBucketScheme(scheme) {
		return nil, fmt.Errorf("archive %s: this program has no object stores: use dlqd-full of the same release",
			withoutCredentials(at))
	}
	bucket, err := blob.OpenBucket(ctx, url)
	if err != nil {
		if isURL { // the error contains the URL
			err = errors.New(redact.Hide(err.Error(), redact.Secrets(url, false)...))
		}
		return nil, fmt.Errorf("archive %s: %w", withoutCredentials(at), err)
	}
	a := &Archive{bucket: bucket, url: withoutCredentials(at)}
	a.same = []string{normal(a.url)}
	if dir, err := filepath.EvalSymlinks(a.same[0]); err == nil {
		a.same = append(a.same, dir)
	}
	return a, nil
}

// normal returns a normal form of a location, so that different spellings of the same location are equal. The normal
// form of a directory is a path without a slash at the end, even if location is a file URL. normal does not use the
// file system: the location may be on another machine or not answer.
func normal(location string) string {
	scheme, rest, isURL := strings.Cut(location, "://")
	if !isURL {
		return filepath.Clean(location)
	}
	rest, query, hasQuery := strings.Cut(rest, "?")
	switch {
	case scheme != "file":
		rest = scheme + "://" + strings.TrimRight(rest, "/")
	case path.IsAbs(rest):
		rest = path.Clean(rest)
	}
	if hasQuery {
		rest += "?" + query
	}
	return rest
}

// isAt reports whether a location, in any spelling, is the location of the archive.
func (a *Archive) isAt(location string) bool { return slices.Contains(a.same, normal(location)) }

// withoutCredentials returns an archive's location without its user and query, which may contain secrets. It keeps the
// prefix from the query, because a bucket may have several archives.
func withoutCredentials(at string) string {
	scheme, rest, isURL := strings.Cut(at, "://")
	if !isURL {
		return at
	}
	rest, query, _ := strings.Cut(rest, "?")
	location := scheme + "://" + rest[strings.LastIndex(rest, "@")+1:]
	if values, err := neturl.ParseQuery(query); err == nil && values.Get("prefix") != "" {
		location += "?prefix=" + values.Get("prefix")
	}
	return location
}

// String returns the archive's location.
func (a *Archive) String() string { return a.url }

// Close releases the archive.
func (a *Archive) Close() error { return a.bucket.Close() }

// Units returns the manifests of all complete units, by name, and an error for each incomplete unit: an ErrUnreadable,
// or an ErrNoUnit if files have no manifest. A unit without a manifest is being written, or its writing was
// interrupted. If the store refuses every manifest, Units returns that error.
func (a *Archive) Units(ctx context.Context) (units []Manifest, incomplete []error, err error) {
	units = []Manifest{}
	last := ""
	var refused error
	list := a.bucket.List(nil)
	for {
		object, err := list.Next(ctx)
		if errors.Is(err, io.EOF) {
			if len(units) == 0 && refused != nil {
				return nil, nil, refused
			}
			return units, incomplete, nil
		}
		if err != nil {
			return nil, nil, fmt.Errorf("archive %s: %w", a, err)
		}
		unit := path.Dir(object.Key)
		if unit == last || !isUnitFile(path.Base(object.Key)) {
			continue
		}
		last = unit
		m, err := a.Manifest(ctx, unit)
		switch {
		case err == nil:
			units = append(units, *m)
		case errors.Is(err, ErrUnreadable):
			incomplete = append(incomplete, err)
		case errors.Is(err, ErrNoUnit):
			incomplete = append(incomplete, fmt.Errorf("archive %s: %s: %w", a, unit, errNoManifest))
		case ctx.Err() != nil:
			return nil, nil, err
		default: // only this unit cannot be read: a bad sector, or slow storage
			refused = err
			incomplete = append(incomplete, fmt.Errorf("%w: %w", ErrUnreadable, err))
		}
	}
}

// isUnitFile reports whether a file has a name that files of units have. The directory of an archive may also contain
// other files.
func isUnitFile(name string) bool {
	return name == manifestName ||
		strings.Contains(name, dataSuffix) && (strings.HasPrefix(name, entriesName) || strings.HasPrefix(name, auditName))
}

// Manifest reads a unit's manifest. It returns ErrNoUnit if the unit has no manifest, and ErrUnreadable if the file is
// not a manifest of this unit.
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
		return nil, fmt.Errorf("archive %s: %s: %w: %w", a, unit, ErrUnreadable, err)
	}
	if m.Unit != unit {
		return nil, fmt.Errorf("archive %s: %s: %w: it names the unit %q", a, unit, ErrUnreadable, m.Unit)
	}
	return &m, nil
}

func (a *Archive) putManifest(ctx context.Context, m *Manifest) error {
	raw, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return err
	}
	o, err := a.create(ctx, path.Join(m.Unit, manifestName), "application/json")
	if err != nil {
		return err
	}
	if _, err := o.Write(append(raw, '\n')); err != nil {
		o.abandon()
		return err
	}
	return o.commit()
}

// object is a file that is being written. The file appears in the archive only with commit.
type object struct {
	*blob.Writer

	local  *os.File // has another name before commit; nil in an object store
	cancel context.CancelFunc
}

func (a *Archive) create(ctx context.Context, key, contentType string) (*object, error) {
	ctx, cancel := context.WithCancel(ctx)
	o := &object{cancel: cancel}
	var err error
	o.Writer, err = a.bucket.NewWriter(ctx, key, &blob.WriterOptions{
		ContentType: contentType,
		BeforeWrite: func(as func(any) bool) error { as(&o.local); return nil },
	})
	if err != nil {
		cancel()
		return nil, err
	}
	return o, nil
}

// commit completes the file. It syncs a local file before it renames the file, and then syncs the directories. The
// archived rows are deleted from the database afterwards, so the file must survive a power failure as well as the
// database does.
func (o *object) commit() error {
	if o.local == nil {
		defer o.cancel()
		return o.Close()
	}
	if err := o.local.Sync(); err != nil {
		o.abandon()
		return err
	}
	defer o.cancel()
	if err := o.Close(); err != nil {
		return err
	}
	dir := filepath.Dir(o.local.Name())
	return errors.Join(syncDir(dir), syncDir(filepath.Dir(dir)))
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// abandon cancels the writing. The archive then has no such file.
func (o *object) abandon() {
	o.cancel()
	_ = o.Close()
}

// Verify reads a unit's files and compares them with the manifest. It returns an error if they differ, or if a line is
// not JSON.
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

// Entries calls each with every entry of a unit. It checks the file while it reads, so it may return an error after it
// has called each with the last entry.
func (a *Archive) Entries(ctx context.Context, m *Manifest, each func(line []byte) error) error {
	if m.Entries == nil {
		return nil
	}
	return a.lines(ctx, m, m.Entries, each)
}

// Audit calls each with every move of a unit, as [Archive.Entries] does with entries.
func (a *Archive) Audit(ctx context.Context, m *Manifest, each func(line []byte) error) error {
	if m.Audit == nil {
		return nil
	}
	return a.lines(ctx, m, m.Audit, each)
}

// lines calls each with every line of a file and checks the file against the manifest. If the file differs, lines
// returns an error after it has called each.
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
	// The scanner stops at the end of the compressed data. The file may be longer, so read the rest for the hash.
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
	object *object
	sum    hash.Hash
	gzip   *gzip.Writer
	file   File
}

func (a *Archive) createFile(ctx context.Context, unit, name string) (*fileWriter, error) {
	o, err := a.create(ctx, path.Join(unit, name), "application/gzip")
	if err != nil {
		return nil, fmt.Errorf("archive %s: %s/%s: %w", a, unit, name, err)
	}
	f := &fileWriter{object: o, sum: sha256.New(), file: File{Name: name}}
	f.gzip = gzip.NewWriter(io.MultiWriter(o, f.sum, (*counter)(&f.file.Bytes)))
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
	if err := f.gzip.Close(); err != nil {
		f.object.abandon()
		return nil, err
	}
	if err := f.object.commit(); err != nil {
		return nil, err
	}
	f.file.SHA256 = hex.EncodeToString(f.sum.Sum(nil))
	return &f.file, nil
}

// freeName returns the first unused unit name: name, name~2, name~3 and so on. taken are the units with the names
// before it. The name of an incomplete unit counts as unused, unless the database records that the unit was complete:
// its files may then be the only copy of its rows.
func (a *Archive) freeName(ctx context.Context, name string, recorded map[string]bool) (free string,
	taken []Manifest, err error,
) {
	free = name
	for n := 2; ; n++ {
		m, err := a.Manifest(ctx, free)
		switch {
		case err == nil:
			taken = append(taken, *m)
		case !errors.Is(err, ErrNoUnit):
			return "", nil, err
		case !recorded[free]:
			return free, taken, nil
		}
		free = name + "~" + strconv.Itoa(n)
	}
}
