package core

import (
	"context"

	"github.com/deepep-go/deepep/core/internal/bootstrap"
	"github.com/deepep-go/deepep/core/internal/device"
	"github.com/deepep-go/deepep/core/internal/engine"
)

// link is the ranks joined: their channel, and the watch over who is alive.
type link struct {
	channel *bootstrap.Channel
	stop    func()
}

func (l *link) open(ctx context.Context, pending *bootstrap.Pending, g *Group) (err error) {
	if l.channel, err = pending.Connect(ctx); err != nil {
		return err
	}
	l.stop = l.channel.OnChange(func(rank int) {
		s := l.channel.State(rank)
		g.each(func(b *engine.Buffer) {
			if s.Ended {
				b.PeerDied(rank)
			} else if s.Left {
				b.PeerLeft(rank)
			}
		})
	})
	return nil
}

func (l *link) close() error {
	if l.channel == nil {
		return nil
	}
	l.stop()
	return l.channel.Close()
}

// members is the group as the engine sees it.
type members struct{ g *Group }

func (m *members) Rank() int { return m.g.rank }
func (m *members) Size() int { return m.g.size }

// Join waits for the start of the group, which a background buffer may come before.
func (m *members) Join(ctx context.Context) error { return m.g.wait(ctx) }

func (m *members) Exchange(ctx context.Context, tag string, blob []byte, fds []int) ([]device.Message, error) {
	got, err := m.g.link.channel.Exchange(ctx, tag, blob, fds)
	if err != nil {
		return nil, err
	}
	all := make([]device.Message, len(got))
	for i, one := range got {
		all[i] = device.Message{Blob: one.Blob, FDs: one.FDs}
	}
	return all, nil
}

func (m *members) Peer(rank int) engine.Peer {
	p := m.g.link.channel.Peers()[rank]
	return engine.Peer{SameHost: p.SameHost, SameProcess: p.SameProcess}
}

func (m *members) Publish(engine.LastCall) {}

func (m *members) Describe(rank int) string { return m.g.link.channel.Peers()[rank].String() }

func (m *members) State(rank int) (engine.PeerState, string) {
	s := m.g.link.channel.State(rank)
	switch {
	case s.Left:
		return engine.PeerGone, ""
	case s.Ended:
		return engine.PeerDead, ""
	}
	return engine.PeerAlive, ""
}
