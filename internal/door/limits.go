package door

import (
	"cmp"
	"math"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/time/rate"
)

// unlimited are the paths without a limit. With a limit, monitoring could take a busy program for a dead one.
var unlimited = map[string]bool{"/livez": true, "/readyz": true, "/metrics": true}

// Limit refuses requests of clients that exceed their number of concurrent requests or their rate, with status 429 and
// Retry-After. It does not limit the paths in unlimited. It runs after the client was authenticated.
func Limit(config Config, next http.Handler) http.Handler {
	if config.Refused == nil {
		config.Refused = func(string) {}
	}
	if config.TooMany == nil {
		config.TooMany = func(w http.ResponseWriter, _ *http.Request, detail string) {
			Problem(w, http.StatusTooManyRequests, detail)
		}
	}
	quota := NewQuota(int64(cmp.Or(config.MaxRequests, DefaultMaxRequests)))
	rates := newRates(config.Rate)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if unlimited[r.URL.Path] {
			next.ServeHTTP(w, r)
			return
		}
		client := config.Client(r)
		if rates != nil {
			wait := rates.take(client, time.Now(), w.Header())
			if wait > 0 {
				config.Refused(RefusedRate)
				w.Header().Set("Retry-After", Seconds(wait))
				config.TooMany(w, r, "rate limit exceeded: "+config.Rate.String()+" requests; try again later")
				return
			}
		}
		if !quota.Acquire(client, 1) {
			config.Refused(RefusedRequests)
			w.Header().Set("Retry-After", "1")
			config.TooMany(w, r, "too many requests at once; try again later")
			return
		}
		defer quota.Release(client, 1)
		next.ServeHTTP(w, r)
	})
}

// Rate is a number of requests per time. Used requests become available again evenly: half of them after half of the
// time.
type Rate struct {
	Requests int
	Per      time.Duration
}

// String returns the rate in the form that [ParseRate] reads.
func (r Rate) String() string { return strconv.Itoa(r.Requests) + "/" + r.Per.String() }

// ParseRate parses a rate such as 100/s, 600/m or 50/10s. An empty text means no limit.
func ParseRate(text string) (Rate, error) {
	if text == "" {
		return Rate{}, nil
	}
	number, per, _ := strings.Cut(text, "/")
	if per != "" && !strings.ContainsAny(per[:1], "0123456789") {
		per = "1" + per
	}
	requests, err := strconv.Atoi(number)
	if err != nil {
		return Rate{}, errInvalidRate
	}
	window, err := time.ParseDuration(per)
	if err != nil || requests < 1 || window < time.Second || window > 24*time.Hour {
		return Rate{}, errInvalidRate
	}
	return Rate{requests, window}, nil
}

// rates has a token bucket for each client.
type rates struct {
	rate   Rate
	policy string // value of the RateLimit-Policy field

	mu      sync.Mutex
	clients map[string]*rate.Limiter
	sweepAt int // number of clients at which clients with a full bucket are removed
}

const firstSweep = 1024

func newRates(limit Rate) *rates {
	if limit.Requests == 0 {
		return nil
	}
	return &rates{
		rate: limit, clients: map[string]*rate.Limiter{}, sweepAt: firstSweep,
		policy: `"requests";q=` + strconv.Itoa(limit.Requests) + ";w=" + Seconds(limit.Per),
	}
}

// take counts a request of a client, and sets the header fields of draft-ietf-httpapi-ratelimit-headers (revision 10).
// It returns how long the client has to wait, or 0 if the request is allowed.
func (r *rates) take(client string, now time.Time, header http.Header) (wait time.Duration) {
	bucket := r.bucket(client, now)
	allowed := bucket.AllowN(now, 1)
	left := max(bucket.TokensAt(now), 0)
	perToken := float64(r.rate.Per) / float64(r.rate.Requests)
	full := time.Duration((float64(r.rate.Requests) - left) * perToken)
	header.Set("RateLimit-Policy", r.policy)                                                         //nolint:canonicalheader // as the draft spells it
	header.Set("RateLimit", `"requests";r=`+strconv.Itoa(int(math.Floor(left)))+";t="+Seconds(full)) //nolint:canonicalheader // as above
	if allowed {
		return 0
	}
	return max(time.Duration((1-left)*perToken), time.Nanosecond)
}

func (r *rates) bucket(client string, now time.Time) *rate.Limiter {
	r.mu.Lock()
	defer r.mu.Unlock()
	bucket := r.clients[client]
	if bucket != nil {
		return bucket
	}
	if len(r.clients) >= r.sweepAt {
		for name, b := range r.clients {
			if b.TokensAt(now) >= float64(r.rate.Requests) { // a full bucket is equal to a new one
				delete(r.clients, name)
			}
		}
		r.sweepAt = max(firstSweep, 2*len(r.clients))
	}
	bucket = rate.NewLimiter(rate.Limit(float64(r.rate.Requests)/r.rate.Per.Seconds()), r.rate.Requests)
	r.clients[client] = bucket
	return bucket
}

// Seconds returns a duration in whole seconds, rounded up, for a header field.
func Seconds(d time.Duration) string { return strconv.Itoa(int(math.Ceil(d.Seconds()))) }
