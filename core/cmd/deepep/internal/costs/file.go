package costs

import (
	"bytes"
	_ "embed"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/deepep-go/deepep/internal/status"
)

// Kernel is what one operation's kernels cost. Zero where a cost does not apply.
type Kernel struct {
	CallUS       float64 `json:"call_us"`                 // of a call, whatever it carries: first handshake, last wait
	NotifyUS     float64 `json:"notify_us,omitempty"`     // of the counts before a dispatch, and of the host that waits for them
	RowUS        float64 `json:"row_us,omitempty"`        // of a row on one SM (low latency: on the whole GPU)
	RowLeastUS   float64 `json:"row_least_us,omitempty"`  // of a row on one SM, however short it is
	SMGBs        float64 `json:"sm_gb_s,omitempty"`       // at which one SM copies rows or adds them
	Senders      float64 `json:"senders,omitempty"`       // warps of an SM that send streams to other nodes; see streams
	StreamRowUS  float64 `json:"stream_row_us,omitempty"` // of a row in its stream, on its warp: slot, signal, fences
	StreamGBs    float64 `json:"stream_gb_s,omitempty"`   // at which such a warp stages rows or adds them
	PutGBs       float64 `json:"put_gb_s,omitempty"`      // at which it puts them where the network is NVLink; a NIC moves the bytes itself
	SignalUS     float64 `json:"signal_us,omitempty"`     // of a message of counts to one peer
	MetadataByte float64 `json:"metadata_bytes,omitempty"`

	Fitted []string `json:"fitted,omitempty"` // names of the costs that Fit finds; the others are assumed
	Source string   `json:"source"`
}

// Machine is what kernels run on. Rates are in GB/s, each way.
type Machine struct {
	NICGBs    float64 `json:"nic_gb_s"`          // payload; 0: the network is NVLink, whose rate both kinds of rows share
	NVLinkGBs float64 `json:"nvlink_gb_s"`       // out of a GPU, and into it
	MemoryGBs float64 `json:"memory_gb_s"`       // of a GPU, reads and writes together
	Latency   float64 `json:"latency_us"`        // of the network, from a post until it is visible
	PostUS    float64 `json:"post_us,omitempty"` // between two requests on one queue pair
	Source    string  `json:"source"`
}

// Measurement is one measured call.
type Measurement struct {
	Operation    string  `json:"operation"` // of Operations
	Format       string  `json:"format"`    // fp8 or bf16
	Ranks        int     `json:"ranks"`
	RanksPerNode int     `json:"ranks_per_node"`
	Tokens       int     `json:"tokens"`
	Hidden       int     `json:"hidden"`
	SMs          int     `json:"sms,omitempty"`    // 0: low latency
	Cached       bool    `json:"cached,omitempty"` // without the counts
	Unreduced    bool    `json:"unreduced,omitempty"`
	HostUS       float64 `json:"host_us,omitempty"` // part of the time that is the host's
	US           float64 `json:"us"`
	Machine      string  `json:"machine"`
	Fit          bool    `json:"fit,omitempty"` // costs come from it; all others check
	Source       string  `json:"source"`
}

// File is a set of costs with its sources.
type File struct {
	Source   string             `json:"source"`
	Kernels  map[string]*Kernel `json:"kernels"`
	Machines map[string]Machine `json:"machines"`
	Measured []Measurement      `json:"measured"`
}

//go:embed measured.json
var builtin []byte

// Builtin are the costs of docs/performance.md.
func Builtin() *File {
	f, err := Read(bytes.NewReader(builtin))
	if err != nil {
		panic(err) // a test reads it
	}
	return f
}

// Operations are the names of calls. Between nodes the kernels' names have " between nodes" behind them.
var Operations = []string{"dispatch", "combine", "low-latency dispatch", "low-latency combine"}

const betweenNodes = " between nodes"

// kernelOf is the name of the kernels that a call takes.
func kernelOf(operation string, nodes int) string {
	if nodes > 1 {
		return operation + betweenNodes
	}
	return operation
}

