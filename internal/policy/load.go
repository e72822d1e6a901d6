package policy

import (
	"bytes"
	"cmp"
	"embed"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-viper/mapstructure/v2"
	"github.com/knadh/koanf/providers/confmap"
	"github.com/knadh/koanf/v2"
	"go.yaml.in/yaml/v3"

	"github.com/dlqd/dlqd/internal/redact"
)

// EnvironmentsDir is the directory, within a configuration directory, that has one directory for each environment.
const EnvironmentsDir = "environments"

// maxFileBytes limits the size of one file of a policy.
const maxFileBytes = 1 << 20

// separator joins the keys of a path inside koanf, because names may contain dots.
const separator = "\x00"

//go:embed defaults/*.yaml
var defaults embed.FS

// Files returns the names of the files of a policy, without extension.
func Files() []string {
	return []string{"retry-policies", "circuit-breaker", "dlq-routing", "worker-pool", "monitoring", "access", "sources"}
}

// section returns a pointer to the field into which a file is decoded.
func (p *Policy) section(name string) any {
	switch name {
	case "retry-policies":
		return &p.RetryPolicies
	case "circuit-breaker":
		return &p.Breakers
	case "dlq-routing":
		return &p.Routing
	case "worker-pool":
		return &p.Workers
	case "access":
		return &p.Access
	case "sources":
		return &p.Sources
	default:
		return &p.Monitoring
	}
}

// inherits lists, for each file, the maps whose items inherit values that they do not set, each with the field from
// which the items inherit.
var inherits = map[string][][2]string{
	"retry-policies":  {{"queues", "defaults"}, {"destinations", "destinationDefaults"}},
	"circuit-breaker": {{"destinations", "defaults"}, {"riverQueues", "defaults"}},
	"worker-pool":     {{"queues", "defaults"}},
	"monitoring":      {{"queues", "defaults"}},
	"sources":         {{"sources", "defaults"}},
}

// Source says where a policy is read from.
type Source struct {
	Dir string // configuration directory; empty for the built-in defaults alone
	Env string // folder of Dir/environments, merged over Dir key by key; empty for none
	// Destination is the URL of the destination "default". It is used if the policy defines no queues.
	Destination string
	// SecretsElsewhere is for commands that check or compare a policy on a machine that may lack the secret files. It
	// makes a missing secret file a warning instead of an error. URLs and secrets of destinations that come from files
	// then count as empty, even if the files exist.
	SecretsElsewhere bool
}

// Setting is one effective value.
type Setting struct {
	File   string // without an ending
	Path   string // such as queues.orders.timeout
	Value  any
	Origin string // "built in", or file:line
}

// String returns file, path and value on one line.
func (s Setting) String() string {
	return fmt.Sprintf("%s %s = %s", s.File, s.Path, displayValue(s.Value))
}

// Text returns the value as its file would write it. Secrets in URLs are hidden.
func (s Setting) Text() string { return displayValue(s.Value) }

// Place returns an origin (file and line) relative to the policy's directory, so that it does not show a path of this
// machine.
func (p *Policy) Place(origin string) string {
	if p.dir == "" {
		return origin
	}
	return strings.TrimPrefix(origin, filepath.Clean(p.dir)+string(filepath.Separator))
}

// displayValue returns the text of a value in the form of its file. Secrets in URLs are hidden.
func displayValue(value any) string {
	raw, err := yaml.Marshal(flow(value))
	if err != nil {
		return fmt.Sprint(value)
	}
	return strings.TrimSpace(string(raw))
}

func flow(value any) *yaml.Node {
	node := &yaml.Node{}
	_ = node.Encode(value) // the value was decoded from YAML, so it can be encoded
	var set func(*yaml.Node)
	set = func(n *yaml.Node) {
		n.Style |= yaml.FlowStyle
		n.Value = redact.Text(n.Value)
		for _, child := range n.Content {
			set(child)
		}
	}
	set(node)
	return node
}

// Default returns the policy of a source without a directory. It has one queue, which delivers to destinationURL.
func Default(destinationURL string) (*Policy, error) {
	return Load(Source{Destination: destinationURL})
}

