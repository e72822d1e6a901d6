// Package kafka reads dead letters from topics of Kafka, and publishes records back to topics. It
// implements source.Broker with franz-go.
package kafka

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/sasl"
	"github.com/twmb/franz-go/pkg/sasl/oauth"
	"github.com/twmb/franz-go/pkg/sasl/plain"
	"github.com/twmb/franz-go/pkg/sasl/scram"
	"golang.org/x/oauth2"
	"golang.org/x/oauth2/clientcredentials"

	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/redact"
	"github.com/dlqd/dlqd/internal/registry"
	"github.com/dlqd/dlqd/internal/source"
)

// clientID identifies dlqd to brokers, in their quotas and logs.
const clientID = "dlqd"

const (
	// dialTimeout limits the connection to one address of a broker.
	dialTimeout = 5 * time.Second
	// tokenTimeout limits a request for a token.
	tokenTimeout = 5 * time.Second
	// topicIDTimeout limits the request for the id of a topic. Without the id, records are recognized by the topic's
	// name.
	topicIDTimeout = 2 * time.Second
)

var errNoCertificate = errors.New("tls.caFile: no certificate in PEM")

// Broker is the client of a policy's Kafka clusters.
type Broker struct {
	policy     *policy.Policy
	unpacker   *unpacker
	registries map[string]*registry.Registry // by name

	mu      sync.Mutex
	clients map[string]*client    // by the cluster's name
	old     map[string]partitions // partitions at the first read of each source, by the name of the source

	types sync.Map // value types that unwrapped has read from descriptors, by the name of the source
}

// partitions has the number of partitions of each topic, by the topic's id.
type partitions map[uuid.UUID]int32

// partitionsBefore returns the partitions that a source had when this broker first read it.
func (b *Broker) partitionsBefore(name string, found map[string]topic) partitions {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.old[name] == nil {
		b.old[name] = partitions{}
		for _, t := range found {
			b.old[name][t.id] = t.partitions
		}
	}
	return b.old[name]
}

// client publishes to a cluster, and looks up topics, offsets and consumer groups. Each reader fetches with a client of
// its own.
type client struct {
	*kgo.Client

	answers atomic.Bool // the last publication succeeded
}

// Open returns a client for the policy's clusters. It does not connect.
func Open(p *policy.Policy) (source.Broker, error) {
	for name, cluster := range p.Sources.Clusters {
		if _, err := options(cluster); err != nil {
			return nil, fmt.Errorf("cluster %s: %w", name, err)
		}
	}
	unpacker, err := sharedUnpacker()
	if err != nil {
		return nil, err
	}
	registries, err := openRegistries(p)
	if err != nil {
		return nil, err
	}
	return &Broker{
		policy: p, unpacker: unpacker, registries: registries, clients: map[string]*client{}, old: map[string]partitions{},
	}, nil
}

// Close disconnects.
func (b *Broker) Close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for name, c := range b.clients {
		c.Close()
		delete(b.clients, name)
	}
	for _, r := range b.registries {
		r.Close()
	}
}

// client returns the client of a cluster.
func (b *Broker) client(name string) (*client, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if c, ok := b.clients[name]; ok {
		return c, nil
	}
	cluster, ok := b.policy.Sources.Clusters[name]
	if !ok {
		return nil, fmt.Errorf("the policy has no cluster %q", name)
	}
	opts, err := options(cluster)
	if err != nil {
		return nil, fmt.Errorf("cluster %s: %w", name, err)
	}
	kafka, err := kgo.NewClient(append(opts, producerOptions()...)...)
	if err != nil {
		return nil, fmt.Errorf("cluster %s: %w", name, err)
	}
	c := &client{Client: kafka}
	b.clients[name] = c
	return c, nil
}

// topicID returns the id of the topic that has a name now, or had it at some time within the last topicsInterval. It
// returns zero if the cluster does not tell the id.
func topicID(ctx context.Context, client *kgo.Client, name string) uuid.UUID {
	named := kmsg.NewMetadataRequestTopic()
	named.Topic = new(name)
	request := kmsg.NewPtrMetadataRequest()
	request.Topics = []kmsg.MetadataRequestTopic{named}
	ctx, cancel := context.WithTimeout(ctx, topicIDTimeout)
	defer cancel()
	response, err := client.RequestCachedMetadata(ctx, request, topicsInterval)
	if err != nil || len(response.Topics) != 1 || response.Topics[0].ErrorCode != 0 {
		return uuid.Nil
	}
	return response.Topics[0].TopicID
}

