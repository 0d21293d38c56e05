package plan

import "github.com/deepep-go/deepep/internal/abi"

// HistogramBuckets is the number of buckets of a latency histogram; a power of two has four.
const HistogramBuckets = abi.HistBuckets

const (
	histogramBase = 512 // ns below which everything is in bucket 0
	histogramSub  = 4   // buckets for each doubling
)

// BucketEnd is the time in ns below which the durations of bucket b lie. The last bucket also has all longer ones.
func BucketEnd(b int) uint64 {
	b++
	return histogramBase << (b / histogramSub) * uint64(histogramSub+b%histogramSub) / histogramSub
}

// Percentile is an upper bound in ns for the given share (0 to 1) of the durations counted; 0 if there are none.
// longest is the longest duration, which bounds every percentile.
func Percentile(histogram *[HistogramBuckets]uint64, share float64, longest uint64) uint64 {
	var total uint64
	for _, n := range histogram {
		total += n
	}
	if total == 0 {
		return 0
	}
	wanted := max(1, uint64(share*float64(total)+0.5))
	var seen uint64
	for b, n := range histogram {
		if seen += n; seen >= wanted {
			if b == HistogramBuckets-1 {
				return longest
			}
			return min(BucketEnd(b), longest)
		}
	}
	return longest
}