// Load reads and checks a policy. Its error lists mistakes with file and line. Load looks for mistakes between files
// only if each file is valid by itself.
func Load(source Source) (*Policy, error) {
	before := source.hash() // before the files are read, so that Watch sees changes during the read
	p, err := (&loader{source: source}).readAll()
	if err != nil {
		return nil, err
	}
	slices.Sort(p.secretFiles)
	p.filesHash = before + hashFiles(p.secretFiles)
	p.version, p.unanswered = version(source.Dir, p.settings)
	return p, nil
}

// Draft returns the policy that would be in force if text replaced one of the source's files. file is the file's name
// without extension. For a file of the environment, the name includes the directory (environments/prod/dlq-routing).
// Draft writes nothing and reads no secrets: it uses the secrets of p.
func (p *Policy) Draft(source Source, file, text string) (*Policy, error) {
	if one := p.Destinations[DefaultQueue]; source.Dir == "" && one != nil {
		source.Destination = one.URL
	}
	return (&loader{source: source, draft: &draft{file: file, text: text, inForce: p}}).readAll()
}

// DraftFiles returns the names of the files that a draft may replace.
func (s Source) DraftFiles() []string {
	names := Files()
	if s.Env != "" {
		for _, name := range Files() {
			names = append(names, path.Join(EnvironmentsDir, s.Env, name))
		}
	}
	return names
}

func (l *loader) readAll() (*Policy, error) {
	l.policy = &Policy{dir: l.source.Dir, origins: map[string]map[string]string{}, secrets: map[string]string{}}
	if err := l.checkDir(); err != nil {
		return nil, fmt.Errorf("policy %s: %w", l.source.Dir, err)
	}
	for _, name := range Files() {
		l.load(name)
	}
	if len(l.problems) == 0 {
		l.check()
	}
	if len(l.problems) > 0 {
		return nil, fmt.Errorf("policy %s: %w", cmp.Or(l.source.Dir, "(built in)"), errors.Join(l.problems...))
	}
	return l.policy, nil
}

// Where returns the file and line of a value, for messages. If the value at path has no line, Where returns the line of
// the nearest value that contains it.
func (p *Policy) Where(file, path string) string {
	for ; path != ""; path = path[:max(strings.LastIndexAny(path, ".["), 0)] {
		if origin, ok := p.origins[file][path]; ok {
			return origin
		}
	}
	return file
}

// Warnings returns probable mistakes, with file and line. They do not keep a policy from coming into force.
func (p *Policy) Warnings() []string { return p.warnings }

// Settings returns every effective value, in order. Signing secrets are hidden. [Setting.Value] may have secrets in
// URLs; [Setting.Text] and [Setting.String] hide them.
func (p *Policy) Settings() []Setting { return p.settings }

type loader struct {
	source   Source
	policy   *Policy
	draft    *draft // nil: use the files
	problems []error
}

// draft is a text that replaces a file.
type draft struct {
	file, text string
	inForce    *Policy
}

// addf records a mistake at a path of a file.
func (l *loader) addf(file, path, format string, args ...any) {
	l.problems = append(l.problems, fmt.Errorf("%s: %s: %w", l.policy.Where(file, path), path,
		fmt.Errorf(format, args...)))
}

// warnf records a probable mistake at a path of a file.
func (l *loader) warnf(file, path, format string, args ...any) {
	l.policy.warnings = append(l.policy.warnings, l.policy.Where(file, path)+": "+path+": "+fmt.Sprintf(format, args...))
}

