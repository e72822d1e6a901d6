package main

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

func TestMain(m *testing.M) { postgrestest.Main(m) }

func TestPipeline_AddsUp(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	err := run(t.Context(), options{documents: 48, databaseURL: postgrestest.URL(t)}, &out)
	t.Log(out.String())
	require.NoError(t, err)
	require.Contains(t, out.String(), "chunker: CONNECTION_REFUSED")
}
