package door

import (
	"errors"
	"io"
	"net/http"
	"os"
	"time"
)

// A body may take as long as DefaultBodyGrace plus its length divided by MinBodyRate.
const (
	DefaultBodyGrace = 10 * time.Second
	MinBodyRate      = 64 << 10 // bytes a second
)

var (
	// ErrNoQuota is returned if other bodies use the available memory, or other bodies of the same client use the
	// client's share.
	ErrNoQuota = errors.New("too many request bodies at once; try again later")
	// ErrSlow is returned if a body arrives too slowly, or stops arriving.
	ErrSlow = errors.New("the request body arrived too slowly")
)

// Bodies limits the memory of request bodies. A body counts while its request is being read or answered.
type Bodies struct {
	Quota *Quota
	Grace time.Duration // DefaultBodyGrace, except in tests
}

// chunk is the least quota, in bytes, that a body acquires at a time. Without it, a body that arrives byte by byte
// would lock the quota for each byte.
const chunk = 4 << 10

// Read reads up to limit bytes of a request's body into a writer. It acquires quota for the client as the bytes arrive;
// the announced length of a body acquires none. The caller must call done to release the quota.
func (b *Bodies) Read(w http.ResponseWriter, r *http.Request, client string, limit int64,
	into io.Writer,
) (done func(), _ error) {
	reader := &bodyReader{
		bodies: b, client: client, body: r.Body, control: http.NewResponseController(w), start: time.Now(),
	}
	done = func() { b.Quota.Release(client, reader.acquired) }
	_, err := io.Copy(into, io.LimitReader(reader, limit))
	_ = reader.control.SetReadDeadline(time.Time{}) // else it would end the request; a test's recorder has none
	if errors.Is(err, os.ErrDeadlineExceeded) {
		err = ErrSlow
	}
	return done, err
}

type bodyReader struct {
	bodies         *Bodies
	client         string
	body           io.Reader
	control        *http.ResponseController
	start          time.Time
	read, acquired int64
}

func (r *bodyReader) Read(p []byte) (int, error) {
	_ = r.control.SetReadDeadline(r.start.Add(r.bodies.Grace + time.Duration(r.read)*time.Second/MinBodyRate))
	n, err := r.body.Read(p)
	r.read += int64(n)
	if r.read > r.acquired {
		more := max(chunk, r.read-r.acquired)
		if !r.bodies.Quota.Acquire(r.client, more) {
			return 0, ErrNoQuota
		}
		r.acquired += more
	}
	return n, err
}
