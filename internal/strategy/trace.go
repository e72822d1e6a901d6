package strategy

import (
	"path"
	"regexp"
	"slices"
	"strings"
)

// ownership says to whom a frame belongs: the application, a library or the runtime. A frame of the application
// identifies the cause best.
type ownership int

const (
	ofApplication ownership = iota
	ofLibrary
	ofRuntime
)

// frame is a frame of a stack trace. function does not have the parts that differ between builds or runs.
type frame struct {
	function string
	of       ownership
}

// maxFrameBytes is how many bytes of each line of a trace are read.
const maxFrameBytes = 500

// ownFrame returns the innermost function of the application in a stack trace of Go, Java, Python, Ruby, JavaScript,
// Rust, .NET or PHP. It removes addresses, line numbers, numbers of lambdas and names of generated classes. If the
// trace has no function of the application, ownFrame returns one of a library, else one of the runtime, else "".
func ownFrame(trace string) string {
	lines := strings.Split(strings.ReplaceAll(trace, "\r\n", "\n"), "\n")
	for i, line := range lines {
		lines[i] = line[:min(len(line), maxFrameBytes)]
	}
	frames := framesOf(lines)
	for of := ofApplication; of <= ofRuntime; of++ {
		if i := slices.IndexFunc(frames, func(f frame) bool { return f.of == of }); i >= 0 {
			return frames[i].function
		}
	}
	return ""
}

// splitTrace splits the text of an error that contains a stack trace. It returns the headline and the result of
// ownFrame. If there is no trace, it returns the whole text and "".
func splitTrace(message string) (headline, own string) {
	if !strings.Contains(message, "\n") {
		return message, ""
	}
	if own = ownFrame(message); own == "" {
		return message, ""
	}
	lines := strings.Split(strings.TrimSpace(message), "\n")
	if pythonHeader.MatchString(message) {
		for _, line := range slices.Backward(lines) {
			if line != "" && line[0] != ' ' && line[0] != '\t' { // the headline follows the frames: "ValueError: …"
				return line, own
			}
		}
	}
	return lines[0], own
}

var pythonHeader = regexp.MustCompile(`(?m)^\s*Traceback \(most recent call last\):`)

// framesOf returns the frames of a trace, the innermost frame first.
func framesOf(lines []string) []frame {
	for _, language := range []struct {
		sign string // occurs in every trace of the language
		read func([]string) []frame
	}{
		{`File "`, pythonFrames},
		{"#", phpFrames},
		{"::", rustFrames},
		{"at ", atFrames},
		{":in ", rubyFrames},
		{"\t", goFrames},
		{"@", firefoxFrames},
	} {
		if !slices.ContainsFunc(lines, func(line string) bool { return strings.Contains(line, language.sign) }) {
			continue
		}
		if frames := language.read(lines); len(frames) > 0 {
			return frames
		}
	}
	return nil
}

func hasAnyPrefix(text string, prefixes []string) bool {
	return slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(text, p) })
}

func containsAny(text string, parts []string) bool {
	return slices.ContainsFunc(parts, func(p string) bool { return strings.Contains(text, p) })
}

