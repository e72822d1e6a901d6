package api

import (
	"context"
	"net/http"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/dlqd/dlqd/internal/source"
)

// SourcesOutputBody lists the partitions that sources read.
type SourcesOutputBody struct {
	Partitions []source.PartitionStatus `json:"partitions" doc:"What the readers of sources reported last, by source, topic and partition."`
}

// ListSources lists the partitions that sources read.
var ListSources = Operation[None, SourcesOutputBody]{"list-sources", http.MethodGet, "/api/sources"}

func (s *service) registerSources(api huma.API) {
	next, lag := int64(812), int64(3)
	list := huma.Operation{
		Tags:    []string{"sources"},
		Summary: "List the partitions that sources read", Errors: []int{503},
	}
	example(&list, http.StatusOK, map[string]any{"partitions": []source.PartitionStatus{{
		Source: "orders", Cluster: "main", Topic: "dlq.prod.payments", Queue: "orders", State: source.StateReading,
		Next: &next, Lag: &lag, Records: 810, Holes: 2, At: time.Date(2026, 11, 28, 9, 30, 0, 0, time.UTC),
	}}})
	register(s, api, ListSources, list, func(ctx context.Context, _ *None) (*SourcesOutputBody, error) {
		partitions, err := s.Sources.List(ctx)
		return &SourcesOutputBody{partitions}, err
	})
}
