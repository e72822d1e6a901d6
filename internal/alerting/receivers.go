package alerting

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"mime"
	"mime/multipart"
	"net"
	"net/http"
	"net/mail"
	"net/textproto"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
)

// Notification is a notification that Alertmanager sent.
type Notification struct {
	At       time.Time
	Receiver string // pagerduty, opsgenie, slack or email
	Title    string
	Text     string
	Link     string // to the page, if the receiver has a field for a link
	Resolved bool   // the notification resolves Incident (pagerduty, opsgenie)
	Incident string // the key of the incident (pagerduty, opsgenie)
}

// Receivers stand in for the notification services.
type Receivers struct {
	http   *http.Server
	web    net.Listener
	mail   net.Listener
	notify func(Notification)

	mu       sync.Mutex
	received []Notification
}

// NewReceivers listens on free ports. notify, if not nil, is called with each notification.
func NewReceivers(ctx context.Context, notify func(Notification)) (*Receivers, error) {
	r := &Receivers{notify: notify}
	var err error
	if r.web, err = (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0"); err != nil {
		return nil, err
	}
	if r.mail, err = (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0"); err != nil {
		return nil, errors.Join(err, r.web.Close())
	}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /slack", jsonHandler(r, func(m *struct {
		Attachments []struct {
			Title, Text string
			TitleLink   string `json:"title_link"`
		}
	},
	) Notification {
		if len(m.Attachments) == 0 {
			return Notification{}
		}
		return Notification{
			Receiver: "slack", Title: m.Attachments[0].Title, Text: m.Attachments[0].Text, Link: m.Attachments[0].TitleLink,
		}
	}))
	mux.HandleFunc("POST /pagerduty", jsonHandler(r, func(m *struct {
		ClientURL string `json:"client_url"`
		Action    string `json:"event_action"`
		Key       string `json:"dedup_key"`
		Payload   struct {
			Summary       string
			CustomDetails map[string]string `json:"custom_details"`
		}
	},
	) Notification {
		return Notification{
			Receiver: "pagerduty", Title: m.Payload.Summary, Text: m.Payload.CustomDetails["text"], Link: m.ClientURL,
			Resolved: m.Action == "resolve", Incident: m.Key,
		}
	}))
	mux.HandleFunc("POST /v2/alerts", jsonHandler(r, func(m *struct {
		Message, Description string
		Alias                string
		Details              map[string]string
	},
	) Notification {
		return Notification{
			Receiver: "opsgenie", Title: m.Message, Text: m.Description, Link: m.Details["page"], Incident: m.Alias,
		}
	}))
	mux.HandleFunc("POST /v2/alerts/{alias}/close", func(w http.ResponseWriter, request *http.Request) {
		r.record(Notification{Receiver: "opsgenie", Resolved: true, Incident: request.PathValue("alias")})
		w.WriteHeader(http.StatusAccepted)
	})
	r.http = &http.Server{Handler: mux, ReadHeaderTimeout: time.Minute}
	go func() { _ = r.http.Serve(r.web) }()
	go r.serveMail()
	return r, nil
}

// Close stops listening.
func (r *Receivers) Close() error { return errors.Join(r.http.Close(), r.mail.Close()) }

// Notifications returns the notifications received so far.
func (r *Receivers) Notifications() []Notification {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.received)
}

func (r *Receivers) record(n Notification) {
	n.At = time.Now()
	r.mu.Lock()
	r.received = append(r.received, n)
	r.mu.Unlock()
	if r.notify != nil {
		r.notify(n)
	}
}

func jsonHandler[T any](r *Receivers, read func(*T) Notification) http.HandlerFunc {
	return func(w http.ResponseWriter, request *http.Request) {
		var body T
		if err := json.NewDecoder(request.Body).Decode(&body); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		if n := read(&body); n.Receiver != "" {
			r.record(n)
		}
		w.WriteHeader(http.StatusAccepted)
		_, _ = io.WriteString(w, `{"status": "success"}`)
	}
}

// serveMail implements the part of SMTP that Alertmanager uses.
func (r *Receivers) serveMail() {
	for {
		conn, err := r.mail.Accept()
		if err != nil {
			return
		}
		go func() {
			defer func() { _ = conn.Close() }()
			if err := r.serveSMTP(textproto.NewConn(conn)); err != nil && !errors.Is(err, io.EOF) {
				r.record(Notification{Receiver: "email", Title: "invalid mail", Text: err.Error()})
			}
		}()
	}
}

func (r *Receivers) serveSMTP(c *textproto.Conn) error {
	if err := c.PrintfLine("220 localhost"); err != nil {
		return err
	}
	for {
		line, err := c.ReadLine()
		if err != nil {
			return err
		}
		answer := "250 ok"
		switch command, _, _ := strings.Cut(strings.ToUpper(line), " "); command {
		case "DATA":
			if err := c.PrintfLine("354 end with a dot"); err != nil {
				return err
			}
			message, err := mail.ReadMessage(c.DotReader())
			if err != nil {
				return err
			}
			text, err := plainText(message)
			if err != nil {
				return err
			}
			r.record(Notification{Receiver: "email", Title: message.Header.Get("Subject"), Text: text})
		case "QUIT":
			return c.PrintfLine("221 bye")
		}
		if err := c.PrintfLine("%s", answer); err != nil {
			return err
		}
	}
}

// plainText returns the text of a message. Alertmanager's messages have one part.
func plainText(message *mail.Message) (string, error) {
	_, params, err := mime.ParseMediaType(message.Header.Get("Content-Type"))
	if err != nil {
		return "", err
	}
	part, err := multipart.NewReader(message.Body, params["boundary"]).NextPart()
	if err != nil {
		return "", err
	}
	text, err := io.ReadAll(part)
	return string(text), err
}

// replaceReceivers changes an Alertmanager configuration so that Alertmanager notifies these receivers, without delay.
// It writes the files with their secrets into dir. It returns an error if the configuration has no receivers.
func (r *Receivers) replaceReceivers(config node, dir string) error {
	secret := filepath.Join(dir, "secret")
	if err := os.WriteFile(secret, []byte("practice"), 0o600); err != nil {
		return err
	}
	web := "http://" + r.web.Addr().String()
	slack := filepath.Join(dir, "slack-url")
	if err := os.WriteFile(slack, []byte(web+"/slack"), 0o600); err != nil {
		return err
	}
	global := config.in("global")
	global["smtp_smarthost"], global["smtp_require_tls"] = r.mail.Addr().String(), false
	delete(global, "smtp_auth_username")
	delete(global, "smtp_auth_password_file")
	removeDelays(config.in("route"))
	replaced := 0
	for receiver := range config.each("receivers") {
		for service := range receiver.each("pagerduty_configs") {
			service["routing_key_file"], service["url"] = secret, web+"/pagerduty"
			replaced++
		}
		for service := range receiver.each("opsgenie_configs") {
			service["api_key_file"], service["api_url"] = secret, web+"/"
			replaced++
		}
		for service := range receiver.each("slack_configs") {
			service["api_url_file"] = slack
			replaced++
		}
		for range receiver.each("email_configs") {
			replaced++
		}
	}
	if replaced == 0 {
		return errors.New("alertmanager.yaml has no receivers")
	}
	return nil
}

// removeDelays makes a route and its subroutes send a new group of alerts at once, and a change of the group after one
// second.
func removeDelays(route node) {
	route["group_wait"], route["group_interval"] = "0s", "1s"
	for inner := range route.each("routes") {
		removeDelays(inner)
	}
}
