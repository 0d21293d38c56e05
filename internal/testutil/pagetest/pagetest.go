// Package pagetest writes to statistics pages as a kernel library does, so that tests of readers need no kernels. A
// page has one writer; there are no locks and no checks.
package pagetest

import (
	"math/bits"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/deepep-go/deepep/internal/abi"
)

// Call is a call that Record counts.
type Call struct {
	Op       uint32
	Start    uint64
	Duration time.Duration
	Error    bool
	BytesTo  []uint64
	WaitFor  []time.Duration
}

// Record counts a call in a page.
func Record(page []byte, c Call) {
	h := (*abi.StatsPage)(unsafe.Pointer(&page[0]))
	o := &h.Ops[c.Op]
	ns := uint64(c.Duration)
	for j, n := range c.BytesTo {
		add(word(page, h, 0, c.Op, j), n)
		add(&o.Bytes, n)
	}
	for j, d := range c.WaitFor {
		add(word(page, h, 1, c.Op, j), uint64(d))
		add(&o.WaitNS, uint64(d))
	}
	add(&o.TotalNS, ns)
	add(&o.Hist[Bucket(ns)], 1)
	if c.Error {
		add(&o.Errors, 1)
	}
	atomic.StoreUint64(&o.MaxNS, max(o.MaxNS, ns))
	atomic.StoreUint64(&o.LastStartNS, c.Start)
	atomic.StoreUint64(&o.LastNS, ns)
	if h.TraceLen > 0 {
		at := h.TraceOffset + h.TraceNext%h.TraceLen*uint64(unsafe.Sizeof(abi.TraceRecord{}))
		for i, w := range []uint64{o.Calls + 1, c.Start, ns, uint64(c.Op) | abi.PhaseBoth<<32} {
			atomic.StoreUint64((*uint64)(unsafe.Pointer(&page[at+8*uint64(i)])), w)
		}
		add(&h.TraceNext, 1)
	}
	add(&o.Calls, 1)
}

func add(p *uint64, n uint64) { atomic.StoreUint64(p, *p+n) }

func word(page []byte, h *abi.StatsPage, table uint64, op uint32, peer int) *uint64 {
	at := h.PeersOffset + 8*((table*abi.NumOps+uint64(op))*uint64(h.NumRanks)+uint64(peer))
	return (*uint64)(unsafe.Pointer(&page[at]))
}

// Bucket is the histogram's bucket of a duration, as kernels.h defines it.
func Bucket(ns uint64) int {
	if ns < 512 {
		return 0
	}
	octave := bits.Len64(ns/512) - 1
	return min(4*octave+int(ns>>(octave+7)&3), abi.HistBuckets-1)
}
