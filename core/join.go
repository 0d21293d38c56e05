package core

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/deepep-go/deepep/internal/bootstrap"
	"github.com/deepep-go/deepep/internal/device"
	"github.com/deepep-go/deepep/internal/env"
	"github.com/deepep-go/deepep/internal/status"
)

// JoinOptions describe a process that wants to become a rank of a buffer's group.
type JoinOptions struct {
	Key     string        // Buffer.JoinKey of any member
	Rank    int           // the lost rank whose place it asks for; -1: any
	Engine  string        // of the buffer to come: it is loaded, and its device opened, before the process asks
	Device  int           // ordinal; -1: the current one
	Timeout time.Duration // of the wait for a regroup; 0: DEEPEP_FIRST_TIMEOUT_MS
}

// JoinGroup waits until members of this host take the process into their group by Buffer.Regroup, which ends when this
// process makes its buffer in the group that JoinGroup returns: it calls NewBuffer at once, with the options of the
// members' buffer. Errors: ErrTimeout if no member listens, or none regroups in time; those of NewGroup.
func JoinGroup(ctx context.Context, o JoinOptions) (*Group, error) {
	s, err := env.Current()
	if err != nil {
		return nil, err
	}
	if o.Key == "" || strings.ContainsFunc(o.Key, func(c rune) bool { return !strings.ContainsRune(keyLetters, c) }) || len(o.Key) > maxKey {
		return nil, status.InvalidArg("join", strconv.Quote(o.Key), "the join_key of a member's buffer")
	}
	if o.Rank < -1 {
		return nil, status.InvalidArg("rank", o.Rank, "a lost rank's number, or -1 (any)")
	}
	limit, err := s.StartLimit(o.Timeout)
	if err != nil {
		return nil, err
	}
	library, name, err := chooseEngine(o.Engine, s)
	if err != nil {
		return nil, err
	}
	warm, err := device.Open(library, o.Device, isaOf(name, s))
	if err != nil {
		return nil, err
	}
	g, err := join(ctx, &o, limit, s)
	if err != nil {
		_ = warm.Release() // the first error counts
		return nil, err
	}
	g.warm = warm
	return g, nil
}

const (
	keyLetters = "0123456789abcdef-"
	maxKey     = 64
)

func join(ctx context.Context, o *JoinOptions, limit time.Duration, s env.Settings) (*Group, error) {
	candidate, err := bootstrap.NewCandidate((&Group{settings: s}).helloOptions())
	if err != nil {
		return nil, err
	}
	hello, err := candidate.Hello()
	if err != nil {
		_ = candidate.Close()
		return nil, status.Errorf(status.Internal, "hello: %w", err)
	}
	limited, done := context.WithTimeout(ctx, limit)
	defer done()
	blob, err := bootstrap.Knock(limited, o.Key, o.Rank, hello)
	var w welcome
	if err == nil {
		err = json.Unmarshal(blob, &w)
	}
	if err != nil {
		_ = candidate.Close()
		return nil, err
	}
	pending, err := candidate.Enter(w.Rank, w.Hellos)
	if err != nil {
		return nil, err
	}
	g, err := newGroup(w.Rank, len(w.Hellos), w.Peers, limit)
	if err != nil {
		_ = pending.Close()
		return nil, err
	}
	g.inherit(w.Heir)
	g.adopt(pending)
	return g, g.connect(limited, pending, false)
}

// joinKey is the key of a buffer by its number: the same on all ranks.
func (g *Group) joinKey(id uint32) string {
	if id == g.heir.ID && g.heir.Key != "" {
		return g.heir.Key
	}
	return fmt.Sprintf("%s-%d", g.name, id)
}

// JoinKey names the buffer to processes of this host and user that want to join its group (JoinGroup), and from now on
// lets this rank hear of them. It is the same on all ranks and stays with Regroup. Members call it before they may be
// needed: a process comes to whichever of them lives. Local.
func (b *Buffer) JoinKey() (string, error) {
	_, err := b.openDoor()
	return b.key, err
}

// PendingJoins lists the processes that wait at this rank to be let in, by the lost rank that each asks for, -1 for any.
// Ranks see them at different times; see AgreedJoins. Local.
func (b *Buffer) PendingJoins() ([]int, error) {
	door, err := b.openDoor()
	if err != nil {
		return nil, err
	}
	return wishes(door.Visitors()), nil
}

// AgreedJoins is PendingJoins of all ranks together: each of them gets the same list, so that all can regroup at the
// same step. Collective among the ranks that are alive; it takes a round trip of the library's channel.
func (b *Buffer) AgreedJoins(ctx context.Context) ([]int, error) {
	if err := b.live().WaitStart(); err != nil {
		return nil, err
	}
	door, err := b.openDoor()
	if err != nil {
		return nil, err
	}
	g := b.Group()
	r := regrouping{g: g}
	var alive []int
	for rank := range g.size {
		if r.alive(rank) {
			alive = append(alive, rank)
		}
	}
	blob, err := json.Marshal(door.Visitors())
	if err != nil {
		return nil, status.Errorf(status.Internal, "visitors: %w", err)
	}
	limited, done := context.WithTimeout(ctx, g.limit)
	defer done()
	got, err := g.link.channel.ExchangeAmong(limited, "joins/"+b.key, blob, alive, true)
	if err != nil {
		return nil, err
	}
	var all []bootstrap.Visitor
	for rank, m := range got {
		var some []bootstrap.Visitor
		if len(m.Blob) > 0 {
			if err := json.Unmarshal(m.Blob, &some); err != nil {
				return nil, status.Errorf(status.Mismatch, "rank %d sent no list of visitors: %w", rank, err)
			}
		}
		all = append(all, some...)
	}
	return wishes(all), nil
}

// LostRanks lists the ranks that have died or left, or whose place is empty, as far as this rank has heard. Local.
func (b *Buffer) LostRanks() ([]int, error) {
	if err := b.live().WaitStart(); err != nil {
		return nil, err
	}
	g := b.Group()
	r := regrouping{g: g}
	var lost []int
	for rank := range g.size {
		if rank != g.rank && !r.alive(rank) {
			lost = append(lost, rank)
		}
	}
	return lost, nil
}

func wishes(visitors []bootstrap.Visitor) []int {
	all := make([]int, len(visitors))
	for i, v := range visitors {
		all[i] = v.Rank
	}
	slices.Sort(all)
	return all
}

func (b *Buffer) openDoor() (*bootstrap.Door, error) {
	if err := b.live().WaitStart(); err != nil {
		return nil, err
	}
	b.doorMu.Lock()
	defer b.doorMu.Unlock()
	if b.closed {
		return nil, status.Errorf(status.InvalidState, "the buffer was destroyed")
	}
	if b.door != nil {
		return b.door, nil
	}
	var err error
	b.door, err = bootstrap.OpenDoor(b.key, b.Group().rank)
	return b.door, err
}

func (b *Buffer) closeDoor() {
	b.doorMu.Lock()
	door := b.door
	b.door, b.closed = nil, true
	b.doorMu.Unlock()
	if door != nil {
		_ = door.Close()
	}
}

// visitors are those at this rank's door, if it has opened one.
func (b *Buffer) visitors() []bootstrap.Visitor {
	b.doorMu.Lock()
	defer b.doorMu.Unlock()
	if b.door == nil {
		return nil
	}
	return b.door.Visitors()
}

// letIn admits a visitor, if it waits at this rank's door.
func (b *Buffer) letIn(id string, blob []byte) {
	b.doorMu.Lock()
	defer b.doorMu.Unlock()
	if b.door != nil {
		b.door.Admit(id, blob)
	}
}
