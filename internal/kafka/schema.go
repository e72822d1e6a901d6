package kafka

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/registry"
	"github.com/dlqd/dlqd/internal/riverdlq"
	"github.com/dlqd/dlqd/internal/source"
)

// TypeEncode is the error type of an edited payload that could not be encoded.
const TypeEncode = "ENCODE_ERROR"

// openRegistries returns clients of the policy's schema registries, by name.
func openRegistries(p *policy.Policy) (map[string]*registry.Registry, error) {
	registries := map[string]*registry.Registry{}
	for name, of := range p.Sources.Registries {
		var secure *tls.Config
		var err error
		if of.TLS.CA != "" || of.TLS.Cert != "" {
			secure, err = tlsConfig(of.TLS)
		}
		if err == nil {
			registries[name], err = registry.New(of, secure)
		}
		if err != nil {
			return nil, fmt.Errorf("registry %s: %w", name, err)
		}
	}
	return registries, nil
}

// decode sets the payload of a record whose schema is in a registry, or the reason why it is not decoded.
func decode(ctx context.Context, schemas *registry.Registry, s *policy.TopicSource, record *source.Record) {
	if schemas == nil || len(record.Value) > s.MaxRecordBytes {
		return
	}
	var err error
	if record.Payload, err = schemas.Decode(ctx, record.Value); err != nil {
		record.NotDecoded = err.Error()
	}
}

// Encode implements source.Publisher.
func (b *Broker) Encode(ctx context.Context, name string, value []byte, edited json.RawMessage) (
	encoded []byte, err error,
) {
	s := b.policy.Sources.Sources[name]
	switch {
	case s == nil:
		err = fmt.Errorf("the policy has no source %s", name)
	case s.Envelope == policy.EnvelopeProtobuf:
		encoded, err = b.encodeEnvelope(s, value, edited)
	case b.registries[s.Registry] == nil:
		err = fmt.Errorf("source %s has no registry with the schema of the value", name)
	default:
		encoded, err = b.registries[s.Registry].Encode(ctx, value, edited)
	}
	if err == nil {
		return encoded, nil
	}
	failure := &riverdlq.Error{
		Type: TypeEncode, Class: riverdlq.ClassValidation, Message: "encoding the edited payload: " + err.Error(),
		Err: errors.Join(err, source.ErrUnpublishable),
	}
	if errors.Is(err, registry.ErrUnavailable) || ctx.Err() != nil {
		failure.Class, failure.Err = riverdlq.ClassOutage, err
	}
	return nil, failure
}

// encodeEnvelope returns the value of a source whose envelope is protobuf, with an edited payload.
func (b *Broker) encodeEnvelope(s *policy.TopicSource, value []byte, edited json.RawMessage) ([]byte, error) {
	of, err := b.valueType(s)
	if err != nil {
		return nil, err
	}
	return registry.EncodeMessage(of, value, edited)
}
