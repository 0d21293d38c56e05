package costs

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"

	"github.com/deepep-go/deepep/core/cmd/deepep/internal/nicsim"
	"github.com/deepep-go/deepep/internal/plan"
	"github.com/deepep-go/deepep/internal/status"
)

// Call is one call of all ranks.
type Call struct {
	Operation, Format    string
	Ranks, RanksPerNode  int
	Tokens, Hidden, TopK int
	Experts, Groups      int // Groups: nodes that a token may use; 0: all
	SMs                  int // normal mode's
	QPs                  int // toward each peer; 0: plan.DefaultQueuePairs
	Cached, Unreduced    bool
	Seed                 uint64
}

// Limit is what bounds a call.
type Limit struct {
	Name string  `json:"name"`
	US   float64 `json:"us"`
}

// Prediction is a call's time and what it is made of.
type Prediction struct {
	US      float64       `json:"us"`
	FixedUS float64       `json:"fixed_us"` // the call's constant part, counts and latency
	Limits  []Limit       `json:"limits"`   // the slowest first; they overlap, so that the first one binds
	NICRows float64       `json:"nic_rows"` // of the busiest rank
	NICMB   float64       `json:"nic_mb"`
	Counts  nicsim.Counts `json:"-"`
}

// Binds is the limit that decides.
func (p *Prediction) Binds() string { return p.Limits[0].Name }

// Limit is the time of a limit by its name.
func (p *Prediction) Limit(name string) float64 {
	i := slices.IndexFunc(p.Limits, func(l Limit) bool { return l.Name == name })
	if i < 0 {
		return 0
	}
	return p.Limits[i].US
}

// Names of limits.
const (
	NIC, NVLink, Memory, SMs, Streams, QueuePairs = "NIC", "NVLink", "memory", "SMs", "streams", "queue pairs"
)

// Limits are the names in the order of tables.
var Limits = []string{NIC, NVLink, SMs, Streams, QueuePairs, Memory}

var operations = map[string]nicsim.Operation{
	Operations[0]: nicsim.Dispatch, Operations[1]: nicsim.Combine, Operations[2]: nicsim.LowLatencyDispatch, Operations[3]: nicsim.LowLatencyCombine,
}

func (c *Call) lowLatency() bool { return strings.HasPrefix(c.Operation, "low") }
func (c *Call) combine() bool    { return strings.HasSuffix(c.Operation, "combine") }

// job checks the call and gives it as nicsim routes it.
func (c *Call) job() (nicsim.Job, error) {
	o, known := operations[c.Operation]
	if !known {
		return nicsim.Job{}, status.InvalidArg("operation", c.Operation, "one of "+strings.Join(Operations, ", "))
	}
	if c.Format != "fp8" && c.Format != "bf16" || c.combine() && c.Format == "fp8" {
		return nicsim.Job{}, status.InvalidArg("format", c.Format, "fp8 (dispatch) or bf16")
	}
	t, err := plan.NewTopology(c.Ranks, c.RanksPerNode)
	if err != nil {
		return nicsim.Job{}, err
	}
	j := nicsim.Job{Operation: o, Topology: t, Tokens: c.Tokens, Hidden: c.Hidden, TopK: c.TopK, Experts: c.Experts, Groups: c.Groups, Queues: c.QPs, SMs: max(2, c.SMs+c.SMs%2), Seed: c.Seed}
	if !c.lowLatency() && c.SMs < 1 {
		return nicsim.Job{}, status.InvalidArg("sms", c.SMs, "1 or more")
	}
	check := j
	return j, check.Check()
}

// RowBytes is the size of a row, with its scales.
func (c *Call) RowBytes() float64 {
	if c.Format == "fp8" {
		return float64(plan.FP8RowBytes(uint64(c.Hidden)))
	}
	return float64(2 * c.Hidden)
}

// counted remembers what was counted: routing thousands of tokens is the slow part.
var counted = struct {
	sync.Mutex
	of map[nicsim.Job]nicsim.Counts
}{of: map[nicsim.Job]nicsim.Counts{}}

func count(j nicsim.Job) (nicsim.Counts, error) {
	j.Operation, j.SMs, j.Queues = nicsim.Dispatch, 2, 0 // rows are routed alike in all operations
	counted.Lock()
	c, ok := counted.of[j]
	counted.Unlock()
	if ok {
		return c, nil
	}
	c, err := nicsim.Count(j)
	counted.Lock()
	defer counted.Unlock()
	counted.of[j] = c
	return c, err
}

// Predict computes a call on a machine.
func (f *File) Predict(c Call, m Machine) (Prediction, error) {
	j, err := c.job()
	if err != nil {
		return Prediction{}, err
	}
	n, err := count(j)
	if err != nil {
		return Prediction{}, err
	}
	k := f.Kernels[kernelOf(c.Operation, j.Topology.Nodes())]
	w := workOf(&c, k, n, j.Topology.Nodes())
	p := Prediction{FixedUS: k.CallUS, NICRows: w.farRows, NICMB: w.farRows * w.bytes / 1e6, Counts: n}
	if nodes := j.Topology.Nodes(); nodes > 1 {
		p.FixedUS += m.Latency + k.SignalUS*float64(j.Topology.NumRemote())
	}
	if !c.Cached && !c.combine() {
		p.FixedUS += k.NotifyUS
	}
	p.Limits = w.limits(&c, k, m)
	slices.SortStableFunc(p.Limits, func(a, b Limit) int {
		switch {
		case a.US > b.US:
			return -1
		case a.US < b.US:
			return 1
		}
		return 0
	})
	p.US = p.FixedUS + p.Limits[0].US
	return p, nil
}

