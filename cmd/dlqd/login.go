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
	// loginTimeout limits the time that a sign-in may take.
	loginTimeout = 5 * time.Minute
	// loginMargin is the time before the expiry of an ID token at which dlqd renews the token, so that the token does not
	// expire on its way to the API.
	loginMargin = 30 * time.Second
	// providerSkew is the accepted difference between the clocks of the provider and of this machine.
	providerSkew = time.Minute
)

// login is the result of "dlqd login" for one API. dlqd stores it in a file that only the file's owner may read.
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

// loginPath returns the path of the file with the login for the API at base.
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
		return nil, fmt.Errorf("%s: other users can read this file, and may have; sign in again with dlqd login", path)
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

// write writes the login to path. A file at path is replaced atomically.
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

// lockLogin lets only one process at a time change a stored sign-in. A refresh token may be used only once: providers
// treat a second use as theft.
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

// loginToken returns the ID token of the login for the client's API, or "" if there is no login. If the token expires
// soon, loginToken renews it, except while a shell completes a command line.
func (c *client) loginToken(ctx context.Context) (string, error) {
	path, err := loginPath(c.base)
	if err != nil {
		return "", nil // without a home directory there is no login
	}
	l, err := readLogin(path)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil || c.completing || time.Until(l.Expiry) > loginMargin {
		return l.token(), err
	}
	unlock, err := lockLogin(path)
	if err != nil {
		return "", err
	}
	defer unlock()
	if l, err = readLogin(path); err != nil || time.Until(l.Expiry) > loginMargin { // if another process has renewed it
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

// provider asks the provider for its endpoints. Requests to the provider need the returned context, which has the HTTP
// client for them.
func (l *login) provider(ctx context.Context) (context.Context, *oidc.Provider, *oauth2.Config, error) {
	if err := access.CheckProviderURL(l.Issuer); err != nil {
		return nil, nil, nil, err
	}
	ctx = oidc.ClientContext(ctx, access.ProviderClient())
	provider, err := oidc.NewProvider(ctx, l.Issuer)
	if err != nil {
		return nil, nil, nil, fmt.Errorf("OpenID Connect provider %s: %w", l.Issuer, err)
	}
	config := &oauth2.Config{ClientID: l.ClientID, Endpoint: provider.Endpoint(), Scopes: l.Scopes}
	config.Endpoint.AuthStyle = oauth2.AuthStyleInParams // trying both styles would send the code twice; a code works once
	if l.ClientSecretFile != "" {
		raw, err := os.ReadFile(l.ClientSecretFile)
		if err != nil {
			return nil, nil, nil, fmt.Errorf("--client-secret-file: %w", err)
		}
		config.ClientSecret = strings.TrimSpace(string(raw))
		config.Endpoint.AuthStyle = oauth2.AuthStyleAutoDetect
	}
	for _, endpoint := range []string{
		config.Endpoint.AuthURL, config.Endpoint.TokenURL,
		cmp.Or(config.Endpoint.DeviceAuthURL, l.Issuer),
	} {
		if err := access.CheckProviderURL(endpoint); err != nil {
			return nil, nil, nil, err
		}
	}
	return ctx, provider, config, nil
}

// storeTokens verifies the ID token of the provider's answer, and stores the ID token and the refresh token in l.
func (l *login) storeTokens(ctx context.Context, provider *oidc.Provider, token *oauth2.Token, nonce string) error {
	raw, _ := token.Extra("id_token").(string)
	if raw == "" {
		return errors.New("the OpenID Connect provider returned no ID token; is openid among the scopes?")
	}
	id, err := provider.Verifier(&oidc.Config{
		ClientID: l.ClientID, SupportedSigningAlgs: access.Algorithms(),
		Now: func() time.Time { return time.Now().Add(-providerSkew) },
	}).Verify(ctx, raw)
	if err != nil {
		return fmt.Errorf("the OpenID Connect provider's ID token: %w", err)
	}
	if nonce != "" && subtle.ConstantTimeCompare([]byte(id.Nonce), []byte(nonce)) != 1 {
		return errors.New("the OpenID Connect provider's ID token belongs to another sign-in (nonce)")
	}
	if l.Subject != "" && id.Subject != l.Subject {
		return errors.New("the OpenID Connect provider's ID token belongs to another user")
	}
	l.Subject, l.IDToken, l.Expiry = id.Subject, raw, id.Expiry
	l.RefreshToken = cmp.Or(token.RefreshToken, l.RefreshToken)
	return nil
}

// renew gets a new ID token with the refresh token.
func (l *login) renew(ctx context.Context) error {
	ended := fmt.Errorf("your sign-in has ended; sign in again: dlqd login --api-url %s", l.API)
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
		return fmt.Errorf("renewing your sign-in failed: %w", err)
	}
	return l.storeTokens(ctx, provider, token, "")
}

func newLogin() *cobra.Command {
	var c client
	var device, noBrowser bool
	var port int
	l := &login{}
	cmd := &cobra.Command{
		Use:   "login",
		Short: "Sign in with the OpenID Connect provider of a dlqd",
		Long: "Login signs you in with the OpenID Connect provider that the API names (access.yaml: oidc), in a browser " +
			"on this\n" +
			"machine or, with --device, on another. It stores the tokens in a file that only you can read. Commands with the\n" +
			"same --api-url use and renew them, unless $DLQD_TOKEN or --token-file is set.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			l.API = strings.TrimSuffix(c.base, "/")
			if err := checkEncrypted(l.API); err != nil {
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
			c.noToken = true
			provided, err := call(cmd, &c, api.GetLogin, api.None{})
			if err != nil {
				return err
			}
			l.Issuer, l.ClientID, l.Scopes = provided.Issuer, provided.ClientID, provided.Scopes
			ctx, cancel := context.WithTimeout(cmd.Context(), loginTimeout)
			defer cancel()
			ctx, provider, config, err := l.provider(ctx)
			if err != nil {
				return err
			}
			signIn := func() error { return l.inBrowser(ctx, cmd, provider, config, port, noBrowser) }
			if device {
				signIn = func() error { return l.onDevice(ctx, cmd, provider, config) }
			}
			if err := signIn(); err != nil {
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
				printSafef(cmd.ErrOrStderr(), "warning: $DLQD_TOKEN or $DLQD_TOKEN_FILE is set; commands use it instead of this "+
					"sign-in\n")
			}
			c.noToken, c.secret = false, l.IDToken
			return whoami(cmd, &c)
		},
	}
	c.registerAddress(cmd)
	flags := cmd.Flags()
	flags.BoolVar(&device, "device", false, "sign in with a code, in a browser on another machine")
	flags.BoolVar(&noBrowser, "no-browser", false, "print the address without opening a browser")
	flags.IntVar(&port, "port", 0, "port on 127.0.0.1 to which the browser returns; any free port if 0")
	flags.StringVar(&l.ClientSecretFile, "client-secret-file", "", "file with the client secret, if the provider "+
		"requires one")
	return cmd
}

// checkEncrypted rejects an address to which dlqd would send credentials unencrypted over the network.
func checkEncrypted(base string) error {
	u, err := url.Parse(base)
	if err != nil {
		return err
	}
	if u.Scheme == "https" || u.Scheme == "unix" || u.Scheme == "http" && access.IsLoopback(u.Hostname()) {
		return nil
	}
	return fmt.Errorf("--api-url %s: credentials would be sent unencrypted; use https, or a tunnel to 127.0.0.1",
		u.Redacted())
}

// inBrowser signs the user in with a browser. The provider's page sends the browser back to a port of this machine,
// with a code.
func (l *login) inBrowser(ctx context.Context, cmd *cobra.Command, provider *oidc.Provider, config *oauth2.Config,
	port int, noBrowser bool,
) error {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	if err != nil {
		return fmt.Errorf("--port: %w", err)
	}
	config.RedirectURL = "http://" + listener.Addr().String() + "/callback"
	state, nonce, verifier := rand.Text(), rand.Text(), oauth2.GenerateVerifier()
	callbacks := make(chan url.Values, 1)
	server := &http.Server{
		ReadHeaderTimeout: time.Minute,
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "text/plain; charset=utf-8")
			w.Header().Set("X-Content-Type-Options", "nosniff")
			w.Header().Set("Cache-Control", "no-store")
			w.Header().Set("Referrer-Policy", "no-referrer")
			query := r.URL.Query()
			// Other pages in the same browser may request this address too. Because they do not know the state, they cannot
			// end the sign-in.
			if r.Method != http.MethodGet || r.URL.Path != "/callback" || subtle.ConstantTimeCompare([]byte(query.Get("state")),
				[]byte(state)) != 1 {
				w.WriteHeader(http.StatusBadRequest)
				_, _ = io.WriteString(w, "This request does not belong to the pending sign-in.\n")
				return
			}
			_, _ = io.WriteString(w, "Sign-in received. Return to your terminal; you can close this page.\n")
			select {
			case callbacks <- query:
			default: // ignore this answer: it is not the first
			}
		}),
	}
	go func() { _ = server.Serve(listener) }()
	defer func() { // let the browser receive the page first
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		if server.Shutdown(ctx) != nil {
			_ = server.Close()
		}
	}()
	address := config.AuthCodeURL(state, oidc.Nonce(nonce), oauth2.S256ChallengeOption(verifier))
	printSafef(cmd.ErrOrStderr(), "Sign in at %s:\n%s\n", l.Issuer, address)
	if !noBrowser {
		openBrowser(ctx, address)
	}
	var query url.Values
	select {
	case query = <-callbacks:
	case <-ctx.Done():
		return errors.New("the sign-in timed out or was interrupted")
	}
	if failed := query.Get("error"); failed != "" {
		return fmt.Errorf("the OpenID Connect provider refused the sign-in: %s %s", printable(failed),
			printable(query.Get("error_description")))
	}
	if iss := query.Get("iss"); iss != "" && iss != l.Issuer { // RFC 9207
		return errors.New("the answer comes from another OpenID Connect provider")
	}
	token, err := config.Exchange(ctx, query.Get("code"), oauth2.VerifierOption(verifier))
	if err != nil {
		return err
	}
	return l.storeTokens(ctx, provider, token, nonce)
}

