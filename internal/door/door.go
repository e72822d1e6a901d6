// Package door checks requests and connections before the rest of dlqd handles them. It checks host name and origin,
// sets headers of every response, and limits the resources that one client may use.
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

// DefaultMaxRequests bounds the number of requests that are answered at a time. A single client may have half of them:
// see [Quota].
const DefaultMaxRequests = 2048

// Reasons for refusing a request or a connection: the values of the metric's label.
const (
	RefusedHost        = "host"
	RefusedOrigin      = "origin"
	RefusedRequests    = "requests"
	RefusedRate        = "rate"
	RefusedBodies      = "bodies"
	RefusedSlow        = "slow"
	RefusedConnections = "connections"
)

// Reasons returns all reasons for refusing a request or a connection.
func Reasons() []string {
	return []string{
		RefusedHost, RefusedOrigin, RefusedRequests, RefusedRate, RefusedBodies, RefusedSlow,
		RefusedConnections,
	}
}

// Config configures [Guard] and [Limit].
type Config struct {
	// Hosts are the allowed host names, in addition to loopback names and the address of the connection.
	Hosts []string
	// Origins are the origins of other sites whose pages may use the API, such as https://console.example. If Origins is
	// empty, no page of another site may.
	Origins []string
	// MaxRequests bounds the number of requests that are answered at a time; 0 means DefaultMaxRequests.
	MaxRequests int
	// Rate limits the rate of requests of each client. The zero Rate means no limit.
	Rate Rate
	// Client returns a name for the client of a request. Limits and shares apply to each name.
	Client func(*http.Request) string
	// Refused, if not nil, is called with the reason of each refusal.
	Refused func(reason string)
	// TooMany, if not nil, answers a request that exceeds a limit. If it is nil, [Problem] does.
	TooMany func(w http.ResponseWriter, r *http.Request, detail string)
}

// Check returns an error for an invalid host or origin.
func (c *Config) Check() error {
	for _, host := range c.Hosts {
		if host == "" || hostOf(host) != strings.ToLower(host) || strings.ContainsAny(host, "/*@ ") {
			return fmt.Errorf("--allowed-host %q: must be a host name or an address, without a port", host)
		}
	}
	for _, origin := range c.Origins {
		u, err := url.Parse(origin)
		if err != nil || u.Host == "" || (u.Scheme != "https" && u.Scheme != "http") || origin != u.Scheme+"://"+u.Host ||
			strings.Contains(origin, "*") {
			return fmt.Errorf("--allowed-origin %q: must be scheme://host or scheme://host:port, as browsers send it", origin)
		}
	}
	return nil
}

// Guard passes allowed requests to next. The caller must have called [Config.Check] successfully.
func Guard(config Config, next http.Handler) http.Handler {
	if config.Refused == nil {
		config.Refused = func(string) {}
	}
	// A page of another site may be open in a browser that can reach this machine. Such a page must not change anything.
	crossOrigin := http.NewCrossOriginProtection()
	for _, origin := range config.Origins {
		if err := crossOrigin.AddTrustedOrigin(origin); err != nil {
			panic(err) // Check refuses it
		}
	}
	crossOrigin.SetDenyHandler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		config.Refused(RefusedOrigin)
		Problem(w, http.StatusForbidden, "requests from pages of this origin are not allowed; --allowed-origin adds it")
	}))
	next = crossOrigin.Handler(next)
	if len(config.Origins) > 0 { // without a trusted origin, the library would allow all origins
		next = cors.New(cors.Options{
			AllowedOrigins: config.Origins,
			AllowedMethods: []string{
				http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodPatch,
				http.MethodDelete,
			},
			AllowedHeaders: []string{"Content-Type", "Authorization", "Traceparent", "Tracestate"},
			ExposedHeaders: []string{"Retry-After", "RateLimit", "RateLimit-Policy"},
		}).Handler(next)
	}
	return withSecurityHeaders(checkHost(config, next))
}