// KernelNames are the names that a file has costs for.
func KernelNames() (names []string) {
	for _, operation := range Operations {
		names = append(names, operation, operation+betweenNodes)
	}
	return names
}

// String lists the costs, with a star behind those that are fitted.
func (k *Kernel) String() string {
	var words []string
	for _, n := range knobs {
		if v := *n.of(k); v != 0 {
			star := ""
			if slices.Contains(k.Fitted, n.name) {
				star = "*"
			}
			words = append(words, fmt.Sprintf("%s %.4g%s", n.name, v, star))
		}
	}
	return strings.Join(words, ", ")
}

// Read reads and checks a file; unknown names are errors.
func Read(r io.Reader) (*File, error) {
	d := json.NewDecoder(r)
	d.DisallowUnknownFields()
	f := &File{}
	if err := d.Decode(f); err != nil {
		return nil, status.Errorf(status.InvalidArgument, "costs: %w", err)
	}
	return f, f.check()
}

// Write writes the file as Read reads it.
func (f *File) Write(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", " ")
	return e.Encode(f)
}

func (f *File) check() error {
	if f.Source == "" {
		return status.InvalidArg("costs: source", f.Source, "where the costs were measured, in words")
	}
	for _, name := range KernelNames() {
		if f.Kernels[name] == nil {
			return status.Errorf(status.InvalidArgument, "costs: kernels has no %q", name)
		}
	}
	for name, k := range f.Kernels {
		if err := k.check(name); err != nil {
			return err
		}
	}
	for name, m := range f.Machines {
		if err := m.check(name); err != nil {
			return err
		}
	}
	for i := range f.Measured {
		if err := f.Measured[i].check(f); err != nil {
			return err
		}
	}
	return nil
}

func (k *Kernel) check(name string) error {
	operation := strings.TrimSuffix(name, betweenNodes)
	if !slices.Contains(Operations, operation) {
		return status.InvalidArg("costs: kernel", name, "one of "+strings.Join(Operations, ", ")+", each also with \""+betweenNodes+"\"")
	}
	for _, n := range knobs {
		if v := *n.of(k); v < 0 || v > 1e9 {
			return status.InvalidArg("costs: "+name+": "+n.name, v, "0 to 1e9")
		}
	}
	if k.SMGBs == 0 {
		return status.InvalidArg("costs: "+name+": sm_gb_s", k.SMGBs, "above 0")
	}
	if k.Senders > 0 && (k.StreamGBs == 0 || k.PutGBs == 0) {
		return status.InvalidArg("costs: "+name+": stream_gb_s, put_gb_s", fmt.Sprint(k.StreamGBs, ", ", k.PutGBs), "above 0 where there are senders")
	}
	for _, fitted := range k.Fitted {
		if !slices.ContainsFunc(knobs, func(n knob) bool { return n.name == fitted }) {
			return status.InvalidArg("costs: "+name+": fitted", fitted, "the name of a cost")
		}
	}
	return nil
}

func (m *Machine) check(name string) error {
	for _, n := range []struct {
		name        string
		value, more float64
	}{{"nic_gb_s", m.NICGBs, 0}, {"nvlink_gb_s", m.NVLinkGBs, 1e-3}, {"memory_gb_s", m.MemoryGBs, 1e-3}, {"latency_us", m.Latency, 0}, {"post_us", m.PostUS, 0}} {
		if n.value < n.more || n.value > 1e6 {
			return status.InvalidArg("costs: machine "+name+": "+n.name, n.value, fmt.Sprintf("%v to 1e6", n.more))
		}
	}
	return nil
}

func (m *Measurement) check(f *File) error {
	if _, ok := f.Machines[m.Machine]; !ok {
		return status.InvalidArg("costs: measured: machine", m.Machine, "one of machines")
	}
	if m.US <= 0 {
		return status.InvalidArg("costs: measured: us", m.US, "above 0")
	}
	if m.Source == "" {
		return status.InvalidArg("costs: measured: source", m.Source, "where the figure stands")
	}
	_, err := m.call().job()
	return err
}
