package postgres

import (
	"reflect"
	"strings"

	"github.com/jackc/pgx/v5"
)

// ColumnsOf returns the columns of T's fields, for SELECT. SELECT * would not do: a function of a newer schema may have
// more columns, and [pgx.RowToStructByName] refuses columns without a field.
func ColumnsOf[T any]() string {
	var columns []string
	for _, field := range reflect.VisibleFields(reflect.TypeFor[T]()) {
		if name, ok := field.Tag.Lookup("db"); ok && name != "-" {
			columns = append(columns, pgx.Identifier{name}.Sanitize())
		}
	}
	return strings.Join(columns, ", ")
}
