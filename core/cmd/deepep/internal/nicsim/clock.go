package nicsim

// Time counts picoseconds since a run began.
type Time int64

// Units of time.
const (
	Nanosecond  Time = 1000
	Microsecond      = 1000 * Nanosecond
)

// Microseconds is the time in microseconds.
func (t Time) Microseconds() float64 { return float64(t) / float64(Microsecond) }

// duration is the time of bytes at a rate in 10^6 bytes a second, rounded up.
func duration(bytes, rate int64) Time { return Time((bytes*1e6 + rate - 1) / rate) }

// Kinds of events. a and b are the event's arguments.
const (
	linkFree     uint8 = iota // a: the link has sent its packet's last byte
	packetArrive              // a: the packet's first byte is at the remote end of its link
	packetDone                // a: the packet's last byte is at its destination
	rankPost                  // a: the rank posts its next message
	postMessage               // a: the message is posted
	queueReady                // a, b: all messages that the rank's queue pair has sent are acknowledged
	timer                     // a, b: of the workload
)

type event struct {
	at    Time
	order uint32 // in which the events were made; breaks ties
	kind  uint8
	a, b  int32
}

func (e *event) before(o *event) bool { return e.at < o.at || e.at == o.at && e.order < o.order }

// eventQueue is a heap with four children a node, which is shallower than one with two.
type eventQueue struct {
	heap []event
	made uint32
}

func (q *eventQueue) push(at Time, kind uint8, a, b int32) {
	e := event{at, q.made, kind, a, b}
	q.made++
	q.heap = append(q.heap, e)
	i := len(q.heap) - 1
	for i > 0 {
		parent := (i - 1) / 4
		if !e.before(&q.heap[parent]) {
			break
		}
		q.heap[i] = q.heap[parent]
		i = parent
	}
	q.heap[i] = e
}

func (q *eventQueue) pop() event {
	top := q.heap[0]
	n := len(q.heap) - 1
	e := q.heap[n]
	q.heap = q.heap[:n]
	if n == 0 {
		return top
	}
	i := 0
	for {
		child := 4*i + 1
		if child >= n {
			break
		}
		for c := child + 1; c < min(child+4, n); c++ {
			if q.heap[c].before(&q.heap[child]) {
				child = c
			}
		}
		if !q.heap[child].before(&e) {
			break
		}
		q.heap[i] = q.heap[child]
		i = child
	}
	q.heap[i] = e
	return top
}
