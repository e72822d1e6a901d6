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

// certificatesInterval is between two looks at the files of certificates.
const certificatesInterval = time.Second

// CertificateFiles names what connections are encrypted with, in PEM files.
type CertificateFiles struct {
	Cert, Key string
	// ClientCA signs the certificates that clients may show; empty where none is asked for. A client need not show one, and one that
	// shows another is refused.
	ClientCA string
}

// Check says which files have to be named, too.
func (f CertificateFiles) Check() error {
	switch {
	case (f.Cert == "") != (f.Key == ""):
		return errors.New("--tls-cert and --tls-key need each other")
	case f.ClientCA != "" && f.Cert == "":
		return errors.New("--tls-client-ca needs --tls-cert and --tls-key")
	}
	return nil
}

// Certificates are those of files, as they are now.
type Certificates struct {
	files  CertificateFiles
	config atomic.Pointer[tls.Config]
	loaded []byte // what the files held
}

// LoadCertificates reads them.
func LoadCertificates(files CertificateFiles) (*Certificates, error) {
	c := &Certificates{files: files}
	if err := errors.Join(files.Check(), c.reload()); err != nil {
		return nil, err
	}
	return c, nil
}

// Config is what a server uses: for each connection, the certificates that are in force.
func (c *Certificates) Config() *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS12,
		// (Here, too: http.Server decides by this whether it speaks HTTP/2, and once, for a Unix socket beside it as well.)
		NextProtos:         protocols(),
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return c.config.Load(), nil },
	}
}

func protocols() []string { return []string{"h2", "http/1.1"} }

// Loop has changed files read. Those that do not fit together, as when one of two was written, change nothing.
func (c *Certificates) Loop() *background.Loop {
	return background.New(background.Config{
		Name: "certificates", Interval: certificatesInterval, WhenIdle: true, Failing: "the certificates that were read before stay in force",
		Once: background.Each(func(context.Context) error { return c.reload() }),
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
	config := &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{certificate}, NextProtos: protocols()}
	if c.files.ClientCA != "" {
		config.ClientCAs = x509.NewCertPool()
		if !config.ClientCAs.AppendCertsFromPEM(pair[2]) {
			return fmt.Errorf("%s: holds no certificate", c.files.ClientCA)
		}
		config.ClientAuth = tls.VerifyClientCertIfGiven
		config.SessionTicketsDisabled = true // a resumed session would show a certificate of a CA that is trusted no more
	}
	c.config.Store(config)
	c.loaded = found
	return nil
}
