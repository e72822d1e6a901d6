package strategy

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// stacks has stack traces by language and cause. Traces of the same cause differ in parts that also differ between runs
// and builds.
var stacks = map[string]map[string][]string{
	"Go": {
		"orders.Place": {
			"goroutine 12 [running]:\nruntime/debug.Stack()\n\t/usr/local/go/src/runtime/debug/stack.go:26 +0x5e\n" +
				"main.recovered.func1()\n\t/app/recover.go:12 +0x45\n" +
				"panic({0x6d1f40?, 0xc00001c0a8?})\n\t/usr/local/go/src/runtime/panic.go:785 +0x132\n" +
				"example.com/shop/orders.(*Service).Place(0xc000012345, {0xa1, 0xb2})\n\t/app/orders/place.go:31 +0x1d\n" +
				"main.work()\n\t/app/main.go:9 +0x18\ncreated by main.main in goroutine 1\n\t/app/main.go:20 +0x25\n",
			"goroutine 87 [running]:\nruntime/debug.Stack()\n\t/opt/go/src/runtime/debug/stack.go:24 +0x64\n" +
				"main.recovered.func2()\n\t/build/recover.go:19 +0x49\n" +
				"panic({0x7f0000?, 0xc0000deadb?})\n\t/opt/go/src/runtime/panic.go:770 +0x111\n" +
				"example.com/shop/orders.(*Service).Place(0xc0009999, {0xff, 0x1})\n\t/build/orders/place.go:48 +0x9f\n",
			"goroutine 3 [running]:\npanic({0x1, 0x2})\n\t/go/src/runtime/panic.go:783 +0x132\nruntime.panicmem(...)\n" +
				"\t/go/src/runtime/panic.go:262\nruntime.sigpanic()\n\t/go/src/runtime/signal_unix.go:917 +0x359\n" +
				"example.com/shop/orders.(*Service).Place.func1({0x3, 0x4})\n\t/app/orders/place.go:33 +0x1\n" +
				"example.com/shop/orders.(*Service).Place(0xc0000)\n\t/app/orders/pl",
			// River's form: functions without arguments.
			"runtime.gopanic\n\t/go/src/runtime/panic.go:783\nexample.com/shop/orders.(*Service).Place\n" +
				"\torders/place.go:7\ngithub.com/riverqueue/river/internal/workunit.x\n\tx.go:1\n",
			"runtime.goPanicIndex\n\t/go/src/runtime/panic.go:115\ngithub.com/jackc/pgx/v5.(*Conn).Query\n" +
				"\t/root/go/pkg/mod/github.com/jackc/pgx/v5@v5.7.1/conn.go:1\n" +
				"example.com/shop/orders.(*Service).Place.func2.1\n\torders/place.go:99\n",
		},
		"prices.Find": {
			"goroutine 12 [running]:\nruntime/debug.Stack()\n\t/usr/local/go/src/runtime/debug/stack.go:26 +0x5e\n" +
				"main.recovered.func1()\n\t/app/recover.go:12 +0x45\n" +
				"panic({0x6d1f40?, 0xc00001c0a8?})\n\t/usr/local/go/src/runtime/panic.go:785 +0x132\n" +
				"example.com/shop/prices.Find[...](0x1)\n\t/app/prices/find.go:3 +0x1d\n" +
				"example.com/shop/orders.(*Service).Place(0xc000012345)\n\t/app/orders/place.go:31 +0x1d\n",
			"goroutine 9 [running]:\npanic({0x6d1f40?, 0xc00001c0a8?})\n\t/usr/local/go/src/runtime/panic.go:785 +0x132\n" +
				"example.com/shop/prices.Find[...](...)\n\t/app/prices/find.go:8\n",
		},
	},
	"Java": {
		"PriceService.lookup": {
			"java.lang.RuntimeException: task failed\n\tat com.acme.OrderWorker.work(OrderWorker.java:31)\n" +
				"\tat java.base/java.lang.Thread.run(Thread.java:840)\n" +
				"Caused by: java.lang.NullPointerException: x\n" +
				"\tat java.base/java.util.Objects.requireNonNull(Objects.java:233)\n" +
				"\tat com.acme.PriceService.lambda$lookup$0(PriceService.java:12)\n" +
				"\tat com.acme.PriceService$$Lambda$14/0x0000000800c03000.apply(Unknown Source)\n\t... 12 more\n",
			"java.lang.RuntimeException: task failed\n\tat com.acme.OrderWorker.work(OrderWorker.java:35)\n" +
				"\tat java.base/java.lang.Thread.run(Thread.java:840)\n" +
				"Caused by: java.lang.NullPointerException: x\n" +
				"\tat com.acme.PriceService$$EnhancerBySpringCGLIB$$1f2e3d.lookup(<generated>)\n" +
				"\tat com.acme.PriceService.lookup(PriceService.java:19)\n\t... 11 more\n",
			"java.lang.RuntimeException: task failed\n\tat com.acme.OrderWorker.work(OrderWorker.java:31)\n" +
				"Caused by: java.lang.NullPointerException: x\n" +
				"\tat app//com.acme.PriceService.lambda$lookup$3(PriceService.java:14)\n" +
				"\tat jdk.internal.reflect.GeneratedMethodAccessor33.invoke(Unknown Source)\n" +
				"\tat com.sun.proxy.$Proxy12.x(Unknow",
		},
		"StockService.take": {
			"java.lang.RuntimeException: task failed\n\tat com.acme.OrderWorker.work(OrderWorker.java:31)\n" +
				"Caused by: java.lang.NullPointerException: x\n\tat com.acme.StockService.take(StockService.java:12)\n" +
				"\t... 12 more\n",
			"java.lang.RuntimeException: task failed\n\tat com.acme.OrderWorker.work(OrderWorker.java:38)\n" +
				"Caused by: java.lang.NullPointerException: x\n\tat com.acme.StockService$$SpringCGLIB$$0.take(<generated>)\n" +
				"\tat com.acme.StockService.take(StockService.java:2)\n",
			"org.postgresql.util.PSQLException: x\n\tat org.postgresql.jdbc.PgStatement.execute(PgStatement.java:2)\n" +
				"\tat com.acme.StockService.take(StockService.java:14)\n",
		},
		"Kotlin's Refunds.pay": {
			"java.lang.IllegalStateException: no\n\tat com.acme.Refunds$pay$2.invokeSuspend(Refunds.kt:12)\n" +
				"\tat kotlin.coroutines.jvm.internal.BaseContinuationImpl.resumeWith(ContinuationImpl.kt:33)\n",
			"java.lang.IllegalStateException: no\n\tat com.acme.Refunds$pay$5$1.invokeSuspend(Refunds.kt:19)\n" +
				"\tat kotlinx.coroutines.DispatchedTask.run(DispatchedTask.kt:108)\n",
		},
	},
	"Python": {
		"prices.find": {
			"Traceback (most recent call last):\n  File \"/app/worker.py\", line 31, in work\n    place(order)\n" +
				"  File \"/app/shop/prices.py\", line 7, in find\n    return table[key]\n           ~~~~~^^^^^\n" +
				"KeyError: 'x'\n",
			"Traceback (most recent call last):\n  File \"/srv/releases/20261123/worker.py\", line 35, in work\n" +
				"    place(order)\n  File \"/srv/releases/20261123/shop/prices.py\", line 9, in find\n    return table[key]\n" +
				"  File \"/usr/lib/python3.12/collections/__init__.py\", line 1015, in __getitem__\n" +
				"    raise KeyError(key)\nKeyError: 'x'\n",
			"Traceback (most recent call last):\n  File \"/app/shop/prices.py\", line 7, in find.<locals>.<lambda>\n" +
				"    return table[key]\nKeyError: 'x'\n\n" +
				"The above exception was the direct cause of the following exception:\n\n" +
				"Traceback (most recent call last):\n  File \"/app/worker.py\", line 31, in work\n    place(order)\n" +
				"RuntimeError: failed\n",
			"Traceback (most recent call last):\n  File \"/app/shop/cache.py\", line 7, in get\n    x\nKeyError: 'x'\n\n" +
				"During handling of the above exception, another exception occurred:\n\n" +
				"Traceback (most recent call last):\n  File \"/app/shop/prices.py\", line 31, in find\n    y\n" +
				"  File \"/venv/lib/python3.12/site-packages/sqlalchemy/x.py\", line 3, in go\n    z\nKeyError: 'x'\n",
		},
		"stock.take": {
			"Traceback (most recent call last):\n  File \"/app/worker.py\", line 31, in work\n    place(order)\n" +
				"  File \"/app/shop/stock.py\", line 7, in take\n    return table[key]\nKeyError: 'x'\n",
			"Traceback (most recent call last):\n  File \"/app/shop/stock.py\", line 12, in take\n    return table[key]\n" +
				"KeyError: 'x'\n",
		},
	},
	"Ruby": {
		"place": {
			"app/models/order.rb:12:in `block (2 levels) in place': undefined method `x' for nil (NoMethodError)\n" +
				"\tfrom app/models/order.rb:10:in `each'\n" +
				"\tfrom /usr/local/bundle/gems/activejob-7.1/lib/x.rb:3:in `perform'\n",
			"/app/models/order.rb:19:in 'Order#place'\n/app/workers/w.rb:3:in 'Worker#perform'\n",
			"/usr/local/bundle/gems/pg-1.5/lib/pg.rb:1:in `exec'\n" +
				"/releases/2026/app/models/order.rb:14:in `rescue in place'\n" +
				"/releases/2026/app/models/order.rb:12:in `place'\n/usr/local/lib/ruby/3.3.0/x.rb:1:in `y",
			"Traceback (most recent call last):\n\t2: from bin/w:3:in `<main>'\n" +
				"\t1: from /app/workers/w.rb:9:in `perform'\n/app/models/order.rb:22:in `place': no (RuntimeError)\n",
		},
		"refund": {
			"app/models/order.rb:40:in `refund': undefined method `x' for nil (NoMethodError)\n" +
				"\tfrom app/models/order.rb:12:in `place'\n",
			"/app/models/order.rb:44:in 'Order#refund'\n/app/models/order.rb:12:in 'Order#place'\n",
		},
	},
	"JavaScript": {
		"place": {
			"TypeError: Cannot read properties of undefined\n    at OrderService.place (/app/dist/orders.js:10:5)\n" +
				"    at async Worker.run (/app/dist/worker.js:3:1)\n" +
				"    at process.processTicksAndRejections (node:internal/process/task_queues:95:5)\n",
			"TypeError: Cannot read properties of undefined\n    at place (/srv/app/dist/orders.js:19:7)\n" +
				"    at Array.map (<anonymous>)\n",
			"TypeError: Cannot read properties of undefined\n    at /app/node_modules/pg/lib/client.js:5:3\n" +
				"    at new Promise (<anonymous>)\n" +
				"    at async Object.place [as run] (file:///app/dist/orders.3f2a1bcd.js:1:2345)\n    at Wor",
			"place@https://shop.example/dist/orders.3f2a1bcd.js?v=1:10:5\nrun@https://shop.example/dist/worker.js:3:1\n",
			"TypeError: x\n    at place (webpack-internal:///./src/orders.js:10:5)\n",
		},
		"refund": {
			"TypeError: Cannot read properties of undefined\n    at OrderService.refund (/app/dist/orders.js:60:5)\n" +
				"    at OrderService.place (/app/dist/orders.js:10:5)\n",
			"TypeError: Cannot read properties of undefined\n" +
				"    at async OrderService.refund (/app/dist/orders-9AF3C2D1.js:61:5)\n",
		},
		"without a name": {
			"Error: x\n    at /app/dist/jobs.js:3:9\n    at Object.<anonymous> (/app/dist/index.js:1:1)\n",
			"Error: x\n    at Object.<anonymous> (/app/dist/jobs.js:5:2)\n",
		},
	},
	"Rust": {
		"orders::place": {
			"thread 'main' panicked at src/orders.rs:12:9:\nno\nstack backtrace:\n   0: rust_begin_unwind\n" +
				"             at /rustc/90b35a6/library/std/src/panicking.rs:645:5\n   1: core::panicking::panic_fmt\n" +
				"             at /rustc/90b35a6/library/core/src/panicking.rs:72:14\n" +
				"   2: core::option::Option<T>::unwrap\n   3: shop::orders::place::{{closure}}\n" +
				"             at ./src/orders.rs:12:9\n   4: shop::main\n             at ./src/main.rs:4:5\n",
			"stack backtrace:\n" +
				"   0:     0x55d0c8a7c4b4 - std::backtrace_rs::backtrace::libunwind::trace::h9f3a1b2c3d4e5f60\n" +
				"   1:     0x55d0c8a7c4b4 - core::panicking::panic::h0011223344556677\n" +
				"   2:     0x55d0c8a11111 - shop::orders::place::hdeadbeefdeadbeef\n   3:     0x55d0c8a2",
			"   0: std::panicking::begin_panic_handler\n   1: anyhow::error::<impl anyhow::Error>::msg\n" +
				"             at /root/.cargo/registry/src/index.crates.io-6f17d22bba15001f/anyhow-1.0.75/src/error.rs:83:36\n" +
				"   2: shop[1a2b3c4d5e6f7a8b]::orders::place::{closure#3}\n             at /build/src/orders.rs:19:13\n",
			// These crates are not in rustLibs.
			"   0: core::panicking::panic_fmt\n   1: price_tables::row\n" +
				"             at /usr/local/cargo/registry/src/index.crates.io-6f17d22bba15001f/price-tables-1.0.0/src/lib.rs:3:1\n" +
				"   2: shop::orders::place\n             at ./src/orders.rs:12:9\n",
			"   0: core::panicking::panic_fmt\n   1: price_tables::row\n" +
				"             at /root/.cargo/git/checkouts/price-tables-1a2b3c4d/5e6f7a8/src/lib.rs:3:1\n" +
				"   2: shop::orders::place\n             at ./src/orders.rs:12:9\n",
		},
		"stock::take": {
			"   0: rust_begin_unwind\n   1: core::panicking::panic_fmt\n   2: shop::stock::take\n" +
				"             at ./src/stock.rs:12:9\n   3: shop::orders::place\n",
			"   0:     0x55d0c8a7c4b4 - core::panicking::panic::h0011223344556677\n" +
				"   1:     0x55d0c8a11111 - shop::stock::take::h1234567890abcdef\n",
		},
	},
	".NET": {
		"Orders.Place": {
			"System.NullReferenceException: x\n   at Acme.Shop.Orders.<Place>d__5.MoveNext() in /src/Orders.cs:line 42\n" +
				"--- End of stack trace from previous location ---\n" +
				"   at System.Runtime.CompilerServices.TaskAwaiter.ThrowForNonSuccess(Task task)\n" +
				"   at Acme.Shop.Worker.Run(String id) in /src/Worker.cs:line 9\n",
			"System.InvalidOperationException: y\n ---> System.NullReferenceException: x\n" +
				"   at Acme.Shop.Orders.<>c__DisplayClass3_0.<Place>b__1(Item i) in C:\\build\\Orders.cs:line 51\n" +
				"   at System.Linq.Enumerable.Select(Func`2 f)\n   --- End of inner exception stack trace ---\n" +
				"   at Acme.Shop.Worker.Run(String id)\n",
			"   at System.Collections.Generic.Dictionary`2.get_Item(TKey key)\n" +
				"   at Acme.Shop.Orders.Place(Int32 n, Func`2 f)\n   at lambda_method123(Closure, Object)\n   at Acme.Sh",
			"   at Npgsql.NpgsqlConnection.Open()\n   at Acme.Shop.Orders.<>c.<Place>b__7_0(Object o)\n",
		},
		"Stock.Take": {
			"System.NullReferenceException: x\n   at Acme.Shop.Stock.Take(Int32 n) in /src/Stock.cs:line 42\n" +
				"   at Acme.Shop.Orders.<Place>d__5.MoveNext() in /src/Orders.cs:line 42\n",
			"System.NullReferenceException: x\n   at Acme.Shop.Stock.<Take>d__11`1.MoveNext()\n",
		},
	},
	"PHP": {
		"Order->place": {
			"#0 /app/src/Worker.php(12): App\\Order->place(Array)\n" +
				"#1 /app/vendor/laravel/framework/src/Illuminate/Container/Container.php(36): App\\Worker->handle()\n" +
				"#2 {main}\n",
			"Error: x in /app/src/Order.php:5\nStack trace:\n" +
				"#0 /srv/releases/7/src/Worker.php(19): App\\Order->place(Object(App\\Item), 'abc')\n#1 {main}\n" +
				"  thrown in /app/src/Order.php on line 5\n",
			"#0 /app/vendor/laravel/framework/src/Illuminate/Container/BoundMethod.php(36): App\\Order->place(1)\n" +
				"#1 [internal function]: Illuminate\\Co",
		},
		"Stock->take": {
			"#0 /app/src/Order.php(12): App\\Stock->take(Array)\n#1 /app/src/Worker.php(12): App\\Order->place(Array)\n" +
				"#2 {main}\n",
			"#0 /srv/src/Order.php(17): App\\Stock->take(5)\n#1 {main}\n",
			"#0 /app/vendor/acme/lists/src/Lists.php(3): array_map(Object(Closure), Array)\n" +
				"#1 /app/src/Order.php(12): App\\Stock->take(Array)\n",
		},
		"a closure of Job's": {
			"#0 [internal function]: App\\Job->App\\{closure}(1)\n#1 /app/src/Job.php(3): array_map(Object(Closure), Array)\n",
			"#0 [internal function]: App\\Job->App\\{closure}(9)\n#1 /app/src/Job.php(7): array_map(Object(Closure), Array)\n",
		},
	},
}

