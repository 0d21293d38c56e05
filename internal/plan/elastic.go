package plan

import (
	"fmt"

	"github.com/deepep-go/deepep/internal/status"
)

// V2's numbers: what get_buffer_size_hint of V2.1 gives, and how a buffer of so many bytes is divided.
const (
	// ElasticUnit divides the bytes of a V2 buffer.
	ElasticUnit = 2 << 20

	maxElasticBytes = 1 << 62
	elasticTopK     = 32 // where num_topk is not known
	elasticRow      = 32 // rows and what travels with them begin on so many bytes
	elasticScales   = 32 // the fewest channels that share a scale
	elasticChoice   = 12 // bytes of a choice in a dispatch: index and weight; its source takes 4 more
	elasticWeight   = 8  // bytes of a choice in a combine

	// Staging is all of a small buffer, whose calls are short and often in graphs, where no row lies in the segment. The row
	// segment of a large one holds FP8 rows of a dispatch in the worst case; the rest is staging, which every combine
	// needs, and every dispatch whose rows have no place in the segment: expanded ones, and what a program keeps for a
	// backward pass. Staging too small makes both slow (RATIONALE.md).
	smallBuffer = 16 << 20
	// V2.1 has a workspace of 15 MiB beside num_bytes. Ours takes under 3 MiB of these, and staging the rest.
	besideNumBytes = 12 << 20

	// What V2 assumes of a buffer that was not told a shape.
	usualTokens, usualHidden = 4096, 7168
	// leastElasticSMs is V2's lower bound of get_theoretical_num_sms.
	leastElasticSMs = 4

	// Queue pairs of V2.1 without num_allocated_qps: in one domain, and across domains.
	directQPs, hybridQPs = 17, 129
	mostDirectQPs        = 9
	qpsPerSM             = 16
)

// Elastic describes a V2 buffer: its shape, or with NumBytes its size.
type Elastic struct {
	NumMaxTokens, Hidden int    // M and H; with NumBytes 0: not known
	NumTopK              int    // 0: 32
	FP8                  bool   // rows of one byte an element, with scales
	Unreduced            bool   // combine sends a row back for each choice
	NumBytes             uint64 // 0: for the shape
}

// ElasticRegions are the parts of a V2 buffer. NVL and Rows together are its NumBytes and, of a large one, at most
// besideNumBytes.
type ElasticRegions struct {
	NumBytes, NVL, RDMA, Rows uint64
}

// Bytes is get_buffer_size_hint: what V2.1 takes on one NVLink domain. A row segment of it holds one dispatch's rows.
func (e Elastic) Bytes(ranks int) (uint64, error) {
	if e.NumTopK < 0 || e.NumTopK > MaxTopK {
		return 0, status.InvalidArg("num_topk", e.NumTopK, fmt.Sprintf("0 to %d", MaxTopK))
	}
	least := 1
	if e.NumBytes != 0 {
		if e.NumBytes > maxElasticBytes || e.NumBytes%ElasticUnit != 0 {
			return 0, status.InvalidArg("num_bytes", e.NumBytes, fmt.Sprintf("a multiple of %d, at most 2^62", ElasticUnit))
		}
		least = 0
	}
	if e.NumMaxTokens < least || e.NumMaxTokens > maxTokens {
		return 0, status.InvalidArg("num_max_tokens_per_rank", e.NumMaxTokens, fmt.Sprintf("%d to %d", least, maxTokens))
	}
	if e.Hidden < least || e.Hidden > maxHiddenBytes {
		return 0, status.InvalidArg("hidden", e.Hidden, fmt.Sprintf("%d to %d", least, maxHiddenBytes))
	}
	if e.NumBytes != 0 {
		return e.NumBytes, nil
	}
	topK, hidden := uint64(e.topK()), uint64(e.Hidden)
	element, scales := uint64(bytesBF16), uint64(0)
	if e.FP8 {
		element, scales = 1, scaleBytes*align(hidden, elasticScales)/elasticScales
	}
	dispatch := align(element*hidden, elasticRow) + align(scales, elasticRow) + align(elasticChoice*topK+4, elasticRow)
	combine := align(bytesBF16*hidden, elasticRow) + align(elasticWeight*topK, elasticRow)
	returned := topK
	if !e.Unreduced {
		returned = min(uint64(ranks), topK)
	}
	return align(max(uint64(ranks)*dispatch, returned*combine)*uint64(e.NumMaxTokens), ElasticUnit), nil
}

