package engine

import (
	"context"

	"github.com/deepep-go/deepep/internal/device"
)

// Peer is what a buffer needs to know of a rank of its group.
type Peer struct {
	SameHost    bool // memory can be shared
	SameProcess bool // a goroutine's rank of this process
}

// PeerState is what is known of a rank's life.
type PeerState int

// States of a peer. A stopped process is alive, and late.
const (
	PeerAlive PeerState = iota
	PeerGone            // left in good order: it destroyed its group
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
	// Describe names a rank for people: "rank 2 (host h, pid 123, last call combine #9, heartbeat 0.1 s ago)".
	Describe(rank int) string
	// State tells how a rank is, and how that was seen: "its process has ended".
	State(rank int) (state PeerState, detail string)
}