// options returns the options with which a client connects to a cluster.
func options(cluster *policy.Cluster) ([]kgo.Opt, error) {
	opts := []kgo.Opt{
		kgo.SeedBrokers(cluster.Brokers...),
		kgo.ClientID(clientID),
		kgo.DisableClientMetrics(),
		kgo.DialTimeout(dialTimeout),
	}
	if cluster.TLS.Enabled {
		config, err := tlsConfig(cluster.TLS)
		if err != nil {
			return nil, err
		}
		opts = append(opts, kgo.DialTLSConfig(config))
	}
	if cluster.SASL.Mechanism != "" {
		mechanism, err := login(cluster.SASL, cluster.TLS)
		if err != nil {
			return nil, err
		}
		opts = append(opts, kgo.SASL(mechanism))
	}
	return opts, nil
}

func tlsConfig(t policy.TLS) (*tls.Config, error) {
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	if t.CA != "" {
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM([]byte(t.CA)) {
			return nil, errNoCertificate
		}
	}
	if t.Cert != "" {
		pair, err := tls.X509KeyPair([]byte(t.Cert), []byte(t.Key))
		if err != nil {
			return nil, fmt.Errorf("tls.certFile and tls.keyFile: %w", err)
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return config, nil
}

// tokenSource is a function that implements [oauth2.TokenSource].
type tokenSource func() (*oauth2.Token, error)

// Token implements [oauth2.TokenSource].
func (s tokenSource) Token() (*oauth2.Token, error) { return s() }

// issuedTokens returns the source of tokens that an identity provider issues for client credentials. A token is used
// until it expires, or once if it has no expiry time. dlqd trusts the provider's certificate if tls.caFile or the
// system's authorities have signed it.
func issuedTokens(s policy.SASL, t policy.TLS) (func(context.Context) (oauth.Auth, error), error) {
	transport := &http.Transport{Proxy: http.ProxyFromEnvironment, TLSHandshakeTimeout: tokenTimeout}
	if t.CA != "" {
		roots, err := x509.SystemCertPool()
		if err != nil {
			roots = x509.NewCertPool()
		}
		if !roots.AppendCertsFromPEM([]byte(t.CA)) {
			return nil, errNoCertificate
		}
		transport.TLSClientConfig = &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: roots}
	}
	config := clientcredentials.Config{
		ClientID: s.Username, ClientSecret: string(s.Password), TokenURL: s.TokenURL, Scopes: s.Scopes,
	}
	client := &http.Client{
		Transport: transport, Timeout: tokenTimeout,
		CheckRedirect: func(*http.Request, []*http.Request) error {
			return http.ErrUseLastResponse // a redirect would carry the client's secret to another address
		},
	}
	with := context.WithValue(context.Background(), oauth2.HTTPClient, client)
	tokens := oauth2.ReuseTokenSource(nil, tokenSource(func() (*oauth2.Token, error) {
		token, err := config.Token(with)
		if err == nil && token.Expiry.IsZero() { // the lifetime is unknown: use the token once
			token.Expiry = time.Now()
		}
		return token, err
	}))
	return func(context.Context) (oauth.Auth, error) {
		token, err := tokens.Token()
		if failed, ok := errors.AsType[*url.Error](err); ok { // omit the URL, which is in the text
			err = failed.Err
		}
		if refused, ok := errors.AsType[*oauth2.RetrieveError](err); ok {
			// Omit the rest of the answer, which may contain the secret.
			err = fmt.Errorf("%s %.100s", refused.Response.Status, refused.ErrorCode)
		}
		if err != nil {
			return oauth.Auth{}, fmt.Errorf("sasl.tokenURL %s issues no token: %w", redact.URL(s.TokenURL), err)
		}
		return oauth.Auth{Token: token.AccessToken}, nil
	}, nil
}

func login(s policy.SASL, t policy.TLS) (sasl.Mechanism, error) {
	password := string(s.Password)
	switch s.Mechanism {
	case "PLAIN":
		return plain.Auth{User: s.Username, Pass: password}.AsMechanism(), nil
	case "SCRAM-SHA-256":
		return scram.Auth{User: s.Username, Pass: password}.AsSha256Mechanism(), nil
	case "SCRAM-SHA-512":
		return scram.Auth{User: s.Username, Pass: password}.AsSha512Mechanism(), nil
	case "OAUTHBEARER":
		if s.TokenURL == "" {
			return oauth.Auth{Token: password}.AsMechanism(), nil
		}
		tokens, err := issuedTokens(s, t)
		if err != nil {
			return nil, err
		}
		return oauth.Oauth(tokens), nil
	}
	return nil, fmt.Errorf("sasl.mechanism: %q is not known", s.Mechanism)
}
