package plan

import (
	"strings"
	"testing"

	"github.com/deepep-go/deepep/internal/status"
)

// V2.1's get_buffer_size_hint, computed by hand from its description: bytes of a token of dispatch (row, scales, 12 K + 4)
// and of combine (row, 8 K), the larger of N × M and min(N, K) × M of them, up to 2 MiB.
func TestElasticBytes(t *testing.T) {
	for _, c := range []struct {
		ranks int
		e     Elastic
		want  uint64
	}{
		{4, Elastic{NumMaxTokens: 4096, Hidden: 7168, NumTopK: 8}, 226 << 20},                             // 4 × 4096 × 14464
		{4, Elastic{NumMaxTokens: 4096, Hidden: 7168, NumTopK: 8, FP8: true}, 226 << 20},                  // combine: 4 × 4096 × 14400
		{8, Elastic{NumMaxTokens: 128, Hidden: 7168}, 16 << 20},                                           // 8 × 128 × 14752
		{2, Elastic{NumMaxTokens: 100, Hidden: 48, NumTopK: 3}, 2 << 20},                                  // the unit
		{4, Elastic{NumMaxTokens: 4096, Hidden: 7168, NumTopK: 8, FP8: true, Unreduced: true}, 450 << 20}, // 8 × 4096 × 14400
		{4, Elastic{NumBytes: 6 << 20}, 6 << 20},
	} {
		got, err := c.e.Bytes(c.ranks)
		if err != nil || got != c.want {
			t.Errorf("%+v of %d ranks: %d MiB, %v; want %d", c.e, c.ranks, got>>20, err, c.want>>20)
		}
	}
}

// Staging and the row segment are the buffer and at most what V2.1 has beside it; the segment holds FP8 rows; a hint never
// falls when a number grows.
func TestElasticRegions(t *testing.T) {
	for _, ranks := range []int{1, 2, 4, 12, 16} {
		topology, err := HintTopology(ranks, 0)
		if err != nil {
			t.Fatal(err)
		}
		before := uint64(0)
		for tokens := 1; tokens <= 1<<14; tokens *= 4 {
			r, err := Elastic{NumMaxTokens: tokens, Hidden: 2048, NumTopK: 6}.Regions(ranks, topology)
			beside := r.NVL + r.Rows - r.NumBytes
			if (beside != 0 && beside != besideNumBytes) || (r.Rows != 0) != (beside != 0) {
				t.Errorf("%d ranks, %d tokens: %+v", ranks, tokens, r)
			}
			if r.Rows != 0 && r.Rows < min(uint64(ranks*tokens*2048), r.NumBytes/2-ElasticUnit) {
				t.Errorf("%d ranks, %d tokens: the segment is small: %+v", ranks, tokens, r)
			}
			if err != nil || r.NVL == 0 || r.NumBytes%ElasticUnit != 0 || r.NumBytes < before {
				t.Errorf("%d ranks, %d tokens: %+v, %v, after %d bytes", ranks, tokens, r, err, before)
			}
			if (r.RDMA > 0) != (ranks > 8) {
				t.Errorf("%d ranks: %d bytes between nodes", ranks, r.RDMA)
			}
			before = r.NumBytes
		}
	}
}

func TestElasticSMsAndQPs(t *testing.T) {
	four, two := Topology{4, 8}, Topology{4, 2}
	e := Elastic{NumMaxTokens: 4096, Hidden: 7168, NumTopK: 8}
	fp8 := e
	fp8.FP8 = true
	for _, c := range []struct {
		t                Topology
		e                Elastic
		capability, most int
		want             int
	}{
		{four, e, 90, 132, 24}, {four, fp8, 90, 132, 16}, {four, Elastic{NumTopK: 8}, 90, 132, 24}, {four, e, 90, 11, 10}, {four, e, 0, 0, 20}, {two, e, 90, 0, 20}, {four, e, 90, 2, 4},
	} {
		if got := c.e.SMs(c.t, c.capability, c.most, 4*4096*7168); got != c.want {
			t.Errorf("%+v: %d SMs", c, got)
		}
	}
	for _, c := range []struct {
		hybrid            bool
		allocated, sms    int
		wantHas, wantUsed int
	}{{false, 0, 4, 17, 4}, {false, 0, 40, 17, 9}, {false, 5, 40, 5, 5}, {true, 0, 4, 129, 65}, {true, 0, 20, 129, 129}} {
		has, used, err := ElasticQPs(c.hybrid, c.allocated, c.sms)
		if err != nil || has != c.wantHas || used != c.wantUsed {
			t.Errorf("%+v: %d and %d queue pairs, %v", c, has, used, err)
		}
	}
}

func TestElasticRefuses(t *testing.T) {
	good := Elastic{NumMaxTokens: 8, Hidden: 64}
	for name, change := range map[string]func(*Elastic){
		"num_max_tokens_per_rank": func(e *Elastic) { e.NumMaxTokens = 0 },
		"hidden":                  func(e *Elastic) { e.Hidden = 0 },
		"num_topk":                func(e *Elastic) { e.NumTopK = MaxTopK + 1 },
		"num_bytes":               func(e *Elastic) { e.NumBytes = 1 << 20 },
	} {
		bad := good
		change(&bad)
		_, err := bad.Bytes(2)
		if status.CodeOf(err) != status.InvalidArgument || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
