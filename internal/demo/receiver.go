// Package demo demonstrates dlqd with realistic input: it sends a few hundred messages over HTTP to a receiver that
// behaves like real services.
package demo

import (
	"context"
	"fmt"
	"hash/fnv"
	"io"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

	"golang.org/x/time/rate"
)

// FaultDuration is the default time after the receiver's start in which its services fail and refuse connections.
const FaultDuration = 8 * time.Second

// Receiver is a receiver for practice. Each path is a service with its own kind of failures. The path "/" accepts every
// message.
type Receiver struct {
	faults  context.Context // done when the temporary failures end
	recover context.CancelFunc
	limiter *rate.Limiter

	mu       sync.Mutex
	accepted map[string]int // how often each message was answered with status 200, by id
}

// NewReceiver returns a receiver. Its temporary failures end after the given duration, or with POST /recover.
func NewReceiver(duration time.Duration) *Receiver {
	faults, cancel := context.WithTimeout(context.Background(), duration)
	return &Receiver{faults: faults, recover: cancel, limiter: rate.NewLimiter(30, 10), accepted: map[string]int{}}
}

// Count is how many messages a receiver has accepted.
type Count struct {
	Messages int `json:"messages"` // distinct messages
	Repeats  int `json:"repeats"`  // deliveries of messages that the receiver had already accepted
}

// Serve listens on an address, announces it, and serves until ctx is done. It also announces a second address, which
// refuses connections until the temporary failures end.
func (r *Receiver) Serve(ctx context.Context, address string, announce func(url, refusing string)) error {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
	if err != nil {
		return err
	}
	refusing, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	late := refusing.Addr().String()
	if err := refusing.Close(); err != nil { // the port is opened again later
		return err
	}
	announce("http://"+listener.Addr().String(), "http://"+late)

	server := &http.Server{Handler: r, ReadHeaderTimeout: 10 * time.Second}
	go func() {
		select {
		case <-ctx.Done():
			return
		case <-r.faults.Done():
		}
		if listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", late); err == nil {
			_ = server.Serve(listener)
		}
	}()
	go func() {
		<-ctx.Done()
		_ = server.Close()
	}()
	if err := server.Serve(listener); err != nil && ctx.Err() == nil {
		return err
	}
	return nil
}

// ServeHTTP answers like the service of the path; /count and /recover control the receiver. A permanent refusal depends
// on a hash of the message's id, so a service that refuses a message refuses each redelivery, too.
func (r *Receiver) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	_, _ = io.Copy(io.Discard, req.Body) // only after that does the server notice that a client disconnects
	id := req.Header.Get("Webhook-Id")
	hash := fnv.New32a()
	_, _ = hash.Write([]byte(id))
	bucket := hash.Sum32() % 100
	failing := r.faults.Err() == nil

	switch req.URL.Path {
	case "/count":
		w.Header().Set("Content-Type", "application/json")
		_, _ = fmt.Fprintf(w, `{"messages": %d, "repeats": %d}`+"\n", r.Count().Messages, r.Count().Repeats)
		return
	case "/recover":
		if req.Method != http.MethodPost {
			http.Error(w, "use POST to end the temporary failures", http.StatusMethodNotAllowed)
			return
		}
		r.recover()
		return
	case "/payments": // a bank: rejects, declines, and fails temporarily
		switch {
		case bucket < 8:
			problem(w, 422, "https://bank.example/errors/amount", "Unprocessable amount", "amount must be positive")
			return
		case bucket < 14:
			problem(w, 409, "https://bank.example/errors/declined", "Card declined", "insufficient funds")
			return
		case bucket < 34 && failing:
			http.Error(w, "internal error", http.StatusInternalServerError)
			return
		}
	case "/orders": // a shop: sometimes slow, and down for maintenance
		if bucket < 20 {
			time.Sleep(300 * time.Millisecond)
		}
		if bucket >= 80 && failing {
			w.Header().Set("Retry-After", "1")
			http.Error(w, "down for maintenance", http.StatusServiceUnavailable)
			return
		}
	case "/invoices": // an archive with missing customers
		if bucket < 10 {
			w.Header().Set("X-Error-Type", "CustomerNotFound")
			http.Error(w, "no such customer", http.StatusNotFound)
			return
		}
	case "/notifications": // a mail provider with a quota
		if !r.limiter.Allow() {
			w.Header().Set("Retry-After", "1")
			http.Error(w, "too many requests", http.StatusTooManyRequests)
			return
		}
	case "/documents": // a converter: hangs, closes connections, or answers 200 with success: false
		switch {
		case bucket < 6 && failing:
			select { // longer than every timeout
			case <-req.Context().Done():
			case <-time.After(time.Minute):
			}
			return
		case bucket < 16 && failing:
			if conn, _, err := http.NewResponseController(w).Hijack(); err == nil {
				_ = conn.Close()
			}
			return
		case bucket < 24:
			r.accept(id)
			_, _ = fmt.Fprintln(w, `{"success": false, "reason": "document is encrypted"}`)
			return
		}
	}
	r.accept(id)
	w.Header().Set("Content-Type", "application/json")
	_, _ = fmt.Fprintln(w, `{"success": true}`)
}

func (r *Receiver) accept(id string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.accepted[id]++
}

// Count returns how many messages the receiver has accepted.
func (r *Receiver) Count() Count {
	r.mu.Lock()
	defer r.mu.Unlock()
	c := Count{Messages: len(r.accepted)}
	for _, n := range r.accepted {
		c.Repeats += n - 1
	}
	return c
}

func problem(w http.ResponseWriter, status int, kind, title, detail string) {
	w.Header().Set("Content-Type", "application/problem+json")
	w.Header().Set("X-Error-Code", strconv.Itoa(status))
	w.WriteHeader(status)
	_, _ = fmt.Fprintf(w, `{"type": %q, "title": %q, "detail": %q, "status": %d}`+"\n", kind, title, detail, status)
}
