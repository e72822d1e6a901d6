// Package door is what a request passes before anything of dlqd's looks at it: whether the name it asks for is ours, which
// headers every answer has, and how much of the program one client may take up.
package door

import (
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"

	"github.com/danielgtaylor/huma/v2"
	"github.com/rs/cors"
)

// DefaultMaxRequests bounds the requests that are answered at once. One client alone may have half of them: see [Room].
const DefaultMaxRequests = 2048

// Why a request, or a connection, was refused: the values of the metric's label.
const (
	RefusedHost        = "host"
	RefusedOrigin      = "origin"
	RefusedRequests    = "requests"
	RefusedRate        = "rate"
	RefusedBodies      = "bodies"
	RefusedSlow        = "slow"
	RefusedConnections = "connections"
)

// Reasons lists them.
func Reasons() []string {
	return []string{RefusedHost, RefusedOrigin, RefusedRequests, RefusedRate, RefusedBodies, RefusedSlow, RefusedConnections}
}

// Config says who may come in, and how often.
type Config struct {
	// Hosts are the names under which the API is asked for, beside loopback names and the address of the connection.
	Hosts []string
	// Origins are those of pages elsewhere that may use the API: https://console.example. None: no page may.
	Origins []string
	// MaxRequests bounds the requests that are answered at once; 0 means DefaultMaxRequests.
	MaxRequests int
	// Rate is how many requests each client may make; the zero Rate is no limit.
	Rate Rate
	// Client names who makes a request: what limits and shares go by.
	Client func(*http.Request) string
	// Refused is told why something was refused; nil for nobody.
	Refused func(reason string)
}

// Check says what is wrong with hosts or origins.
func (c *Config) Check() error {
	for _, host := range c.Hosts {
		if host == "" || hostOf(host) != strings.ToLower(host) || strings.ContainsAny(host, "/*@ ") {
			return fmt.Errorf("--allowed-host %q: must be a host name or an address, without a port", host)
		}
	}
	for _, origin := range c.Origins {
		u, err := url.Parse(origin)
		if err != nil || u.Host == "" || (u.Scheme != "https" && u.Scheme != "http") || origin != u.Scheme+"://"+u.Host || strings.Contains(origin, "*") {
			return fmt.Errorf("--allowed-origin %q: must be scheme://host or scheme://host:port, as browsers send it", origin)
		}
	}
	return nil
}

// Guard lets requests through to next that may come in. [Config.Check] has found nothing wrong.
func Guard(config Config, next http.Handler) http.Handler {
	if config.Refused == nil {
		config.Refused = func(string) {}
	}
	// A page of another site, open in a browser that reaches this machine, must not move anything.
	crossOrigin := http.NewCrossOriginProtection()
	for _, origin := range config.Origins {
		if err := crossOrigin.AddTrustedOrigin(origin); err != nil {
			panic(err) // Check refuses it
		}
	}
	crossOrigin.SetDenyHandler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		config.Refused(RefusedOrigin)
		Problem(w, http.StatusForbidden, "a page of another site may not do this; --allowed-origin names those that may")
	}))
	next = crossOrigin.Handler(next)
	if len(config.Origins) > 0 { // without any, the library would allow all
		next = cors.New(cors.Options{
			AllowedOrigins: config.Origins,
			AllowedMethods: []string{http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete},
			AllowedHeaders: []string{"Content-Type", "Authorization", "Traceparent", "Tracestate"},
			ExposedHeaders: []string{"Retry-After", "RateLimit", "RateLimit-Policy"},
		}).Handler(next)
	}
	return protect(checkHost(config, next))
}

// protections keep a browser from doing more with an answer than show it, and anybody from keeping it: most answers hold payloads,
// or could.
var protections = []struct {
	name  string
	value []string // shared by all answers
}{
	{"X-Content-Type-Options", []string{"nosniff"}},
	{"Content-Security-Policy", []string{"default-src 'none'; frame-ancestors 'none'"}},
	{"Referrer-Policy", []string{"no-referrer"}},
	{"Cross-Origin-Resource-Policy", []string{"same-origin"}},
	{"Cross-Origin-Opener-Policy", []string{"same-origin"}},
	{"Cache-Control", []string{"no-store"}},
}

func protect(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		header := w.Header()
		for _, p := range protections {
			header[p.name] = p.value
		}
		next.ServeHTTP(w, r)
	})
}

