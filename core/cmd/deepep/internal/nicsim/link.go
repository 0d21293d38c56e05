package nicsim

// none is not an index.
const none = -1

// link is a directed link with the queue before it. It sends one packet at a time. A packet is in the queue until its
// first byte leaves. The first byte is at the remote end one latency later and is forwarded at once (cut-through), so
// that queues hold packets whose last byte has not arrived.
type link struct {
	rate    int64
	latency Time
	kind    linkKind
	owner   int32 // the rank, leaf or spine that sends

	head, tail int32 // of the queue
	waiting    int64 // bytes in it
	largest    int64 // maximum of waiting

	busy      bool
	from      int32 // link over which the packet being sent came, whose buffer it still occupies; none
	fromBytes int64

	limited bool
	credit  int64 // free bytes of the buffer at the remote end

	carried int64 // bytes sent
	worked  Time  // their time
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

// packet is a part of a message in flight.
type packet struct {
	message int32
	at      int32 // link that it last crossed; none before the first
	next    int32 // in a queue, or in the list of unused packets
	payload int32
	bytes   int64 // with headers
	tail    Time  // when its last byte reaches the present place of its first byte
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

// enqueue appends a packet to a link's queue.
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

// serve starts the link's next packet if the link is idle and the remote end has room. Else the end of the present
// packet, or the release of room, calls it again.
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

// free runs when the last byte has left, and releases the packet's room before the link.
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

// sendRate is the rate at which a NIC reads payload from the GPU.
func (h *Hardware) sendRate() int64 { return min(h.NICRate, h.PCIeRate) }
