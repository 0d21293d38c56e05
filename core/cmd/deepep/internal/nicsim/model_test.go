package nicsim

import (
	"slices"
	"testing"

	"github.com/deepep-go/deepep/internal/plan"
)

// script is a workload whose messages are all posted at the beginning.
type script struct{ finish []Time }

func (s *script) arrived(m *machine, i int32)        { s.finish[i] = m.now }
func (s *script) timer(_ *machine, _ int32, _ int32) {}

// sent is an RDMA message of a script.
type sent struct {
	src, dst int
	queue    int32
	bytes    int64
	flag     bool
}

// scripted runs messages between ranks of different nodes and returns their arrival times.
func scripted(t *testing.T, hw Hardware, ranks int, list ...sent) ([]Time, *machine) {
	t.Helper()
	m := newMachine(&hw, &Job{Topology: plan.Topology{Ranks: ranks, Peers: 1}})
	s := &script{make([]Time, len(list))}
	m.work = s
	for _, one := range list {
		i := m.add(one.src, one.dst, m.queue(one.src, one.queue), one.bytes, none)
		m.messages[i].flag = one.flag
		m.nics[one.src].posts = append(m.nics[one.src].posts, i)
	}
	m.sortQueues()
	for r := range m.nics {
		if len(m.nics[r].posts) > 0 {
			m.events.push(hw.Post, rankPost, int32(r), 0)
		}
	}
	m.run()
	if err := m.audit(); err != nil {
		t.Fatal(err)
	}
	return s.finish, m
}

// plain is hardware for calculations by hand: no headers, one rate, all messages posted at once.
func plain() Hardware {
	h := H800
	h.LinkRate, h.NICRate, h.Header, h.PostGap, h.Buffer, h.Grant = 50000, 50000, 0, 0, 0, 0
	return h
}

// One message takes the latencies of its path and its bytes at the slowest rate.
func TestOneMessage(t *testing.T) {
	for _, c := range []struct {
		name     string
		change   func(*Hardware)
		ranks    int
		bytes    int64
		hops     Time
		transfer Time
	}{
		{"same leaf", func(*Hardware) {}, 2, 8000, 2, 160 * Nanosecond},
		{"over a spine", func(h *Hardware) { h.LeafSize = 1 }, 2, 8000, 4, 160 * Nanosecond},
		{"NIC slower", func(h *Hardware) { h.NICRate = 25000 }, 2, 8000, 2, 320 * Nanosecond},
		{"PCIe slower", func(h *Hardware) { h.PCIeRate = 10000 }, 2, 8000, 2, 800 * Nanosecond},
		{"headers", func(h *Hardware) { h.Header = 50 }, 2, 8192, 2, duration(8292, 50000)},
		{"several packets", func(h *Hardware) { h.Segment = 1000 }, 2, 8000, 2, 160 * Nanosecond},
		{"arbitration", func(h *Hardware) { h.Grant = 5 * Microsecond }, 2, 8000, 2, 160 * Nanosecond}, // its turn was the last one's
		{"empty message", func(*Hardware) {}, 2, 0, 2, 0},
	} {
		h := plain()
		c.change(&h)
		got, _ := scripted(t, h, c.ranks, sent{src: 0, dst: 1, bytes: c.bytes})
		if want := h.Post + c.hops*h.Wire + h.Land + c.transfer; got[0] != want {
			t.Errorf("%s: %d ps, on paper %d", c.name, got[0], want)
		}
	}
}

// In an incast all messages share one link, for every size of buffers; its queue holds all but the one being sent.
func TestIncast(t *testing.T) {
	const senders, bytes = 12, 10000
	for _, buffer := range []int64{0, 16 << 10} {
		h := plain()
		h.Buffer = buffer
		var list []sent
		for s := range senders {
			list = append(list, sent{src: s + 1, dst: 0, bytes: bytes})
		}
		got, m := scripted(t, h, senders+1, list...)
		if want := h.Post + 2*h.Wire + h.Land + senders*duration(bytes, h.LinkRate); slices.Max(got) != want {
			t.Errorf("buffer %d: %d ps, on paper %d", buffer, slices.Max(got), want)
		}
		if down := m.links[m.net.hostDown]; down.largest < (senders-1)*bytes || down.largest > senders*bytes {
			t.Errorf("buffer %d: the queue had %d bytes", buffer, down.largest)
		}
	}
}

