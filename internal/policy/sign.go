package policy

import (
	"encoding/base64"
	"fmt"
	"slices"
	"strings"
	"time"

	standardwebhooks "github.com/standard-webhooks/standard-webhooks/libraries/go"
)

const (
	secretPrefix = "whsec_"
	// minSecretBytes is the length of the shortest secret that the Standard Webhooks specification permits.
	minSecretBytes = 24
	// maxSecrets is 2: the current secret and, during a rotation, the former one.
	maxSecrets = 2
)

// lines returns the secrets in s, which are separated by newlines: the current secret and, during a rotation, the
// former one.
func (s Secret) lines() []string {
	if s == "" {
		return nil
	}
	lines := strings.Split(strings.TrimSpace(string(s)), "\n")
	for i, line := range lines {
		lines[i] = strings.TrimSpace(line)
	}
	return lines
}

// newSigners returns a signer for each secret, of which there are at most maxSecrets. Its error contains no part of a
// secret.
func newSigners(secret Secret) ([]*standardwebhooks.Webhook, error) {
	lines := secret.lines()
	signers := make([]*standardwebhooks.Webhook, 0, len(lines))
	for i, line := range lines {
		where := ""
		if len(lines) > 1 {
			where = fmt.Sprintf("line %d ", i+1)
		}
		key, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(line, secretPrefix))
		switch {
		case line == "":
			return nil, fmt.Errorf("%sis empty; remove it", where)
		case len(lines) > 1 && !strings.HasPrefix(line, secretPrefix): // the line may be a part of one secret
			return nil, fmt.Errorf("%smust begin with %s, as each of two secrets does; a single secret is one line", where,
				secretPrefix)
		case err != nil:
			return nil, fmt.Errorf("%smust be base64, with or without the prefix %s", where, secretPrefix)
		case len(key) < minSecretBytes:
			return nil, fmt.Errorf("%shas %d bytes; must have at least %d (openssl rand -base64 32 prints one)", where,
				len(key), minSecretBytes)
		}
		signer, err := standardwebhooks.NewWebhookRaw(key)
		if err != nil {
			return nil, err
		}
		signers = append(signers, signer)
	}
	if len(lines) > maxSecrets {
		return nil, fmt.Errorf("has %d lines; must have one secret, or two during a rotation: the new one, then the "+
			"former one", len(lines))
	}
	return signers, nil
}

// Signer returns a function that signs deliveries to the destination (Standard Webhooks) with each of the destination's
// secrets. It returns nil if the destination has no secret.
func (d *Destination) Signer() func(messageID string, at time.Time, body []byte) (string, error) {
	if d.Secret == "" {
		return nil
	}
	signers, err := newSigners(d.Secret)
	if err != nil {
		panic(err) // checked when the policy was loaded
	}
	return func(messageID string, at time.Time, body []byte) (string, error) {
		signatures := make([]string, 0, len(signers))
		for _, signer := range signers {
			signature, err := signer.Sign(messageID, at, body)
			if err != nil {
				return "", err
			}
			signatures = append(signatures, signature)
		}
		return strings.Join(signatures, " "), nil
	}
}

// SecretsSince returns the number of secrets with which d signs deliveries, and how many of them former did not have.
func (d *Destination) SecretsSince(former *Destination) (total, added int) {
	lines, before := d.Secret.lines(), former.Secret.lines()
	for _, line := range lines {
		if !slices.Contains(before, line) {
			added++
		}
	}
	return len(lines), added
}
