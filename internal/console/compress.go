package console

import (
	"bytes"
	"compress/gzip"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// minCompressed is the size in bytes from which answers are compressed. A smaller answer fits into one packet anyway.
const minCompressed = 1400

// mayCompress reports whether a page may be compressed. The size of a compressed page reveals whether a text in its
// address also occurs in its data (BREACH). An attacker whose site makes the browser load pages of dlqd, and who sees
// the traffic, could guess data this way. Therefore a page is compressed only if the user opened it from a page of
// dlqd, or by typing its address.
func mayCompress(r *http.Request, v *view) bool {
	return v.Until.IsZero() && !v.Secret &&
		slices.Contains([]string{"same-origin", "none"}, r.Header.Get("Sec-Fetch-Site"))
}

// acceptsGzip reports whether the client accepts compressed answers.
func acceptsGzip(r *http.Request) bool {
	for encoding := range strings.SplitSeq(strings.Join(r.Header.Values("Accept-Encoding"), ","), ",") {
		name, weight, weighted := strings.Cut(encoding, ";")
		if !strings.EqualFold(strings.TrimSpace(name), "gzip") {
			continue
		}
		q, err := strconv.ParseFloat(strings.TrimPrefix(strings.TrimSpace(weight), "q="), 64)
		return !weighted || err == nil && q > 0
	}
	return false
}

// compressed returns data as gzip.
func compressed(data []byte) []byte {
	var out bytes.Buffer
	w := gzip.NewWriter(&out)
	_, _ = w.Write(data) // a bytes.Buffer returns no error
	_ = w.Close()
	return out.Bytes()
}

// compressedAssets returns the static files as gzip, by address.
var compressedAssets = sync.OnceValue(func() map[string][]byte {
	files := map[string][]byte{}
	for address, name := range assetNames {
		raw, err := staticFiles.ReadFile(name)
		if err != nil {
			panic(err) // unreachable: assetNames has the names of staticFiles
		}
		files[address] = compressed(raw)
	}
	return files
})
