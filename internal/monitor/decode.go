package monitor

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"strings"
	"time"
	"unicode"

	"github.com/deepep-go/deepep/internal/abi"
)

// decode reads a page's bytes, which may hold anything.
func decode(b []byte) (*Stats, error) {
	if len(b) < headerBytes {
		return nil, fmt.Errorf("damaged: %d bytes, the header alone has %d", len(b), headerBytes)
	}
	var h abi.StatsPage
	if _, err := binary.Decode(b, binary.LittleEndian, &h); err != nil {
		return nil, fmt.Errorf("damaged: %w", err)
	}
	switch {
	case h.Magic == 0:
		return nil, errUnfinished
	case h.Magic != abi.StatsMagic:
		return nil, fmt.Errorf("damaged: begins with %#x, not with a page's mark", h.Magic)
	case h.Version != abi.StatsVersion:
		return nil, fmt.Errorf("page has version %d, this program reads %d", h.Version, abi.StatsVersion)
	}
	if err := check(&h, len(b)); err != nil {
		return nil, fmt.Errorf("damaged: %w", err)
	}
	s := &Stats{
		PID: int(h.PID), StartTime: h.StartTime, Created: time.Unix(0, int64(h.CreatedNS)),
		Rank: int(h.Rank), NumRanks: int(h.NumRanks), Buffer: h.BufferID, State: State(h.State),
		Group: clean(h.Group[:]), Host: clean(h.Host[:]), Engine: clean(h.Engine[:]), Device: clean(h.Device[:]),
		TraceTotal: h.TraceNext,
	}
	ranks := int(h.NumRanks)
	words := b[h.PeersOffset:]
	table := func(which, op int) []uint64 {
		row := make([]uint64, ranks)
		from := (which*abi.NumOps + op) * ranks * 8
		for i := range row {
			row[i] = binary.LittleEndian.Uint64(words[from+8*i:])
		}
		return row
	}
	for op := range s.Ops {
		s.Ops[op] = OpStats{OpStats: h.Ops[op], BytesTo: table(0, op), WaitFor: table(1, op)}
	}
	s.Trace = decodeTrace(&h, b)
	return s, nil
}

// check compares every offset and count with the size of the page.
func check(h *abi.StatsPage, size int) error {
	peers := 2 * abi.NumOps * 8 * uint64(uint32(h.NumRanks))
	switch {
	case uint64(h.TotalBytes) != uint64(size):
		return fmt.Errorf("says %d bytes, has %d", h.TotalBytes, size)
	case h.NumOps != abi.NumOps:
		return fmt.Errorf("%d operations, not %d", h.NumOps, abi.NumOps)
	case h.NumRanks < 1 || h.NumRanks > abi.MaxRanks:
		return fmt.Errorf("%d ranks, not 1 to %d", h.NumRanks, abi.MaxRanks)
	case h.Rank < 0 || h.Rank >= h.NumRanks:
		return fmt.Errorf("rank %d of %d", h.Rank, h.NumRanks)
	case h.PID == 0 || h.PID > 1<<30:
		return fmt.Errorf("pid %d", h.PID)
	case h.State < uint32(Live) || h.State > uint32(Destroyed):
		return fmt.Errorf("state %d", h.State)
	case !inside(h.PeersOffset, peers, size):
		return fmt.Errorf("table of peers at %d, outside the page", h.PeersOffset)
	case h.TraceLen > maxTrace || !inside(h.TraceOffset, h.TraceLen*uint64(recordBytes), size):
		return fmt.Errorf("trace of %d calls at %d, outside the page", h.TraceLen, h.TraceOffset)
	}
	return nil
}

// inside reports whether a part lies after the header and within the page.
func inside(offset, length uint64, size int) bool {
	return offset%8 == 0 && offset >= uint64(headerBytes) && offset <= uint64(size) && length <= uint64(size)-offset
}

// decodeTrace lists the calls in the ring, oldest first. A record that a kernel is overwriting may mix two calls;
// records that no call writes are dropped.
func decodeTrace(h *abi.StatsPage, b []byte) []Call {
	n := min(h.TraceNext, h.TraceLen)
	var calls []Call
	for i := h.TraceNext - n; i < h.TraceNext; i++ {
		at := h.TraceOffset + i%h.TraceLen*uint64(recordBytes)
		var r abi.TraceRecord
		if _, err := binary.Decode(b[at:], binary.LittleEndian, &r); err != nil || r.Op >= abi.NumOps {
			continue
		}
		calls = append(calls, Call{Op: Op(r.Op), Phase: r.Phase, Number: r.Call, Start: r.StartNS, Duration: time.Duration(min(r.DurationNS, 1<<62))})
	}
	return calls
}

// clean returns a field's text up to its first zero, printable.
func clean(field []byte) string {
	text, _, _ := bytes.Cut(field, []byte{0})
	return Printable(string(text))
}

// Printable replaces control characters, which a terminal would obey, and broken UTF-8: names of files and texts in
// pages may be another user's.
func Printable(text string) string {
	return strings.Map(func(r rune) rune {
		if r == unicode.ReplacementChar || !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, text)
}
