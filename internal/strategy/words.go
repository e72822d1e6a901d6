package strategy

import "strings"

// Limits on names and phrases, so that matching takes time in proportion to the text.
const (
	maxNameBytes = 255 // a type or code that is longer has no name in it; columns hold as many
	maxNameWords = 10  // of a name; more are no name of an error
	maxGapWords  = 6   // that … in a phrase stands for
)

// wording is the words of a text in lower case: runs of letters and digits, where the humps of a name such as FileNotFoundError
// are words too. A match of words never begins or ends within a word.
type wording struct {
	text []byte // the words, each with a blank behind it
	list []word
}

type word struct {
	start, end int // in wording.text
	name       int // index of the first word of the run of letters, digits and _ that this word belongs to
	last       bool
}

func (w *wording) at(i int) []byte { return w.text[w.list[i].start:w.list[i].end] }

// span is the words from i to before j.
func (w *wording) span(i, j int) []byte { return w.text[w.list[i].start:w.list[j-1].end] }

const (
	otherByte = iota
	lowerByte
	upperByte
	digitByte
	underscoreByte
)

func kindOf(c byte) int {
	switch {
	case c >= 'a' && c <= 'z' || c >= 0x80:
		return lowerByte
	case c >= 'A' && c <= 'Z':
		return upperByte
	case c >= '0' && c <= '9':
		return digitByte
	case c == '_':
		return underscoreByte
	}
	return otherByte
}

func wordsOf(text string) *wording {
	w := &wording{text: make([]byte, 0, len(text)+len(text)/4+8), list: make([]word, 0, len(text)/5+4)}
	name := 0 // index of the first word of the name that i is in
	start := -1
	end := func() {
		if start >= 0 {
			w.list = append(w.list, word{start: start, end: len(w.text), name: name})
			w.text = append(w.text, ' ')
			start = -1
		}
	}
	before := otherByte
	for i := range len(text) {
		c := text[i]
		kind := kindOf(c)
		switch {
		case kind == otherByte:
			end()
			if name < len(w.list) {
				w.list[len(w.list)-1].last = true
				name = len(w.list)
			}
		case kind == underscoreByte:
			end()
		case kind == upperByte && (before == lowerByte || before == upperByte && i+1 < len(text) && kindOf(text[i+1]) == lowerByte):
			end()
		}
		if kind != otherByte && kind != underscoreByte {
			if start < 0 {
				start = len(w.text)
			}
			if kind == upperByte {
				c += 'a' - 'A'
			}
			w.text = append(w.text, c)
		}
		before = kind
	}
	end()
	if n := len(w.list); n > 0 {
		w.list[n-1].last = true
	}
	return w
}

// names finds lines of the table by the names of errors.
type names map[string][]nameLine

type nameLine struct {
	openLeft, openRight bool // words may stand before and behind
	line                int
}

// add takes a name in, in which * at the beginning or the end stands for any number of words.
func (n names) add(pattern string, line int) {
	l := nameLine{line: line}
	pattern, l.openLeft = strings.CutPrefix(pattern, "* ")
	pattern, l.openRight = strings.CutSuffix(pattern, " *")
	n[pattern] = append(n[pattern], l)
}

// none is the line of what the table does not know.
const none = int(^uint(0) >> 1)

// find returns the first line for a name which is words i to before j. A line for exactly this name goes before those for
// many.
func (n names) find(w *wording, i, j int) int {
	best, exact := none, none
	for from := i; from < j; from++ {
		for to := from + 1; to <= j; to++ {
			for _, l := range n[string(w.span(from, to))] {
				switch {
				case from == i && to == j && !l.openLeft && !l.openRight:
					exact = min(exact, l.line)
				case (from == i || l.openLeft) && (to == j || l.openRight):
					best = min(best, l.line)
				}
			}
		}
	}
	if exact != none {
		return exact
	}
	return best
}

// ofName returns the first line for a type or code: of its last part (Net::ReadTimeout, java.net.ConnectException,
// https://bank.example/errors/declined), or of the whole where that part is a mere Error (serde_json::Error).
func (n names) ofName(text string) int {
	if text == "" || len(text) > maxNameBytes {
		return none
	}
	if i := strings.IndexAny(text, "<[("); i > 0 {
		text = text[:i]
	}
	text = strings.TrimRight(text, " .:/\\$#]>")
	w := wordsOf(text[strings.LastIndexAny(text, ".:/\\$#")+1:])
	if len(w.list) == 1 && isGeneric(w.at(0)) {
		w = wordsOf(text)
	}
	if len(w.list) > maxNameWords {
		return none
	}
	return n.ofWords(w, 0, len(w.list))
}

// ofWords returns the first line for the name that words i to before j are, with or without what names errors as such.
func (n names) ofWords(w *wording, i, j int) int {
	if i < j {
		for _, l := range n[string(w.span(i, j))] {
			if !l.openLeft && !l.openRight {
				return l.line
			}
		}
	}
	for i < j && isGeneric(w.at(j-1)) {
		j--
	}
	// ERR_INVALID_URL, 429 TooManyRequests
	if i < j && (string(w.at(i)) == "err" || len(w.at(i)) == 3 && kindOf(w.at(i)[0]) == digitByte) {
		i++
	}
	return n.find(w, i, j)
}

// isGeneric reports whether a word names errors as such.
func isGeneric(word []byte) bool {
	switch string(word) {
	case "error", "errors", "exception", "err", "fault":
		return true
	}
	return false
}

// phrases finds lines of the table by words of a text: a tree of words.
type phrases struct {
	next map[string]*phrases
	gap  *phrases // after at most maxGapWords words
	line int
}

// add takes a phrase in, in which … stands for a few words.
func (p *phrases) add(phrase string, line int) {
	for _, part := range strings.SplitAfter(phrase, "…") {
		w := wordsOf(strings.TrimSuffix(part, "…"))
		for i := range w.list {
			if p.next == nil {
				p.next = map[string]*phrases{}
			}
			key := string(w.at(i))
			if p.next[key] == nil {
				p.next[key] = &phrases{line: none}
			}
			p = p.next[key]
		}
		if strings.HasSuffix(part, "…") {
			if p.gap == nil {
				p.gap = &phrases{line: none}
			}
			p = p.gap
		}
	}
	p.line = min(p.line, line)
}

// find returns the first line that has a phrase at words i and following.
func (p *phrases) find(w *wording, i int) int {
	best := p.line
	if i < len(w.list) {
		if next := p.next[string(w.at(i))]; next != nil {
			best = min(best, next.find(w, i+1))
		}
	}
	if p.gap != nil {
		for j := i; j <= min(i+maxGapWords, len(w.list)); j++ {
			best = min(best, p.gap.find(w, j))
		}
	}
	return best
}
