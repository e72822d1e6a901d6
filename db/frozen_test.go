package db_test

import (
	"bufio"
	"crypto/sha256"
	"encoding/hex"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Frozen migrations must not change, because databases have run them: a change of their tables needs a new migration.
func TestMigrations_Frozen(t *testing.T) {
	t.Parallel()
	sums, err := os.Open("frozen.sum")
	require.NoError(t, err)
	defer sums.Close()
	frozen := map[string]bool{}
	newest := ""
	for lines := bufio.NewScanner(sums); lines.Scan(); {
		want, file, ok := strings.Cut(lines.Text(), "  ")
		require.True(t, ok, "frozen.sum has lines in the format of sha256sum: %s", lines.Text())
		raw, err := os.ReadFile(file)
		require.NoError(t, err, "%s is frozen and must not be deleted", file)
		sum := sha256.Sum256(raw)
		require.Equal(t, want, hex.EncodeToString(sum[:]),
			"%s is frozen, because databases have run it: put the change into a new migration with the next number", file)
		frozen[file] = true
		newest = max(newest, file)
	}
	number, _, _ := strings.Cut(filepath.Base(newest), "_")
	require.FileExists(t, "../internal/postgres/testdata/frozen/"+number+".sql.gz",
		"the functions of the frozen version, for the test of an upgrade (make freeze)")
	files, err := filepath.Glob("migrations/*.sql")
	require.NoError(t, err)
	for _, file := range files {
		require.True(t, frozen[file] || file > newest, "%s sorts before %s, which is frozen", file, newest)
	}
}
