package nicsim

import "fmt"

// message is a unit that a queue pair, an NVLink or a copying SM moves.
type message struct {
	src, dst int32
	queue    int32 // src's queue pair; none: not over RDMA
	next     int32 // in the queue pair
	tag      int32 // for the workload
	flag     bool  // may not overtake earlier messages of its queue pair
	bytes    int64
	left     int64 // not yet sent
	arrived  int64
}

// workload reacts to the machine's events.
type workload interface {
	arrived(m *machine, index int32) // a message is complete at its destination
	timer(m *machine, a, b int32)
}

// machine is the state of a run.
type machine struct {
	hw   *Hardware
	net  *fabric
	work workload
	seed uint64

	now      Time
	events   eventQueue
	links    []link
	packets  []packet
	unused   int32 // first unused packet
	nics     []nic
	numbers  []map[int32]int32 // by rank: queue pairs by number, until sortQueues
	messages []message
}

func newMachine(hw *Hardware, j *Job) *machine {
	m := &machine{hw: hw, seed: j.Seed, unused: none, nics: make([]nic, j.Topology.Ranks), numbers: make([]map[int32]int32, j.Topology.Ranks)}
	m.net, m.links = newFabric(hw, j.Topology)
	for r := range m.numbers {
		m.numbers[r] = map[int32]int32{}
	}
	return m
}

// add makes a message without sending it.
func (m *machine) add(src, dst int, queue int32, bytes int64, tag int32) int32 {
	m.messages = append(m.messages, message{src: int32(src), dst: int32(dst), queue: queue, next: none, tag: tag, bytes: bytes, left: bytes})
	return int32(len(m.messages) - 1)
}

// push sends a message as one packet, which begins with a link of NVLink or of the copying SMs.
func (m *machine) push(first, index int32) {
	msg := &m.messages[index]
	msg.left = 0
	p := m.newPacket(index, int32(msg.bytes), msg.bytes)
	m.packets[p].tail = m.now
	m.enqueue(first+msg.src, p)
}

// run handles events until there are none.
func (m *machine) run() {
	for len(m.events.heap) > 0 {
		e := m.events.pop()
		m.now = e.at
		m.handle(e)
	}
}

func (m *machine) handle(e event) {
	switch e.kind {
	case linkFree:
		m.free(e.a)
	case packetArrive:
		m.forward(e.a)
	case packetDone:
		m.done(e.a)
	case rankPost:
		m.postNext(e.a)
	case postMessage:
		m.post(e.a)
	case queueReady:
		m.ready(e.a, e.b)
	case timer:
		m.work.timer(m, e.a, e.b)
	}
}

// done handles a packet that has arrived.
func (m *machine) done(index int32) {
	p := &m.packets[index]
	i := p.message
	msg := &m.messages[i]
	msg.arrived += int64(p.payload)
	p.next, m.unused = m.unused, index
	if msg.arrived < msg.bytes {
		return
	}
	if msg.queue != none {
		m.acknowledge(msg)
	}
	m.work.arrived(m, i)
}

// audit checks what must hold after every run.
func (m *machine) audit() error {
	for i := range m.messages {
		if msg := &m.messages[i]; msg.arrived != msg.bytes || msg.left != 0 {
			return fmt.Errorf("audit: of message %d, rank %d to rank %d, %d of %d bytes arrived and %d were never sent", i, msg.src, msg.dst, msg.arrived, msg.bytes, msg.left)
		}
	}
	for i := range m.links {
		l := &m.links[i]
		if l.busy || l.head != none || l.waiting != 0 {
			return fmt.Errorf("audit: link %d (kind %d) still has %d bytes", i, l.kind, l.waiting)
		}
		if l.limited && l.credit != m.hw.Buffer {
			return fmt.Errorf("audit: the buffer after link %d (kind %d) has %d free bytes of %d", i, l.kind, l.credit, m.hw.Buffer)
		}
		if least := duration(l.carried, l.rate); l.worked < least || l.worked > m.now {
			return fmt.Errorf("audit: link %d (kind %d) took %d ps for %d bytes, which need %d, in a run of %d", i, l.kind, l.worked, l.carried, least, m.now)
		}
	}
	return m.auditTotals()
}

// auditTotals checks that what NICs sent is what NICs received, over every level of switches.
func (m *machine) auditTotals() error {
	var carried [copier + 1]int64
	for i := range m.links {
		carried[m.links[i].kind] += m.links[i].carried
	}
	if carried[hostUp] != carried[hostDown] || carried[leafUp] != carried[spineDown] || carried[nvOut] != carried[nvIn] {
		return fmt.Errorf("audit: bytes got lost or appeared: NICs sent %d and received %d, leaves sent %d up and received %d, GPUs %d and %d",
			carried[hostUp], carried[hostDown], carried[leafUp], carried[spineDown], carried[nvOut], carried[nvIn])
	}
	return nil
}
