package nicsim

import "github.com/deepep-go/deepep/internal/plan"

// normal is the traffic of a normal-mode call. A stream is one channel between a rank and the rank of the same index on
// a node, its own node included; it moves chunks of tokens in order, a window of them at a time.
//
// Dispatch: a chunk crosses RDMA to that rank, whose SMs copy each row to its destination ranks on the node and then
// return the window. Combine: the ranks of the node push their rows to that rank over NVLink; its SMs sum them and send
// one row for each token over RDMA. plan.ConfigFor gives the sizes of chunks and windows.
type normal struct {
	job     *Job
	window  int32 // tokens
	streams []stream
	chunks  []chunk
	pushed  [][]int32 // combine: by node, the streams into which its ranks push
	finish  []Time
	logical int64
}

type stream struct {
	source int32 // the rank of the tokens
	remote int32 // the rank of the same index on the node
	queue  int32 // of the sender; none within a node
	first  int32 // chunk
	end    int32
	next   int32 // chunk to send
	tokens int32 // in flight
}

type chunk struct {
	stream  int32
	tokens  int32
	rows    []int32 // for each rank of the node
	missing int32   // copies (dispatch) or pushes (combine) that have not arrived
	summed  bool
}

// Meanings of a timer's b.
const (
	startRank int32 = iota // of rank a
	widen                  // stream a gets b - widen tokens of its window back
)

func newNormal(m *machine, j *Job) *normal {
	kind, t := plan.KindDispatch, j.Topology
	if j.Operation == Combine {
		kind = plan.KindCombine
	}
	c, err := plan.ConfigFor(kind, t.Ranks)
	if err != nil {
		panic(err) // Check has checked the number of ranks
	}
	w := &normal{job: j, window: c.RDMARecvChunk, finish: make([]Time, t.Ranks), pushed: make([][]int32, t.Nodes())}
	m.work = w
	numbers := make([]numbering, t.Ranks)
	for r := range numbers {
		numbers[r] = newNumbering(j, r)
	}
	for src := range t.Ranks {
		w.cut(m, numbers, src, c.RDMASendChunk)
	}
	m.sortQueues()
	start := seeded(j.Seed, 3)
	for r := range t.Ranks {
		var at Time
		if j.Skew > 0 {
			at = Time(start.next() % uint64(j.Skew+1))
		}
		m.events.push(at, timer, int32(r), startRank)
	}
	return w
}

// cut makes a rank's streams and their chunks. Channels have equal shares of the tokens.
func (w *normal) cut(m *machine, numbers []numbering, src int, most int32) {
	j, t := w.job, w.job.Topology
	size, channels := t.NodeSize(), j.SMs/2
	perRank := j.Experts / t.Ranks
	route := newRouter(j, src)
	wanted := make([]bool, t.Ranks)
	for channel := range channels {
		lists := make([][]chunk, t.Nodes())
		for range (channel+1)*j.Tokens/channels - channel*j.Tokens/channels {
			clear(wanted)
			for _, e := range route.next(j.TopK) {
				wanted[e/perRank] = true
			}
			for node := range lists {
				lists[node] = w.addToken(lists[node], wanted[node*size:(node+1)*size], most)
			}
		}
		for node := range lists {
			w.addStream(m, numbers, src, node, channel, lists[node])
		}
	}
}

// addToken adds a token to the last chunk, or to a new one if that is full, if a rank of the node is a destination.
func (w *normal) addToken(list []chunk, wanted []bool, most int32) []chunk {
	rows := int64(0)
	for _, yes := range wanted {
		if yes {
			rows++
		}
	}
	if rows == 0 {
		return list
	}
	if len(list) == 0 || list[len(list)-1].tokens == most {
		list = append(list, chunk{rows: make([]int32, len(wanted))})
	}
	c := &list[len(list)-1]
	c.tokens++
	for i, yes := range wanted {
		if yes {
			c.rows[i]++
		}
	}
	if w.job.Topology.Nodes() > 1 {
		rows = 1 // upstream counts (token, node) between nodes
	}
	w.logical += rows * w.job.payloadBytes()
	return list
}

func (w *normal) addStream(m *machine, numbers []numbering, src, node, channel int, list []chunk) {
	if len(list) == 0 {
		return
	}
	t := w.job.Topology
	remote := node*t.NodeSize() + t.Local(src)
	s := stream{source: int32(src), remote: int32(remote), queue: none, first: int32(len(w.chunks))}
	s.next, s.end = s.first, s.first+int32(len(list))
	if queue := w.job.queues.OfChannel(channel); remote != src && w.job.Operation == Dispatch {
		s.queue = m.queue(src, numbers[src].number(remote, queue))
	} else if remote != src {
		s.queue = m.queue(remote, numbers[remote].number(src, queue))
	}
	index := int32(len(w.streams))
	for i := range list {
		list[i].stream = index
	}
	w.chunks = append(w.chunks, list...)
	w.streams = append(w.streams, s)
	w.pushed[node] = append(w.pushed[node], index)
}

