package api

import (
	"context"
	"log/slog"
	"net/http"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/jackc/pgx/v5"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/postgres"
)

// logLevelTimeout bounds how long a change of the log level waits until its audit row is written.
const logLevelTimeout = 2 * time.Second

// LogLevel is the log level of a process.
type LogLevel struct {
	Level string `json:"level" enum:"debug,info,warn,error" doc:"The lowest level that is logged."`
}

// SetLogLevelInput is a request to set the log level.
type SetLogLevelInput struct{ Body LogLevel }

// Operations on the log level.
var (
	GetLogLevel = Operation[None, LogLevel]{"get-log-level", http.MethodGet, "/api/log-level"}
	SetLogLevel = Operation[SetLogLevelInput, LogLevel]{"set-log-level", http.MethodPut, "/api/log-level"}
)

func (s *service) registerLogLevel(api huma.API) {
	tags := []string{operationsTag}
	now := func() *LogLevel {
		level := slog.LevelInfo
		if s.LogLevel != nil {
			level = s.LogLevel.Level()
		}
		return &LogLevel{strings.ToLower(level.String())}
	}
	get := huma.Operation{
		Tags:    tags,
		Summary: "Get the log level of this process",
	}
	example(&get, http.StatusOK, LogLevel{"info"})
	register(s, api, GetLogLevel, get, func(context.Context, *None) (*LogLevel, error) { return now(), nil })

	put := huma.Operation{
		Tags:    tags,
		Summary: "Set the log level of this process until it stops",
		Description: "Changes only the process that handles the request. --log-level sets the initial level. The change is " +
			"in the audit trail.",
		Errors: []int{409, 422},
	}
	example(&put, http.StatusOK, LogLevel{"debug"})
	register(s, api, SetLogLevel, put, func(ctx context.Context, in *SetLogLevelInput) (*LogLevel, error) {
		if s.LogLevel == nil {
			return nil, huma.Error409Conflict("the log level of this process cannot be changed")
		}
		previous := now().Level
		var level slog.Level
		if err := level.UnmarshalText([]byte(in.Body.Level)); err != nil {
			return nil, huma.Error422UnprocessableEntity(err.Error())
		}
		// The level changes even if the database does not answer. In that case the audit row is missing.
		recording, cancel := context.WithTimeout(ctx, logLevelTimeout)
		defer cancel()
		if err := s.Store.Record(recording, "log level of "+postgres.ProcessName(), "set to "+in.Body.Level,
			(&Action{}).act(ctx), func(pgx.Tx) error { return nil }); err != nil {
			s.Logger.WarnContext(ctx, "recording the change of the log level failed", "error", err)
		}
		// The change itself is logged at a level of at most warn, so that the log shows every change and its actor.
		s.LogLevel.Set(min(level, slog.LevelWarn))
		s.Logger.WarnContext(ctx, "log level changed", "from", previous, "to", in.Body.Level, "actor", access.From(ctx).Name)
		s.LogLevel.Set(level)
		return now(), nil
	})
}