// base returns the name of a file without folders, for paths of Unix and Windows.
func base(file string) string { return path.Base(strings.ReplaceAll(file, `\`, "/")) }

// Go.

var (
	goFile = regexp.MustCompile(`^\t(\S.*\.(?:go|s)):\d+`)
	// goArguments matches the arguments of a function in a trace of the Go runtime.
	goArguments = regexp.MustCompile(`\((?:[^()]|\([^()]*\)|\{[^{}]*\})*\)$|\(\.{3}\)$`)
	goLambda    = regexp.MustCompile(`(?:\.func\d+|\.gowrap\d+|\.deferwrap\d+|\.\d+|-fm|-range\d+|\[\.\.\.\])+(?:$|\.)`)
	goStandard  = strings.Fields(`
		archive bufio builtin bytes cmp compress container context crypto database debug embed encoding errors expvar
		flag fmt go hash html image index internal io iter log maps math mime net os path plugin reflect regexp runtime
		slices sort strconv strings structs sync syscall testing text time unicode unique unsafe vendor weak panic`)
	// goPanics lists the functions of the runtime that run deferred functions after a panic. The frames above them in a
	// trace belong to deferred functions.
	goPanics = []string{"panic", "runtime.gopanic", "runtime.sigpanic"}
)

// goFrames reads the traces that River records and that debug.Stack returns. In them, each function is followed by a
// line with the function's file.
func goFrames(lines []string) []frame {
	var frames []frame
	for i := 0; i+1 < len(lines); i++ {
		file := goFile.FindStringSubmatch(lines[i+1])
		line := lines[i]
		if file == nil || line == "" || line[0] == '\t' || strings.HasPrefix(line, "created by ") {
			continue
		}
		function := strings.TrimSpace(line)
		if !strings.HasPrefix(function, "panic(") {
			function = goArguments.ReplaceAllString(function, "")
		}
		if strings.HasPrefix(function, "panic(") || slices.Contains(goPanics, function) {
			// The frames before this one belong to the deferred function that recorded the trace.
			frames = frames[:0]
			continue
		}
		of := ofApplication
		first, _, _ := strings.Cut(function, "/")
		if first == function {
			first, _, _ = strings.Cut(function, ".")
		}
		switch {
		case slices.Contains(goStandard, first) || strings.HasPrefix(function, "golang.org/x/sync"):
			of = ofRuntime
		case containsAny(function, []string{"riverqueue/river", "dlqd/riverdlq", "dlqd/internal/riverdlq"}):
			of = ofRuntime
		case containsAny(file[1], []string{"/pkg/mod/", "/vendor/"}) || strings.Contains(file[1], "@v"):
			of = ofLibrary
		}
		function = function[strings.LastIndexByte(function, '/')+1:]
		for goLambda.MatchString(function) {
			function = strings.TrimSuffix(goLambda.ReplaceAllString(function, "."), ".")
		}
		frames = append(frames, frame{function, of})
	}
	return frames
}

// Java, .NET and JavaScript: their frames begin with "at".

var (
	javaFile = regexp.MustCompile(`^(?:[^()\s]+\.(?:java|kt|scala|groovy|clj|kts)(?::\d+)?|Native Method|` +
		`Unknown Source|<generated>|SourceFile(?::\d+)?)$`)
	javaLambda    = regexp.MustCompile(`^lambda\$(.+?)\$\d+$`)
	javaGenerated = regexp.MustCompile(`\$\$Lambda|\$\$FastClass|\$Proxy\d+|GeneratedMethodAccessor|` +
		`GeneratedConstructorAccessor|LambdaForm\$|\$\$Generated|_jsp\b`)
	javaSuffix = regexp.MustCompile(`\$\$[\w$]*$|\$HibernateProxy\$\w+$|(?:\$\d+)+$|\$ByteBuddy\$\w+$|` +
		`_ClientProxy$|_Subclass$`)
	javaRuntime = []string{
		"java.", "javax.", "jdk.", "sun.", "com.sun.", "jakarta.", "kotlin.", "scala.", "groovy.", "clojure.",
	}
	javaLibs = []string{
		"org.springframework.", "org.apache.", "org.hibernate.", "org.eclipse.", "io.netty.", "reactor.",
		"io.micrometer.", "com.fasterxml.", "com.zaxxer.", "org.postgresql.",
		"io.undertow.", "kotlinx.", "com.google.", "com.mysql.", "io.grpc.", "okhttp3.", "retrofit2.",
		"io.quarkus.", "io.smallrye.", "io.vertx.", "org.jboss.", "feign.",
		"ch.qos.", "org.slf4j.", "org.junit.", "software.amazon.", "com.amazonaws.", "akka.", "org.quartz.",
		"com.riverqueue.", "org.aspectj.", "net.bytebuddy.", "redis.clients.",
		"io.lettuce.", "com.netflix.", "io.github.resilience4j.",
	}

	dotnetFrame   = regexp.MustCompile(`^\s*at ([^\s(].*?)\((?:[^()]|\([^()]*\))*\)(?: in (.+):line \d+)?\s*$`)
	dotnetName    = regexp.MustCompile(`^[\w.<>|` + "`" + `+\[\],$~ -]+\.[\w<>|` + "`" + `$.\[\],~-]+$`)
	dotnetAsync   = regexp.MustCompile(`<([^<>]+)>[a-z]__\d+(?:` + "`" + `\d+)?(?:\[[^\]]*\])?\.MoveNext$`)
	dotnetLocal   = regexp.MustCompile(`<([^<>]+)>g__([^|]+)\|[\d_]+$`)
	dotnetLambda  = regexp.MustCompile(`<([^<>]+)>b__[\d_]+$`)
	dotnetClass   = regexp.MustCompile(`\.<>c(?:__DisplayClass[\d_]+)?(?:` + "`" + `\d+)?(?:\[[^\]]*\])?`)
	dotnetKind    = regexp.MustCompile("`" + `\d+|\[[^\]]*\]`)
	dotnetRuntime = []string{"System.", "Microsoft.", "lambda_method", "Interop.", "Internal."}
	dotnetLibs    = []string{
		"Npgsql.", "Newtonsoft.", "Dapper.", "Polly.", "MediatR.", "MassTransit.", "Hangfire.", "Quartz.",
		"RestSharp.", "StackExchange.", "Grpc.", "Google.", "Azure.", "Amazon.", "Serilog.", "AutoMapper.",
		"Castle.", "Autofac.",
	}

	jsFrame = regexp.MustCompile(`^\s*at (?:(.+?) \()?((?:[^()]|\([^()]*\))+?)(?::\d+)?(?::\d+)?\)?\s*$`)
	jsHash  = regexp.MustCompile(`[.-][0-9a-fA-F]{6,}(?:[.-]|$)|[.-][0-9A-Z]{8}(?:[.-]|$)`)
	jsQuery = regexp.MustCompile(`\?.*$`)

	jsRuntime = []string{"node:", "internal/", "native", "<anonymous>", "index ", "bootstrap_node"}
)

func atFrames(lines []string) []frame {
	if !slices.ContainsFunc(lines, func(line string) bool {
		return strings.HasPrefix(strings.TrimLeft(line, " \t"), "at ")
	}) {
		return nil
	}
	if frames := javaFrames(lines); len(frames) > 0 {
		return frames
	}
	var frames []frame
	for _, line := range lines {
		trimmed := strings.TrimSpace(line)
		if strings.HasPrefix(trimmed, "at ") {
			if f, ok := dotnetFrameOf(trimmed); ok {
				frames = append(frames, f)
			} else if f, ok := jsFrameOf(trimmed); ok {
				frames = append(frames, f)
			}
		}
	}
	return frames
}

// javaFrame parses a line such as "at app//com.acme.Orders.place(Orders.java:12)".
func javaFrame(line string) (class, method string, ok bool) {
	name, ok := strings.CutPrefix(strings.TrimLeft(line, " \t"), "at ")
	if !ok {
		return "", "", false
	}
	name, file, ok := strings.Cut(name, "(")
	file, _, closed := strings.Cut(file, ")")
	if !ok || !closed || !javaFile.MatchString(file) {
		return "", "", false
	}
	if at := strings.LastIndex(name, "/"); at >= 0 && !strings.Contains(name, "$$Lambda") { // cut off the module name
		name = name[at+1:]
	}
	at := strings.LastIndexByte(name, '.')
	if at < 0 || strings.ContainsAny(name, " \\") {
		return "", "", false
	}
	return name[:at], name[at+1:], true
}

// javaFrames returns the frames of the root cause first, and then those of the exceptions that the root cause led to.
// In the trace, the root cause is last, after "Caused by".
func javaFrames(lines []string) []frame {
	sections := [][]frame{nil}
	for _, line := range lines {
		if strings.HasPrefix(strings.TrimLeft(line, " \t"), "Caused by: ") {
			sections = append(sections, nil)
			continue
		}
		class, method, ok := javaFrame(line)
		if !ok {
			continue
		}
		of := ofApplication
		if javaGenerated.MatchString(class) || strings.HasPrefix(method, "access$") {
			continue
		}
		switch {
		case hasAnyPrefix(class, javaRuntime):
			of = ofRuntime
		case hasAnyPrefix(class, javaLibs):
			of = ofLibrary
		}
		if lambda := javaLambda.FindStringSubmatch(method); lambda != nil {
			method = lambda[1]
		}
		class = javaSuffix.ReplaceAllString(class, "")
		if method == "invokeSuspend" || method == "invoke" {
			if parts := strings.Split(class, "$"); len(parts) > 1 { // a Kotlin coroutine or lambda: Class$method$1
				class, method = parts[0], parts[1]
			}
		}
		last := len(sections) - 1
		sections[last] = append(sections[last], frame{class + "." + method, of})
	}
	slices.Reverse(sections)
	return slices.Concat(sections...)
}

func dotnetFrameOf(line string) (frame, bool) {
	match := dotnetFrame.FindStringSubmatch(line)
	if match == nil {
		return frame{}, false
	}
	if match[2] == "" { // without a file, it may be a JavaScript frame
		if strings.Contains(match[1], " ") || !dotnetName.MatchString(match[1]) || jsPlace.MatchString(line) {
			return frame{}, false
		}
	}
	name, of := match[1], ofApplication
	switch {
	case hasAnyPrefix(name, dotnetRuntime):
		of = ofRuntime
	case hasAnyPrefix(name, dotnetLibs):
		of = ofLibrary
	}
	name = dotnetAsync.ReplaceAllString(name, "$1")
	name = dotnetLocal.ReplaceAllString(name, "$1.$2")
	name = dotnetLambda.ReplaceAllString(name, "$1")
	name = dotnetClass.ReplaceAllString(name, "")
	name = dotnetAsync.ReplaceAllString(name, "$1")
	return frame{dotnetKind.ReplaceAllString(name, ""), of}, true
}

// jsPlace matches the file position at the end of a JavaScript frame.
var jsPlace = regexp.MustCompile(`:\d+:\d+\)?$|\((?:native|<anonymous>|index \d+)\)$`)

func jsFrameOf(line string) (frame, bool) {
	if !jsPlace.MatchString(line) {
		return frame{}, false
	}
	match := jsFrame.FindStringSubmatch(line)
	if match == nil {
		return frame{}, false
	}
	return jsNamed(match[1], match[2])
}

// jsNamed returns the frame of a function in a file. function is empty for an anonymous function.
func jsNamed(function, file string) (frame, bool) {
	of := ofApplication
	switch {
	case hasAnyPrefix(file, jsRuntime) || file == "":
		of = ofRuntime
	case strings.Contains(file, "node_modules") || strings.Contains(file, "/.pnpm/"):
		of = ofLibrary
	}
	file = base(jsQuery.ReplaceAllString(file, ""))
	for jsHash.MatchString(file) {
		file = strings.TrimSuffix(jsHash.ReplaceAllString(file, "."), ".")
	}
	if at := strings.Index(function, " [as "); at >= 0 {
		function = function[:at]
	}
	function = strings.TrimPrefix(strings.TrimPrefix(function, "async "), "new ")
	function = function[strings.LastIndexByte(function, '.')+1:]
	if function == "<anonymous>" || strings.HasPrefix(function, "anonymous") || function == "eval" {
		function = ""
	}
	return frame{file + ":" + function, of}, true
}

// firefoxFrame matches a frame of Firefox and Safari: function@file:line:column.
var firefoxFrame = regexp.MustCompile(`^([^@\s]*)@(\S+?):\d+:\d+$`)

func firefoxFrames(lines []string) []frame {
	var frames []frame
	for _, line := range lines {
		if match := firefoxFrame.FindStringSubmatch(strings.TrimSpace(line)); match != nil {
			if f, ok := jsNamed(strings.Trim(match[1], "/<"), match[2]); ok {
				frames = append(frames, f)
			}
		}
	}
	return frames
}

// Python.

var (
	pythonFrame     = regexp.MustCompile(`^\s*File "([^"]+)", line \d+(?:, in (.+))?\s*$`)
	pythonDuring    = "During handling of the above exception, another exception occurred:"
	pythonFrom      = "The above exception was the direct cause of the following exception:"
	pythonRuntime   = []string{"/lib/python", `\lib\`, `\Lib\`, "<frozen ", "<string>", "<stdin>", "<__array_function__"}
	pythonLibs      = []string{"site-packages", "dist-packages"}
	pythonAnonymous = regexp.MustCompile(`\.<locals>|<lambda>|<listcomp>|<genexpr>|<dictcomp>|<setcomp>`)
)

// pythonFrames returns the frames of the exception that was raised last or, if the trace names a direct cause, of that
// cause. The trace lists the most recent call last.
func pythonFrames(lines []string) []frame {
	var frames []frame
	caused := false
	for _, line := range lines {
		switch trimmed := strings.TrimSpace(line); {
		case trimmed == pythonDuring:
			frames, caused = frames[:0], false
		case trimmed == pythonFrom:
			caused = true
		case !caused:
			match := pythonFrame.FindStringSubmatch(line)
			if match == nil {
				continue
			}
			of := ofApplication
			switch {
			case containsAny(match[1], pythonLibs):
				of = ofLibrary
			case containsAny(match[1], pythonRuntime):
				of = ofRuntime
			}
			function := strings.TrimRight(pythonAnonymous.ReplaceAllString(match[2], ""), ".")
			frames = append(frames, frame{strings.TrimSuffix(base(match[1]), ".py") + "." + function, of})
		}
	}
	slices.Reverse(frames)
	return frames
}

// Ruby.

var (
	rubyFrame = regexp.MustCompile(`^\s*(?:\d+: )?(?:from )?([^\s:][^:]*\.(?:rb|erb|rake|ru|haml)|<internal:[^>]+>|-e|` +
		`\(eval[^)]*\)|[^\s:]+/bin/[^\s:]+):\d+:in ` + "[`'](.+?)'")
	rubyBlock  = regexp.MustCompile(`(?:block(?: \(\d+ levels\))?|rescue|ensure|rescue in|ensure in|loop) in `)
	rubyScope  = regexp.MustCompile(`^.*[#.]`)
	rubyBottom = regexp.MustCompile(`^Traceback \(most recent call last\):`)
	rubyView   = regexp.MustCompile(`__+\d+(?:_\d+)*$|_+\d+_\d+$`)
)

func rubyFrames(lines []string) []frame {
	var frames []frame
	reversed := false
	for _, line := range lines {
		reversed = reversed || rubyBottom.MatchString(line)
		match := rubyFrame.FindStringSubmatch(line)
		if match == nil {
			continue
		}
		of := ofApplication
		switch file := match[1]; {
		case strings.Contains(file, "/gems/") || strings.Contains(file, "/bundle/"):
			of = ofLibrary
		case strings.HasPrefix(file, "<internal:") || strings.Contains(file, "/lib/ruby/") || strings.Contains(file, "/bin/"):
			of = ofRuntime
		}
		method := match[2]
		for rubyBlock.MatchString(method) {
			method = rubyBlock.ReplaceAllString(method, "")
		}
		method = rubyView.ReplaceAllString(rubyScope.ReplaceAllString(method, ""), "")
		frames = append(frames, frame{base(match[1]) + ":" + method, of})
	}
	if reversed {
		slices.Reverse(frames)
	}
	return frames
}

// Rust.

var (
	rustFrame   = regexp.MustCompile(`^\s*(?:frame #)?\d+:\s+(?:0x[0-9a-f]+ - )?(.+?)\s*$`)
	rustAt      = regexp.MustCompile(`^\s+at (\S+?)(?::\d+)*\s*$`)
	rustHash    = regexp.MustCompile(`::h[0-9a-f]{16}$`)
	rustCrate   = regexp.MustCompile(`\[[0-9a-f]{8,16}\]`)
	rustClosure = regexp.MustCompile(`(?:::\{\{closure\}\}|::\{closure[#\d]*\}|::\{async_(?:fn|block)_env[#\d]*\}|` +
		`::\{closure_env[#\d]*\}|::\{\{async_block\}\})+`)
	rustRuntime = []string{
		"std::", "core::", "alloc::", "rust_", "__rust", "_rust", "backtrace::", "<core::", "<alloc::", "<std::",
		"_start", "__libc_start", "clone", "start_thread", "__GI_", "_main",
		"<unknown>", "__clone", "panic_unwind::", "test::", "main\x00",
	}
	rustLibs = []string{
		"anyhow::", "tokio::", "futures", "hyper::", "axum::", "tower::", "eyre::", "color_eyre::", "rayon::",
		"sqlx", "reqwest::", "serde", "tracing::", "actix", "<anyhow::", "<tokio::", "<futures",
	}
	rustTrait = regexp.MustCompile(` as (?:core|std|alloc)::[^>]+>`)
)

// rustFrames reads the backtrace that Rust's std prints. The first frames of such a backtrace belong to Rust's panic
// handling.
func rustFrames(lines []string) []frame {
	var frames []frame
	for i, line := range lines {
		match := rustFrame.FindStringSubmatch(line)
		if match == nil || !strings.Contains(match[1], "::") && !hasAnyPrefix(match[1], rustRuntime) && match[1] != "main" {
			continue
		}
		name, of := rustCrate.ReplaceAllString(rustHash.ReplaceAllString(match[1], ""), ""), ofApplication
		file := ""
		if i+1 < len(lines) {
			if at := rustAt.FindStringSubmatch(lines[i+1]); at != nil {
				file = at[1]
			}
		}
		switch {
		case hasAnyPrefix(name, rustRuntime), name == "main", strings.HasPrefix(file, "/rustc/"):
			of = ofRuntime
		case strings.HasPrefix(name, "<") && rustTrait.MatchString(name) && strings.Contains(name, "dyn "):
			of = ofRuntime
		case hasAnyPrefix(name, rustLibs) || strings.Contains(file, "/.cargo/") || strings.Contains(file, "/registry/src/"):
			of = ofLibrary
		}
		frames = append(frames, frame{rustClosure.ReplaceAllString(name, ""), of})
	}
	return frames
}

// PHP.

var (
	phpFrame   = regexp.MustCompile(`^\s*#\d+ (?:(\[internal function\])|(.+?)\(\d+\)(?: : eval\(\)'d code)?): (.+)$`)
	phpArgs    = regexp.MustCompile(`\(.*$`)
	phpClosure = regexp.MustCompile(`\{closure[^}]*\}`)
	phpClass   = regexp.MustCompile(`class@anonymous[^-:]*`)
	phpLibs    = []string{
		`Illuminate\`, `Symfony\`, `GuzzleHttp\`, `Doctrine\`, `Laravel\`, `Psr\`, `Monolog\`, `Composer\`, `Twig\`,
		`Predis\`, `League\`, `Carbon\`, `PHPUnit\`, `Nette\`, `Slim\`,
		`Sentry\`, `React\`, `Amp\`, `PhpAmqpLib\`, `Stripe\`, `Aws\`, `Google\`, `Ramsey\`, `Livewire\`, `Spatie\`,
		`Yiisoft\`, `yii\`, `Zend\`, `Laminas\`, `Cake\`,
		"PDO", "Redis", "call_user_func", "array_", "Closure->", "Reflection", "json_", "SoapClient",
	}
)

// phpFrames reads the output of getTraceAsString. Each frame has the called function and the file that called the
// function.
func phpFrames(lines []string) []frame {
	var frames []frame
	for _, line := range lines {
		match := phpFrame.FindStringSubmatch(line)
		if match == nil {
			continue
		}
		function, file := match[3], base(match[2])
		named := phpClass.ReplaceAllString(function, "class@anonymous")
		named = phpArgs.ReplaceAllString(phpClosure.ReplaceAllString(named, "{closure}"), "")
		vendor := match[2] == "" || strings.Contains(match[2], "/vendor/") || strings.Contains(match[2], `\vendor\`)
		library := hasAnyPrefix(named, phpLibs) || !strings.ContainsAny(named, `\:>`) && vendor
		switch {
		case !library:
			frames = append(frames, frame{named, ofApplication})
		case !vendor: // a file of the application calls a library's function
			frames = append(frames, frame{named, ofLibrary}, frame{file, ofApplication})
		default:
			frames = append(frames, frame{named, ofLibrary})
		}
	}
	return frames
}
