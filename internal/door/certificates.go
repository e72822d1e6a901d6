package door

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"time"

	"github.com/dlqd/dlqd/internal/background"
)

// certificatesInterval is the time between two reads of the certificate files.
const certificatesInterval = time.Second

// CertificateFiles has the paths of the PEM files for TLS connections.
type CertificateFiles struct {
	Cert, Key string
	// ClientCA is the file of the CA that signs certificates of clients. If it is empty, no client certificate is
	// requested. A client may connect without a certificate, but not with a certificate of another CA.
	ClientCA string
}

// Check returns an error if a path is set without the other paths that it requires.
func (f CertificateFiles) Check() error {
	switch {
	case (f.Cert == "") != (f.Key == ""):
		return errors.New("--tls-cert and --tls-key must be set together")
	case f.ClientCA != "" && f.Cert == "":
		return errors.New("--tls-client-ca needs --tls-cert and --tls-key")
	}
	return nil
}

// Certificates has the current certificates of the files.
type Certificates struct {
	files  CertificateFiles
	config atomic.Pointer[tls.Config]
	loaded []byte // contents of the files
}

// LoadCertificates returns the certificates of files.
func LoadCertificates(files CertificateFiles) (*Certificates, error) {
	c := &Certificates{files: files}
	if err := errors.Join(files.Check(), c.reload()); err != nil {
		return nil, err
	}
	return c, nil
}

// Config returns a configuration for a server. The server uses the current certificates for each new connection.
func (c *Certificates) Config() *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS12,
		// http.Server reads this list once, to decide whether it serves HTTP/2. That also applies on a Unix socket.
		NextProtos:         protocols(),
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return c.config.Load(), nil },
	}
}

func protocols() []string { return []string{"h2", "http/1.1"} }

// Loop returns the loop that reads changed files. Files that do not fit together change nothing, for example if only
// one of two new files has been written.
func (c *Certificates) Loop() *background.Loop {
	return background.New(background.Config{
		Name: "certificates", Interval: certificatesInterval, WhenIdle: true,
		Failing: "reading changed certificates failed: the previous ones stay in use",
		Once:    background.Each(func(context.Context) error { return c.reload() }),
	})
}

func (c *Certificates) reload() error {
	pair := make([][]byte, 3)
	for i, path := range []string{c.files.Cert, c.files.Key, c.files.ClientCA} {
		if path == "" {
			continue
		}
		var err error
		if pair[i], err = os.ReadFile(path); err != nil {
			return fmt.Errorf("certificates: %w", err)
		}
	}
	found := bytes.Join(pair, []byte{0})
	if bytes.Equal(found, c.loaded) {
		return nil
	}
	certificate, err := tls.X509KeyPair(pair[0], pair[1])
	if err != nil {
		return fmt.Errorf("%s and %s: %w", c.files.Cert, c.files.Key, err)
	}
	config := &tls.Config{
		MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{certificate}, NextProtos: protocols(),
	}
	if c.files.ClientCA != "" {
		config.ClientCAs = x509.NewCertPool()
		if !config.ClientCAs.AppendCertsFromPEM(pair[2]) {
			return fmt.Errorf("%s: contains no certificate", c.files.ClientCA)
		}
		config.ClientAuth = tls.VerifyClientCertIfGiven
		// With a resumed session, a client could present a certificate of a CA that is no longer trusted.
		config.SessionTicketsDisabled = true
	}
	c.config.Store(config)
	c.loaded = found
	return nil
}
