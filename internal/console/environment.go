package console

import (
	"encoding/hex"
	"fmt"
	"math"
	"net/http"
	"strings"
)

// environmentPath is the path of the style sheets with environments' colours. It is below the path of static files,
// because the sign-in page uses them, too.
const environmentPath = "/static/environment/"

// environmentStyle returns the address of the style sheet for a colour of the policy (#rrggbb), or "" if the text is no
// such colour. The colour is in a style sheet because Content-Security-Policy allows no style in the page itself.
func environmentStyle(colour string) string {
	if len(colour) != len("#rrggbb") {
		return ""
	}
	return environmentPath + strings.ToLower(colour[1:]) + ".css"
}

// environmentSheet serves the style sheet of the colour that its address names.
func environmentSheet(w http.ResponseWriter, r *http.Request) {
	name, isCSS := strings.CutSuffix(r.PathValue("file"), ".css")
	rgb, err := hex.DecodeString(name)
	if !isCSS || err != nil || len(rgb) != 3 {
		http.NotFound(w, r)
		return
	}
	w.Header().Set("Content-Type", "text/css; charset=utf-8")
	w.Header().Set("Cache-Control", "public, max-age=31536000, immutable")
	_, _ = fmt.Fprintf(w, ":root { --environment: #%x; --on-environment: %s; --band: 24px; }\n", rgb, //nolint:gosec // hex digits
		textOn([3]byte(rgb)))
}

// textOn returns the colour of text on a background: black or white, whichever has more contrast. The better one has a
// contrast of at least 4.58, the root of 21; WCAG 2 requires 4.5.
func textOn(rgb [3]byte) string {
	if l := luminance(rgb); contrast(1, l) >= contrast(l, 0) {
		return "#fff"
	}
	return "#000"
}

// contrast returns the contrast of two luminances, the lighter one first, as WCAG 2 defines it: 1 to 21.
func contrast(lighter, darker float64) float64 { return (lighter + 0.05) / (darker + 0.05) }

// luminance returns the relative luminance of an sRGB colour, as WCAG 2 defines it: 0 to 1.
func luminance(rgb [3]byte) float64 {
	linear := func(v byte) float64 {
		c := float64(v) / 255
		if c <= 0.04045 {
			return c / 12.92
		}
		return math.Pow((c+0.055)/1.055, 2.4)
	}
	return 0.2126*linear(rgb[0]) + 0.7152*linear(rgb[1]) + 0.0722*linear(rgb[2])
}
