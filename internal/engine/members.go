package engine

import (
	"context"

	"github.com/deepep-go/deepep/internal/device"
)

// Peer describes a rank of the group for a buffer.
type Peer struct {
	Absent      bool // no process has this place; it counts as dead
	SameHost    bool // memory can be shared
	SameProcess bool // the rank is a goroutine of this process
	Crowd       bool // of so many that memory is shared by addresses
}

// PeerState is whether a rank takes part.
type PeerState int

// States of a peer. A stopped process is alive, and late.
const (
	PeerAlive PeerState = iota
	PeerGone            // left in good order: it destroyed its group
	PeerDead
)

// LastCall is a rank's newest call, which it publishes for the other ranks' errors.
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
	// Tell sends a word to every other rank and does not wait; there the group calls Told.
	Tell(tag string, word []byte) error
	// Publish publishes this rank's newest call. It does not block.
	Publish(LastCall)
	// Called returns another rank's newest call, as far as this one knows.
	Called(rank int) LastCall
	// Describe names a rank for errors: "rank 2 (host h, pid 123, last call combine #9, heartbeat 0.1 s ago)".
	Describe(rank int) string
	// State returns a rank's state and how it was observed: "its process has ended".
	State(rank int) (state PeerState, detail string)
	// Awaits returns the rank that another one waits for in an Exchange, as it says; -1: it does not wait.
	Awaits(rank int) int
}
