package console

import (
	"context"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"

	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/filter"
	"github.com/dlqd/dlqd/internal/postgres"
)

const (
	// countAge is the age from which a tab's count is read again. Until the new count is known, pages show the old one,
	// up to the age countRetention.
	countAge       = 10 * time.Second
	countRetention = 30 * time.Second
	// countWait is how long after the start of its request a page waits for missing counts. A count that arrives later is
	// shown by the next page.
	countWait = 25 * time.Millisecond
	// maxCounted limits the saved views that a page counts.
	maxCounted = 12
	// maxCachedCounts limits the cached counts of all viewers.
	maxCachedCounts = 10_000
)

// countCache caches the counts of tabs by the viewer's permissions, name and filter. Each count stops at
// api.MostCounted, or when the API's time for counts is over.
type countCache struct {
	reading singleflight.Group
	one     sync.Mutex // only one count runs at a time, so that counts leave connections for requests

	mu            sync.Mutex
	cached        map[string]cachedCount
	invalidBefore time.Time // counts whose reading began before may miss the latest action
}

type cachedCount struct {
	api.Count

	at time.Time // when the reading began
}

// get returns the counts that are known by countWait after the request began, by their filter. It leaves out filters
// that search texts, which no index answers.
func (c *countCache) get(in *request, queries []string) map[string]*api.Count {
	if unknown := c.refresh(in, queries); unknown != nil {
		select {
		case <-unknown:
		case <-time.After(countWait - time.Since(in.now)):
		}
	}
	counts := map[string]*api.Count{}
	for _, query := range queries {
		if count, _, ok := c.known(countsKey(in) + query); ok {
			counts[query] = &count
		}
	}
	return counts
}

// countsKey returns the beginning of a viewer's keys in the cache.
func countsKey(in *request) string { return permissionsKey(in.me()) + "\x00" + in.actor() + "\x00" }

// refresh starts to read counts that are missing or old. It returns a channel that is closed when they have been read.
// If no count is missing, it returns nil.
func (c *countCache) refresh(in *request, queries []string) <-chan struct{} {
	viewer, unknown := countsKey(in), false
	var reads []func() error
	for _, query := range queries {
		if chosen, err := filter.Parse(query, in.actor()); err != nil || len(chosen.ErrorMessage) > 0 ||
			chosen.Payload != nil || len(chosen.PayloadAt) > 0 {
			continue
		}
		if _, old, ok := c.known(viewer + query); old || !ok {
			reads = append(reads, func() error { return c.read(in, viewer+query, query) })
			unknown = unknown || !ok
		}
	}
	if len(reads) == 0 {
		return nil
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = inParallel(reads...) // a count that fails is not shown
	}()
	if !unknown {
		return nil
	}
	return done
}

// known returns a cached count and whether it must be read again.
func (c *countCache) known(key string) (count api.Count, old, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	cached, ok := c.cached[key]
	age := time.Since(cached.at)
	return cached.Count, age > countAge, ok && age <= countRetention && cached.at.After(c.invalidBefore)
}

// read counts the entries that a filter selects. It continues after the page has ended, and its statements do not count
// as statements of the page.
func (c *countCache) read(in *request, key, query string) error {
	_, err, _ := c.reading.Do(key, func() (any, error) {
		c.one.Lock()
		defer c.one.Unlock()
		at := time.Now()
		ctx, _ := postgres.Counting(context.WithoutCancel(in.Context()))
		alone := &request{Request: in.WithContext(ctx), console: in.console}
		page, ok, err := callIfAllowed(alone, api.ListEntries, api.ListInput{Q: query, CountOnly: true})
		if err != nil || !ok || page.Count == nil {
			return nil, err
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.cached == nil || len(c.cached) >= maxCachedCounts {
			c.cached = map[string]cachedCount{}
		}
		c.cached[key] = cachedCount{*page.Count, at}
		return nil, nil
	})
	return err
}

// invalidate stops the use of cached counts after an action.
func (c *countCache) invalidate() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.invalidBefore = time.Now()
}
