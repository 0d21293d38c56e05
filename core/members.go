package core

import (
	"context"

	"github.com/deepep-go/deepep/internal/bootstrap"
	"github.com/deepep-go/deepep/internal/device"
	"github.com/deepep-go/deepep/internal/engine"
	"github.com/deepep-go/deepep/internal/health"
	"github.com/deepep-go/deepep/internal/status"
)

// link is the connection to the other ranks: the channel, and the watch over which of them are alive.
type link struct {
	channel *bootstrap.Channel
	watch   *health.Watcher
	cancels []func()
}

func (l *link) open(ctx context.Context, pending *bootstrap.Pending, g *Group) (err error) {
	channel, err := pending.Connect(ctx)
	if err != nil {
		return err
	}
	watch, err := health.Start(ctx, channel, health.Options{Heartbeat: g.settings.Heartbeat, Log: g.log})
	if err != nil {
		_ = channel.CloseWith(err) // the first error counts
		return err
	}
	l.channel, l.watch = channel, watch
	channel.OnWord(g.told)
	l.cancels = []func(){
		watch.OnDeath(func(d health.Death) { g.each(func(b *engine.Buffer) { b.PeerDied(d.Rank) }) }),
		watch.OnLeft(func(rank int) { g.each(func(b *engine.Buffer) { b.PeerLeft(rank) }) }),
	}
	return nil
}

// close leaves the other ranks, which learn the cause if there is one.
func (l *link) close(cause error) error {
	if l.channel == nil {
		return nil
	}
	for _, cancel := range l.cancels {
		cancel()
	}
	err := l.watch.Close()
	status.Keep(&err, l.channel.CloseWith(cause))
	return err
}

// members is the group as the engine sees it.
type members struct{ g *Group }

func (m *members) Rank() int { return m.g.rank }
func (m *members) Size() int { return m.g.size }

// Join waits for the group's start, which may still run when a background buffer starts.
func (m *members) Join(ctx context.Context) error { return m.g.wait(ctx) }

func (m *members) Exchange(ctx context.Context, tag string, blob []byte, fds []int) ([]device.Message, error) {
	got, err := m.g.link.channel.Exchange(ctx, tag, blob, fds)
	if err != nil {
		return nil, err
	}
	return messages(got), nil
}

func messages(got []bootstrap.Message) []device.Message {
	all := make([]device.Message, len(got))
	for i, one := range got {
		all[i] = device.Message{Blob: one.Blob, FDs: one.FDs, Lost: one.Lost}
	}
	return all
}

func (m *members) Tell(tag string, word []byte) error { return m.g.link.channel.Tell(tag, word) }

func (m *members) Peer(rank int) engine.Peer {
	p := m.g.link.channel.Peers()[rank]
	return engine.Peer{Absent: p.Absent, SameHost: p.SameHost, SameProcess: p.SameProcess, Crowd: p.Crowd}
}

func (m *members) Publish(c engine.LastCall) {
	m.g.link.watch.SetLastCall(health.LastCall{Op: c.Op, Number: c.Number, Phase: c.Phase, Buffer: c.Buffer})
}

func (m *members) Called(rank int) engine.LastCall {
	c := m.g.link.watch.LastCallOf(rank)
	return engine.LastCall{Op: c.Op, Number: c.Number, Phase: c.Phase, Buffer: c.Buffer}
}

func (m *members) Describe(rank int) string { return m.g.link.watch.Describe(rank) }

func (m *members) Awaits(rank int) int { return m.g.link.channel.Awaits(rank) }

func (m *members) State(rank int) (engine.PeerState, string) {
	w := m.g.link.watch
	if m.g.link.channel.Peers()[rank].Absent {
		return engine.PeerDead, "regroup left it out"
	}
	if d, dead := w.Dead(rank); dead {
		return engine.PeerDead, d.How
	}
	if w.Left(rank) {
		return engine.PeerGone, ""
	}
	return engine.PeerAlive, ""
}
