package main

import (
	"bytes"
	"encoding/pem"
	"io"
	"path/filepath"
	"slices"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"golang.org/x/crypto/x509roots/fallback/bundle"
)

// imageUser is the user of the image. It is a number, because Kubernetes can only check a number for not being root.
const imageUser = 65532

// rootsNotice is the licence notice of the root certificates, which only the images contain.
const rootsNotice = "\nThe root certificates in /etc/ssl/certs are those of Mozilla, under the Mozilla Public License 2.0\n" +
	"(https://www.mozilla.org/MPL/2.0/), as golang.org/x/crypto/x509roots/fallback has them.\n"

// writeImage writes an archive with an OCI image layout, which contains the programs. docker, podman and skopeo can
// read it. The image has no time zones, because the program contains them (time/tzdata).
func (r *release) writeImage(programs []*program) error {
	base := []file{
		{path: "/etc/passwd", body: []byte("root:x:0:0:root:/:/sbin/nologin\n" +
			"dlqd:x:65532:65532:dlqd:/var/lib/dlqd:/sbin/nologin\n")},
		{path: "/etc/group", body: []byte("root:x:0:\ndlqd:x:65532:\n")},
		{path: "/etc/ssl/certs/ca-certificates.crt", body: certificates()},
		{path: "/etc/dlqd/"},
		{path: "/tmp/", mode: 0o1777},
		{path: "/var/lib/dlqd/", mode: 0o700, owner: imageUser},
	}
	below, err := r.layer(base)
	if err != nil {
		return err
	}
	licence, err := r.sourceFile("/usr/share/doc/dlqd/LICENSE", "LICENSE", 0)
	if err != nil {
		return err
	}
	index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	for _, p := range programs {
		top, err := r.layer([]file{
			{path: "/usr/bin/dlqd", body: p.body, mode: 0o755},
			licence,
			{path: "/usr/share/doc/dlqd/LICENSES", body: p.licences},
			{path: "/usr/share/doc/dlqd/NOTICE", body: append(slices.Clone(p.notice), rootsNotice...)},
		})
		if err != nil {
			return err
		}
		image, err := r.image(p, below, top)
		if err != nil {
			return err
		}
		index = mutate.AppendManifests(index, mutate.IndexAddendum{
			Add: image, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: p.os, Architecture: p.arch}},
		})
	}
	variant := programs[0].variant
	dir := filepath.Join(r.work, variant+"_image")
	at, err := layout.Write(dir, empty.Index)
	if err != nil {
		return err
	}
	if err := at.AppendIndex(index, layout.WithAnnotations(map[string]string{
		"org.opencontainers.image.ref.name": r.number(),
		"io.containerd.image.name":          "docker.io/dlqd/" + variant + ":" + r.number(),
	})); err != nil {
		return err
	}
	files, err := readTree(dir, "/")
	if err != nil {
		return err
	}
	var archive bytes.Buffer
	if err := tarOf(&archive, files, r.time); err != nil {
		return err
	}
	return write(filepath.Join(r.out, variant+"_"+r.number()+"_oci.tar"), archive.Bytes())
}

func (r *release) layer(files []file) (v1.Layer, error) {
	var archive bytes.Buffer
	if err := tarOf(&archive, files, r.time); err != nil {
		return nil, err
	}
	return tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(archive.Bytes())), nil
	}, tarball.WithMediaType(types.OCILayer), tarball.WithCompressedCaching)
}

func (r *release) image(p *program, layers ...v1.Layer) (v1.Image, error) {
	image := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	image, err := mutate.AppendLayers(image, layers...)
	if err != nil {
		return nil, err
	}
	config, err := image.ConfigFile()
	if err != nil {
		return nil, err
	}
	config = config.DeepCopy()
	config.OS, config.Architecture, config.Created = p.os, p.arch, v1.Time{Time: r.time}
	config.Config = v1.Config{
		User: "65532:65532", Entrypoint: []string{"/usr/bin/dlqd"}, Cmd: []string{"help"}, WorkingDir: "/var/lib/dlqd",
		Env: []string{"PATH=/usr/bin", "HOME=/var/lib/dlqd"},
		Labels: map[string]string{
			"org.opencontainers.image.title": "dlqd", "org.opencontainers.image.version": r.number(),
			"org.opencontainers.image.revision": r.commit, "org.opencontainers.image.licenses": "MIT",
			"org.opencontainers.image.source": "https://github.com/dlqd/dlqd",
		},
	}
	return mutate.ConfigFile(image, config)
}

// certificates returns the root certificates that Mozilla trusts, from the version of x509roots in go.mod. It omits
// roots with a constraint, for example those that Mozilla trusts only for certificates issued before a date. PEM cannot
// express a constraint.
func certificates() []byte {
	var all bytes.Buffer
	for root := range bundle.Roots() {
		if root.Constraint == nil {
			_ = pem.Encode(&all, &pem.Block{Type: "CERTIFICATE", Bytes: root.Certificate}) // writing to a buffer cannot fail
		}
	}
	return all.Bytes()
}
