package main

import (
	"regexp"
	"slices"
	"strings"
)

// word is a token of SQL: its text in upper case, and its position.
type word struct {
	text       string
	start, end int
}

var (
	// A dollar quote is a separate word, so that the body of a function is read as SQL.
	wordPattern = regexp.MustCompile(`--[^\n]*|'(?:[^']|'')*'|"[^"]*"|\$[A-Za-z_]*\$|\w+|::|:=|[-+*/<>=~!@#%^&|?]+|\S`)
	// termEnds are the words that end a term of a condition, or an expression of ORDER BY.
	termEnds = strings.Fields(`) ] , ; AND OR THEN LOOP ELSE WHEN END AS FROM WHERE JOIN LEFT CROSS ON GROUP HAVING
		WINDOW ORDER LIMIT OFFSET FOR UNION EXCEPT INTERSECT RETURNING ASC DESC NULLS`)
	lockEnds = strings.Fields(`) ; LOOP`)
	replaced = map[string]string{
		"<": "<=", "<=": "<", ">": ">=", ">=": ">", "=": "<>", "<>": "=", "+": "-", "-": "+",
		"DESC": "ASC", "NOT": "", "TRUE": "false", "FALSE": "true", "LEAST": "greatest", "GREATEST": "least",
	}
)

func words(source []byte) (all []word) {
	for _, at := range wordPattern.FindAllIndex(source, -1) {
		if text := string(source[at[0]:at[1]]); !strings.HasPrefix(text, "--") {
			all = append(all, word{strings.ToUpper(text), at[0], at[1]})
		}
	}
	return all
}

// end returns the index of the first word at or after i that is in ends. It skips words inside of parentheses and CASE.
func end(all []word, i int, ends []string) int {
	depth, between := 0, false
	for ; i < len(all); i++ {
		text := all[i].text
		switch {
		case depth == 0 && text == "AND" && between:
			between = false
		case depth == 0 && text == "FROM" && all[i-1].text == "DISTINCT", text == "LEFT" && all[i+1].text == "(":
		case depth == 0 && (slices.Contains(ends, text) || strings.HasPrefix(text, "$") && strings.HasSuffix(text, "$")):
			return i
		case text == "(" || text == "[" || text == "CASE":
			depth++
		case text == ")" || text == "]" || text == "END":
			depth--
		case depth == 0 && text == "BETWEEN":
			between = true
		}
	}
	return len(all) - 1
}

// mutateSQL returns the mutants of SQL: other comparisons, orders and signs; terms of conditions removed; branches that
// always or never run; true for false; least for greatest; NOT, a row lock, SKIP LOCKED or a guard against null
// removed. Postgres refuses mutants that are not valid SQL, such as "SET a < b".
func mutateSQL(file string, source []byte) (all []Mutant) {
	found := words(source)
	var searched []bool // for each enclosing CASE expression, whether it has the form CASE WHEN condition
	betweenEnds := map[int]bool{}
	for i := 1; i < len(found)-2; i++ {
		before, w, next := found[i-1].text, found[i], found[i+1]
		replace := func(from, to int, replacement string) { // replaces the words [from, to)
			if from < to {
				all = append(all, newMutant(file, source, found[from].start, found[to-1].end, replacement))
			}
		}
		if replacement, ok := replaced[w.text]; ok {
			replace(i, i+1, replacement)
		}
		isBranch := false
		switch w.text {
		case "CASE":
			if before != "END" {
				searched = append(searched, next.text == "WHEN")
			}
		case "END":
			if len(searched) > 0 && next.text != "IF" && next.text != "LOOP" {
				searched = searched[:len(searched)-1]
			}
		case "WHEN":
			isBranch = before == "EXIT" || before == "CONTINUE" || len(searched) > 0 && searched[len(searched)-1]
		case "IF", "ELSIF":
			isBranch = slices.Contains([]string{";", "THEN", "ELSE", "LOOP", "BEGIN"}, before)
		case "BETWEEN":
			betweenEnds[end(found, i+1, []string{"AND"})] = true
		case "WHERE", "AND":
			if !betweenEnds[i] {
				replace(i+1, end(found, i+1, termEnds), "true")
			}
		case "OR":
			if before != "CREATE" {
				replace(i+1, end(found, i+1, termEnds), "false")
			}
		case "ORDER":
			last := end(found, i+2, termEnds)
			if after := found[last].text; next.text == "BY" && after != "DESC" && after != "ASC" {
				place := found[last-1].end
				all = append(all, newMutant(file, source, place, place, " DESC"))
			}
		case "FOR":
			if slices.Contains([]string{"UPDATE", "SHARE", "NO", "KEY"}, next.text) {
				replace(i, end(found, i, lockEnds), "")
			}
		case "SKIP":
			replace(i, i+2, "")
		case "COALESCE":
			if next.text == "(" {
				replace(end(found, i+2, []string{",", ")"}), end(found, i+2, []string{")"}), "")
			}
		case "DISTINCT":
			if next.text == "FROM" && before == "IS" {
				replace(i-1, i+2, "<>")
			} else if next.text == "FROM" {
				replace(i-2, i+2, "=")
			}
		}
		if isBranch {
			last := end(found, i+1, []string{"THEN", ";"})
			replace(i+1, last, "true")
			replace(i+1, last, "false")
		}
	}
	return all
}