// checkDir rejects a directory if part of the configuration would be ignored without an error: because a file name is
// misspelled, or because the environment does not exist.
func (l *loader) checkDir() error {
	if l.source.Dir == "" {
		if l.source.Env != "" {
			return fmt.Errorf("environment %q: an environment requires a configuration directory", l.source.Env)
		}
		return nil
	}
	dirs := []string{l.source.Dir}
	if l.source.Env != "" {
		dir := filepath.Join(l.source.Dir, EnvironmentsDir, l.source.Env)
		if info, err := os.Stat(dir); err != nil || !info.IsDir() || l.source.Env != filepath.Base(l.source.Env) {
			names, _ := filepath.Glob(filepath.Join(l.source.Dir, EnvironmentsDir, "*"))
			for i := range names {
				names[i] = filepath.Base(names[i])
			}
			return fmt.Errorf("unknown environment %q (known: %s)", l.source.Env, strings.Join(names, ", "))
		}
		dirs = append(dirs, dir)
	}
	for _, dir := range dirs {
		items, err := os.ReadDir(dir)
		if errors.Is(err, fs.ErrNotExist) && l.source.Committed() {
			continue // a commit removed the directory's last file, and Git removed the directory
		}
		if err != nil {
			return err
		}
		for _, item := range items {
			name, extension := item.Name(), filepath.Ext(item.Name())
			if item.IsDir() || !slices.Contains(extensions, extension) || strings.Contains(name, ".samples.") {
				continue
			}
			if !slices.Contains(Files(), strings.TrimSuffix(name, extension)) {
				return fmt.Errorf("%s is not a file of a policy (known: %s)", filepath.Join(dir, name), strings.Join(Files(), ", "))
			}
		}
	}
	return nil
}

// layer is one decoded file.
type layer struct {
	content map[string]any
	lines   map[string]string // file:line by path
	empty   bool              // whether the file has no content, not even {}; it may still be being written
}

func (l *loader) load(name string) {
	merged := koanf.New(separator)
	origins := map[string]string{}
	l.policy.origins[name] = origins
	add := func(one *layer) {
		// A list of this layer replaces the list of an earlier layer, so delete the origins of the earlier list's items.
		for old := range origins {
			if list, _, inside := strings.Cut(old, "["); inside && one.lines[list] != "" {
				delete(origins, old)
			}
		}
		maps.Copy(origins, one.lines)
		_ = merged.Load(confmap.Provider(one.content, ""), nil) // a map, which cannot fail
	}
	raw, _ := defaults.ReadFile("defaults/" + name + ".yaml") // embedded
	built, err := parse(raw, nil)
	if err != nil {
		panic(err) // a test loads the defaults
	}
	add(built)
	dirs := l.source.dirs()
	if l.draft != nil && len(dirs) == 0 {
		dirs = []string{""}
	}
	for _, dir := range dirs {
		if one := l.read(dir, name); one != nil {
			if !one.empty {
				l.policy.files = append(l.policy.files, filepath.Join(dir, name))
			}
			add(one)
		}
	}
	if name == "retry-policies" && len(items(merged, "queues")) == 0 {
		one := map[string]any{"queues": map[string]any{DefaultQueue: map[string]any{}}}
		if !merged.Exists(strings.Join([]string{"destinations", DefaultQueue}, separator)) {
			one["destinations"] = map[string]any{DefaultQueue: map[string]any{"url": l.source.Destination}}
		}
		add(&layer{content: one, lines: map[string]string{"destinations.default.url": "--destination"}})
	}
	for _, pair := range inherits[name] {
		inherit(merged, origins, pair[0], pair[1])
	}
	if len(l.problems) > 0 {
		return // because of the problems, the values would not be those that the files intend
	}
	if err := merged.UnmarshalWithConf("", l.policy.section(name),
		koanf.UnmarshalConf{DecoderConfig: &mapstructure.DecoderConfig{
			TagName: "json", ErrorUnused: true,
			DecodeHook: mapstructure.ComposeDecodeHookFunc(durationHook, wordsHook), Result: l.policy.section(name),
		}}); err != nil {
		l.problems = append(l.problems, fmt.Errorf("%s: %w", name, err))
	}
	for _, key := range slices.Sorted(maps.Keys(merged.All())) {
		path := strings.ReplaceAll(key, separator, ".")
		value := merged.Get(key)
		if strings.HasSuffix(path, ".secret") && value != "" {
			value = Secret("hidden").String()
		}
		list, ok := value.([]any)
		if ok && len(list) > 0 && reflect.TypeOf(list[0]).Kind() == reflect.Map { // each rule is a setting
			for i, item := range list {
				at := path + "[" + strconv.Itoa(i) + "]"
				l.policy.settings = append(l.policy.settings,
					Setting{File: name, Path: at, Value: item, Origin: cmp.Or(origins[at], "built in")})
			}
			continue
		}
		l.policy.settings = append(l.policy.settings,
			Setting{File: name, Path: path, Value: value, Origin: cmp.Or(origins[path], "built in")})
	}
}

