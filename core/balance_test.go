package core

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/deepep-go/deepep/internal/status"
)

// Experts' bytes come to the slots of their copies, and what was added to the copies comes back to the experts.
func TestCopiesOfExperts(t *testing.T) {
	for _, ranks := range []int{1, 3} {
		t.Run(fmt.Sprint(ranks), func(t *testing.T) {
			onRanks(t, ranks, BufferOptions{NumNVLBytes: 1 << 20}, (*member).balance)
		})
	}
}

func (m *member) balance() {
	const slots, local, words = 3, 2, 36
	mapping, experts, copies := make([]int32, m.size*slots), make([]float32, local*words), make([]float32, slots*words)
	for i := range mapping {
		mapping[i] = int32(i*5%(m.size*local+1)) - 1
	}
	weight := func(expert, word int) float32 { return float32(1000*expert + word) }
	for i := range experts {
		experts[i] = weight(m.rank*local+i/words, i%words)
	}
	a := BalanceArgs{NumTensors: 1, NumSlots: slots, NumLocalExperts: local, Mapping: address(m, mapping)}
	a.ExpertBytes[0], a.Copies[0], a.Experts[0] = 4*words, address(m, copies), address(m, experts)
	room := func(reduce bool) {
		bytes, err := m.BalanceWorkspace(&a, reduce)
		m.must(err)
		a.Workspace, a.WorkspaceBytes = address(m, make([]float64, bytes/8+1)), bytes
	}
	room(false)
	a.WorkspaceBytes--
	m.check(status.CodeOf(m.PrefetchWeights(&a, &Call{})) == status.InvalidArgument, "a workspace that is too small")
	a.WorkspaceBytes++
	a.Copies[0] = address(m, experts[words:])
	err := m.PrefetchWeights(&a, &Call{})
	m.check(status.CodeOf(err) == status.InvalidArgument && strings.Contains(err.Error(), "memory of experts[0]"), "copies that lie in the experts: %v", err)
	a.Copies[0] = address(m, copies)
	m.must(m.PrefetchWeights(&a, &Call{}))
	for i, got := range copies {
		want := float32(0)
		if expert := int(mapping[m.rank*slots+i/words]); expert >= 0 {
			want = weight(expert, i%words)
		}
		m.check(got == want, "word %d of slot %d: %v, want %v", i%words, i/words, got, want)
	}
	room(true)
	m.must(m.ReduceGrads(&a, &Call{}))
	for i, got := range experts {
		want := weight(m.rank*local+i/words, i%words)
		for _, expert := range mapping {
			if int(expert) == m.rank*local+i/words {
				want += weight(int(expert), i%words)
			}
		}
		m.check(got == want, "word %d of expert %d: %v, want %v", i%words, i/words, got, want)
	}
	if m.size == 1 {
		return
	}
	// Ranks that disagree get one error, though the call was several dispatches.
	if a.NumTensors = 2; m.rank == 1 {
		mapping[0] = (mapping[0]+2)%int32(local+1) - 1
	}
	a.ExpertBytes[1], a.Copies[1], a.Experts[1] = a.ExpertBytes[0], a.Copies[0], a.Experts[0]
	err = m.ReduceGrads(&a, &Call{})
	m.check(status.CodeOf(err) == status.InvalidArgument, "another mapping on rank 1: %v", err)
	m.must(m.Barrier(&Call{}))
	m.must(m.Check())
	// Their numbers are compared, also one that no rank needs to move the rows.
	a.NumTensors = 1
	if m.rank == 1 {
		a.NumLocalExperts++
		experts = append(experts, make([]float32, words)...)
		a.Experts[0] = address(m, experts)
	}
	clear(mapping)
	before := slices.Clone(experts)
	err = m.ReduceGrads(&a, &Call{})
	m.check(status.CodeOf(err) == status.Mismatch && strings.Contains(err.Error(), "num_local_experts"), "other experts on rank 1: %v", err)
	m.check(slices.Equal(experts, before), "a refused call has added")
	m.must(m.Barrier(&Call{}))
	m.must(m.Check())
}
