package nicsim

import (
	"math/bits"
	"slices"
)

// nic serves its queue pairs in the order of their numbers; each with messages sends for one turn.
type nic struct {
	queues   []queue
	byNumber []int32 // indexes in queues, by number
	active   []uint64
	current  int32 // index in byNumber of the queue pair whose turn it is
	turn     int64 // bytes left of it
	overhead Time  // minimum time of the packet that was granted last

	posts []int32 // messages to post, in order
	next  int     // index in posts
}

// queue is a queue pair.
type queue struct {
	number     int32
	place      int32 // index in byNumber
	head, tail int32 // messages
	inFlight   int32 // messages sent and not acknowledged
	fenced     bool  // its head waits for these
	acked      Time
}

// queue returns the rank's queue pair of that number. Until sortQueues it makes one for a new number.
func (m *machine) queue(rank int, number int32) int32 {
	known := m.numbers[rank]
	if i, ok := known[number]; ok {
		return i
	}
	n := &m.nics[rank]
	i := int32(len(n.queues))
	n.queues = append(n.queues, queue{number: number, head: none, tail: none})
	known[number] = i
	return i
}

// sortQueues fixes the order in which NICs serve queue pairs.
func (m *machine) sortQueues() {
	for r := range m.nics {
		n := &m.nics[r]
		n.byNumber = make([]int32, len(n.queues))
		for i := range n.byNumber {
			n.byNumber[i] = int32(i)
		}
		slices.SortFunc(n.byNumber, func(a, b int32) int { return int(n.queues[a].number - n.queues[b].number) })
		for place, i := range n.byNumber {
			n.queues[i].place = int32(place)
		}
		n.active = make([]uint64, (len(n.queues)+63)/64)
		n.current = int32(len(n.queues)) - 1 // the first turn is that of the lowest number
	}
}

func (n *nic) setActive(place int32, on bool) {
	if bit := uint64(1) << (place % 64); on {
		n.active[place/64] |= bit
	} else {
		n.active[place/64] &^= bit
	}
}

func (n *nic) isActive(place int32) bool { return n.active[place/64]>>(place%64)&1 != 0 }

// following finds the first active queue pair after an index, cyclically; none if there is none.
func (n *nic) following(place int32) int32 {
	start := int(place) + 1
	for pass := range 2 {
		for w := start / 64; w < len(n.active); w++ {
			word := n.active[w]
			if w == start/64 {
				word &= ^uint64(0) << (start % 64)
			}
			if word != 0 {
				return int32(w*64 + bits.TrailingZeros64(word))
			}
		}
		if pass == 0 {
			start = 0
		}
	}
	return none
}

// post appends a message to its queue pair and activates it in the NIC.
func (m *machine) post(index int32) {
	m.hand(index)
	m.serve(m.net.hostUp + m.messages[index].src)
}

// postNext posts a rank's next message; without a gap between messages it posts all at once.
func (m *machine) postNext(rank int32) {
	n := &m.nics[rank]
	for {
		m.hand(n.posts[n.next])
		n.next++
		if n.next == len(n.posts) || m.hw.PostGap > 0 {
			break
		}
	}
	if n.next < len(n.posts) {
		m.events.push(m.now+m.hw.PostGap, rankPost, rank, 0)
	}
	m.serve(m.net.hostUp + rank)
}

// hand appends a message to its queue pair.
func (m *machine) hand(index int32) {
	msg := &m.messages[index]
	n := &m.nics[msg.src]
	q := &n.queues[msg.queue]
	if q.tail == none {
		q.head = index
	} else {
		m.messages[q.tail].next = index
	}
	q.tail = index
	if q.head == index && !m.fence(q) {
		n.setActive(q.place, true)
	}
}

// fence reports whether the queue pair's head has to wait until all messages before it are acknowledged. If packets may
// overtake each other, NICs delay an atomic that follows writes.
func (m *machine) fence(q *queue) bool {
	q.fenced = m.hw.Routing == Adaptive && m.messages[q.head].flag && q.inFlight > 0
	return q.fenced
}

// grant moves the next packet of the queue pair whose turn it is to the queue of the NIC's link.
func (m *machine) grant(l *link) {
	n := &m.nics[l.owner]
	place := n.current
	n.overhead = 0
	if len(n.queues) == 0 {
		return
	}
	if n.turn <= 0 || !n.isActive(place) {
		if m.hw.LowestFirst {
			place = none
		}
		if place = n.following(place); place == none {
			return
		}
		if place != n.current {
			n.overhead = m.hw.Grant
		}
		n.current, n.turn = place, m.hw.Turn
		if m.hw.Turn == 0 {
			n.turn = 1 << 62
		}
	}
	q := &n.queues[n.byNumber[place]]
	msg := &m.messages[q.head]
	if msg.left == msg.bytes {
		q.inFlight++
	}
	payload := min(msg.left, m.hw.Segment)
	msg.left -= payload
	n.turn -= payload
	p := m.newPacket(q.head, int32(payload), m.hw.wireBytes(payload))
	l.head, l.tail = p, p
	l.waiting += m.packets[p].bytes
	if msg.left > 0 {
		return
	}
	if m.hw.Turn > 0 {
		n.turn = 0
	}
	if q.head = msg.next; q.head == none {
		q.tail = none
	}
	if q.head == none || m.fence(q) {
		n.setActive(place, false)
	}
}

// acknowledge handles the acknowledgement of a message.
func (m *machine) acknowledge(msg *message) {
	q := &m.nics[msg.src].queues[msg.queue]
	q.inFlight--
	q.acked = max(q.acked, m.now+m.net.back(int(msg.src), int(msg.dst)))
	if q.fenced && q.inFlight == 0 {
		m.events.push(q.acked, queueReady, msg.src, msg.queue)
	}
}

// ready ends a queue pair's fence.
func (m *machine) ready(rank, index int32) {
	n := &m.nics[rank]
	q := &n.queues[index]
	q.fenced = false
	n.setActive(q.place, true)
	m.serve(m.net.hostUp + rank)
}
