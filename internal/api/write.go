package api

import (
	"net/http"
	"time"
)

// DefaultWriteTimeout is how long a client may leave a part of an answer unread.
const DefaultWriteTimeout = 30 * time.Second

// cutOffUnread cuts off clients that do not read: an export, or a stream of progress, would wait for them for ever.
func cutOffUnread(next http.Handler, timeout time.Duration) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		timed := &timedWriter{ResponseWriter: w, control: http.NewResponseController(w), timeout: timeout}
		timed.extend()
		next.ServeHTTP(timed, r)
		timed.extend() // what is still buffered
	})
}

// timedWriter gives each write a time of its own, however long the whole answer takes.
type timedWriter struct {
	http.ResponseWriter

	control *http.ResponseController
	timeout time.Duration
	begun   bool // a part of the answer was written
}

func (w *timedWriter) extend() { _ = w.control.SetWriteDeadline(time.Now().Add(w.timeout)) } // a test's recorder has none

func (w *timedWriter) WriteHeader(status int) {
	w.extend()
	w.begun = w.begun || status >= http.StatusOK
	w.ResponseWriter.WriteHeader(status)
}

func (w *timedWriter) Write(p []byte) (int, error) {
	w.extend()
	w.begun = true
	return w.ResponseWriter.Write(p)
}

// Flush implements http.Flusher, for streams of events.
func (w *timedWriter) Flush() {
	w.extend()
	w.begun = true
	_ = w.control.Flush()
}

// hasBegun reports whether a part of an answer may have been sent.
func hasBegun(w http.ResponseWriter) bool {
	for w != nil {
		if timed, ok := w.(*timedWriter); ok {
			return timed.begun
		}
		wraps, ok := w.(interface{ Unwrap() http.ResponseWriter })
		if !ok {
			return false
		}
		w = wraps.Unwrap()
	}
	return false
}

// Unwrap is for http.ResponseController.
func (w *timedWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }
