// Package db contains dlqd's SQL: migrations of its tables, and the functions, views and triggers
// on them.
package db

import "embed"

// Migrations contains the goose migrations of dlqd's tables.
//
//go:embed migrations/*.sql
var Migrations embed.FS

// Code contains the functions, views and triggers. The files run in the order of their names. Each file can be run
// again at any time, and replaces what it created before.
//
//go:embed code/*.sql
var Code embed.FS

// Triggers creates the triggers on dlqd's own tables, which call functions of [Code].
//
//go:embed triggers.sql
var Triggers string

// RiverTriggers creates the triggers on River's table, which call functions of [Code].
//
//go:embed river_triggers.sql
var RiverTriggers string
