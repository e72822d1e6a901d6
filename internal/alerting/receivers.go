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
	Link     string // to the page, if the receiver has a field for it
	Over     bool   // it resolves Incident (pagerduty, opsgenie)
	Incident string // the key of the incident (pagerduty, opsgenie)
}

// Receivers replace the notification services.
type Receivers struct {
	http   *http.Server
	web    net.Listener
	mail   net.Listener
	notify func(Notification)

	mu  sync.Mutex
	got []Notification
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
	mux.HandleFunc("POST /slack", taking(r, func(m *struct {
		Attachments []struct {
			Title, Text string
			TitleLink   string `json:"title_link"`
		}
	},
	) Notification {
		if len(m.Attachments) == 0 {
			return Notification{}
		}
		return Notification{Receiver: "slack", Title: m.Attachments[0].Title, Text: m.Attachments[0].Text, Link: m.Attachments[0].TitleLink}
	}))
	mux.HandleFunc("POST /pagerduty", taking(r, func(m *struct {
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
			Over: m.Action == "resolve", Incident: m.Key,
		}
	}))
	mux.HandleFunc("POST /v2/alerts", taking(r, func(m *struct {
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
		r.take(Notification{Receiver: "opsgenie", Over: true, Incident: request.PathValue("alias")})
		w.WriteHeader(http.StatusAccepted)
	})
	r.http = &http.Server{Handler: mux, ReadHeaderTimeout: time.Minute}
	go func() { _ = r.http.Serve(r.web) }()
	go r.takeMail()
	return r, nil
}

// Close stops listening.
func (r *Receivers) Close() error { return errors.Join(r.http.Close(), r.mail.Close()) }

// Notifications returns the notifications received so far.
func (r *Receivers) Notifications() []Notification {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.got)
}

func (r *Receivers) take(n Notification) {
	n.At = time.Now()
	r.mu.Lock()
	r.got = append(r.got, n)
	r.mu.Unlock()
	if r.notify != nil {
		r.notify(n)
	}
}

func taking[T any](r *Receivers, read func(*T) Notification) http.HandlerFunc {
	return func(w http.ResponseWriter, request *http.Request) {
		var body T
		if err := json.NewDecoder(request.Body).Decode(&body); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		if n := read(&body); n.Receiver != "" {
			r.take(n)
		}
		w.WriteHeader(http.StatusAccepted)
		_, _ = io.WriteString(w, `{"status": "success"}`)
	}
}

// takeMail implements the part of SMTP that Alertmanager uses.
func (r *Receivers) takeMail() {
	for {
		conn, err := r.mail.Accept()
		if err != nil {
			return
		}
		go func() {
			defer func() { _ = conn.Close() }()
			if err := r.converse(textproto.NewConn(conn)); err != nil && !errors.Is(err, io.EOF) {
				r.take(Notification{Receiver: "email", Title: "not understood", Text: err.Error()})
			}
		}()
	}
}

func (r *Receivers) converse(c *textproto.Conn) error {
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
			if err := c.PrintfLine("354 go on"); err != nil {
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
			r.take(Notification{Receiver: "email", Title: message.Header.Get("Subject"), Text: text})
		case "QUIT":
			return c.PrintfLine("221 bye")
		}
		if err := c.PrintfLine("%s", answer); err != nil {
			return err
		}
	}
}

// plainText returns the text of a message; Alertmanager's messages have one part.
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

// takeThePlace changes a configuration of Alertmanager to send to these receivers without delay.
func (r *Receivers) takeThePlace(config node, dir string) error {
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
	hurry(config.in("route"))
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

// hurry makes a route and its subroutes send at once.
func hurry(route node) {
	route["group_wait"], route["group_interval"] = "0s", "1s"
	for inner := range route.each("routes") {
		hurry(inner)
	}
}