// openBrowser opens an address in a browser if the machine has a desktop. The caller also prints the address.
func openBrowser(ctx context.Context, address string) {
	if os.Getenv("DISPLAY") == "" && os.Getenv("WAYLAND_DISPLAY") == "" {
		return
	}
	if command := exec.CommandContext(context.WithoutCancel(ctx), "xdg-open", address); command.Start() == nil { //nolint:gosec // https, or http on this machine
		go func() { _ = command.Wait() }()
	}
}

// onDevice signs the user in with a code that the user types in a browser of any device (RFC 8628).
func (l *login) onDevice(ctx context.Context, cmd *cobra.Command, provider *oidc.Provider,
	config *oauth2.Config,
) error {
	if config.Endpoint.DeviceAuthURL == "" {
		return errors.New("this OpenID Connect provider does not support --device")
	}
	device, err := config.DeviceAuth(ctx)
	if err != nil {
		return err
	}
	printSafef(cmd.ErrOrStderr(), "Sign in at %s with the code %s\n",
		cmp.Or(device.VerificationURIComplete, device.VerificationURI), device.UserCode)
	token, err := config.DeviceAccessToken(ctx, device)
	if err != nil {
		return err
	}
	return l.storeTokens(ctx, provider, token, "")
}

func newLogout() *cobra.Command {
	var c client
	cmd := &cobra.Command{
		Use:   "logout",
		Short: "Sign out: delete the stored tokens and revoke them at the provider",
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
				printSafef(cmd.OutOrStdout(), "not signed in at %s\n", c.base)
				return nil
			}
			// Remove the file even if it does not contain a readable login. Keep the lock file: another process may be
			// waiting for the lock.
			if removed := os.Remove(path); removed != nil {
				return removed
			}
			if err == nil {
				err = l.revoke(cmd.Context())
			}
			if err != nil {
				printSafef(cmd.ErrOrStderr(), "warning: revoking the sign-in at the provider failed; a copy of its tokens can "+
					"still renew it: %s\n",
					err.Error())
			}
			printSafef(cmd.OutOrStdout(), "signed out at %s\n", c.base)
			return nil
		},
	}
	c.registerAddress(cmd)
	return cmd
}

