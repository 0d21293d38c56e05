package engine

import (
	"context"

	"github.com/deepep-go/deepep/core/internal/device"
)

// Peer is what a buffer needs to know of a rank of its group.
type Peer struct {
	SameHost    bool // memory can be shared
	SameProcess bool // a goroutine's rank of this process
}

// PeerState is what is known of a rank's life.
type PeerState int

// States of a peer. A stopped process is late, not dead.
const (
	PeerAlive PeerState = iota
	PeerStopped
	PeerGone // left in good order: it destroyed its group
	PeerDead
)

// LastCall is what a rank publishes of its newest call, for the others' errors.
type LastCall struct {
	Op, Phase uint32
	Number    uint64
	Buffer    uint32
}

// Members is the group as a buffer sees it. Everything may be called from any goroutine.
type Members interface {
	Rank() int
	Size() int
	Peer(rank int) Peer
	// Join waits until the ranks are connected; nothing below may be called before.
	Join(ctx context.Context) error
	// Exchange is collective; for one tag all ranks call it in the same order.
	Exchange(ctx context.Context, tag string, blob []byte, fds []int) ([]device.Message, error)
	// Publish makes the newest call known; it must not block.
	Publish(LastCall)
	// Describe names a rank for people: "rank 2 (host h, pid 123, last call combine #9)".
	Describe(rank int) string
	// State tells how a rank is; detail says more where more is known ("killed by signal 9").
	State(rank int) (state PeerState, detail string)
}