// work is what a rank does in a call.
type work struct {
	bytes    float64 // of a row
	wire     float64 // of a row with its metadata
	farRows  float64 // that cross the network
	nearRows float64 // that cross NVLink
	handled  float64 // rows that the SMs stage, forward, read or add
	touched  float64 // bytes of memory read and written
	perQueue float64 // rows in turn on one queue pair
	perWarp  float64 // rows in turn on one warp that sends streams
}

// streams are those of a call between nodes, as nvshmem/internode/normal/rings.h has them: the warps that send have one each, or so many that
// there are fewest toward each other node. channels: toward each of them.
func (k *Kernel) streams(sms, others int) (perWarp, channels float64) {
	const fewest, most = 60, 256
	warps := max(1, k.Senders*float64(sms))
	perWarp = math.Ceil(fewest * float64(others) / warps)
	return perWarp, max(1, min(most, math.Floor(warps*perWarp/float64(others))))
}

func workOf(c *Call, k *Kernel, n nicsim.Counts, nodes int) work {
	w := work{bytes: c.RowBytes()}
	w.wire = w.bytes + k.MetadataByte
	qps := float64(c.QPs)
	if qps == 0 {
		qps = plan.DefaultQueuePairs
	}
	switch {
	case c.lowLatency() && c.combine() && c.Unreduced: // a row for each expert crosses
		w.farRows, w.nearRows, w.handled = n.FarExperts, n.NearExperts, n.ExpertRows
		w.perQueue = n.FarExperts / (qps * float64(max(1, c.Ranks-c.RanksPerNode)))
		w.touched = 2 * n.ExpertRows * w.bytes
	case c.lowLatency():
		w.farRows, w.nearRows, w.handled = n.FarRanks, n.NearRanks, n.RankRows
		w.perQueue = n.FarRanks / (qps * float64(max(1, c.Ranks-c.RanksPerNode)))
		w.touched = (2*n.RankRows + n.ExpertRows) * w.bytes
	case nodes > 1:
		// Staged once for each node, put, and read by each rank of the node, or the same way back.
		w.farRows, w.nearRows, w.handled = n.FarNodes, n.Forwarded, n.NodeRows+n.RankRows
		w.touched = 2 * (n.NodeRows + n.FarNodes + n.RankRows) * w.bytes
		perWarp, channels := k.streams(c.SMs, nodes-1)
		w.perQueue = n.StreamRows / min(qps, channels)
		w.perWarp = perWarp * n.StreamRows / channels
	default:
		w.nearRows, w.handled = n.NearRanks, n.RankRows
		w.touched = 2 * n.RankRows * w.bytes
	}
	return w
}

// limits are the times of the limits, each by itself.
func (w *work) limits(c *Call, k *Kernel, m Machine) []Limit {
	sms := float64(c.SMs)
	if c.lowLatency() {
		sms = 1 // its costs are those of the whole GPU
	}
	near := w.nearRows * w.wire / m.NVLinkGBs / 1e3
	list := []Limit{
		{Memory, w.touched / m.MemoryGBs / 1e3},
		{SMs, w.handled * max(k.RowLeastUS, k.RowUS+w.bytes/k.SMGBs/1e3) / sms},
	}
	if w.farRows == 0 {
		return append(list, Limit{NVLink, near})
	}
	nic := m.NICGBs
	if nic == 0 {
		nic = m.NVLinkGBs // the network is NVLink, and rows of both kinds share it
		near += w.farRows * w.wire / nic / 1e3
	}
	queues := w.perQueue * m.PostUS
	if k.Senders > 0 {
		row := k.StreamRowUS + w.bytes/k.StreamGBs/1e3
		if m.NICGBs == 0 {
			row += w.bytes / k.PutGBs / 1e3
		}
		list = append(list, Limit{Streams, w.perWarp * row})
	}
	return append(list, Limit{NVLink, near}, Limit{NIC, w.farRows * w.wire / nic / 1e3}, Limit{QueuePairs, queues})
}

func (m *Measurement) call() *Call {
	return &Call{Operation: m.Operation, Format: m.Format, Ranks: m.Ranks, RanksPerNode: m.RanksPerNode, Tokens: m.Tokens, Hidden: m.Hidden, SMs: m.SMs,
		TopK: nicsim.PublishedTopK, Experts: nicsim.PublishedExperts, Cached: m.Cached, Unreduced: m.Unreduced, Seed: 1}
}

// Compare predicts a measurement. The miss is relative: 0.1 is a tenth too slow.
func (f *File) Compare(m *Measurement) (p Prediction, miss float64, err error) {
	if p, err = f.Predict(*m.call(), f.Machines[m.Machine]); err != nil {
		return p, 0, fmt.Errorf("%s, %d ranks: %w", m.Operation, m.Ranks, err)
	}
	return p, (p.US+m.HostUS)/m.US - 1, nil
}
