package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"aead.dev/minisign"
)

// writeSums writes SHA256SUMS with the checksums of all files and, if there is a key, the signature of SHA256SUMS.
func (r *release) writeSums(context.Context) error {
	var sums bytes.Buffer
	err := filepath.WalkDir(r.out, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		body, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		name, err := filepath.Rel(r.out, path)
		_, _ = fmt.Fprintf(&sums, "%x  %s\n", sha256.Sum256(body), filepath.ToSlash(name))
		return err
	})
	if err != nil {
		return err
	}
	path := filepath.Join(r.out, "SHA256SUMS")
	if err := write(path, sums.Bytes()); err != nil {
		return err
	}
	if r.key == "" {
		fmt.Fprintln(os.Stderr, "release: SHA256SUMS is NOT SIGNED: no -key was given (make release KEY=…)")
		return nil
	}
	key, err := r.readKey()
	if err != nil {
		return fmt.Errorf("key %s: %w", r.key, err)
	}
	// minisign's default comment contains the current time, with which two signatures would differ.
	signature := minisign.SignWithComments(key, sums.Bytes(), "dlqd "+r.version+" "+r.commit,
		fmt.Sprintf("signature from minisign secret key %016X", key.ID()))
	return write(path+".minisig", signature)
}

func (r *release) readKey() (minisign.PrivateKey, error) {
	text, err := os.ReadFile(r.key)
	if err != nil {
		return minisign.PrivateKey{}, err
	}
	if minisign.IsEncrypted(text) {
		return minisign.DecryptKey(r.password, text)
	}
	var key minisign.PrivateKey
	return key, key.UnmarshalText(text)
}
