package core

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/deepep-go/deepep/internal/bootstrap"
	"github.com/deepep-go/deepep/internal/device"
	"github.com/deepep-go/deepep/internal/engine"
	"github.com/deepep-go/deepep/internal/plan"
	"github.com/deepep-go/deepep/internal/status"
)

// RegroupOptions describe the group that a buffer goes on in. All its ranks that are alive pass the same.
type RegroupOptions struct {
	// Members are the ranks of the new group by their present numbers. One that is lost (dead, left, or left out before),
	// or with Renumber a number from the group's size on, stands for a process that waits to join.
	Members []int
	// Renumber gives each member its place in Members as its number; else the numbers stay, and a rank that is not among
	// Members stays as a masked place, which needs BufferOptions.Shrink.
	Renumber bool
	Timeout  time.Duration // 0: that of the group's start
}

// Regroup moves the buffer into a group of its present members that are alive and of processes that wait to join
// (JoinGroup), over the library's own channel; the Exchanger of the old group is not used. Collective among them. Calls
// that still run are aborted. Memory, the mappings of peers that stay, the communication stream, segments of the caller
// and events stay; flags, masks, statistics, tickets and calls in two steps begin anew. Group returns the new group,
// which ends with its last buffer.
//
// After an error (ErrMismatch if the members disagree, ErrTimeout with the ranks that are late, ErrPeerDead with one
// that died meanwhile, ErrInvalidState if no process waits for a lost rank's place) the buffer may be regrouped again;
// if the ranks had stopped its calls by then, calls are refused until that succeeds. ErrUnsupported where the kernel
// library's memory can neither drop nor add a rank (NVSHMEM).
func (b *Buffer) Regroup(ctx context.Context, o RegroupOptions) error {
	if !b.regrouping.TryLock() {
		return status.Errorf(status.InvalidState, "regroup: another thread is regrouping the buffer")
	}
	defer b.regrouping.Unlock()
	old := b.Group()
	if err := b.live().WaitStart(); err != nil {
		return err
	}
	if err := b.live().CanRegroup(); err != nil {
		return err
	}
	r, err := old.regrouping(b, &o)
	if err != nil {
		return err
	}
	limit := o.Timeout
	if limit == 0 {
		limit = old.limit
	}
	ctx, done := context.WithTimeout(ctx, limit)
	defer done()
	began := time.Now()
	g, err := r.meet(ctx)
	if err == nil {
		if err = b.move(ctx, g, r); err != nil {
			_ = g.link.close(err) // the first error counts
		}
	}
	if err != nil {
		old.link.channel.Withdraw(r.tag(), err) // the others then know that this rank has given up
		return fmt.Errorf("regroup: %w", err)
	}
	g.log.Info(fmt.Sprintf("regrouped: rank %d of %d is rank %d of %d, after %v", old.rank, old.size, g.rank, g.size, time.Since(began)), zap.Int("rank", g.rank))
	return nil
}

// regrouping is one rank's part of a regroup.
type regrouping struct {
	b      *Buffer
	g      *Group // of before
	o      *RegroupOptions
	order  []int  // by new rank: its number of before, which may be past the old group
	was    []int  // the same; -1: a process that joins
	absent []bool // by new rank: a masked place
	rank   int    // of this one, new
	hellos [][]byte
}

// regrouping checks the options. It asks no other rank.
func (g *Group) regrouping(b *Buffer, o *RegroupOptions) (*regrouping, error) {
	r := &regrouping{b: b, g: g, o: o, rank: -1}
	limit := g.size
	if o.Renumber {
		limit = plan.MaxRanks
	}
	for i, old := range o.Members {
		if old < 0 || old >= limit {
			return nil, status.InvalidArg("members", old, fmt.Sprintf("ranks from 0 to %d", limit-1))
		}
		if slices.Contains(o.Members[:i], old) {
			return nil, status.InvalidArg("members", fmt.Sprint(o.Members), "each rank once")
		}
	}
	if !slices.Contains(o.Members, g.rank) {
		return nil, status.InvalidArg("members", fmt.Sprint(o.Members), fmt.Sprintf("a list with this rank, %d", g.rank))
	}
	if o.Timeout < 0 {
		return nil, status.InvalidArg("timeout", o.Timeout, "0 (the default) or more")
	}
	if o.Renumber {
		r.was = slices.Clone(o.Members)
	} else {
		for old := range g.size {
			r.was = append(r.was, old)
		}
	}
	r.order = slices.Clone(r.was)
	r.absent = make([]bool, len(r.was))
	for rank, old := range r.was {
		r.absent[rank] = !slices.Contains(o.Members, old)
		if old == g.rank {
			r.rank = rank
		}
		if r.absent[rank] && !b.options.Shrink {
			return nil, status.InvalidArg("members", fmt.Sprint(o.Members), fmt.Sprintf("with kept numbers every rank from 0 to %d: "+
				"a masked place needs enable_shrink; or renumber", g.size-1))
		}
	}
	_, err := plan.NewTopology(len(r.was), g.topology.Peers)
	return r, err
}

