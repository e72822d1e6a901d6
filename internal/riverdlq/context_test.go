package riverdlq

import (
	"encoding/json"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// Numbers in an error's context keep all their digits.
func TestContext_KeepsDigitsOfNumbers(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		number := rapid.StringMatching(`-?[1-9][0-9]{0,40}(\.[0-9]{1,30})?(e-?[1-9][0-9]?)?`).Draw(rt, "number")
		context := map[string]any{"id": json.RawMessage(number), "list": []any{map[string]any{"id": json.Number(number)}}}
		require.Equal(rt, fmt.Sprintf(`{"id":%s,"list":[{"id":%s}]}`, number, number), string(storable(context))) //nolint:testifylint // JSONEq compares floats
	})
	require.Equal(t, `{"account":9007199254740993}`, string(storable(map[string]any{"account": int64(9007199254740993)})))
	for _, number := range []string{"1e400", "1e-400", "1e999999999"} {
		require.Nil(t, storable(map[string]any{"n": json.RawMessage(number)}),
			"a number outside the range of a float64 is stored")
	}
}