// securityHeaders are headers that restrict what a browser does with a response, and that keep caches from storing it,
// because most responses may contain payloads.
var securityHeaders = []struct {
	name  string
	value []string // shared by all responses
}{
	{"X-Content-Type-Options", []string{"nosniff"}},
	{"Content-Security-Policy", []string{"default-src 'none'; frame-ancestors 'none'"}},
	{"Referrer-Policy", []string{"no-referrer"}},
	{"Cross-Origin-Resource-Policy", []string{"same-origin"}},
	{"Cross-Origin-Opener-Policy", []string{"same-origin"}},
	{"Cache-Control", []string{"no-store"}},
}

func withSecurityHeaders(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		header := w.Header()
		for _, p := range securityHeaders {
			header[p.name] = p.value
		}
		next.ServeHTTP(w, r)
	})
}

// checkHost refuses requests for other host names (DNS rebinding). An attacker can make the name of a site resolve to
// this machine. A browser then treats pages of that site as same-origin with the API. But their requests carry the
// site's host name.
func checkHost(config Config, next http.Handler) http.Handler {
	own := config.names()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		local, _ := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
		if !isSocket(local) && !isOwnHost(own, hostOf(r.Host), local) {
			config.Refused(RefusedHost)
			Problem(w, http.StatusMisdirectedRequest, "unknown host name; --allowed-host adds it")
			return
		}
		next.ServeHTTP(w, r)
	})
}

// isSocket reports whether a connection came through a Unix socket, which no browser can reach.
func isSocket(local net.Addr) bool { return local != nil && local.Network() == "unix" }

func isOwnHost(own []string, host string, local net.Addr) bool {
	if slices.Contains(own, host) {
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

// Host returns the host name of a request, without the port.
func Host(r *http.Request) string { return hostOf(r.Host) }

// IsOwnHost reports whether a request is for one of dlqd's own names. Unlike [Guard], it also checks the name
// if the request came through a Unix socket.
func (c *Config) IsOwnHost(r *http.Request) bool {
	local, _ := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
	return isOwnHost(c.names(), hostOf(r.Host), local)
}

// names returns Hosts and localhost in the form that hostOf returns.
func (c *Config) names() []string {
	names := make([]string, 0, len(c.Hosts)+1)
	names = append(names, "localhost")
	for _, host := range c.Hosts {
		names = append(names, hostOf(host))
	}
	return names
}

// hostOf returns the host of a Host header in a normal form for comparisons. It returns "" if the text after the host
// is not a port: in a URL, the host of localhost:1@evil.example is evil.example.
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

// HostsOf returns the hosts in addresses to listen on. It omits "", unspecified addresses such as 0.0.0.0, and Unix
// sockets.
func HostsOf(listen []string) []string {
	var hosts []string
	for _, at := range listen {
		host, _, err := net.SplitHostPort(at)
		if address, notAddress := netip.ParseAddr(host); err == nil && host != "" &&
			(notAddress != nil || !address.IsUnspecified()) && !strings.HasPrefix(at, "unix:") {
			hosts = append(hosts, host)
		}
	}
	return hosts
}

// prefixIPv6 is the length, in bits, of the IPv6 prefix that one customer of a provider has.
const prefixIPv6 = 64

// Peer returns the peer of a request: its IPv4 address or its IPv6 network. A machine can have any number of addresses
// in its IPv6 network.
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

// ClientCertificate returns the certificate that a request's client presented, or nil. TLS verified that certificate at
// the start of the connection: see [Certificates].
func ClientCertificate(r *http.Request) *x509.Certificate {
	if r.TLS == nil || len(r.TLS.VerifiedChains) == 0 {
		return nil
	}
	return r.TLS.VerifiedChains[0][0]
}

// Problem writes a response with problem details (RFC 9457).
func Problem(w http.ResponseWriter, status int, detail string) {
	raw, err := json.Marshal(huma.ErrorModel{Title: http.StatusText(status), Status: status, Detail: detail})
	if err != nil {
		panic(err) // strings and a number can be encoded
	}
	w.Header().Set("Content-Type", "application/problem+json")
	w.WriteHeader(status)
	_, _ = w.Write(raw)
}

var errInvalidRate = errors.New("must be requests/time, such as 100/s, 600/m or 50/10s")
