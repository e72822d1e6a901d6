package console

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestEnvironment_TextHasContrast checks the text on every colour whose parts are multiples of five.
func TestEnvironment_TextHasContrast(t *testing.T) {
	t.Parallel()
	for r := 0; r < 256; r += 5 {
		for g := 0; g < 256; g += 5 {
			for b := 0; b < 256; b += 5 {
				rgb := [3]byte{byte(r), byte(g), byte(b)}
				l := luminance(rgb)
				has := contrast(l, 0)
				if textOn(rgb) == "#fff" {
					has = contrast(1, l)
				}
				require.GreaterOrEqual(t, has, 4.5, rgb)
			}
		}
	}
	require.Equal(t, "#fff", textOn([3]byte{0xb9, 0x1c, 0x1c}))
	require.Equal(t, "#000", textOn([3]byte{0xfa, 0xcc, 0x15}))
}

// TestEnvironment_SheetHasOnlyColours checks that a style sheet is served only for the name of a colour.
func TestEnvironment_SheetHasOnlyColours(t *testing.T) {
	t.Parallel()
	c := New(Config{})
	for path, want := range map[string]int{
		environmentStyle("#B91C1C"):     http.StatusOK,
		environmentPath + "b91c1.css":   http.StatusNotFound,
		environmentPath + "b91c1c":      http.StatusNotFound,
		environmentPath + "red%7d.css":  http.StatusNotFound,
		environmentPath + "b91c1c0.css": http.StatusNotFound,
	} {
		answer := httptest.NewRecorder()
		c.ServeHTTP(answer, httptest.NewRequest(http.MethodGet, path, nil))
		require.Equal(t, want, answer.Code, path)
		if want == http.StatusOK {
			require.Contains(t, answer.Body.String(), "--environment: #b91c1c; --on-environment: #fff")
		}
	}
	require.Empty(t, environmentStyle(""))
}
