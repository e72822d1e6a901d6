package console_test

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"text/template"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
	"github.com/dlqd/dlqd/internal/server"
)

// maxClicks limits the clicks and filled fields from an alert's link, or from the overview, to the result.
const maxClicks = 10

// maxIncident limits the time of an incident. Only "make trial-incidents" enforces it, because
// machines that run these tests may be busy.
const maxIncident = time.Minute

// incident opens the page_url of an alert, as its rule renders it for labels, and starts the count of
// clicks and the clock.
func (b *tab) incident(alert string, labels map[string]string) {
	b.Helper()
	raw, err := os.ReadFile("../../deploy/prometheus/rules.yaml")
	require.NoError(b, err)
	var file struct {
		Groups []struct {
			Rules []struct {
				Alert       string
				Annotations map[string]string
			}
		}
	}
	require.NoError(b, yaml.Unmarshal(raw, &file))
	for _, group := range file.Groups {
		for _, rule := range group.Rules {
			if rule.Alert != alert {
				continue
			}
			link, err := template.New(alert).Parse("{{$labels := .Labels}}{{$externalLabels := .External}}" +
				rule.Annotations["page_url"])
			require.NoError(b, err)
			var to strings.Builder
			require.NoError(b, link.Execute(&to,
				map[string]any{"Labels": labels, "External": map[string]string{"dlqd_url": b.o.base}}))
			b.clicks, b.began = 0, time.Now()
			b.open(strings.TrimPrefix(to.String(), b.o.base))
			return
		}
	}
	require.FailNow(b, "there is no such alert", alert)
}

func (b *tab) within(clicks int) {
	b.Helper()
	took := time.Since(b.began)
	b.Logf("%d clicks, %.1f s", b.clicks, took.Seconds())
	require.Less(b, b.clicks, clicks)
	if os.Getenv("DLQD_TRIAL") != "" {
		require.Less(b, took, maxIncident)
	}
}

// TestIncident_Outage handles an outage while automatic redelivery of outages is off. Once the
// receiver is up, the operator resets its breaker and replays the failures at a rate.
func TestIncident_Outage(t *testing.T) {
	t.Parallel()
	o := open(t, nil)
	o.exec("SELECT dlq.set_automatic('class', 'outage', false)")
	const failed = 10 // the tenth failure opens the breaker
	for i := range failed {
		o.submit("payments", fmt.Sprint("m", i), "payment.captured",
			map[string]any{"answer": 503, "says": "bank.example is being maintained"})
	}
	o.eventually(1, "SELECT count(*) FROM dlq.circuit_breakers WHERE name = 'destination:default' AND state = 'open'")
	o.eventually(failed, `SELECT count(*) FROM dlq.dead_letter_open WHERE error_class = 'outage'
		AND waiting_for = 'automatic'`)
	o.receiverWorks.Store(true)
	b := o.tab()
	b.incident("CircuitBreakerOpen", map[string]string{
		"job": "dlqd", "name": "destination:default", "severity": "warning",
	})
	b.click(b.button("Reset …"))
	b.follow(b.button("Reset default"))
	b.follow("#queues a[href*='dead-letters'][href*='payments']")
	b.click("#act-on summary")
	b.follow("#act-on a[href*='do=replay']")
	b.waitForText("Replay 10 dead letters")
	b.fill("input[name=rate]", "20")
	b.fill("textarea[name=note]", "the bank is back")
	b.follow("form.split button.primary")
	b.waitForText("Done in")
	b.waitForText("10 recovered, 0 failed again of 10")
	b.within(maxClicks)
	require.Equal(t, failed, o.count("SELECT count(*) FROM dlq.dead_letter_queue WHERE status = 'dlq_resolved'"))
}

