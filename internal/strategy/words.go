package strategy

import "strings"

// Limits on names and texts. Because of them, the time of matching is proportional to the length of the text.
const (
	maxNameBytes = 255 // as in the columns for types and codes; a longer type or code does not match
	maxNameWords = 10  // a name with more words does not match
	maxGapWords  = 6   // the maximum number of words for which … stands
)

// wording is a text as lower-case words, which are runs of letters and digits. The parts of a name such as
// FileNotFoundError are words, too. A match begins and ends at word boundaries.
type wording struct {
	text []byte // the words, each followed by a space
	list []word
}

type word struct {
	start, end int  // in wording.text
	name       int  // index of the first word of this word's name (letters, digits and _)
	ends       bool // whether this is the last word of its name
}

func (w *wording) at(i int) []byte { return w.text[w.list[i].start:w.list[i].end] }

// span returns the text of the words [i, j).
func (w *wording) span(i, j int) []byte { return w.text[w.list[i].start:w.list[j-1].end] }

// Kinds of bytes. A byte that is not ASCII counts as a letter.
const (
	separator = iota
	underscore
	smallLetter
	capital
	digit
)

func sortOf(c byte) int {
	switch {
	case c >= 'a' && c <= 'z' || c >= 0x80:
		return smallLetter
	case c >= 'A' && c <= 'Z':
		return capital
	case c >= '0' && c <= '9':
		return digit
	case c == '_':
		return underscore
	}
	return separator
}

func wordsOf(text string) *wording {
	w := &wording{text: make([]byte, 0, len(text)+len(text)/4+8), list: make([]word, 0, len(text)/5+4)}
	name, start := 0, -1
	endWord := func() {
		if start >= 0 {
			w.list = append(w.list, word{start: start, end: len(w.text), name: name})
			w.text = append(w.text, ' ')
			start = -1
		}
	}
	endName := func() {
		endWord()
		if name < len(w.list) {
			w.list[len(w.list)-1].ends = true
			name = len(w.list)
		}
	}
	before := separator
	for i := range len(text) {
		c := text[i]
		sort := sortOf(c)
		switch sort {
		case separator:
			endName()
		case underscore:
			endWord()
		case capital:
			// The B of fooBar and of HTTPBar begins a word.
			if before == smallLetter || before == capital && i+1 < len(text) && sortOf(text[i+1]) == smallLetter {
				endWord()
			}
			c += 'a' - 'A'
		}
		if sort != separator && sort != underscore {
			if start < 0 {
				start = len(w.text)
			}
			w.text = append(w.text, c)
		}
		before = sort
	}
	endName()
	return w
}

// index finds the lines of a table.
type index struct {
	lines []line
	names namesOfErrors
	texts *phrases
}

func newIndex(lines []line) *index {
	x := &index{lines: lines, names: namesOfErrors{}, texts: &phrases{line: noLine}}
	for i, l := range lines {
		for _, name := range listOf(l.names) {
			x.names.add(name, i)
		}
		for _, text := range listOf(l.texts) {
			x.texts.add(text, i)
		}
	}
	return x
}

// listOf splits a comma-separated list of names or texts.
func listOf(list string) []string {
	var all []string
	for item := range strings.SplitSeq(list, ",") {
		if item = strings.Join(strings.Fields(item), " "); item != "" {
			all = append(all, item)
		}
	}
	return all
}

func (x *index) line(i int) *line {
	if i == noLine {
		return nil
	}
	return &x.lines[i]
}

// ofName returns the line of a type or code, or nil. It looks up the last part of the name (of Net::ReadTimeout,
// java.net.ConnectException or https://bank.example/errors/declined). If the last part is generic, as in
// serde_json::Error, it looks up the whole name.
func (x *index) ofName(name string) *line {
	if name == "" || len(name) > maxNameBytes {
		return nil
	}
	if i := strings.IndexAny(name, "<[("); i > 0 {
		name = name[:i]
	}
	const separators = `.:/\$#`
	name = strings.TrimRight(name, separators+" ]>")
	w := wordsOf(name[strings.LastIndexAny(name, separators)+1:])
	if len(w.list) == 1 && isGeneric(w.at(0)) {
		w = wordsOf(name)
	}
	return x.line(x.names.find(w, 0, len(w.list)))
}

