package engine

import (
	"runtime/debug"
	"sync"
	"time"

	"github.com/deepep-go/deepep/internal/device"
	"github.com/deepep-go/deepep/internal/status"
)

// A transport with memory of its own (NVSHMEM) starts, allocates and frees with all ranks together, and knows no limit to
// its waits. So these calls have a goroutine each, which a start or a Destroy that has to end leaves behind.

func (b *Buffer) heapOptions() device.HeapOptions {
	q := &b.opt.RDMA.Queues
	return device.HeapOptions{Rank: b.rank, Ranks: b.size, Peers: b.top.Peers, QPs: q.PerPeer, Depth: q.Depth}
}

// makeHeapID is rank 0's part before all attach: the others get the id with its offer.
func (b *Buffer) makeHeapID() (err error) {
	if b.opt.Library.HasTransportHeap() && b.rank == 0 {
		b.heapID, err = b.dev.HeapID(b.heapOptions())
	}
	return err
}

// shareHeap attaches by rank 0's id and allocates the blocks.
func (b *Buffer) shareHeap(c ctx, exchange device.Exchange) error {
	all, err := exchange(c, b.heapID, nil)
	if err != nil {
		return err
	}
	b.heap, err = bounded(c, "the start of the transport", func() (*device.Heap, error) { return b.dev.Attach(b.heapOptions(), all[0].Blob) })
	if err = b.agree(c, "transport", err); err != nil {
		return err
	}
	b.log.Info("transport: " + b.heap.Version)
	if b.heap.Note != "" {
		b.log.Warn("transport: " + b.heap.Note)
	}
	b.block, err = bounded(c, "the allocation of the transport's memory", func() (*device.Symmetric, error) { return b.heap.Share(b.rank, b.regions.Total) })
	if err == nil {
		err = b.checkHeap()
	}
	return b.agree(c, "heap", err)
}

// checkHeap refuses a node whose ranks do not all reach each other by loads and stores.
func (b *Buffer) checkHeap() error {
	for rank, address := range b.block.Addresses {
		if address == 0 && !b.top.Remote(b.rank, rank) {
			return status.Errorf(status.Unsupported, "num_nvl_peers = %d puts %s into this rank's node, but loads and stores do not reach its memory",
				b.top.Peers, b.members.Describe(rank))
		}
	}
	return nil
}

// bounded runs what has no limit of its own. Left behind, its result is lost.
func bounded[T any](c ctx, what string, f func() (T, error)) (T, error) {
	type result struct {
		value T
		err   error
	}
	done := make(chan result, 1)
	go func() {
		var r result
		defer func() {
			if p := recover(); p != nil {
				r.err = status.Errorf(status.Internal, "panic in %s: %v\n%s", what, p, debug.Stack())
			}
			done <- r
		}()
		r.value, r.err = f()
	}()
	select {
	case r := <-done:
		return r.value, r.err
	case <-c.Done():
		var none T
		return none, status.Errorf(status.Timeout, "%s did not end in time: it waits for all ranks", what)
	}
}

// heapGrace is how long Destroy waits for the other ranks to free theirs; later ones are waited for behind its back.
const heapGrace = 400 * time.Millisecond

// heapTurn keeps what a process frees in the order of its Destroys, which is the same on all ranks.
var heapTurn sync.Mutex

// freeHeap gives block and attachment back, together with all ranks. With a dead one that can never end.
func (b *Buffer) freeHeap() error {
	for rank := range b.size {
		if state, _ := b.members.State(rank); state == PeerDead {
			b.log.Warn("the transport's memory stays until the process ends: all ranks free theirs together, and " + b.members.Describe(rank) + " is dead")
			return nil
		}
	}
	done := make(chan error, 1)
	go func() {
		heapTurn.Lock()
		defer heapTurn.Unlock()
		err := b.block.Release()
		status.Keep(&err, b.heap.Detach())
		done <- err
	}()
	select {
	case err := <-done:
		return err
	case <-time.After(heapGrace):
		b.log.Info("the transport's memory is freed once all ranks have destroyed the buffer")
		return nil
	}
}