// TestIncident_PaymentsFailOfSeveralCauses starts from a complaint that names only the queue. The overview shows why
// payments fail, and its link to them leads to a replay of the failures of all causes. The look-up leads to the same
// list.
func TestIncident_PaymentsFailOfSeveralCauses(t *testing.T) {
	t.Parallel()
	o := open(t, nil)
	for i := range 8 {
		o.submit("payments", fmt.Sprint("pay", i), "payment.captured",
			map[string]any{"answer": []int{402, 422}[i%2], "says": "account is closed"})
		o.submit("orders", fmt.Sprint("order", i), "order.placed", map[string]any{"answer": 400, "says": "price is missing"})
	}
	o.eventually(16, "SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_manual'")
	o.exec(postgrestest.RefreshRollups)
	o.receiverWorks.Store(true)
	b := o.tab()
	b.task()
	require.Contains(t, b.texts("#groups .group-row"), "402 Payment Required · account is closed")
	b.follow("#groups .row-meta a[href*='payments']")
	chosen := b.value(`document.querySelector("[data-filter]").value`)
	b.rows(8)
	b.click("#act-on summary")
	b.follow("#act-on a[href*='do=replay']")
	b.waitForText("Replay 8 dead letters")
	b.follow("form.split button.primary")
	b.waitForText("8 recovered, 0 failed again of 8")
	b.within(5)
	require.Equal(t, 8, o.count("SELECT count(*) FROM dlq.dead_letter_open"), "the orders")

	o.fail("payments", "payment.captured", "account is closed", 1)
	o.eventually(9, "SELECT count(*) FROM dlq.dead_letter_open")
	b.open("/search?q=payments")
	b.follow("#found a[href*='dead-letters']")
	require.Equal(t, chosen, b.value(`document.querySelector("[data-filter]").value`))
}

// TestIncident_BadDeploy marks a failure group as fixed after the next deploy, and replays it.
func TestIncident_BadDeploy(t *testing.T) {
	t.Parallel()
	o := open(t, nil)
	for i := range 8 {
		o.submit("orders", fmt.Sprint("m", i), "order.placed", map[string]any{"answer": 400, "says": "price is missing"})
	}
	o.eventually(8, "SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_manual'")
	o.exec(postgrestest.RefreshRollups)
	o.receiverWorks.Store(true)
	b := o.tab()
	b.incident("DLQBacklogGrowing", map[string]string{"job": "dlqd", "severity": "critical"})
	b.follow("main [data-row] a, main .row-link")
	b.waitForText("Mark as fixed")
	b.follow(b.button("Mark as fixed"))
	b.waitForText("Marked as fixed")
	b.follow(b.button("Replay "))
	b.waitForText("Replay 8 dead letters")
	b.follow("form.split button.primary")
	b.waitForText("8 recovered, 0 failed again of 8")
	b.within(maxClicks)
}

// TestIncident_PoisonMessage finds a poison message by its customer, edits it and replays it.
func TestIncident_PoisonMessage(t *testing.T) {
	t.Parallel()
	o := open(t, nil)
	for i := range 5 {
		o.submit("payments", fmt.Sprint("m", i), "payment.captured",
			map[string]any{"answer": 422, "customer": fmt.Sprint("cus_", i), "amount": -1})
	}
	o.eventually(5, "SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_manual'")
	b := o.tab()
	b.incident("DLQQueueGrowing", map[string]string{"job": "dlqd", "queue": "payments", "severity": "warning"})
	b.fill("[data-filter]", "queue:payments payload.customer:cus_3")
	b.navigate(func() { b.press("\r") })
	b.rows(1)
	b.follow("[data-row] a")
	b.click(b.button("Edit and replay"))
	b.fill("textarea[name=payload]", `{"customer": "cus_3", "amount": 1}`)
	b.follow(b.button("Preview changes"))
	b.follow(b.button("Replay with these changes"))
	b.until(`document.getElementById("head").innerText.includes("resolved")`)
	b.within(maxClicks)
	require.Equal(t, 4, o.count("SELECT count(*) FROM dlq.dead_letter_open"))
}

// task starts the count of clicks and the clock at the overview, for a task that no alert leads to.
func (b *tab) task() {
	b.Helper()
	b.clicks, b.began = 0, time.Now()
	b.open("/")
}

// TestIncident_PaymentsFail starts a replay as a new user would who knows only that payments fail. Other failures are
// more frequent, and have been resolved.
func TestIncident_PaymentsFail(t *testing.T) {
	t.Parallel()
	o := open(t, nil)
	o.fail("orders", "order.placed", "no stock", 12)
	o.exec(`SELECT dlq.act_where('resolve', '{"queue": "orders"}', 'lee', 'sold out')`)
	for i := range 5 {
		o.submit("payments", fmt.Sprint("m", i), "payment.captured",
			map[string]any{"answer": 402, "says": "card declined"})
	}
	o.eventually(5, "SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_manual'")
	o.exec(postgrestest.RefreshRollups)
	o.receiverWorks.Store(true)
	b := o.tab()
	b.task()
	require.Contains(t, b.texts("#sentence"), "Main cause: payments, 402 Payment Required · card declined (5 open).")
	b.follow("#sentence a")
	require.Contains(t, b.value("document.title"), "card declined")
	b.waitForText("5 dead letters are open. Class business: rejected for a business reason.")
	b.follow(b.button("Replay "))
	b.waitForText("Replay 5 dead letters")
	b.follow("form.split button.primary")
	b.waitForText("5 recovered, 0 failed again of 5")
	b.within(maxClicks)
}