// read reads and checks a file with any of the extensions. It returns nil if no such file exists. If it cannot read the
// file, it records a problem and returns nil.
func (l *loader) read(dir, name string) *layer {
	if l.draft != nil && filepath.Join(dir, name) == filepath.Join(l.source.Dir, filepath.FromSlash(l.draft.file)) {
		return l.parsed(name, l.draft.file+extensions[0], []byte(l.draft.text))
	}
	if dir == "" {
		return nil
	}
	var found string
	for _, extension := range extensions {
		path := filepath.Join(dir, name+extension)
		if _, err := os.Stat(path); err != nil {
			continue
		}
		if found != "" {
			l.problems = append(l.problems, fmt.Errorf("%s and %s both exist; remove one", found, path))
			return nil
		}
		found = path
	}
	if found == "" {
		return nil
	}
	raw, err := os.ReadFile(found)
	if err != nil {
		l.problems = append(l.problems, fmt.Errorf("%s: %w", found, err))
		return nil
	}
	return l.parsed(name, found, raw)
}

// parsed decodes and checks the content of a file.
func (l *loader) parsed(name, found string, raw []byte) *layer {
	if len(raw) > maxFileBytes {
		l.problems = append(l.problems, fmt.Errorf("%s: is larger than %d bytes", found, maxFileBytes))
		return nil
	}
	one, err := parse(raw, func(line int) string { return found + ":" + strconv.Itoa(line) })
	if err != nil {
		for _, text := range unreadable(err) {
			l.problems = append(l.problems, errors.New(found+":"+text))
		}
		return nil
	}
	for _, p := range validate(name, one.content) {
		at := found
		for path := p.path; path != ""; path = path[:max(strings.LastIndexAny(path, ".["), 0)] {
			if origin, ok := one.lines[path]; ok {
				at = origin
				break
			}
		}
		l.problems = append(l.problems, fmt.Errorf("%s: %s: %s", at, p.path, p.text))
	}
	return one
}

// unreadable returns the mistakes that make a file invalid YAML. Each begins with its line: "7: did not find expected
// key".
func unreadable(err error) []string {
	texts := []string{strings.TrimPrefix(err.Error(), "yaml: ")}
	if several, ok := errors.AsType[*yaml.TypeError](err); ok {
		texts = several.Errors
	}
	for i, text := range texts {
		if after, ok := strings.CutPrefix(text, "line "); ok {
			texts[i] = after
			continue
		}
		texts[i] = "1: " + text
	}
	return texts
}

// parse decodes YAML or JSON (a subset of YAML), and records the line of each value. It returns an error for more than
// one document, and for one that is not a mapping. It drops nulls and the key $schema.
func parse(raw []byte, origin func(line int) string) (*layer, error) {
	decoder := yaml.NewDecoder(bytes.NewReader(raw))
	var document yaml.Node
	if err := decoder.Decode(&document); err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	var another yaml.Node
	if err := decoder.Decode(&another); err == nil {
		return nil, fmt.Errorf("line %d: contains more than one document", another.Line)
	} else if !errors.Is(err, io.EOF) {
		return nil, err
	}
	one := &layer{content: map[string]any{}, lines: map[string]string{}}
	if document.IsZero() || document.Content[0].Tag == "!!null" {
		one.empty = true // empty, or only comments
		return one, nil
	}
	if document.Content[0].Kind != yaml.MappingNode {
		return nil, fmt.Errorf("line %d: must be a mapping of names to values", document.Content[0].Line)
	}
	if err := checkKeys(document.Content[0]); err != nil {
		return nil, err
	}
	if err := document.Decode(&one.content); err != nil {
		return nil, err
	}
	delete(one.content, "$schema") // editors use the key $schema
	if origin != nil {
		recordLines(document.Content[0], "", one.lines, origin)
	}
	dropNulls(one.content)
	return one, nil
}

