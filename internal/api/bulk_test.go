package api

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestCell_EscapesFormulas(t *testing.T) {
	t.Parallel()
	for _, text := range []string{
		"=1+1", "+1", "-1", "@SUM", " =1", "\t=1", "\n\r =1", "\u00a0=1", "\u200b=1", "\ufeff=1",
		"＝1", " ＠SUM", "\rx",
	} {
		require.Equal(t, "'"+text, cell(&text))
	}
	for _, text := range []string{"", "a=1", " plain", "1-1"} {
		require.Equal(t, text, cell(&text))
	}
}
