package postgres

import (
	"reflect"
	"strings"

	"github.com/jackc/pgx/v5"
)

// ColumnsOf returns the columns of T's fields, for SELECT. A function of a newer schema may have more columns, which
// [pgx.RowToStructByName] refuses after SELECT *.
func ColumnsOf[T any]() string {
	var columns []string
	for _, field := range reflect.VisibleFields(reflect.TypeFor[T]()) {
		if name, ok := field.Tag.Lookup("db"); ok && name != "-" {
			columns = append(columns, pgx.Identifier{name}.Sanitize())
		}
	}
	return strings.Join(columns, ", ")
}
