package main

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/coreos/go-oidc/v3/oidc"
	"github.com/spf13/cobra"
	"golang.org/x/oauth2"
	"golang.org/x/sys/unix"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/api"
)

const (
	// loginPatience limits the time for a sign-in.
	loginPatience = 5 * time.Minute
	// loginMargin is how long before its expiry an ID token is renewed, so that it does not expire in
	// transit.
	loginMargin = 30 * time.Second
	// providerSkew is the accepted difference between the provider's clock and the local one.
	providerSkew = time.Minute
)

// login is the result of "dlqd login" for one API. It is stored in a file that only its owner may
// read.
type login struct {
	API              string    `json:"api"`
	Issuer           string    `json:"issuer"`
	ClientID         string    `json:"clientId"`
	ClientSecretFile string    `json:"clientSecretFile,omitempty"`
	Scopes           []string  `json:"scopes"`
	Subject          string    `json:"subject"`
	IDToken          string    `json:"idToken"`
	RefreshToken     string    `json:"refreshToken,omitempty"`
	Expiry           time.Time `json:"expiry"` // of the ID token
}

// loginPath returns the path of the login for an API.
func loginPath(base string) (string, error) {
	dir, err := os.UserConfigDir()
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256([]byte(strings.TrimSuffix(base, "/")))
	return filepath.Join(dir, "dlqd", "logins", hex.EncodeToString(sum[:8])+".json"), nil
}

func readLogin(path string) (*login, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if info.Mode().Perm()&0o077 != 0 {
		return nil, fmt.Errorf("%s: others than its owner may read it; sign in again (dlqd login), since they may have", path)
	}
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var l login
	if err := json.Unmarshal(raw, &l); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return &l, nil
}

// write replaces the file of the login atomically.
func (l *login) write(path string) error {
	raw, err := json.MarshalIndent(l, "", "  ") //nolint:gosec // the file is there to hold them
	if err != nil {
		return err
	}
	file, err := os.CreateTemp(filepath.Dir(path), "login-") // readable by its owner only
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(file.Name()) }()
	_, err = file.Write(raw)
	if err = errors.Join(err, file.Close()); err != nil {
		return err
	}
	return os.Rename(file.Name(), path)
}

// lockLogin serializes processes. A refresh token can be used once: providers treat a second use as
// theft.
func lockLogin(path string) (unlock func(), err error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, err
	}
	file, err := os.OpenFile(path+".lock", os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(file.Fd()), unix.LOCK_EX); err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return func() { _ = file.Close() }, nil
}

// loginToken returns the ID token of the login at this API, renewed if necessary, or "" if there is
// no login.
func (c *client) loginToken(ctx context.Context) (string, error) {
	path, err := loginPath(c.base)
	if err != nil {
		return "", nil // without a home directory there is no login
	}
	l, err := readLogin(path)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil || time.Until(l.Expiry) > loginMargin {
		return l.token(), err
	}
	unlock, err := lockLogin(path)
	if err != nil {
		return "", err
	}
	defer unlock()
	if l, err = readLogin(path); err != nil || time.Until(l.Expiry) > loginMargin { // another process has renewed it
		return l.token(), err
	}
	if err = l.renew(ctx); err == nil {
		err = l.write(path)
	}
	if err != nil && time.Now().Before(l.Expiry) {
		err = nil
	}
	return l.IDToken, err
}

func (l *login) token() string {
	if l == nil {
		return ""
	}
	return l.IDToken
}

// provider discovers the provider's endpoints. The returned context carries the HTTP client for
// requests to the provider.
func (l *login) provider(ctx context.Context) (context.Context, *oidc.Provider, *oauth2.Config, error) {
	if err := access.CheckProviderURL(l.Issuer); err != nil {
		return nil, nil, nil, err
	}
	ctx = oidc.ClientContext(ctx, access.ProviderClient())
	provider, err := oidc.NewProvider(ctx, l.Issuer)
	if err != nil {
		return nil, nil, nil, fmt.Errorf("the OpenID Connect provider %s: %w", l.Issuer, err)
	}
	config := &oauth2.Config{ClientID: l.ClientID, Endpoint: provider.Endpoint(), Scopes: l.Scopes}
	config.Endpoint.AuthStyle = oauth2.AuthStyleInParams // trying both styles would use up the code
	if l.ClientSecretFile != "" {
		raw, err := os.ReadFile(l.ClientSecretFile)
		if err != nil {
			return nil, nil, nil, fmt.Errorf("--client-secret-file: %w", err)
		}
		config.ClientSecret = strings.TrimSpace(string(raw))
		config.Endpoint.AuthStyle = oauth2.AuthStyleAutoDetect
	}
	for _, where := range []string{config.Endpoint.AuthURL, config.Endpoint.TokenURL, cmp.Or(config.Endpoint.DeviceAuthURL, l.Issuer)} {
		if err := access.CheckProviderURL(where); err != nil {
			return nil, nil, nil, err
		}
	}
	return ctx, provider, config, nil
}