// Regions divides the buffer of so many ranks into staging (NVL), what crosses nodes, and the row segment, which GPUs
// have. t may count the last node as full (HintTopology).
func (e Elastic) Regions(ranks int, t Topology) (r ElasticRegions, err error) {
	if r.NumBytes, err = e.Bytes(ranks); err != nil {
		return r, err
	}
	c, err := ConfigFor(KindDispatch, ranks)
	if err != nil {
		return r, err
	}
	row := bytesBF16 * int64(e.hidden())
	wanted, err := c.NVLBytes(row, t)
	if err != nil {
		return r, err
	}
	wanted = align(wanted, ElasticUnit)
	if r.NVL = r.NumBytes; r.NumBytes > smallBuffer {
		all := r.NumBytes + besideNumBytes
		rows := align(uint64(ranks)*uint64(e.tokens())*uint64(e.hidden()), ElasticUnit)
		r.NVL = min(all-min(rows, r.NumBytes/2/ElasticUnit*ElasticUnit), wanted)
		r.Rows = all - r.NVL
	}
	r.RDMA, err = c.RDMABytes(row, t)
	return r, err
}

// SMs is get_theoretical_num_sms: what dispatch or combine of the shape takes, at least 4, at most those of the device
// (0: not known). computeCapability 0: a device without SMs. segment: bytes for received rows that need no staging.
func (e Elastic) SMs(t Topology, computeCapability, ofDevice int, segment uint64) int {
	q := SMQuery{Topology: t, ComputeCapability: computeCapability, Tokens: e.tokens(), TopK: e.topK()}
	hidden, most := uint64(e.hidden()), 0
	for _, call := range []struct {
		kind           int
		bytes, inPlace uint64 // of a row; of what lies in the segment
	}{
		{KindDispatch, FP8RowBytes(hidden), hidden},
		{KindDispatch, bytesBF16 * hidden, bytesBF16 * hidden},
		{KindCombine, bytesBF16 * hidden, 0},
	} {
		if e.FP8 && call.kind == KindDispatch && call.inPlace > hidden {
			continue
		}
		q.Kind, q.RowBytes = call.kind, call.bytes
		q.Staged = segment < uint64(t.Ranks)*uint64(q.Tokens)*call.inPlace
		most = max(most, NumSMs(q))
	}
	if ofDevice > 0 && computeCapability > 0 {
		most = min(most, ofDevice)
	}
	return max(leastElasticSMs, most-most%2)
}

// ElasticQPs is get_theoretical_num_qps with the queue pairs that the buffer has: `allocated`, or without a number V2's
// default. hybrid: the logical domains are several.
func ElasticQPs(hybrid bool, allocated, numSMs int) (has, used int, err error) {
	if allocated < 0 {
		return 0, 0, status.InvalidArg("num_allocated_qps", allocated, "0 or more")
	}
	if numSMs < 0 {
		return 0, 0, status.InvalidArg("num_sms", numSMs, "0 or more")
	}
	has, used = directQPs, min(numSMs, mostDirectQPs)
	if hybrid {
		has, used = hybridQPs, qpsPerSM*numSMs+1
	}
	if allocated > 0 {
		has = allocated
	}
	return has, min(used, has), nil
}

func (e Elastic) topK() int {
	if e.NumTopK == 0 {
		return elasticTopK
	}
	return e.NumTopK
}

func (e Elastic) tokens() int {
	if e.NumMaxTokens == 0 {
		return usualTokens
	}
	return e.NumMaxTokens
}

func (e Elastic) hidden() int {
	if e.Hidden == 0 {
		return usualHidden
	}
	return e.Hidden
}
