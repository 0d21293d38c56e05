package nicsim

// none is the index of nothing.
const none = -1

// link is a directed link with the queue before it. It sends one packet at a time. A packet is in the queue until its first
// byte leaves; its first byte is at the far end one latency later and may go on at once (cut-through), so queues hold
// packets that are still coming in.
type link struct {
	rate    int64
	latency Time
	kind    linkKind
	owner   int32 // the rank, leaf or spine that sends

	head, tail int32 // of the queue
	waiting    int64 // bytes in it
	largest    int64 // that there have been

	busy      bool
	from      int32 // link over which the packet being sent came, whose buffer it still fills; none
	fromBytes int64

	limited bool
	credit  int64 // free bytes of the buffer at the far end

	carried int64 // bytes sent
	worked  Time  // time that they took
}

type linkKind uint8

const (
	hostUp    linkKind = iota // NIC to leaf
	leafUp                    // leaf to spine
	spineDown                 // spine to leaf
	hostDown                  // leaf to NIC
	nvOut                     // GPU to NVSwitch
	nvIn                      // NVSwitch to GPU
	copier                    // the SMs that copy or sum rows
)

// packet is a part of a message on its way.
type packet struct {
	message int32
	at      int32 // link that it last went over; none before the first
	next    int32 // in a queue, or in the list of unused packets
	payload int32
	bytes   int64 // with headers
	tail    Time  // when its last byte is where its first byte is now
}

func (m *machine) newPacket(message, payload int32, bytes int64) int32 {
	p := m.unused
	if p == none {
		m.packets = append(m.packets, packet{})
		p = int32(len(m.packets) - 1)
	} else {
		m.unused = m.packets[p].next
	}
	m.packets[p] = packet{message: message, payload: payload, bytes: bytes, at: none, next: none}
	return p
}

// enqueue puts a packet behind the others before a link.
func (m *machine) enqueue(i, p int32) {
	l := &m.links[i]
	if l.tail == none {
		l.head = p
	} else {
		m.packets[l.tail].next = p
	}
	l.tail = p
	l.waiting += m.packets[p].bytes
	l.largest = max(l.largest, l.waiting)
	m.serve(i)
}

// serve starts the link's next packet if the link is free and the far end has room. Otherwise the end of what is going on, or
// the room that comes free, calls it again.
func (m *machine) serve(i int32) {
	l := &m.links[i]
	if l.busy {
		return
	}
	if l.kind == hostUp && l.head == none {
		m.grant(l)
	}
	if l.head == none {
		return
	}
	p := &m.packets[l.head]
	if l.limited {
		if l.credit < p.bytes {
			return
		}
		l.credit -= p.bytes
	}
	index := l.head
	if l.head = p.next; l.head == none {
		l.tail = none
	}
	p.next = none
	l.waiting -= p.bytes
	l.busy = true
	m.send(i, index)
}

// send occupies the link with a packet.
func (m *machine) send(i, index int32) {
	l, p := &m.links[i], &m.packets[index]
	work := duration(p.bytes, l.rate)
	if l.kind == hostUp {
		work = max(duration(int64(p.payload), m.hw.sendRate()), work, m.nics[l.owner].overhead)
	}
	end := max(m.now+work, p.tail)
	l.worked += work
	l.carried += p.bytes
	l.from, l.fromBytes = p.at, p.bytes
	p.at, p.tail = i, end+l.latency
	m.events.push(end, linkFree, i, 0)
	if m.last(p) {
		m.events.push(p.tail, packetDone, index, 0)
	} else {
		m.events.push(m.now+l.latency, packetArrive, index, 0)
	}
}

// free is called when the last byte has left: the place that the packet had before the link is empty.
func (m *machine) free(i int32) {
	l := &m.links[i]
	l.busy = false
	if l.from != none {
		if up := &m.links[l.from]; up.limited {
			up.credit += l.fromBytes
			m.serve(l.from)
		}
	}
	m.serve(i)
}

// sendRate is at which a NIC can get payload out of the GPU.
func (h *Hardware) sendRate() int64 { return min(h.NICRate, h.PCIeRate) }