// revoke revokes the refresh token, if there is one, at the provider (RFC 7009).
func (l *login) revoke(ctx context.Context) error {
	if l.RefreshToken == "" {
		return nil
	}
	ctx, provider, config, err := l.provider(ctx)
	if err != nil {
		return err
	}
	var metadata struct {
		Revocation string `json:"revocation_endpoint"`
	}
	if err := provider.Claims(&metadata); err != nil {
		return err
	}
	if metadata.Revocation == "" {
		return errors.New("the provider has no revocation endpoint")
	}
	if err := access.CheckProviderURL(metadata.Revocation); err != nil {
		return err
	}
	form := url.Values{"token": {l.RefreshToken}, "token_type_hint": {"refresh_token"}, "client_id": {l.ClientID}}
	if config.ClientSecret != "" {
		form.Set("client_secret", config.ClientSecret)
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, metadata.Revocation, strings.NewReader(form.Encode()))
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
		return fmt.Errorf("the provider answered %s", response.Status)
	}
	return nil
}

func newWhoami() *cobra.Command {
	var c client
	cmd := &cobra.Command{
		Use:   "whoami",
		Short: "Show your identity at the API, and your grants",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return whoami(cmd, &c) },
	}
	c.register(cmd)
	return cmd
}

func whoami(cmd *cobra.Command, c *client) error {
	caller, err := call(cmd, c, api.Whoami, api.None{})
	if err != nil || c.asJSON {
		return err
	}
	if caller.Via == "" {
		printSafef(cmd.OutOrStdout(), "authentication is off: every caller may do everything\n")
		return nil
	}
	printSafef(cmd.OutOrStdout(), "%s (by %s)\n", caller.Name, caller.Via)
	if len(caller.Grants) == 0 {
		printSafef(cmd.OutOrStdout(), "no permissions: no grant of access.yaml applies to you\n")
	}
	for _, g := range caller.Grants {
		printSafef(cmd.OutOrStdout(), "%s %s\n", g.Role,
			scopeText(&access.Token{Queues: g.Queues, Kinds: g.Kinds, Sources: g.Sources}))
	}
	return nil
}
