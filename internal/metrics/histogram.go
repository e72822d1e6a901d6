package metrics

import (
	"encoding/json"
	"math"
	"slices"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"google.golang.org/protobuf/proto"
)

const (
	// nativeSchema sets the width of the bins of dlq.counters. Each bin is 2^(1/8) times as wide as the previous one.
	nativeSchema  = 3
	binsPerDouble = 1 << nativeSchema
	// Powers of two, in seconds, that bound the classic buckets. The buckets begin at one second (firstBucket), or at 16
	// ms for times that are normally short (firstShortBucket), and end at 48 days (lastBucket). Every bin lies within one
	// classic bucket.
	firstBucket, firstShortBucket, lastBucket = 0, -6, 22
	// maxBin is above the bin of every time: 2^50 seconds.
	maxBin = 50 * binsPerDouble
	// zeroThreshold is the upper bound of the native histogram's zero bucket, as in client_golang.
	zeroThreshold = prometheus.DefNativeHistogramZeroThreshold
)

// binned are times of dlq.counters for one name and queue. Bin n counts the times above 2^((n-1)/8) and up to 2^(n/8)
// seconds. sum is the sum of all times in seconds.
type binned struct {
	bins map[int]float64
	sum  float64
}

// newBinned parses labels and values of dlq.counters.
func newBinned(labels []string, values []float64) binned {
	of := binned{bins: make(map[int]float64, len(labels))}
	for i, label := range labels {
		if label == "seconds" {
			of.sum = values[i]
			continue
		}
		n, err := strconv.Atoi(label)
		if err != nil || n < -maxBin || n > maxBin {
			continue // not a bin: skip it
		}
		of.bins[n] = values[i]
	}
	return of
}

// MarshalJSON implements json.Marshaler. It writes a list: the sum, the lowest n, and the counts of all bins from that
// n on.
func (b binned) MarshalJSON() ([]byte, error) {
	list := []float64{b.sum}
	if len(b.bins) > 0 {
		first, last := math.MaxInt, math.MinInt
		for n := range b.bins {
			first, last = min(first, n), max(last, n)
		}
		list = append(list, float64(first))
		for n := first; n <= last; n++ {
			list = append(list, b.bins[n])
		}
	}
	return json.Marshal(list)
}

// UnmarshalJSON implements json.Unmarshaler.
func (b *binned) UnmarshalJSON(raw []byte) error {
	var list []float64
	if err := json.Unmarshal(raw, &list); err != nil {
		return err
	}
	*b = binned{bins: map[int]float64{}}
	if len(list) > 0 {
		b.sum = list[0]
	}
	if len(list) > 1 {
		for i, entries := range list[2:] {
			if entries > 0 {
				b.bins[int(list[1])+i] = entries
			}
		}
	}
	return nil
}

// histogram is a Prometheus metric of binned times. It has classic and native buckets. The counts of both are exact.
type histogram struct {
	desc   *prometheus.Desc
	labels []*dto.LabelPair
	of     binned
	first  int // power of two of the first classic bucket
}

func newHistogram(desc *prometheus.Desc, first int, of binned, labels ...string) histogram {
	return histogram{desc, prometheus.MakeLabelPairs(desc, labels), of, first}
}

// Desc implements prometheus.Metric.
func (h histogram) Desc() *prometheus.Desc { return h.desc }

// Write implements prometheus.Metric.
func (h histogram) Write(out *dto.Metric) error {
	numbers := make([]int, 0, len(h.of.bins))
	var count uint64
	for n, entries := range h.of.bins {
		numbers = append(numbers, n)
		count += uint64(entries)
	}
	slices.Sort(numbers)
	made := &dto.Histogram{
		SampleCount: new(count), SampleSum: new(h.of.sum),
		Schema: proto.Int32(nativeSchema), ZeroThreshold: new(zeroThreshold), ZeroCount: proto.Uint64(0),
	}
	var below uint64
	next := 0
	for power := h.first; power <= lastBucket; power++ {
		for ; next < len(numbers) && numbers[next] <= power*binsPerDouble; next++ {
			below += uint64(h.of.bins[numbers[next]])
		}
		made.Bucket = append(made.Bucket, &dto.Bucket{UpperBound: new(math.Ldexp(1, power)), CumulativeCount: new(below)})
	}
	var before int64
	for i, n := range numbers {
		entries := int64(h.of.bins[n])
		switch {
		case i == 0:
			made.PositiveSpan = append(made.PositiveSpan, &dto.BucketSpan{Offset: new(int32(n)), Length: proto.Uint32(1)})
		case n == numbers[i-1]+1:
			last := made.GetPositiveSpan()[len(made.GetPositiveSpan())-1]
			last.Length = new(last.GetLength() + 1)
		default:
			made.PositiveSpan = append(made.PositiveSpan, &dto.BucketSpan{
				Offset: new(int32(n - numbers[i-1] - 1)), Length: proto.Uint32(1),
			})
		}
		made.PositiveDelta = append(made.PositiveDelta, entries-before)
		before = entries
	}
	if len(numbers) == 0 { // without a span, it would count as a classic histogram
		made.PositiveSpan = []*dto.BucketSpan{{Offset: proto.Int32(0), Length: proto.Uint32(0)}}
	}
	out.Label, out.Histogram = h.labels, made
	return nil
}