// checkKeys rejects keys of mappings that YAML does not decode as strings.
func checkKeys(node *yaml.Node) error {
	for i, child := range node.Content {
		if name := child.ShortTag(); node.Kind == yaml.MappingNode && i%2 == 0 && name != "!!str" && name != "!!merge" {
			return fmt.Errorf("line %d: the name %s must be a string: put it in quotes", child.Line, child.Value)
		}
		if err := checkKeys(child); err != nil {
			return err
		}
	}
	return nil
}

func recordLines(node *yaml.Node, path string, lines map[string]string, origin func(int) string) {
	switch node.Kind { //nolint:exhaustive // the others hold nothing
	case yaml.AliasNode:
		recordLines(node.Alias, path, lines, origin)
	case yaml.MappingNode:
		for i := 0; i+1 < len(node.Content); i += 2 { // merged keys (<<) first: the mapping's own keys override them
			merged := node.Content[i+1]
			switch {
			case node.Content[i].ShortTag() != "!!merge":
			case merged.Kind == yaml.SequenceNode:
				for _, item := range slices.Backward(merged.Content) {
					recordLines(item, path, lines, origin)
				}
			default:
				recordLines(merged, path, lines, origin)
			}
		}
		for i := 0; i+1 < len(node.Content); i += 2 {
			if node.Content[i].ShortTag() == "!!merge" {
				continue
			}
			at := node.Content[i].Value
			if path != "" {
				at = path + "." + at
			}
			lines[at] = origin(node.Content[i].Line)
			recordLines(node.Content[i+1], at, lines, origin)
		}
	case yaml.SequenceNode:
		for i, item := range node.Content {
			at := path + "[" + strconv.Itoa(i) + "]"
			lines[at] = origin(item.Line)
			recordLines(item, at, lines, origin)
		}
	}
}

// dropNulls replaces null by an empty map: "orders:" without a value then means "orders: {}".
func dropNulls(m map[string]any) {
	for key, value := range m {
		switch value := value.(type) {
		case nil:
			m[key] = map[string]any{}
		case map[string]any:
			dropNulls(value)
		}
	}
}

func items(k *koanf.Koanf, key string) map[string]any {
	m, _ := k.Get(key).(map[string]any)
	return m
}

// inherit adds the values of the map at from to each item of the map at into, unless the item sets them.
func inherit(k *koanf.Koanf, origins map[string]string, into, from string) {
	base, added := k.Cut(from).All(), map[string]any{}
	for name := range items(k, into) {
		for key, value := range base {
			to := strings.Join([]string{into, name, key}, separator)
			if k.Exists(to) {
				continue
			}
			added[to] = value
			path := strings.ReplaceAll(key, separator, ".")
			if origin, ok := origins[from+"."+path]; ok {
				origins[into+"."+name+"."+path] = origin
			}
		}
	}
	_ = k.Load(confmap.Provider(added, separator), nil) // one call of Load, because each call walks all of k
}

// durationHook decodes durations, in which days are allowed.
func durationHook(from, to reflect.Type, data any) (any, error) {
	if to != reflect.TypeFor[time.Duration]() || from.Kind() != reflect.String {
		return data, nil
	}
	return ParseDuration(data.(string)) //nolint:forcetypeassert // its kind is string
}

// ParseDuration is time.ParseDuration and also accepts days first: 30d, 1d12h.
func ParseDuration(text string) (time.Duration, error) {
	days, rest, ok := strings.Cut(text, "d")
	if !ok {
		return time.ParseDuration(text)
	}
	n, err := strconv.Atoi(days)
	if err != nil || n < 0 || n > 100_000 {
		return 0, fmt.Errorf("%q is not a duration, such as 30s, 5m, 2h or 30d", text)
	}
	d := time.Duration(n) * 24 * time.Hour
	if rest == "" {
		return d, nil
	}
	more, err := time.ParseDuration(rest)
	return d + more, err
}

// wordsHook decodes a text or a list of texts. It converts numbers to texts.
func wordsHook(_, to reflect.Type, data any) (any, error) {
	if to != reflect.TypeFor[Words]() {
		return data, nil
	}
	list, ok := data.([]any)
	if !ok {
		list = []any{data}
	}
	words := make([]any, len(list))
	for i, item := range list {
		words[i] = fmt.Sprint(item)
	}
	return words, nil
}