// ofText returns the first line that has a text in w, or that has the name of an error in w. Such a name ends with a
// generic word, as ConnectionError does. ofText returns nil if there is no such line.
func (x *index) ofText(w *wording) *line { return x.line(x.inText(w)) }

func (x *index) inText(w *wording) int {
	first := noLine
	for i := range w.list {
		if w.list[i].ends && isGeneric(w.at(i)) {
			first = min(first, x.names.find(w, w.list[i].name, i+1))
		}
		first = min(first, x.texts.find(w, i))
	}
	return first
}

// noLine stands for no line. It is greater than the index of any line.
const noLine = int(^uint(0) >> 1)

// namesOfErrors finds lines by the names of errors.
type namesOfErrors map[string][]nameLine

type nameLine struct {
	openLeft, openRight bool // whether the name begins or ends with *
	line                int
}

func (n namesOfErrors) add(name string, line int) {
	l := nameLine{line: line}
	name, l.openLeft = strings.CutPrefix(name, "* ")
	name, l.openRight = strings.CutSuffix(name, " *")
	n[name] = append(n[name], l)
}

// find returns the first line for the name that consists of the words [i, j). It looks up the name as it is, and then
// without generic words. A name without * takes precedence over names with *.
func (n namesOfErrors) find(w *wording, i, j int) int {
	if j-i > maxNameWords || i == j {
		return noLine
	}
	if line := n.exactly(w, i, j); line != noLine {
		return line
	}
	for j > i && isGeneric(w.at(j-1)) {
		j--
	}
	if j-i > 1 && (string(w.at(i)) == "err" || isFailure(w.at(i))) { // ERR_INVALID_URL, 429 TooManyRequests
		i++
	}
	if i == j {
		return noLine
	}
	if line := n.exactly(w, i, j); line != noLine {
		return line
	}
	first := noLine
	for from := i; from < j; from++ {
		for to := from + 1; to <= j; to++ {
			for _, l := range n[string(w.span(from, to))] {
				if (from == i || l.openLeft) && (to == j || l.openRight) {
					first = min(first, l.line)
				}
			}
		}
	}
	return first
}

func (n namesOfErrors) exactly(w *wording, i, j int) int {
	for _, l := range n[string(w.span(i, j))] {
		if !l.openLeft && !l.openRight {
			return l.line
		}
	}
	return noLine
}

// isGeneric reports whether a word, such as exception, occurs in the names of most errors and says nothing about the
// cause.
func isGeneric(word []byte) bool {
	switch string(word) {
	case "error", "errors", "exception", "err", "fault":
		return true
	}
	return false
}

// phrases is a tree of words that finds lines by the words of messages.
type phrases struct {
	next map[string]*phrases
	gap  *phrases // the words after a gap of at most maxGapWords words
	line int      // the line of the text that ends here, or noLine
}

func phrasesOf(list ...string) *phrases {
	p := &phrases{line: noLine}
	for _, text := range list {
		p.add(text, 0)
	}
	return p
}

func (p *phrases) add(text string, line int) {
	for i, part := range strings.Split(text, "…") {
		if i > 0 {
			if p.gap == nil {
				p.gap = &phrases{line: noLine}
			}
			p = p.gap
		}
		w := wordsOf(part)
		for i := range w.list {
			if p.next == nil {
				p.next = map[string]*phrases{}
			}
			word := string(w.at(i))
			if p.next[word] == nil {
				p.next[word] = &phrases{line: noLine}
			}
			p = p.next[word]
		}
	}
	p.line = min(p.line, line)
}

// find returns the first line with a text that matches the words from word i on.
func (p *phrases) find(w *wording, i int) int {
	first := p.line
	if i < len(w.list) && p.next != nil {
		if next := p.next[string(w.at(i))]; next != nil {
			first = min(first, next.find(w, i+1))
		}
	}
	if p.gap != nil {
		for j := i; j <= min(i+maxGapWords, len(w.list)); j++ {
			first = min(first, p.gap.find(w, j))
		}
	}
	return first
}

// in reports whether a text contains one of the phrases.
func (p *phrases) in(w *wording) bool {
	for i := range w.list {
		if p.find(w, i) != noLine {
			return true
		}
	}
	return false
}
