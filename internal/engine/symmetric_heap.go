package engine

import (
	"context"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/deepep-go/deepep/internal/device"
	"github.com/deepep-go/deepep/internal/status"
)

// A transport may bring memory of its own, the symmetric heap (NVSHMEM). It starts, allocates and frees with all ranks
// together, and its waits have no limit. So each of these calls runs in a goroutine, which a start or a Destroy that
// reaches its deadline leaves running.

func (b *Buffer) symmetricHeapOptions() device.SymmetricHeapOptions {
	_, queuePairs := b.perNIC()
	return device.SymmetricHeapOptions{
		Rank: b.rank, Ranks: b.size, Peers: b.top.Peers, QPsPerNIC: max(1, queuePairs), Depth: b.opt.RDMA.Queues.Depth, MNNVL: b.opt.RDMA.MNNVL,
		Settings: b.opt.RDMA.Settings,
	}
}

// makeSymmetricHeapID makes the id by which all ranks attach. Rank 0 makes it; the others receive it with its
// fingerprint.
func (b *Buffer) makeSymmetricHeapID() (err error) {
	if b.opt.Library.HasTransportHeap() && b.rank == 0 {
		b.symmetricHeapID, err = b.dev.SymmetricHeapID(b.symmetricHeapOptions())
	}
	return err
}

// shareSymmetricHeap attaches by rank 0's id and allocates the block from the symmetric heap.
func (b *Buffer) shareSymmetricHeap(ctx context.Context, exchange device.Exchange) error {
	all, err := exchange(ctx, b.symmetricHeapID, nil)
	if err != nil {
		return err
	}
	b.symmetricHeap, err = bounded(ctx, "the start of the transport", func() (*device.SymmetricHeap, error) {
		return b.dev.Attach(b.symmetricHeapOptions(), all[0].Blob)
	})
	if err = b.agree(ctx, "transport", err); err != nil {
		return err
	}
	b.log.Info("transport: " + b.symmetricHeap.Version)
	if b.symmetricHeap.Note != "" {
		b.log.Warn("transport: " + b.symmetricHeap.Note)
	}
	end := b.building.to(stageMemory)
	b.block, err = bounded(ctx, "the allocation of the transport's memory", func() (*device.Symmetric, error) {
		return b.symmetricHeap.Share(b.rank, b.regions.Total)
	})
	end()
	if err == nil {
		err = b.checkSymmetricHeap()
	}
	return b.agree(ctx, "heap", err)
}

// checkSymmetricHeap refuses a node whose ranks do not all reach each other by loads and stores.
func (b *Buffer) checkSymmetricHeap() error {
	for rank, address := range b.block.Addresses {
		if address == 0 && !b.top.Remote(b.rank, rank) {
			return status.Errorf(status.Unsupported, "num_nvl_peers = %d puts %s into this rank's node, but loads and stores do not reach its memory",
				b.top.Peers, b.members.Describe(rank))
		}
	}
	return nil
}

// outcome is what a function returned in a goroutine of its own.
type outcome[T any] struct {
	value T
	err   error
}

// inBackground runs f in a goroutine and returns where its outcome arrives. A panic becomes an error: unrecovered it
// would end the host process.
func inBackground[T any](what string, f func() (T, error)) <-chan outcome[T] {
	done := make(chan outcome[T], 1)
	go func() {
		var o outcome[T]
		defer func() {
			if p := recover(); p != nil {
				o.err = status.Errorf(status.Internal, "panic in %s: %v\n%s", what, p, debug.Stack())
			}
			done <- o
		}()
		o.value, o.err = f()
	}()
	return done
}

// bounded waits for f until ctx ends. After that f's outcome is lost.
func bounded[T any](ctx context.Context, what string, f func() (T, error)) (T, error) {
	select {
	case o := <-inBackground(what, f):
		return o.value, o.err
	case <-ctx.Done():
		var none T
		return none, status.Errorf(status.Timeout, "%s did not end in time: it waits for all ranks", what)
	}
}

// symmetricFreeGrace is how long Destroy waits for the other ranks to free theirs. After it the goroutine goes on
// alone.
const symmetricFreeGrace = 400 * time.Millisecond

// symmetricFreesLeft counts the releases that have begun and not ended, of all buffers of the process.
var symmetricFreesLeft atomic.Int32

// AwaitFrees waits up to limit for the memory that Destroys have left to be freed. False: some is not free yet.
func AwaitFrees(limit time.Duration) bool {
	return within(limit, func() bool { return symmetricFreesLeft.Load() == 0 })
}

// symmetricFreeTurn keeps what a process frees in the order of its Destroys, which is the same on all ranks.
var symmetricFreeTurn sync.Mutex

// freeSymmetricHeap frees the block and detaches, together with all ranks. If one is dead that can never end, so the
// memory stays.
func (b *Buffer) freeSymmetricHeap() error {
	for rank := range b.size {
		if state, _ := b.members.State(rank); state == PeerDead {
			b.log.Warn("the transport's memory stays until the process ends: all ranks free theirs together, and " + b.members.Describe(rank) + " is dead")
			return nil
		}
	}
	symmetricFreesLeft.Add(1)
	done := inBackground("the release of the transport's memory", func() (struct{}, error) {
		defer symmetricFreesLeft.Add(-1)
		symmetricFreeTurn.Lock()
		defer symmetricFreeTurn.Unlock()
		err := b.block.Release()
		status.Keep(&err, b.symmetricHeap.Detach())
		return struct{}{}, err
	})
	select {
	case o := <-done:
		return o.err
	case <-time.After(symmetricFreeGrace):
		b.log.Info("the transport's memory is freed once all ranks have destroyed the buffer")
		return nil
	}
}
