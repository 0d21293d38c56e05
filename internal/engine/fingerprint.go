package engine

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/deepep-go/deepep/internal/device"
	"github.com/deepep-go/deepep/internal/status"
)

// fingerprint is what a rank sends to the others when a buffer is made: what must be equal, its device, and its error
// if it cannot take part.
type fingerprint struct {
	Equal   [][2]string `json:"equal"` // name, value
	UUID    string      `json:"uuid"`
	Failure string      `json:"failure,omitempty"`
	Code    status.Code `json:"code,omitempty"`

	absent bool
}

func (b *Buffer) fingerprint(failure error) fingerprint {
	o := &b.opt
	f := fingerprint{Equal: [][2]string{
		{"engine", o.Library.Kind}, {"build of the kernel library", o.Library.Build},
		{"num_nvl_peers", strconv.Itoa(o.Topology.Peers)},
		{"num_nvl_bytes", strconv.FormatUint(o.NVLBytes, 10)}, {"num_rdma_bytes", strconv.FormatUint(o.RDMABytes, 10)},
		{"low_latency_mode", strconv.FormatBool(o.LowLatency)}, {"enable_shrink", strconv.FormatBool(o.Shrink)},
		{"allow_nvlink_for_low_latency_mode", strconv.FormatBool(!o.RDMA.Everywhere)},
		{"how low-latency calls in halves run (DEEPEP_LL_TRANSFER)", b.transferOfHalves().String()},
		{"whether copy engines move rows of normal mode (DEEPEP_NORMAL_TRANSFER)", strconv.FormatBool(b.copiesNormal())},
	}}
	if b.usesTransport() {
		nics, _ := b.perNIC()
		f.Equal = append(f.Equal, [2]string{"num_qps_per_rank", strconv.Itoa(o.RDMA.Queues.PerPeer)},
			[2]string{"the NICs of a rank (DEEPEP_NUM_NICS sets them)", strconv.Itoa(nics)},
			[2]string{"allow_mnnvl", strconv.FormatBool(o.RDMA.MNNVL)})
	}
	if b.dev != nil {
		f.UUID = fmt.Sprintf("%x", b.dev.UUID)
	}
	if failure != nil {
		f.Failure, f.Code = failure.Error(), status.CodeOf(failure)
	}
	return f
}

// compareAll finds the first difference among the ranks, and before that the first rank that failed.
func compareAll(all []fingerprint, describe func(rank int) string) error {
	for rank, f := range all {
		if f.Failure != "" {
			return status.Errorf(f.Code, "%s cannot make the buffer: %s", describe(rank), f.Failure)
		}
	}
	first := max(0, slices.IndexFunc(all, func(f fingerprint) bool { return !f.absent }))
	for i, field := range all[first].Equal {
		for rank, f := range all {
			if f.absent {
				continue
			}
			if i >= len(f.Equal) || f.Equal[i][0] != field[0] {
				return status.Errorf(status.Mismatch, "ranks %d and %d describe their buffers differently: different versions", first, rank)
			}
			if f.Equal[i][1] != field[1] {
				return status.Errorf(status.Mismatch, "ranks disagree on %s: %s", field[0], whoHasWhat(all, i))
			}
		}
	}
	return nil
}

// whoHasWhat lists each value once with its ranks: "rank 0 has 8, ranks 1, 2 have 16".
func whoHasWhat(all []fingerprint, field int) string {
	var parts []string
	seen := map[string]bool{}
	for _, f := range all {
		if f.absent {
			continue
		}
		value := f.Equal[field][1]
		if seen[value] {
			continue
		}
		seen[value] = true
		var ranks []string
		for rank, g := range all {
			if !g.absent && g.Equal[field][1] == value {
				ranks = append(ranks, strconv.Itoa(rank))
			}
		}
		if len(ranks) == 1 {
			parts = append(parts, fmt.Sprintf("rank %s has %s", ranks[0], value))
		} else {
			parts = append(parts, fmt.Sprintf("ranks %s have %s", strings.Join(ranks, ", "), value))
		}
	}
	return strings.Join(parts, ", ")
}

// withFingerprint puts a fingerprint before every message of an exchange, so that one exchange does for both.
// Ranks that are absent have none.
func withFingerprint(own fingerprint, exchange device.Exchange, absent func(rank int) bool, seen func([]fingerprint) error) device.Exchange {
	return func(ctx context.Context, blob []byte, fds []int) ([]device.Message, error) {
		text, err := json.Marshal(own)
		if err != nil {
			return nil, status.Errorf(status.Internal, "fingerprint: %w", err)
		}
		head := binary.LittleEndian.AppendUint32(nil, uint32(len(text)))
		all, err := exchange(ctx, append(append(head, text...), blob...), fds)
		if err != nil {
			return nil, err
		}
		prints := make([]fingerprint, len(all))
		for rank := range all {
			if prints[rank].absent = absent(rank); prints[rank].absent {
				continue
			}
			if all[rank].Blob, err = cut(all[rank].Blob, &prints[rank]); err != nil {
				return all, status.Errorf(status.Mismatch, "rank %d sent no fingerprint of its buffer: %w", rank, err)
			}
		}
		return all, seen(prints)
	}
}

// cut reads the fingerprint at the head of a message and returns what follows it.
func cut(blob []byte, f *fingerprint) ([]byte, error) {
	if len(blob) < 4 {
		return nil, fmt.Errorf("%d bytes", len(blob))
	}
	n := binary.LittleEndian.Uint32(blob)
	if uint64(n) > uint64(len(blob)-4) {
		return nil, fmt.Errorf("%d bytes announced, %d there", n, len(blob)-4)
	}
	return blob[4+n:], json.Unmarshal(blob[4:4+n], f)
}
