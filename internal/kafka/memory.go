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

// unpackedBytes limits the unpacked batches in memory, of all sources together. The last batch may exceed the limit.
const unpackedBytes = 256 << 20

// errMemory is returned instead of unpacking a batch while unpacked batches fill the memory. franz-go then returns the
// records before the batch, and fetches the batch again later.
var errMemory = errors.New("unpacked batches fill the memory")

// unpacker unpacks compressed batches, one at a time: a fetch of 8 MiB may hold batches of many partitions, each of
// which unpacks to up to batchBytes.
type unpacker struct {
	inner kgo.Decompressor // refuses batches above batchBytes
	limit int64

	bytes     atomic.Int64 // unpacked batches that are in memory
	mu        sync.Mutex
	collected time.Time
}

// sharedUnpacker returns the unpacker of the process. Brokers of several policies share it, because a reader that a new
// policy does not change keeps its client.
var sharedUnpacker = sync.OnceValues(func() (*unpacker, error) { return newUnpacker(unpackedBytes) })

func newUnpacker(limit int64) (*unpacker, error) {
	// Only a client of franz-go makes a decompressor with a limit. The client does not connect.
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

// Decompress implements kgo.Decompressor. A batch counts until the garbage collector frees it, because records refer to
// its memory until they are stored.
func (u *unpacker) Decompress(src []byte, codec kgo.CompressionCodecType) ([]byte, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.bytes.Load() >= u.limit {
		if time.Since(u.collected) > time.Second { // collect, or batches whose records are stored would still count
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
