package kafka

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

// unpackedBytes bounds the unpacked batches in memory of all sources. One more batch may exceed it.
const unpackedBytes = 256 << 20

// errMemory refuses to unpack a batch while there are too many in memory. franz-go then returns the records before the
// batch, and fetches the batch again later.
var errMemory = errors.New("unpacked batches fill the memory")

// unpacker unpacks compressed batches, one at a time. A fetch of 8 MiB may hold batches of many partitions that unpack
// to batchBytes each.
type unpacker struct {
	inner kgo.Decompressor // refuses batches above batchBytes
	limit int64

	bytes     atomic.Int64 // of unpacked batches that are in memory
	mu        sync.Mutex
	collected time.Time
}

// sharedUnpacker returns the unpacker of the process. A reader that a new policy does not change keeps the client of
// the earlier policy.
var sharedUnpacker = sync.OnceValues(func() (*unpacker, error) { return newUnpacker(unpackedBytes) })

func newUnpacker(limit int64) (*unpacker, error) {
	// franz-go has no other way to make a decompressor with a limit. The client does not connect.
	client, err := kgo.NewClient(kgo.MaxDecompressBatchBytes(batchBytes))
	if err != nil {
		return nil, err
	}
	defer client.Close()
	inner, ok := client.OptValue(kgo.WithDecompressor).(kgo.Decompressor)
	if !ok {
		return nil, fmt.Errorf("franz-go's decompressor is a %T", client.OptValue(kgo.WithDecompressor))
	}
	return &unpacker{inner: inner, limit: limit}, nil
}

// Decompress implements kgo.Decompressor. A batch counts until the garbage collector frees it: records refer to it
// until they are stored.
func (u *unpacker) Decompress(src []byte, codec kgo.CompressionCodecType) ([]byte, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.bytes.Load() >= u.limit {
		if time.Since(u.collected) > time.Second { // without a collection, batches that are stored would count
			runtime.GC()
			u.collected = time.Now()
		}
		return nil, errMemory
	}
	out, err := u.inner.Decompress(src, codec)
	if err != nil || codec == kgo.CodecNone || len(out) == 0 {
		return out, err
	}
	size := int64(cap(out))
	u.bytes.Add(size)
	runtime.AddCleanup(&out[0], func(size int64) { u.bytes.Add(-size) }, size)
	return out, nil
}