func TestOwnFrame_SameCauseSameFrame(t *testing.T) {
	t.Parallel()
	for language, causes := range stacks {
		seen := map[string]string{}
		for name, traces := range causes {
			frames := map[string]bool{}
			for _, trace := range traces {
				frames[ownFrame(trace)] = true
			}
			require.Len(t, frames, 1, "%s: %s: %v", language, name, slices.Collect(maps.Keys(frames)))
			for own := range frames {
				require.NotEmpty(t, own, "%s: %s", language, name)
				require.Empty(t, seen[own], "%s: %s is another cause than %s", language, name, seen[own])
				seen[own] = name
			}
		}
	}
}

// dlqd reads the beginning and the end of a long trace, and other programs cut off the end of traces.
func TestOwnFrame_TruncatedTraceGivesSameFrame(t *testing.T) {
	t.Parallel()
	libraries := map[string]string{
		"Go":         "github.com/x/y.Serve%d(0xc0%d)\n\t/root/go/pkg/mod/github.com/x/y@v1.2.3/y.go:%d +0x1\n",
		"Java":       "\tat org.springframework.web.Filter%d.do%d(Filter.java:%d)\n",
		"Python":     "  File \"/venv/lib/python3.12/site-packages/x/y%d.py\", line %d, in go%d\n    x\n",
		"Ruby":       "\tfrom /usr/local/bundle/gems/x-1/lib/y%d.rb:%d:in `go%d'\n",
		"JavaScript": "    at go%d (/app/node_modules/x/y%d.js:%d:1)\n",
		"Rust":       "  %d: tokio::runtime::go%d\n             at /root/.cargo/registry/src/x/tokio/y.rs:%d:1\n",
		".NET":       "   at Microsoft.AspNetCore.Go%d.Run%d(Int32 n) in /_/src/x.cs:line %d\n",
		"PHP":        "#%d /app/vendor/x/y/z.php(%d): Illuminate\\Pipeline\\Go%d->handle()\n",
	}
	for language, library := range libraries {
		for name, traces := range stacks[language] {
			trace := traces[0]
			if language == "Ruby" && strings.HasPrefix(trace, "Traceback") {
				continue
			}
			var more strings.Builder
			for i := range 400 {
				fmt.Fprintf(&more, library, i, i, i)
			}
			long := trace + more.String()
			if language == "Python" { // the innermost frames come last
				head, last, _ := strings.Cut(trace, "  File ")
				long = head + more.String() + "  File " + last
			}
			if language == "Java" { // the root cause comes last
				if head, root, ok := strings.Cut(trace, "Caused by"); ok {
					long = head + more.String() + "Caused by" + root
				}
			}
			require.Greater(t, len(long), 2*8192, language)
			read := long[:8192] + "\n…\n" + long[len(long)-8192:]
			require.Equal(t, ownFrame(trace), ownFrame(read), "%s: %s", language, name)
			if language != "Python" && language != "Java" {
				require.Equal(t, ownFrame(trace), ownFrame(long[:1000]), "%s: %s", language, name)
			}
		}
	}
}

func TestOwnFrame_AcceptsAnyText(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		var all []string
		for _, causes := range stacks {
			for _, traces := range causes {
				all = append(all, traces...)
			}
		}
		slices.Sort(all)
		trace := rapid.SampledFrom(all).Draw(t, "trace")
		at := rapid.IntRange(0, len(trace)).Draw(t, "cut")
		ownFrame(trace[:at] + rapid.String().Draw(t, "text") + trace[at:])
		ownFrame(trace[at:])
	})
}

func BenchmarkOwnFrame(b *testing.B) {
	trace := strings.Repeat(stacks["Java"]["PriceService.lookup"][0], 20)
	for b.Loop() {
		ownFrame(trace)
	}
}