// In a ring, where every rank sends to the next one, no message delays another.
func TestRing(t *testing.T) {
	const ranks, messages, bytes = 8, 5, 20000
	h := plain()
	h.LeafSize, h.Routing = 2, Static
	var list []sent
	for r := range ranks {
		for range messages {
			list = append(list, sent{src: r, dst: (r + 1) % ranks, bytes: bytes})
		}
	}
	got, m := scripted(t, h, ranks, list...)
	want := h.Post + 4*h.Wire + h.Land + messages*duration(bytes, h.LinkRate)
	if slices.Max(got) != want {
		t.Errorf("%d ps, on paper %d", slices.Max(got), want)
	}
	for i := range m.links {
		if l := &m.links[i]; l.kind != hostUp && l.largest > bytes {
			t.Errorf("a queue of %d bytes", l.largest)
		}
	}
}

// Three queue pairs of two messages each, posted at once, are served in the order of the NIC's policy.
func TestTurns(t *testing.T) {
	list := []sent{
		{0, 1, 2, 1000, false}, {0, 1, 2, 1000, false}, {0, 1, 0, 1000, false}, {0, 1, 0, 1000, false}, {0, 1, 1, 1000, false}, {0, 1, 1, 1000, false},
	}
	for _, c := range []struct {
		name   string
		change func(*Hardware)
		order  []int // of the list's messages
	}{
		{"in turn", func(*Hardware) {}, []int{2, 4, 0, 3, 5, 1}},
		{"until empty", func(h *Hardware) { h.Turn = 0 }, []int{2, 3, 4, 5, 0, 1}},
		{"lowest first", func(h *Hardware) { h.LowestFirst = true }, []int{2, 3, 4, 5, 0, 1}},
		{"one after the other", func(h *Hardware) { h.PostGap = Nanosecond }, []int{0, 2, 4, 1, 3, 5}},
	} {
		h := plain()
		c.change(&h)
		got, _ := scripted(t, h, 2, list...)
		order := []int{0, 1, 2, 3, 4, 5}
		slices.SortFunc(order, func(a, b int) int { return int(got[a] - got[b]) })
		if !slices.Equal(order, c.order) {
			t.Errorf("%s: %v, want %v", c.name, order, c.order)
		}
	}
}

// Two queue pairs with a message each take turns of Turn bytes.
func TestTurnsInsideMessages(t *testing.T) {
	for turn, first := range map[int64]int64{1000: 7000, 2000: 6000, 4000: 4000, 16000: 4000, 0: 4000} {
		h := plain()
		h.Segment, h.Turn = 1000, turn
		got, _ := scripted(t, h, 2, sent{0, 1, 0, 4000, false}, sent{0, 1, 1, 4000, false})
		start := h.Post + 2*h.Wire + h.Land
		if got[0] != start+duration(first, h.LinkRate) || got[1] != start+duration(8000, h.LinkRate) {
			t.Errorf("turns of %d: %d and %d ps", turn, got[0]-start, got[1]-start)
		}
	}
}

// With adaptive routing a flag waits for the acknowledgement of its own queue pair's messages alone.
func TestFence(t *testing.T) {
	list := []sent{{0, 1, 0, 50000, false}, {0, 1, 0, 8, true}, {0, 1, 1, 8, true}}
	h := plain()
	got, _ := scripted(t, h, 2, list...)
	if trip := h.Wire*4 + h.Land; got[1] < got[0]+trip || got[1] > got[0]+trip+Nanosecond {
		t.Errorf("the flag came %d ps after its data, a round trip is %d", got[1]-got[0], trip)
	}
	if got[2] > got[0]+Nanosecond {
		t.Errorf("the other queue pair's flag waited as well: %d, data %d", got[2], got[0])
	}
	h.Routing = Static
	if got, _ = scripted(t, h, 2, list...); got[1] > got[0]+Nanosecond {
		t.Errorf("with one path the flag came %d ps after its data", got[1]-got[0])
	}
}

// A packet for a busy port delays the next one if buffers are small, and does not if they are large.
func TestHeadOfLine(t *testing.T) {
	var list []sent
	for s := range 8 {
		list = append(list, sent{src: s + 2, dst: 0, bytes: 16000}, sent{src: s + 2, dst: 0, bytes: 16000, queue: 1}, sent{src: s + 2, dst: 0, bytes: 16000, queue: 2})
	}
	list = append(list, sent{src: 9, dst: 1, bytes: 16000, queue: 3})
	h := plain()
	large, _ := scripted(t, h, 10, list...)
	h.Buffer = 16000
	small, _ := scripted(t, h, 10, list...)
	if last := len(list) - 1; small[last] < 2*large[last] {
		t.Errorf("to the idle rank: %d ps with little room, %d with any", small[last], large[last])
	}
	if a, b := slices.Max(small), slices.Max(large); a < b || a > b*11/10 {
		t.Errorf("the busy rank, whose link is never idle for long, has all at %d ps with little room and at %d with any", a, b)
	}
}