// checkHost refuses requests for a name that is not ours. A page of a site whose name was made to lead to this machine is of the
// same origin as the API, for its browser; its requests bear the site's name.
func checkHost(config Config, next http.Handler) http.Handler {
	ours := config.names()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		local, _ := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
		if !viaSocket(local) && !isOurs(ours, hostOf(r.Host), local) {
			config.Refused(RefusedHost)
			Problem(w, http.StatusMisdirectedRequest, "dlqd is not asked for under this name; --allowed-host adds it")
			return
		}
		next.ServeHTTP(w, r)
	})
}

// viaSocket says that a connection came through a Unix socket, which no browser reaches.
func viaSocket(local net.Addr) bool { return local != nil && local.Network() == "unix" }

func isOurs(ours []string, host string, local net.Addr) bool {
	if slices.Contains(ours, host) {
		return true
	}
	address, err := netip.ParseAddr(host)
	if err != nil {
		return false
	}
	if address.Unmap().IsLoopback() {
		return true
	}
	at, ok := local.(*net.TCPAddr)
	return ok && at.AddrPort().Addr().Unmap().WithZone("") == address.Unmap().WithZone("")
}

// Host is the name under which dlqd is asked for, without the port.
func Host(r *http.Request) string { return hostOf(r.Host) }

// Ours reports whether a request asks for dlqd under one of its own names, by a Unix socket, too.
func (c *Config) Ours(r *http.Request) bool {
	local, _ := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
	return isOurs(c.names(), hostOf(r.Host), local)
}

// names are those of Hosts, and localhost, as they are compared.
func (c *Config) names() []string {
	names := make([]string, 0, len(c.Hosts)+1)
	names = append(names, "localhost")
	for _, host := range c.Hosts {
		names = append(names, hostOf(host))
	}
	return names
}

// hostOf is the host of a Host header, as names are compared; empty where what follows it is no port: localhost:1@evil.example is another
// host in a URL.
func hostOf(hostPort string) string {
	host := strings.ToLower(hostPort)
	if name, port, err := net.SplitHostPort(host); err == nil {
		if strings.Trim(port, "0123456789") != "" {
			return ""
		}
		host = name
	}
	host = strings.TrimSuffix(strings.TrimPrefix(host, "["), "]")
	return strings.TrimSuffix(host, ".")
}

// HostsOf are the names in addresses to listen at: "" and 0.0.0.0 are none.
func HostsOf(listen []string) []string {
	var hosts []string
	for _, at := range listen {
		host, _, err := net.SplitHostPort(at)
		if address, notAddress := netip.ParseAddr(host); err == nil && host != "" && (notAddress != nil || !address.IsUnspecified()) && !strings.HasPrefix(at, "unix:") {
			hosts = append(hosts, host)
		}
	}
	return hosts
}

// prefixIPv6 is the part of an IPv6 address that one customer of a provider has all of, in bits.
const prefixIPv6 = 64

// Peer names a request's peer: its address or, for IPv6, its network, since one machine has as many addresses there as it likes.
func Peer(r *http.Request) string { return peerOf(r.RemoteAddr) }

func peerOf(remote string) string {
	at, err := netip.ParseAddrPort(remote)
	if err != nil {
		return "a local socket"
	}
	address := at.Addr().Unmap().WithZone("")
	if address.Is4() {
		return address.String()
	}
	network, err := address.Prefix(prefixIPv6)
	if err != nil {
		return address.String()
	}
	return network.String()
}

// ClientCertificate is the certificate that a request's client showed, nil where it showed none. It was verified when the connection began:
// see [Certificates].
func ClientCertificate(r *http.Request) *x509.Certificate {
	if r.TLS == nil || len(r.TLS.VerifiedChains) == 0 {
		return nil
	}
	return r.TLS.VerifiedChains[0][0]
}

// Problem answers with problem details (RFC 9457).
func Problem(w http.ResponseWriter, status int, detail string) {
	raw, err := json.Marshal(huma.ErrorModel{Title: http.StatusText(status), Status: status, Detail: detail})
	if err != nil {
		panic(err) // three texts and a number
	}
	w.Header().Set("Content-Type", "application/problem+json")
	w.WriteHeader(status)
	_, _ = w.Write(raw)
}

var errNoRate = errors.New("must be requests/time, such as 100/s, 600/m or 50/10s")
