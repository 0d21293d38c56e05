package nicsim

import "github.com/deepep-go/deepep/internal/plan"

// fabric numbers the links. Every rank has its own NIC.
type fabric struct {
	hw       *Hardware
	topology plan.Topology
	leaves   int
	ports    int // NICs on the fullest leaf

	// First links of each kind. The links of a kind are in the order of owners, for leafUp and spineDown of leaf, then
	// spine.
	hostUp, hostDown, nvOut, nvIn, copier, leafUp, spineDown int32

	turn []int // by leaf: where its search for the shortest queue begins
}

func newFabric(hw *Hardware, t plan.Topology) (*fabric, []link) {
	f := &fabric{hw: hw, topology: t}
	for r := range t.Ranks {
		f.leaves, f.ports = max(f.leaves, f.leaf(r)+1), max(f.ports, f.port(r)+1)
	}
	f.turn = make([]int, f.leaves)
	var links []link
	add := func(kind linkKind, owners int, rate int64, latency Time) int32 {
		first := int32(len(links))
		for i := range owners {
			l := link{rate: rate, latency: latency, kind: kind, owner: int32(i), head: none, tail: none, from: none}
			if hw.Buffer > 0 && (kind == hostUp || kind == leafUp || kind == spineDown) {
				l.limited, l.credit = true, hw.Buffer
			}
			links = append(links, l)
		}
		return first
	}
	f.hostUp = add(hostUp, t.Ranks, hw.LinkRate, hw.Wire)
	f.hostDown = add(hostDown, t.Ranks, min(hw.LinkRate, hw.PCIeRate), hw.Wire+hw.Land)
	f.nvOut = add(nvOut, t.Ranks, hw.NVLinkRate, hw.NVWire/2)
	f.nvIn = add(nvIn, t.Ranks, hw.NVLinkRate, hw.NVWire/2)
	f.copier = add(copier, t.Ranks, hw.CopyRate, 0)
	f.leafUp = add(leafUp, f.leaves*hw.Spines, hw.LinkRate, hw.Wire)
	f.spineDown = add(spineDown, f.leaves*hw.Spines, hw.LinkRate, hw.Wire)
	return f, links
}

// leaf is the switch of a rank's NIC.
func (f *fabric) leaf(rank int) int {
	if f.hw.Fabric == Pod {
		return rank / f.hw.LeafSize
	}
	return f.topology.Node(rank)/f.hw.LeafSize*f.topology.NodeSize() + f.topology.Local(rank)
}

// port is a rank's index on its leaf.
func (f *fabric) port(rank int) int {
	if f.hw.Fabric == Pod {
		return rank % f.hw.LeafSize
	}
	return f.topology.Node(rank) % f.hw.LeafSize
}

// back is the time of an acknowledgement: the latencies of the path, because it has hardly any bytes.
func (f *fabric) back(src, dst int) Time {
	if f.leaf(src) == f.leaf(dst) {
		return 2 * f.hw.Wire
	}
	return 4 * f.hw.Wire
}

// last reports whether a packet is on the last link of its path.
func (m *machine) last(p *packet) bool {
	switch m.links[p.at].kind {
	case hostDown, nvIn:
		return true
	case copier:
		msg := &m.messages[p.message]
		return msg.src == msg.dst
	}
	return false
}

// forward moves a packet to its next link.
func (m *machine) forward(index int32) {
	p := &m.packets[index]
	msg := &m.messages[p.message]
	l := &m.links[p.at]
	f := m.net
	var to int32
	switch l.kind {
	case hostUp:
		from, into := f.leaf(int(msg.src)), f.leaf(int(msg.dst))
		to = f.hostDown + msg.dst
		if from != into {
			to = f.leafUp + int32(from*f.hw.Spines+m.spine(from, msg))
		}
	case leafUp:
		spine := int(p.at-f.leafUp) % f.hw.Spines
		to = f.spineDown + int32(f.leaf(int(msg.dst))*f.hw.Spines+spine)
	case spineDown:
		to = f.hostDown + msg.dst
	case copier:
		to = f.nvOut + msg.src
	case nvOut:
		to = f.nvIn + msg.dst
	}
	m.enqueue(to, index)
}

// spine chooses a packet's spine.
func (m *machine) spine(leaf int, msg *message) int {
	f := m.net
	switch f.hw.Routing {
	case Static:
		return (f.leaf(int(msg.dst))*f.ports + f.port(int(msg.dst))) % f.hw.Spines // NICs in turn
	case ECMP:
		number := m.nics[msg.src].queues[msg.queue].number
		return int(mix(uint64(msg.src)<<42^uint64(msg.dst)<<32^uint64(number)+m.seed*golden) % uint64(f.hw.Spines))
	}
	best, least := 0, int64(1)<<62
	first := f.leafUp + int32(leaf*f.hw.Spines)
	for i := range f.hw.Spines {
		s := (f.turn[leaf] + i) % f.hw.Spines
		l := &m.links[first+int32(s)]
		load := l.waiting
		if l.busy {
			load++ // prefers an idle link to one that becomes idle
		}
		if load < least {
			if best, least = s, load; load == 0 {
				break
			}
		}
	}
	f.turn[leaf] = (best + 1) % f.hw.Spines
	return best
}
