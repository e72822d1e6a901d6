package policy

import (
	"errors"
	"time"

	standardwebhooks "github.com/standard-webhooks/standard-webhooks/libraries/go"
)

func newSigner(secret Secret) (*standardwebhooks.Webhook, error) {
	if secret == "" {
		return nil, errors.New("no secret")
	}
	return standardwebhooks.NewWebhook(string(secret))
}

// Signer returns the function that signs deliveries to the destination (Standard Webhooks), or nil
// if it has no secret.
func (d *Destination) Signer() func(messageID string, at time.Time, body []byte) (string, error) {
	if d.Secret == "" {
		return nil
	}
	webhook, err := newSigner(d.Secret)
	if err != nil {
		panic(err) // checked when the policy was loaded
	}
	return webhook.Sign
}
