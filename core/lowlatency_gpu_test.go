package core

import (
	"context"
	"testing"
)

// Calls in halves on the communication stream, in turn with whole ones, with fewer SMs than tokens.
func TestHalvesOnTheStreamOnEmulatedGPUs(t *testing.T) {
	emulatedGPUs(t)
	t.Setenv("DEEPEP_LL_TRANSFER", "stream")
	t.Setenv("DEEPEP_LL_SMS", "2")
	onRanks(t, 2, BufferOptions{Engine: EngineCUDA, LowLatency: true, NumRDMABytes: 1 << 22}, func(m *member) {
		m.check(m.Info().LLOnStream && !m.Info().LLCopies, "%+v", m.Info())
		done, err := m.NewEvent()
		m.must(err)
		defer func() { m.must(done.Destroy()) }()
		other, err := m.group.NewBuffer(context.Background(), BufferOptions{Engine: EngineCUDA, NumNVLBytes: 1 << 20})
		m.must(err)
		defer func() { m.must(other.Destroy()) }()
		call := &Call{Stream: other.Info().CommStream, Event: done} // the ranks have one default stream between them
		l := newLowLatency(&m.pin, m.rank, m.size, 3, 4, 128, 2, 4)
		for turn := range 6 {
			d, c := l.dispatch(SendRecv, false), l.combine(SendRecv, 0)
			if turn%2 == 0 {
				d.Phases, c.Phases = Send, Send
			}
			clear(l.recvX)
			clear(l.combined)
			m.must(m.LowLatencyDispatch(d, call))
			if d.Phases == Send {
				d.Phases = Recv
				m.must(m.LowLatencyDispatch(d, call))
			}
			m.must(done.Wait(-1))
			l.checkRows(m, false)
			m.must(m.LowLatencyCombine(c, call))
			if c.Phases == Send {
				c.Phases = Recv
				m.must(m.LowLatencyCombine(c, call))
			}
			m.must(done.Wait(-1))
			l.checkCombined(m)
		}
	})
}