// TestIncident_FindsAMessage finds the state of a message by its id.
func TestIncident_FindsAMessage(t *testing.T) {
	t.Parallel()
	o := open(t, nil)
	for i := range 5 {
		o.submit("payments", fmt.Sprint("order-", i), "payment.captured",
			map[string]any{"answer": 402, "says": "card declined"})
	}
	id := o.entry("order-3", "dlq_manual")
	b := o.tab()
	b.task()
	b.click("[data-look]")
	b.fill("#look-for", "order-3")
	b.navigate(func() { b.press("\r") })
	require.Equal(t, "/dead-letters/"+id, b.value("location.pathname"))
	b.waitForText("card declined")
	b.within(maxClicks)
}

// TestIncident_NamesWhoDiscarded finds who discarded dead letters yesterday, which ones and why.
func TestIncident_NamesWhoDiscarded(t *testing.T) {
	t.Parallel()
	o := open(t, nil)
	o.fail("reports", "report.daily", "no such report", 4)
	o.exec(`SELECT dlq.act_where('discard', '{"kind": "report.daily"}', 'lee', 'ticket 4711')`)
	superuser, err := pgx.Connect(t.Context(), postgrestest.Superuser(t, o.url)) // the audit trail is append-only
	require.NoError(t, err)
	_, err = superuser.Exec(t.Context(), `SET session_replication_role = replica;
		UPDATE dlq.dead_letter_transitions SET at = at - interval '1 day' WHERE actor = 'lee';
		UPDATE dlq.operations SET started_at = started_at - interval '1 day', last_at = last_at - interval '1 day'`)
	require.NoError(t, err)
	require.NoError(t, superuser.Close(t.Context()))
	b := o.tab()
	b.task()
	b.follow(`.rail a[href="/audit"]`)
	b.follow(b.button("Yesterday"))
	b.waitForText("ticket 4711")
	require.Contains(t, b.texts("#rows"), "lee")
	b.follow(`#rows a[href^="/operations/"]`)
	b.until(`document.querySelectorAll("main .rows > li .ok").length === 4`)
	b.within(maxClicks)
}

// TestIncident_ParksADestination parks the pending dead letters of one destination. Dead letters of other destinations
// stay pending.
func TestIncident_ParksADestination(t *testing.T) {
	t.Parallel()
	o := open(t, func(c *server.Config) {
		bank := *c.Policy.Destinations["default"]
		bank.Name = "bank"
		c.Policy.Destinations["bank"] = &bank
		c.Policy.Queues["payments"].Destination = "bank"
	})
	o.exec("SELECT dlq.set_automatic('class', 'outage', false)")
	for i := range 4 {
		for _, queue := range []string{"payments", "orders"} {
			o.submit(queue, fmt.Sprint(queue, i), "order.placed", map[string]any{"answer": 503, "says": "maintenance"})
		}
	}
	const pending = "SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_pending' AND waiting_for = 'automatic'"
	o.eventually(8, pending)
	b := o.tab()
	b.task()
	b.follow(`.rail a[href="/queues"]`)
	b.follow(`tr[id="destination:bank"] a[href^="/dead-letters"]`)
	b.rows(4)
	b.click("#act-on > summary")
	b.follow(`#act-on a[href*="do=park"]`)
	b.fill("textarea[name=note]", "the bank fixes it on Monday")
	b.follow(b.button("Park 4"))
	b.waitForText("Park: 4 dead letters.")
	b.within(maxClicks)
	require.Equal(t, 4, o.count(
		"SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_manual' AND queue = 'payments'"))
	require.Equal(t, 4, o.count(pending))
}

// TestIncident_DownloadsForACustomer downloads the dead letters of a customer.
func TestIncident_DownloadsForACustomer(t *testing.T) {
	t.Parallel()
	o := open(t, nil)
	o.fail("payments", "payment.captured", "no such account", 200) // two of them are of customer 42
	b := o.tab()
	b.task()
	b.follow(`.rail a[href="/dead-letters"]`)
	b.fill("[data-filter]", "payload.customer:42")
	b.navigate(func() { b.press("\r") })
	b.rows(2)
	b.follow(b.button("Download …"))
	b.reloadUntil(`document.body.innerText.includes("Download 2 dead letters")`, "dead letters or more")
	b.click(".form .primary")
	o.eventually(1, "SELECT count(*) FROM dlq.acts WHERE subject = 'export' AND act = 'exported'")
	b.within(maxClicks)
}
