package door

import (
	"errors"
	"io"
	"net/http"
	"os"
	"time"
)

// A body may take DefaultBodyGrace plus the time that it takes at MinBodyRate.
const (
	DefaultBodyGrace = 10 * time.Second
	MinBodyRate      = 64 << 10 // bytes a second
)

var (
	// ErrNoRoom is returned if other bodies, or other bodies of the same client, use the available
	// memory.
	ErrNoRoom = errors.New("too many submissions at once; send it again later")
	// ErrSlow is returned if a body arrives too slowly, or stops arriving.
	ErrSlow = errors.New("the body came too slowly")
)

// Bodies limits the memory of bodies whose requests are being read or answered.
type Bodies struct {
	Room  *Room
	Grace time.Duration // DefaultBodyGrace, except in tests
}

// chunk is the least room, in bytes, that a body takes at a time, so that a sender of single bytes
// does not keep the room busy.
const chunk = 4 << 10

// Read reads up to most bytes of a request's body into a writer. It takes room for the client as
// bytes arrive: an announced length takes no room from others. The caller must call done to give
// the room back.
func (b *Bodies) Read(w http.ResponseWriter, r *http.Request, client string, most int64, into io.Writer) (done func(), _ error) {
	reader := &bodyReader{bodies: b, client: client, body: r.Body, control: http.NewResponseController(w), start: time.Now()}
	done = func() { b.Room.Give(client, reader.taken) }
	_, err := io.Copy(into, io.LimitReader(reader, most))
	_ = reader.control.SetReadDeadline(time.Time{}) // or it would end the request; a test's recorder has none
	if errors.Is(err, os.ErrDeadlineExceeded) {
		err = ErrSlow
	}
	return done, err
}

type bodyReader struct {
	bodies      *Bodies
	client      string
	body        io.Reader
	control     *http.ResponseController
	start       time.Time
	read, taken int64
}

func (r *bodyReader) Read(p []byte) (int, error) {
	_ = r.control.SetReadDeadline(r.start.Add(r.bodies.Grace + time.Duration(r.read)*time.Second/MinBodyRate))
	n, err := r.body.Read(p)
	r.read += int64(n)
	if r.read > r.taken {
		more := max(chunk, r.read-r.taken)
		if !r.bodies.Room.Take(r.client, more) {
			return 0, ErrNoRoom
		}
		r.taken += more
	}
	return n, err
}
