package nicsim

// lowLatency is the traffic of a low-latency call: one row for each (token, expert) on the queue pair of the expert,
// and a flag after an expert's rows, even if there are none. Rows within a node cross NVLink; rows to the sender itself
// are not sent.
type lowLatency struct {
	finish  []Time
	logical int64
}

func newLowLatency(m *machine, j *Job) *lowLatency {
	w := &lowLatency{finish: make([]Time, j.Topology.Ranks)}
	m.work = w
	rows := w.rows(j)
	numbers := make([]numbering, j.Topology.Ranks)
	for r := range numbers {
		numbers[r] = newNumbering(j, r)
	}
	for _, one := range rows {
		m.move(j, numbers, one.src, one.dst, one.queue, j.rowBytes(), false)
	}
	local := j.Experts / j.Topology.Ranks
	for src := range j.Topology.Ranks {
		for i := range j.Experts { // each rank begins with the next rank
			e := (i + (src+1)*local) % j.Experts
			m.move(j, numbers, src, e/local, e%local, flagBytes, true)
		}
	}
	m.sortQueues()
	start := seeded(j.Seed, 3)
	for r := range m.nics {
		at := m.hw.Post
		if j.Skew > 0 {
			at += Time(start.next() % uint64(j.Skew+1))
		}
		if len(m.nics[r].posts) > 0 {
			m.events.push(at, rankPost, int32(r), 0)
		}
	}
	return w
}

// row is one row's source and destination; queue is the local expert that sends or receives it.
type row struct{ src, dst, queue int }

// rows lists all rows, those of a rank in the order in which its SMs post them. In dispatch the SMs send all tokens at
// the same time, each to one expert after the other. In combine all (expert, source) pairs send at the same time, each
// row after row, in a random order of pairs, because hundreds of warps run concurrently.
func (w *lowLatency) rows(j *Job) []row {
	ranks, local := j.Topology.Ranks, j.Experts/j.Topology.Ranks
	var all []row
	pairs := make([]int, j.Experts*ranks) // rows of each (expert, source)
	for src := range ranks {
		route := newRouter(j, src)
		for range j.Tokens {
			for _, e := range route.next(j.TopK) {
				w.logical += j.payloadBytes()
				pairs[e*ranks+src]++
				if j.Operation == LowLatencyDispatch {
					all = append(all, row{src, e / local, e % local})
				}
			}
		}
	}
	if j.Operation == LowLatencyDispatch {
		return all
	}
	for rank := range ranks {
		all = append(all, returning(pairs[rank*local*ranks:(rank+1)*local*ranks], rank, ranks, seeded(j.Seed, 4, uint64(rank)))...)
	}
	return all
}

// returning lists the rows that one rank sends back; pairs has their number for each of its experts and each source.
func returning(pairs []int, rank, ranks int, chance *random) []row {
	var list []row
	var order []int
	for i, n := range pairs {
		if n > 0 {
			order = append(order, i)
		}
	}
	for round := 0; len(order) > 0; round++ {
		chance.shuffle(order)
		left := order[:0]
		for _, i := range order {
			list = append(list, row{rank, i % ranks, i / ranks})
			if pairs[i] > round+1 {
				left = append(left, i)
			}
		}
		order = left
	}
	return list
}

// move sends a message over NVLink or RDMA, as the topology requires.
func (m *machine) move(j *Job, numbers []numbering, src, dst, expert int, bytes int64, flag bool) {
	switch {
	case src == dst:
	case j.Topology.Remote(src, dst) || j.AllRDMA:
		q := m.queue(src, numbers[src].number(dst, j.queues.OfExpert(expert)))
		i := m.add(src, dst, q, bytes, none)
		m.messages[i].flag = flag
		m.nics[src].posts = append(m.nics[src].posts, i)
	default:
		m.push(m.net.nvOut, m.add(src, dst, none, bytes, none))
	}
}

func (w *lowLatency) arrived(m *machine, index int32) { w.finish[m.messages[index].dst] = m.now }

func (w *lowLatency) timer(*machine, int32, int32) {}
