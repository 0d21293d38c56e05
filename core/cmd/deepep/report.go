package main

import (
	"time"

	"github.com/deepep-go/deepep/internal/monitor"
)

// The JSON form of a view.
type (
	hostReport struct {
		Time    time.Time      `json:"time"`
		Buffers []bufferReport `json:"buffers"`
		Skipped []string       `json:"skipped,omitempty"`
	}
	bufferReport struct {
		Group    string       `json:"group"`
		Buffer   uint32       `json:"buffer"`
		NumRanks int          `json:"num_ranks"`
		SlowRank *int         `json:"slow_rank"`    // null: none is slow
		WaitNS   [][]float64  `json:"mean_wait_ns"` // mean of a round
		Ranks    []rankReport `json:"ranks"`
	}
	rankReport struct {
		Rank    int        `json:"rank"`
		PID     int        `json:"pid"`
		Engine  string     `json:"engine"`
		Device  string     `json:"device"`
		State   string     `json:"state"`
		Dead    bool       `json:"dead"`
		Seconds float64    `json:"seconds"` // interval of the counts
		Ops     []opReport `json:"operations"`
	}
	opReport struct {
		Op      string   `json:"operation"`
		Calls   uint64   `json:"calls"`
		Errors  uint64   `json:"errors"`
		Bytes   []uint64 `json:"bytes_to"`
		Wait    []uint64 `json:"wait_ns_for"`
		TotalNS uint64   `json:"total_ns"`
		P50NS   int64    `json:"p50_ns"`
		P99NS   int64    `json:"p99_ns"`
		P999NS  int64    `json:"p999_ns"`
		MaxNS   uint64   `json:"max_ns"`
	}
)

func (h *hostView) report(now time.Time) hostReport {
	out := hostReport{Time: now, Buffers: []bufferReport{}}
	for i := range h.buffers {
		out.Buffers = append(out.Buffers, h.buffers[i].report())
	}
	for _, e := range h.damaged {
		out.Skipped = append(out.Skipped, e.Err.Error())
	}
	return out
}

func (b *bufferView) report() bufferReport {
	waits := b.waits()
	out := bufferReport{Group: b.group, Buffer: b.buffer, NumRanks: b.numRanks, WaitNS: waits.Mean}
	if slow, found := waits.Slowest(); found {
		out.SlowRank = &slow.Rank
	}
	for i := range b.ranks {
		out.Ranks = append(out.Ranks, b.ranks[i].report())
	}
	return out
}

func (r *rankView) report() rankReport {
	out := rankReport{Rank: r.Rank, PID: r.PID, Engine: r.Engine, Device: r.Device, State: r.State.String(), Dead: r.dead, Seconds: r.seconds, Ops: []opReport{}}
	for _, op := range monitor.Ops() {
		s := &r.delta[op]
		if r.Ops[op].Calls+r.Ops[op].Errors == 0 {
			continue
		}
		out.Ops = append(out.Ops, opReport{
			Op: op.String(), Calls: s.Calls, Errors: s.Errors, Bytes: s.BytesTo, Wait: s.WaitFor, TotalNS: s.TotalNS,
			P50NS: s.Percentile(0.5).Nanoseconds(), P99NS: s.Percentile(0.99).Nanoseconds(), P999NS: s.Percentile(0.999).Nanoseconds(), MaxNS: s.MaxNS,
		})
	}
	return out
}