// take verifies the provider's tokens and stores them in l.
func (l *login) take(ctx context.Context, provider *oidc.Provider, token *oauth2.Token, nonce string) error {
	raw, _ := token.Extra("id_token").(string)
	if raw == "" {
		return errors.New("the OpenID Connect provider gave no ID token; is openid among the scopes?")
	}
	id, err := provider.Verifier(&oidc.Config{
		ClientID: l.ClientID, SupportedSigningAlgs: access.Algorithms(), Now: func() time.Time { return time.Now().Add(-providerSkew) },
	}).Verify(ctx, raw)
	if err != nil {
		return fmt.Errorf("the OpenID Connect provider's ID token: %w", err)
	}
	if nonce != "" && subtle.ConstantTimeCompare([]byte(id.Nonce), []byte(nonce)) != 1 {
		return errors.New("the OpenID Connect provider's ID token answers another sign-in (nonce)")
	}
	if l.Subject != "" && id.Subject != l.Subject {
		return errors.New("the OpenID Connect provider's ID token is somebody else's")
	}
	l.Subject, l.IDToken, l.Expiry = id.Subject, raw, id.Expiry
	l.RefreshToken = cmp.Or(token.RefreshToken, l.RefreshToken)
	return nil
}

// renew gets a new ID token with the refresh token.
func (l *login) renew(ctx context.Context) error {
	ended := fmt.Errorf("your sign-in has ended: dlqd login --api-url %s", l.API)
	if l.RefreshToken == "" {
		return ended
	}
	ctx, provider, config, err := l.provider(ctx)
	if err != nil {
		return err
	}
	token, err := config.TokenSource(ctx, &oauth2.Token{RefreshToken: l.RefreshToken}).Token()
	if refused, ok := errors.AsType[*oauth2.RetrieveError](err); ok && refused.ErrorCode == "invalid_grant" {
		return ended
	}
	if err != nil {
		return fmt.Errorf("your sign-in cannot be renewed: %w", err)
	}
	return l.take(ctx, provider, token, "")
}

func newLogin() *cobra.Command {
	var c client
	var device, noBrowser bool
	var port int
	l := &login{}
	cmd := &cobra.Command{
		Use:   "login",
		Short: "Sign in by the OpenID Connect provider of a dlqd",
		Long: "Signs you in by the OpenID Connect provider that the API names (access.yaml: oidc), in a browser on this machine, or with --device on any other.\n" +
			"What it gets is kept in a file that you alone may read, and used and renewed by commands with the same --api-url, where neither $DLQD_TOKEN nor\n" +
			"--token-file says otherwise.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			l.API = strings.TrimSuffix(c.base, "/")
			if err := checkPrivate(l.API); err != nil {
				return &usageError{err}
			}
			if l.ClientSecretFile != "" {
				var err error
				if l.ClientSecretFile, err = filepath.Abs(l.ClientSecretFile); err != nil {
					return err
				}
			}
			path, err := loginPath(l.API)
			if err != nil {
				return err
			}
			var says api.Login
			c.nobody = true
			if err := c.call(cmd, http.MethodGet, "/api/login", nil, &says); err != nil {
				return err
			}
			l.Issuer, l.ClientID, l.Scopes = says.Issuer, says.ClientID, says.Scopes
			ctx, cancel := context.WithTimeout(cmd.Context(), loginPatience)
			defer cancel()
			ctx, provider, config, err := l.provider(ctx)
			if err != nil {
				return err
			}
			ask := func() error { return l.inBrowser(ctx, cmd, provider, config, port, noBrowser) }
			if device {
				ask = func() error { return l.onDevice(ctx, cmd, provider, config) }
			}
			if err := ask(); err != nil {
				return err
			}
			unlock, err := lockLogin(path)
			if err != nil {
				return err
			}
			err = l.write(path)
			unlock()
			if err != nil {
				return err
			}
			if os.Getenv("DLQD_TOKEN") != "" || os.Getenv("DLQD_TOKEN_FILE") != "" {
				sayf(cmd.ErrOrStderr(), "while $DLQD_TOKEN or $DLQD_TOKEN_FILE is set, commands use that\n")
			}
			c.nobody, c.secret = false, l.IDToken
			return whoami(cmd, &c)
		},
	}
	c.registerAddress(cmd)
	flags := cmd.Flags()
	flags.BoolVar(&device, "device", false, "sign in with a browser on another machine, by a code")
	flags.BoolVar(&noBrowser, "no-browser", false, "print the address, and start no browser")
	flags.IntVar(&port, "port", 0, "where the browser comes back to, on 127.0.0.1; any free one if 0")
	flags.StringVar(&l.ClientSecretFile, "client-secret-file", "", "file with the client's secret, of providers that give one to programs too")
	return cmd
}