// alive reports whether a rank of before takes part.
func (r *regrouping) alive(old int) bool {
	if old >= r.g.size {
		return false
	}
	state, _ := (&members{r.g}).State(old)
	return state == engine.PeerAlive
}

// proposal is what a rank says at the beginning of a regroup.
type proposal struct {
	Members  []int
	Renumber bool
	Hello    []byte
	Visitors []bootstrap.Visitor
}

func (p *proposal) text() string {
	return fmt.Sprintf("members = %v, renumber = %v", p.Members, p.Renumber)
}

// welcome is what a process learns that is let in.
type welcome struct {
	Rank   int
	Peers  int // of a node
	Hellos [][]byte
	Heir   heir
}

// meet agrees with the other members and connects them and the processes that join.
func (r *regrouping) meet(ctx context.Context) (*Group, error) {
	candidate, err := bootstrap.NewCandidate(r.g.helloOptions())
	if err != nil {
		return nil, err
	}
	proposals, held, stop, err := r.propose(ctx, candidate)
	if err == nil {
		defer stop()
		ctx = held
		err = r.fill(proposals)
	}
	if err != nil {
		_ = candidate.Close()
		return nil, err
	}
	pending, err := candidate.Enter(r.rank, r.hellos)
	if err != nil {
		return nil, err
	}
	g, err := newGroup(r.rank, len(r.was), r.g.topology.Peers, r.g.limit)
	if err != nil {
		_ = pending.Close()
		return nil, err
	}
	g.owned = true
	g.inherit(r.heir())
	g.adopt(pending)
	pending.Follows(func(rank int) (awaited int, waits bool) { // ranks that are still in propose wait, as this one does
		old := r.was[rank]
		if old < 0 {
			return -1, false
		}
		before := r.g.link.channel.Awaits(old)
		if before < 0 {
			return -1, false
		}
		return slices.Index(r.was, before), true
	})
	return g, g.connect(ctx, pending, false)
}

// heir is what the buffer's place in the new group is known by.
func (r *regrouping) heir() heir {
	h := heir{Key: r.b.key, ID: r.b.live().Number()}
	h.Maker, h.Generation = r.b.live().Origin()
	h.Control, h.Wire = r.b.live().OwnRegions()
	if len(r.was) != r.g.size {
		h.Generation++
		return h
	}
	for rank, old := range r.order {
		if old != rank {
			h.Generation++
			break
		}
	}
	return h
}

// bequeath fills in what the options of the buffer that takes the place have from it; those of others stay.
func (h *heir) bequeath(opt *engine.Options) {
	if opt.ID == h.ID {
		opt.Maker, opt.Generation, opt.MinControl, opt.MinWire = h.Maker, h.Generation, h.Control, h.Wire
	}
}

func (g *Group) inherit(h heir) { g.heir, g.made = h, h.ID-1 }

func (g *Group) helloOptions() bootstrap.HelloOptions {
	return bootstrap.HelloOptions{Version: versionText(), Interface: g.settings.Interface}
}

// propose gathers the ranks' proposals. held ends when one of them does not
// hold any more; the caller calls stop.
func (r *regrouping) propose(ctx context.Context, candidate *bootstrap.Candidate) (all []*proposal, held context.Context, stop func(), err error) {
	own := proposal{Members: r.o.Members, Renumber: r.o.Renumber, Visitors: r.b.visitors()}
	if own.Hello, err = candidate.Hello(); err != nil {
		return nil, nil, nil, status.Errorf(status.Internal, "hello: %w", err)
	}
	blob, err := json.Marshal(own)
	if err != nil {
		return nil, nil, nil, status.Errorf(status.Internal, "proposal: %w", err)
	}
	var alive []int
	for _, old := range r.o.Members {
		if r.alive(old) {
			alive = append(alive, old)
		}
	}
	all = make([]*proposal, r.g.size)
	agree := func(old int, post []byte) error {
		theirs := &proposal{}
		if err := json.Unmarshal(post, theirs); err != nil {
			return status.Errorf(status.Mismatch, "rank %d sent no proposal: %w", old, err)
		}
		if theirs.text() != own.text() {
			return status.Errorf(status.Mismatch, "ranks disagree: rank %d has %s; rank %d has %s", r.g.rank, own.text(), old, theirs.text())
		}
		all[old] = theirs
		return nil
	}
	channel := r.g.link.channel
	got, err := channel.Gather(ctx, r.tag(), blob, alive, agree)
	if err != nil {
		return nil, nil, nil, err
	}
	for _, old := range alive {
		if got[old].Lost {
			all[old] = nil
		}
	}
	held, stop = channel.WhileGathered(ctx, r.tag(), alive, got)
	return all, held, stop, nil
}

