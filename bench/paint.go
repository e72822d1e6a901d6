package main

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/chromedp"
)

const (
	// paints is how often each page is loaded. The median is printed.
	paints = 5
	// slowCPU is the factor by which the browser's processor is slowed down. Chromium's developer tools use it for a slow
	// machine.
	slowCPU = 4
	// paintTimeout bounds one load of a page.
	paintTimeout = time.Minute
)

// firstPaints returns for each page the time from the start of its load to its first contentful paint, in milliseconds.
// Chromium measures it, with an empty cache.
func firstPaints(ctx context.Context, base string, pages []string) (map[string]float64, error) {
	var path string
	for _, name := range []string{"chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"} {
		if path == "" {
			path, _ = exec.LookPath(name)
		}
	}
	if path == "" {
		return nil, errors.New("chromium is not on PATH: run scripts/install.sh chromium")
	}
	ctx, cancel := chromedp.NewExecAllocator(ctx, append(chromedp.DefaultExecAllocatorOptions[:], chromedp.ExecPath(path),
		chromedp.NoSandbox, chromedp.DisableGPU,
		chromedp.Flag("disable-dev-shm-usage", true), chromedp.WSURLReadTimeout(paintTimeout),
		chromedp.WindowSize(1440, 900))...)
	defer cancel()
	// WithErrorf suppresses errors about events that chromedp does not know.
	ctx, cancel = chromedp.NewContext(ctx, chromedp.WithErrorf(func(string, ...any) {}))
	defer cancel()
	if err := chromedp.Run(ctx, network.Enable(), network.SetCacheDisabled(true),
		emulation.SetCPUThrottlingRate(slowCPU)); err != nil {
		return nil, err
	}
	median := make(map[string]float64, len(pages))
	for _, page := range pages {
		took := make([]float64, paints)
		for i := range took {
			if err := paint(ctx, base+page, &took[i]); err != nil {
				return nil, fmt.Errorf("%s: %w", page, err)
			}
		}
		slices.Sort(took)
		median[page] = took[len(took)/2]
	}
	return median, nil
}

// paint loads a page once.
func paint(ctx context.Context, address string, milliseconds *float64) error {
	ctx, cancel := context.WithTimeout(ctx, paintTimeout)
	defer cancel()
	if err := chromedp.Run(ctx, chromedp.Navigate("about:blank"), chromedp.Navigate(address)); err != nil {
		return err
	}
	for {
		err := chromedp.Run(ctx, chromedp.Evaluate(
			`performance.getEntriesByName("first-contentful-paint")[0]?.startTime ?? 0`, milliseconds))
		if err != nil || *milliseconds > 0 {
			return err
		}
		if err := chromedp.Run(ctx, chromedp.Sleep(20*time.Millisecond)); err != nil { // the paint is recorded after the load
			return err
		}
	}
}