// checkPrivate rejects addresses to which credentials would be sent unencrypted over the network.
func checkPrivate(base string) error {
	u, err := url.Parse(base)
	if err != nil {
		return err
	}
	if u.Scheme == "https" || u.Scheme == "unix" || u.Scheme == "http" && access.IsLoopback(u.Hostname()) {
		return nil
	}
	return fmt.Errorf("--api-url %s: others on the way could read who you are, and be you; use https, or a tunnel to 127.0.0.1", u.Redacted())
}

// inBrowser signs the user in with a browser, which returns to this machine with a code.
func (l *login) inBrowser(ctx context.Context, cmd *cobra.Command, provider *oidc.Provider, config *oauth2.Config, port int, noBrowser bool) error {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	if err != nil {
		return fmt.Errorf("--port: %w", err)
	}
	config.RedirectURL = "http://" + listener.Addr().String() + "/callback"
	state, nonce, verifier := rand.Text(), rand.Text(), oauth2.GenerateVerifier()
	came := make(chan url.Values, 1)
	server := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		w.Header().Set("Cache-Control", "no-store")
		w.Header().Set("Referrer-Policy", "no-referrer")
		query := r.URL.Query()
		// Other pages in the same browser may request this address too. They do not know the state, so they
		// cannot end the sign-in.
		if r.Method != http.MethodGet || r.URL.Path != "/callback" || subtle.ConstantTimeCompare([]byte(query.Get("state")), []byte(state)) != 1 {
			w.WriteHeader(http.StatusBadRequest)
			_, _ = io.WriteString(w, "This is no answer to the sign-in that waits here.\n")
			return
		}
		_, _ = io.WriteString(w, "dlqd has the answer; see your terminal. This page can be closed.\n")
		select {
		case came <- query:
		default: // only the first answer counts
		}
	})}
	go func() { _ = server.Serve(listener) }()
	defer func() { // let the browser receive its page
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		if server.Shutdown(ctx) != nil {
			_ = server.Close()
		}
	}()
	address := config.AuthCodeURL(state, oidc.Nonce(nonce), oauth2.S256ChallengeOption(verifier))
	sayf(cmd.ErrOrStderr(), "Sign in at %s:\n%s\n", l.Issuer, address)
	if !noBrowser {
		openBrowser(ctx, address)
	}
	var query url.Values
	select {
	case query = <-came:
	case <-ctx.Done():
		return errors.New("nobody signed in")
	}
	if failed := query.Get("error"); failed != "" {
		return fmt.Errorf("the OpenID Connect provider refuses: %s %s", printable(failed), printable(query.Get("error_description")))
	}
	if iss := query.Get("iss"); iss != "" && iss != l.Issuer { // RFC 9207
		return errors.New("another OpenID Connect provider answers than was asked")
	}
	token, err := config.Exchange(ctx, query.Get("code"), oauth2.VerifierOption(verifier))
	if err != nil {
		return err
	}
	return l.take(ctx, provider, token, nonce)
}

// openBrowser opens an address if there is a desktop. The caller prints the address as well.
func openBrowser(ctx context.Context, address string) {
	if os.Getenv("DISPLAY") == "" && os.Getenv("WAYLAND_DISPLAY") == "" {
		return
	}
	if command := exec.CommandContext(context.WithoutCancel(ctx), "xdg-open", address); command.Start() == nil { //nolint:gosec // https, or http on this machine
		go func() { _ = command.Wait() }()
	}
}

