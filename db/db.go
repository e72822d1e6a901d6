// Package db holds dlqd's SQL: migrations of its tables, and the functions, views and triggers on them.
package db

import "embed"

// Migrations are goose migrations of the tables that hold data.
//
//go:embed migrations/*.sql
var Migrations embed.FS

// Code are the functions, views and triggers, in the order of their file names. Each file can be run again at any
// time: it replaces what is there.
//
//go:embed code/*.sql
var Code embed.FS

// Triggers puts the triggers on dlqd's own tables that call the functions of [Code].
//
//go:embed triggers.sql
var Triggers string

// RiverTriggers puts the triggers on River's table that call the functions of [Code].
//
//go:embed river_triggers.sql
var RiverTriggers string