func (r *regrouping) tag() string { return "regroup/" + r.b.key }

// fill gives each place its process, and lets in those that join. All ranks come to the same result.
func (r *regrouping) fill(proposals []*proposal) error {
	var visitors []bootstrap.Visitor
	for _, p := range proposals {
		if p != nil {
			visitors = append(visitors, p.Visitors...)
		}
	}
	r.hellos = make([][]byte, len(r.was))
	joined := map[string]int{}
	var without []string
	for rank, old := range r.was {
		switch {
		case r.absent[rank]:
		case old < len(proposals) && proposals[old] != nil:
			r.hellos[rank] = proposals[old].Hello
		default:
			i := choose(visitors, old)
			if i < 0 {
				without = append(without, r.describe(old))
				continue
			}
			r.hellos[rank], joined[visitors[i].ID] = visitors[i].Hello, rank
			visitors = slices.Delete(visitors, i, i+1)
			r.was[rank] = -1
		}
	}
	if without != nil {
		return status.Errorf(status.InvalidState, "no process waits to join in the place of %s: leave it out of members, or try again later", strings.Join(without, ", "))
	}
	return r.admit(joined)
}

// describe names a rank of before that is lost, or a new place.
func (r *regrouping) describe(old int) string {
	if old < r.g.size {
		return (&members{r.g}).Describe(old)
	}
	return fmt.Sprintf("rank %d (new)", old)
}

// choose finds a visitor for a place: one that asks for it, else one that takes any.
func choose(visitors []bootstrap.Visitor, place int) int {
	for _, want := range []int{place, -1} {
		if i := slices.IndexFunc(visitors, func(v bootstrap.Visitor) bool { return v.Rank == want }); i >= 0 {
			return i
		}
	}
	return -1
}

func (r *regrouping) admit(joined map[string]int) error {
	for id, rank := range joined {
		blob, err := json.Marshal(welcome{Rank: rank, Peers: r.g.topology.Peers, Hellos: r.hellos, Heir: r.heir()})
		if err != nil {
			return status.Errorf(status.Internal, "welcome: %w", err)
		}
		r.b.letIn(id, blob)
	}
	return nil
}

// move makes the engine's buffer for the new group and puts it in the place of the old one.
func (b *Buffer) move(ctx context.Context, g *Group, r *regrouping) error {
	old := b.live()
	o := b.options
	o.Background, o.Preinitialize = false, false
	opt, err := g.options(&o, g.settings)
	if err != nil {
		return err
	}
	if opt.ID, err = g.enter(b); err != nil {
		return err
	}
	old.Inherit(&opt)
	g.heir.bequeath(&opt)
	opt.Succession = engine.Succession{From: old, Was: r.was, Fresh: r.strangers(), Commit: func(ctx context.Context, tag string, blob []byte) ([]device.Message, error) {
		everyone := make([]int, g.size)
		for rank := range everyone {
			everyone[rank] = rank
		}
		got, err := g.link.channel.ExchangeAmong(ctx, tag, blob, everyone, true)
		return messages(got), err
	}}
	made, err := engine.New(ctx, &members{g}, opt)
	if err != nil {
		return err
	}
	g.publish(b, made)
	b.group.Store(g)
	old.Succeeded(made)
	g.link.channel.Succeeded()
	made.ReadStates()
	err = old.Destroy()
	status.Keep(&err, r.g.forget(b))
	if err != nil { // the buffer works on in its new group
		g.log.Warn("regroup: "+err.Error(), zap.Int("rank", g.rank))
	}
	return nil
}

// strangers reports whether a rank lives that is left out: what it still runs may write to the others' memory.
func (r *regrouping) strangers() bool {
	for old := range r.g.size {
		if !slices.Contains(r.was, old) && r.alive(old) {
			return true
		}
		if i := slices.Index(r.was, old); i >= 0 && r.absent[i] && r.alive(old) {
			return true
		}
	}
	return false
}
