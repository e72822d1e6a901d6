package access

import (
	"crypto/rand"
	"crypto/sha256"
	"hash/crc32"
	"math/big"
	"strings"
)

// secretPrefix begins every token, so that scanners of repositories and logs can recognize tokens.
const secretPrefix = "dlqd_"

// sessionPrefix begins the value of a session cookie, which has the form of a token.
const sessionPrefix = "dlqds_"

// A token is the prefix, randomLength digits of base 62 (178 bits), and a checksum of checksumLength digits. Because of
// the checksum, dlqd refuses a mistyped or invented token without a query.
const (
	randomLength   = 30
	checksumLength = 6
)

const digits = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

// newSecret returns a new token or cookie value, and the hash that the database stores. The secret
// is random enough to need no salt and no slow hash.
func newSecret(prefix string) (secret string, hash []byte, err error) {
	random := make([]byte, randomLength)
	for i := range random {
		n, err := rand.Int(rand.Reader, big.NewInt(int64(len(digits))))
		if err != nil {
			return "", nil, err
		}
		random[i] = digits[n.Int64()]
	}
	secret = prefix + string(random)
	secret += checksum(secret)
	return secret, hashOf(secret), nil
}

func checksum(of string) string {
	sum, text := crc32.ChecksumIEEE([]byte(of)), [checksumLength]byte{}
	for i := checksumLength - 1; i >= 0; i-- {
		text[i] = digits[sum%uint32(len(digits))]
		sum /= uint32(len(digits))
	}
	return string(text[:])
}

func hashOf(secret string) []byte {
	hash := sha256.Sum256([]byte(secret))
	return hash[:]
}

// wellFormed reports whether secret has the form of a token, or of a session cookie's value, with the given prefix.
func wellFormed(prefix, secret string) bool {
	if len(secret) != len(prefix)+randomLength+checksumLength || !strings.HasPrefix(secret, prefix) {
		return false
	}
	body := secret[:len(secret)-checksumLength]
	return checksum(body) == secret[len(body):]
}
