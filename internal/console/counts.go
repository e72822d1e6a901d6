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
	// countAge is the age from which the count of a tab is read again.
	countAge = 10 * time.Second
	// countWait is how long a page waits for the counts of its tabs. A later one is for the next page.
	countWait = 50 * time.Millisecond
	// maxCounted limits the saved views that a page counts.
	maxCounted = 12
	// maxCachedCounts limits the cached counts of all viewers.
	maxCachedCounts = 10_000
)

// countCache caches the counts of tabs by the viewer's permissions, name and filter. Each count stops at
// api.MostCounted, or when the API's time for counts is over.
type countCache struct {
	reading singleflight.Group
	one     sync.Mutex // lets one count run at a time, so that counts leave connections for requests

	mu            sync.Mutex
	cached        map[string]cachedCount
	invalidBefore time.Time // counts whose reading began earlier may miss the latest action
}

type cachedCount struct {
	api.Count

	at time.Time // when the reading began
}

// get returns the counts that are known soon, by their filter. It leaves out filters that search texts, which no index
// answers.
func (c *countCache) get(in *request, queries []string) map[string]*api.Count {
	viewer := permissionsKey(in.me()) + "\x00" + in.actor() + "\x00"
	var missing []func() error
	for _, query := range queries {
		if chosen, err := filter.Parse(query, in.actor()); err != nil || len(chosen.ErrorMessage) > 0 ||
			chosen.Payload != nil || len(chosen.PayloadAt) > 0 {
			continue
		}
		if _, ok := c.known(viewer + query); !ok {
			missing = append(missing, func() error { return c.read(in, viewer+query, query) })
		}
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = inParallel(missing...) // a count that fails is not shown
	}()
	select {
	case <-done:
	case <-time.After(countWait):
	}
	counts := map[string]*api.Count{}
	for _, query := range queries {
		if count, ok := c.known(viewer + query); ok {
			counts[query] = &count
		}
	}
	return counts
}

func (c *countCache) known(key string) (api.Count, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	count, ok := c.cached[key]
	return count.Count, ok && time.Since(count.at) <= countAge && count.at.After(c.invalidBefore)
}

// read counts the entries that a filter selects. It does not end with the page, and its statements are not counted as
// statements of the page.
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