// onDevice signs the user in on another device with a code (RFC 8628).
func (l *login) onDevice(ctx context.Context, cmd *cobra.Command, provider *oidc.Provider, config *oauth2.Config) error {
	if config.Endpoint.DeviceAuthURL == "" {
		return errors.New("this OpenID Connect provider has no --device sign-in")
	}
	asked, err := config.DeviceAuth(ctx)
	if err != nil {
		return err
	}
	sayf(cmd.ErrOrStderr(), "Sign in at %s with the code %s\n", cmp.Or(asked.VerificationURIComplete, asked.VerificationURI), asked.UserCode)
	token, err := config.DeviceAccessToken(ctx, asked)
	if err != nil {
		return err
	}
	return l.take(ctx, provider, token, "")
}

func newLogout() *cobra.Command {
	var c client
	cmd := &cobra.Command{
		Use:   "logout",
		Short: "Forget what dlqd login got, and have the provider forget it too",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			path, err := loginPath(c.base)
			if err != nil {
				return err
			}
			unlock, err := lockLogin(path)
			if err != nil {
				return err
			}
			defer unlock()
			l, err := readLogin(path)
			if errors.Is(err, fs.ErrNotExist) {
				sayf(cmd.OutOrStdout(), "nobody is signed in at %s\n", c.base)
				return nil
			}
			// Remove the file even if it is not readable as a login. Keep the lock file: another process may be
			// waiting for it.
			if removed := os.Remove(path); removed != nil {
				return removed
			}
			if err == nil {
				err = l.revoke(cmd.Context())
			}
			if err != nil {
				sayf(cmd.ErrOrStderr(), "the provider was not told, and may renew this sign-in to whoever has a copy of it: %s\n", err.Error())
			}
			sayf(cmd.OutOrStdout(), "signed out at %s\n", c.base)
			return nil
		},
	}
	c.registerAddress(cmd)
	return cmd
}

// revoke revokes the refresh token at the provider (RFC 7009).
func (l *login) revoke(ctx context.Context) error {
	if l.RefreshToken == "" {
		return nil
	}
	ctx, provider, config, err := l.provider(ctx)
	if err != nil {
		return err
	}
	var says struct {
		Revocation string `json:"revocation_endpoint"`
	}
	if err := provider.Claims(&says); err != nil {
		return err
	}
	if says.Revocation == "" {
		return errors.New("it has no way to revoke")
	}
	if err := access.CheckProviderURL(says.Revocation); err != nil {
		return err
	}
	form := url.Values{"token": {l.RefreshToken}, "token_type_hint": {"refresh_token"}, "client_id": {l.ClientID}}
	if config.ClientSecret != "" {
		form.Set("client_secret", config.ClientSecret)
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, says.Revocation, strings.NewReader(form.Encode()))
	if err != nil {
		return err
	}
	request.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	response, err := access.ProviderClient().Do(request)
	if err != nil {
		return err
	}
	defer func() { _ = response.Body.Close() }()
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("it answered %s", response.Status)
	}
	return nil
}

func newWhoami() *cobra.Command {
	var c client
	cmd := &cobra.Command{
		Use:   "whoami",
		Short: "Say as whom the API knows you, and what you may do",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return whoami(cmd, &c) },
	}
	c.register(cmd)
	return cmd
}

func whoami(cmd *cobra.Command, c *client) error {
	var caller api.Caller
	if err := c.call(cmd, http.MethodGet, "/api/whoami", nil, &caller); err != nil || c.asJSON {
		return err
	}
	if caller.Via == "" {
		sayf(cmd.OutOrStdout(), "nobody is asked who they are; everybody may do everything\n")
		return nil
	}
	sayf(cmd.OutOrStdout(), "%s (by %s)\n", caller.Name, caller.Via)
	if len(caller.Grants) == 0 {
		sayf(cmd.OutOrStdout(), "may do nothing: no grant of access.yaml names you\n")
	}
	for _, g := range caller.Grants {
		sayf(cmd.OutOrStdout(), "%s %s\n", g.Role, where(&access.Token{Queues: g.Queues, Kinds: g.Kinds, Sources: g.Sources}))
	}
	return nil
}