func (w *normal) timer(m *machine, a, b int32) {
	switch {
	case b >= widen:
		w.streams[a].tokens -= b - widen
		w.advance(m, a)
	case w.job.Operation == Combine:
		w.pushRows(m, a)
	default:
		for i := range w.streams {
			if w.streams[i].source == a {
				w.advance(m, int32(i))
			}
		}
	}
}

// advance sends the chunks for which the window has room.
func (w *normal) advance(m *machine, index int32) {
	s := &w.streams[index]
	for s.next < s.end {
		c := &w.chunks[s.next]
		if s.tokens > 0 && s.tokens+c.tokens > w.window || w.job.Operation == Combine && !c.summed {
			return
		}
		i := s.next
		s.next++
		if w.job.Operation == Combine && s.queue == none {
			continue // the sum is at its destination
		}
		s.tokens += c.tokens
		if s.queue == none {
			w.copyRows(m, i)
			continue
		}
		src, dst := s.source, s.remote
		if w.job.Operation == Combine {
			src, dst = dst, src
		}
		msg := m.add(int(src), int(dst), s.queue, int64(c.tokens)*w.job.rowBytes(), i)
		m.events.push(m.now+m.hw.Post, postMessage, msg, 0)
	}
}

// copyRows copies the rows of an arrived chunk to the ranks of the node.
func (w *normal) copyRows(m *machine, index int32) {
	c := &w.chunks[index]
	remote := int(w.streams[c.stream].remote)
	t := w.job.Topology
	for i, rows := range c.rows {
		if rows > 0 {
			c.missing++
			m.push(m.net.copier, m.add(remote, t.Node(remote)*t.NodeSize()+i, none, int64(rows)*w.job.rowBytes(), index))
		}
	}
}

// pushRows sends a rank's rows for the streams of its node, chunk by chunk.
func (w *normal) pushRows(m *machine, rank int32) {
	t := w.job.Topology
	streams := w.pushed[t.Node(int(rank))]
	local := t.Local(int(rank))
	for k, more := int32(0), true; more; k++ {
		more = false
		for i := range streams {
			s := &w.streams[streams[(i+local*len(streams)/t.NodeSize())%len(streams)]]
			if s.first+k >= s.end {
				continue
			}
			more = true
			c := &w.chunks[s.first+k]
			rows := c.rows[local]
			switch {
			case s.remote == rank:
				w.expect(m, s.first+k, local)
			case rows > 0:
				m.push(m.net.nvOut, m.add(int(rank), int(s.remote), none, int64(rows)*w.job.rowBytes(), s.first+k))
			}
		}
	}
}

// expect sets how many pushes a chunk waits for. Some may have arrived: missing has counted them down from zero.
func (w *normal) expect(m *machine, index int32, own int) {
	c := &w.chunks[index]
	for i, rows := range c.rows {
		if rows > 0 && i != own {
			c.missing++
		}
	}
	if c.missing == 0 {
		w.sum(m, index)
	}
}

func (w *normal) sum(m *machine, index int32) {
	c := &w.chunks[index]
	var rows int64
	for _, n := range c.rows {
		rows += int64(n)
	}
	remote := int(w.streams[c.stream].remote)
	m.push(m.net.copier, m.add(remote, remote, none, rows*w.job.rowBytes(), index))
}

func (w *normal) arrived(m *machine, index int32) {
	msg := m.messages[index] // a copy: the calls below may append to messages
	w.finish[msg.dst] = m.now
	i := msg.tag
	c := &w.chunks[i]
	crossed := msg.queue != none
	switch {
	case w.job.Operation == Dispatch && crossed:
		w.copyRows(m, i)
	case w.job.Operation == Dispatch:
		if c.missing--; c.missing == 0 {
			w.giveBack(m, c, int(msg.src))
		}
	case crossed:
		w.giveBack(m, c, int(msg.dst))
	case msg.src == msg.dst:
		c.summed = true
		w.advance(m, c.stream)
	default:
		if c.missing--; c.missing == 0 {
			w.sum(m, i)
		}
	}
}

// giveBack returns a chunk's share of the window.
func (w *normal) giveBack(m *machine, c *chunk, by int) {
	s := &w.streams[c.stream]
	at := m.now
	if s.queue != none {
		sender := int(s.source+s.remote) - by
		at += m.hw.Post + m.net.back(by, sender)
		w.finish[by] = max(w.finish[by], m.now)
	}
	m.events.push(at, timer, c.stream, widen+c.tokens)
}
