package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/deepep-go/deepep/core"
	"github.com/deepep-go/deepep/internal/status"
)

// faultOrder is a line from `deepep faults` to a rank's process.
type faultOrder struct {
	Do       string `json:"do"`   // prepare, go, park, count, until, move, regroup
	Name     string `json:"name"` // of the group
	Folder   string `json:"folder"`
	Engine   string `json:"engine"`
	Place    int    `json:"place"` // of the process, which keeps its device from group to group
	Rank     int    `json:"rank"`
	Ranks    int    `json:"ranks"`
	PerNode  int    `json:"per_node"`
	Phase    string `json:"phase"`
	Fault    string `json:"fault"` // what this rank does to itself; "": nothing
	DelayUS  int    `json:"delay_us"`
	LimitMS  int    `json:"limit_ms"`
	StartMS  int    `json:"start_ms"` // limit of the group's start
	Seed     uint64 `json:"seed"`
	UntilNum int64  `json:"until"`
	Hold     bool   `json:"hold"`    // a rank whose calls have failed keeps its buffer until "move"
	Members  []int  `json:"members"` // of move: the survivors, in whose group the buffer goes on
}

// faultEvent is a line back. Times are those of CLOCK_MONOTONIC, which all processes share.
type faultEvent struct {
	Event     string      `json:"event"` // ready, fault, parked, count, stopping, masked, held, ended, regrouped
	At        uint64      `json:"at"`
	Count     int64       `json:"count"`
	Error     string      `json:"error,omitempty"`
	Code      status.Code `json:"code,omitempty"`
	Masks     []int       `json:"masks,omitempty"`
	DestroyMS int64       `json:"destroy_ms"`
	Left      string      `json:"left,omitempty"` // what the round left over in this process
	What      string      `json:"what,omitempty"` // the fault in detail: the descriptor that was closed
}

// errPlanned ends a rank's calls as an exception of the caller's program would.
var errPlanned = errors.New("planned")

func faultsRankCommand() *cobra.Command {
	return &cobra.Command{
		Use: "faults-rank", Hidden: true, Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			r := &faultRank{out: json.NewEncoder(cmd.OutOrStdout())}
			return r.serve(cmd.InOrStdin())
		},
	}
}

// faultRank plays one rank, round after round, so that what a round leaves over adds up.
type faultRank struct {
	mu   sync.Mutex
	out  *json.Encoder
	base leftovers
	// CUDA: base was taken after a group of several ranks.
	settled bool
	calls   atomic.Int64
	until   atomic.Int64 // the number of calls after which all ranks stop together; 0: none
	gate    sync.Mutex   // held by "park" until "until": the next call waits
	begin   chan struct{}
	move    chan *faultOrder
	doing   chan struct{} // closed when the round's calls have ended
}

func (r *faultRank) send(e faultEvent) {
	e.At = monotonic()
	r.mu.Lock()
	defer r.mu.Unlock()
	_ = r.out.Encode(e) // the parent has ended, and this process ends with it
}

func (r *faultRank) serve(in io.Reader) error {
	lines := bufio.NewScanner(in)
	parked := false
	for lines.Scan() {
		var o faultOrder // a new one each time: "prepare" and "move" keep theirs
		if err := json.Unmarshal(lines.Bytes(), &o); err != nil {
			return err
		}
		switch o.Do {
		case "prepare":
			r.calls.Store(0)
			r.until.Store(0)
			r.begin, r.doing, r.move = make(chan struct{}), make(chan struct{}), make(chan *faultOrder, 1)
			begin, doing := r.begin, r.doing
			go func() {
				defer close(doing)
				e := faultEvent{Event: "ended"}
				if err := guarded(func() error { return r.play(&o, begin, &e) }); err != nil {
					e.Error, e.Code = err.Error(), status.CodeOf(err)
				}
				r.send(e)
			}()
		case "go":
			close(r.begin)
		case "move":
			r.move <- &o
		case "park":
			r.gate.Lock()
			parked = true
			r.send(faultEvent{Event: "parked"})
		case "count":
			r.send(faultEvent{Event: "count", Count: r.calls.Load()})
		case "until":
			r.until.Store(o.UntilNum)
			if parked {
				r.gate.Unlock()
				parked = false
			}
			r.send(faultEvent{Event: "stopping"})
		case "regroup":
			<-r.doing
			e := faultEvent{Event: "regrouped"}
			if err := guarded(func() error { return r.regroup(&o) }); err != nil {
				e.Error, e.Code = err.Error(), status.CodeOf(err)
			}
			if o.Engine == "cuda" && !r.settled && o.Ranks > 1 {
				r.base, r.settled = countLeftovers(), true // a process opens its peers' devices once
			}
			e.Left = r.leftOver()
			r.send(e)
		}
	}
	return lines.Err()
}

// faultShape is small: a round's calls take about 100 us.
func (o *faultOrder) spec() *benchSpec {
	return &benchSpec{
		Rank: o.Rank, Ranks: o.Ranks, PerNode: o.PerNode, Folder: o.Folder, Engine: o.Engine, Operations: []string{"low-latency"},
		Tokens: []int{16}, Hidden: 512, Experts: 2 * o.Ranks, TopK: 2, Routing: "uniform", Seed: o.Seed, FP8: o.Phase == "low-latency fp8",
	}
}

// member is a rank's group and buffer in a round.
type member struct {
	spec      *benchSpec
	group     *core.Group
	buffer    *core.Buffer
	calls     *caller
	normal    *normalCalls
	ll        *lowLatencyCalls
	shrink    bool
	others    *caller // masks: makes other, whose calls overwrite what a rank that was stopped and masked may be reading
	other     *lowLatencyCalls
	limit     time.Duration // of a regroup
	maskWords uintptr
	x         []uint16
	index     []int64
}

func (o *faultOrder) open(name string) (m *member, err error) {
	m = &member{spec: o.spec(), shrink: strings.HasPrefix(o.Phase, "masks")}
	defer func() {
		if err != nil {
			_ = m.close() // the first error counts
			m = nil
		}
	}()
	start := time.Duration(o.StartMS) * time.Millisecond
	ctx, cancel := context.WithTimeout(context.Background(), start)
	defer cancel()
	meet, err := core.OpenFile(ctx, core.FileOptions{Rank: o.Rank, Size: o.Ranks, Dir: o.Folder, Name: name})
	if err != nil {
		return m, err
	}
	if m.group, err = core.NewGroup(ctx, core.GroupOptions{Exchanger: meet, NumNVLPeers: o.PerNode, Timeout: start}); err != nil {
		return m, err
	}
	options, err := m.spec.buffer()
	if err != nil {
		return m, err
	}
	limit := time.Duration(o.LimitMS) * time.Millisecond
	options.NumRDMABytes *= 2
	if options.Device >= 0 {
		info, err := core.QueryEngine(o.Engine)
		if err != nil {
			return m, err
		}
		options.Device = o.Place % info.NumDevices
	}
	m.limit = limit
	options.Timeout, options.FirstTimeout, options.Shrink = limit, limit, m.shrink
	if m.buffer, err = m.group.NewBuffer(ctx, options); err != nil {
		return m, err
	}
	if err = m.buffer.WaitReady(-1); err != nil {
		return m, err
	}
	if m.calls, err = newCaller(m.buffer, m.spec); err != nil {
		return m, err
	}
	if o.Phase == "asynchronous" && m.calls.event == nil {
		if m.calls.event, err = m.buffer.NewEvent(); err != nil {
			return m, err
		}
	}
	if err = m.tensors(); err == nil && m.shrink {
		err = m.otherShape()
	}
	return m, err
}

func (m *member) otherShape() (err error) {
	spec := *m.spec
	spec.Tokens, spec.Hidden = []int{m.spec.Tokens[0] / 4}, 2*m.spec.Hidden
	if m.others, err = newCaller(m.buffer, &spec); err == nil {
		m.other, err = m.others.lowLatency(spec.Tokens[0])
	}
	return err
}

func (m *member) tensors() (err error) {
	tokens, s := m.spec.Tokens[0], m.spec
	if m.index, err = route(s.Routing, tokens, s.TopK, s.Experts, s.Rank, s.Seed); err != nil {
		return err
	}
	if m.normal, err = m.calls.normal(tokens); err != nil {
		return err
	}
	if m.ll, err = m.calls.lowLatency(tokens); err != nil {
		return err
	}
	m.x = make([]uint16, tokens*s.Hidden)
	for i := range m.x {
		m.x[i] = core.ToBF16(float32((7*s.Rank+3*(i/s.Hidden)+i)%32 - 8)) // sums of a few are exact
	}
	ones := make([]float32, tokens*s.TopK)
	for i := range ones {
		ones[i] = 1
	}
	mem := m.calls.mem
	m.maskWords = mem.alloc(4 * s.Ranks)
	return errors.Join(
		mem.err,
		put(mem, m.normal.x, m.x), put(mem, m.ll.dispatch.X, m.x), put(mem, m.normal.weights, ones), put(mem, m.ll.combine.TopKWeights, ones))
}

// all lists the ranks of a group.
func all(size int) []int {
	ranks := make([]int, size)
	for rank := range ranks {
		ranks[rank] = rank
	}
	return ranks
}

// put writes a slice to device memory, and get reads it.
func put[T any](t *tensors, to uintptr, values []T) error {
	defer runtime.KeepAlive(values)
	return t.copy(to, uintptr(unsafe.Pointer(unsafe.SliceData(values))), len(values)*int(unsafe.Sizeof(values[0])))
}

func get[T any](t *tensors, values []T, from uintptr) error {
	defer runtime.KeepAlive(values)
	return t.copy(uintptr(unsafe.Pointer(unsafe.SliceData(values))), from, len(values)*int(unsafe.Sizeof(values[0])))
}

// close ends the buffer before the memory that its kernels use.
func (m *member) close() (err error) {
	if m.buffer != nil {
		status.Keep(&err, m.buffer.Destroy())
	}
	for _, c := range []*caller{m.calls, m.others} {
		if c != nil {
			status.Keep(&err, c.close())
		}
	}
	if m.group != nil {
		status.Keep(&err, m.group.Destroy())
	}
	return err
}

// play is a rank's part of a round: it makes the group and calls the phase's operation until something ends it.
func (r *faultRank) play(o *faultOrder, begin <-chan struct{}, e *faultEvent) error {
	if r.base.descriptors == 0 {
		if err := r.settle(o); err != nil {
			return fmt.Errorf("before the round: %w", err)
		}
	}
	var m *member
	var err error
	if o.Phase != "construct" {
		if m, err = o.open(o.Name); err == nil {
			err = m.step(o.Phase, 0, nil)
		}
	}
	if err == nil {
		r.send(faultEvent{Event: "ready"})
		<-begin
		stop := r.plan(o)
		if o.Phase == "construct" {
			m, err = o.open(o.Name)
		}
		if err == nil {
			err = r.loop(m, o, e, stop)
		}
	}
	e.At = monotonic()
	if err != nil {
		r.send(faultEvent{Event: "error", Error: err.Error(), Code: status.CodeOf(err), Count: r.calls.Load()})
	}
	if m == nil {
		return nil
	}
	var moved error
	if err != nil && o.Hold && !errors.Is(err, errPlanned) {
		r.send(faultEvent{Event: "held"})
		if moved = m.moveTo(<-r.move); moved != nil {
			moved = fmt.Errorf("regroup: %w", moved)
		}
	}
	started := time.Now()
	failed := m.close()
	e.DestroyMS = time.Since(started).Milliseconds()
	if failed != nil {
		failed = fmt.Errorf("destroy: %w", failed)
	}
	return errors.Join(moved, failed)
}

// moveTo lets the failed buffer go on among the survivors; both modes work in it.
func (m *member) moveTo(o *faultOrder) (err error) {
	if err := m.buffer.Regroup(context.Background(), core.RegroupOptions{Members: o.Members, Renumber: true, Timeout: usualLimit}); err != nil {
		return err
	}
	before := m.calls
	defer func() { status.Keep(&err, before.close()) }()
	m.spec = o.spec()
	if m.calls, err = newCaller(m.buffer, m.spec); err != nil {
		m.calls = nil
		return err
	}
	if err := m.tensors(); err != nil {
		return err
	}
	return m.bothModes()
}

func (m *member) bothModes() error {
	for range 2 {
		for _, phase := range []string{"normal", "low-latency"} {
			if err := m.step(phase, 0, nil); err != nil {
				return err
			}
		}
	}
	return nil
}

// plan lets this process's own fault happen after the delay. The channel is closed by an exception.
func (r *faultRank) plan(o *faultOrder) <-chan struct{} {
	stop := make(chan struct{})
	if o.Fault == "" {
		return stop
	}
	go func() {
		time.Sleep(time.Duration(o.DelayUS) * time.Microsecond)
		if o.Fault == "close" {
			r.closeOne(o.Seed)
			return
		}
		r.send(faultEvent{Event: "fault"})
		switch o.Fault {
		case "exit":
			os.Exit(3)
		case "exec":
			_ = unix.Exec("/bin/sleep", []string{"sleep", "60"}, nil)
		case "segv":
			_ = unix.Kill(os.Getpid(), unix.SIGSEGV)
		case "exception":
			close(stop)
		}
	}()
	return stop
}

// closeOne closes a descriptor that this process did not open, as a daemon's start-up code or a wrong close does.
func (r *faultRank) closeOne(seed uint64) {
	files, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		r.send(faultEvent{Event: "fault", What: "nothing: " + err.Error()})
		return
	}
	var open []int
	for _, f := range files {
		var fd int
		if _, err := fmt.Sscan(f.Name(), &fd); err == nil && fd > 2 {
			open = append(open, fd)
		}
	}
	fd := open[rand.New(rand.NewPCG(seed, 1)).IntN(len(open))]
	what, _ := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd)) // "": it was the folder's own
	r.send(faultEvent{Event: "fault", What: fmt.Sprintf("descriptor %d, %s", fd, what)})
	_ = unix.Close(fd)
}

// longestRound bounds a round in which no fault is noticed and no one says when to stop.
const longestRound = 30 * time.Second

func (r *faultRank) loop(m *member, o *faultOrder, e *faultEvent, stop <-chan struct{}) error {
	if o.Phase == "destroy" {
		time.Sleep(time.Duration(rand.IntN(2000)) * time.Microsecond)
		return nil
	}
	phase := o.Phase
	if phase == "construct" {
		phase = "barrier"
	}
	for end := time.Now().Add(longestRound); time.Now().Before(end); {
		select {
		case <-stop:
			return errPlanned
		default:
		}
		r.gate.Lock()
		n := r.calls.Add(1)
		r.gate.Unlock()
		if err := m.step(phase, n, e); err != nil {
			return err
		}
		if len(e.Masks) > 0 && e.Event == "ended" && e.Count == 0 {
			e.Count = n
			r.send(faultEvent{Event: "masked", Masks: e.Masks})
		}
		if until := r.until.Load(); until > 0 && n >= until {
			return nil
		}
	}
	return errors.New("the round has no end")
}

// step makes one call of a phase and checks its results. e.Masks is what the masks were.
func (m *member) step(phase string, number int64, e *faultEvent) error {
	switch phase {
	case "construct", "destroy", "normal", "asynchronous":
		return errors.Join(m.normal.Dispatch(), m.combineNormal())
	case "cached":
		if number == 0 {
			return m.step("normal", 0, e)
		}
		if err := m.normal.Cached(); err != nil {
			return err
		}
		return m.combineNormal()
	case "combine":
		if number == 0 {
			return m.step("normal", 0, e)
		}
		return m.combineNormal()
	case "low-latency", "low-latency fp8", "low-latency hooks":
		return m.roundTrip(phase)
	case "masks":
		return m.masked(number, e)
	case "barrier":
		return m.calls.together()
	case "regroup":
		if number == 0 {
			return m.step("normal", 0, e)
		}
		if err := m.buffer.Regroup(context.Background(), core.RegroupOptions{Members: all(m.spec.Ranks), Renumber: true, Timeout: m.limit}); err != nil {
			return err
		}
		return m.step("normal", number, e)
	case "clean":
		s := m.spec
		call := &core.Call{}
		if m.calls.event == nil {
			return m.buffer.Clean(int32(s.Tokens[0]), int32(s.Hidden), int32(s.Experts), call)
		}
		call.Stream = m.buffer.Info().CommStream
		if err := m.buffer.Clean(int32(s.Tokens[0]), int32(s.Hidden), int32(s.Experts), call); err != nil {
			return err
		}
		return m.calls.finish(m.calls.event.Record(call.Stream))
	case "warm-up":
		s := m.spec
		_, err := m.buffer.Warmup(core.WarmupOptions{
			NumTokens: int32(s.Tokens[0]), Hidden: int32(s.Hidden), NumTopK: int32(s.TopK), NumExperts: int32(s.Experts),
			LLNumMaxTokens: int32(s.Tokens[0]), LLHidden: int32(s.Hidden), LLNumTopK: int32(s.TopK), LLNumExperts: int32(s.Experts),
		})
		return err
	}
	return fmt.Errorf("no phase %q", phase)
}

// combineNormal checks the sums: a token's row comes back once from each rank that it went to.
func (m *member) combineNormal() error {
	if err := m.normal.Combine(); err != nil {
		return err
	}
	return m.compare(m.normal.out, func(token int) float32 {
		ranks := map[int64]bool{}
		for _, expert := range m.experts(token) {
			ranks[expert/int64(m.spec.Experts/m.spec.Ranks)] = true
		}
		return float32(len(ranks))
	})
}

func (m *member) experts(token int) []int64 {
	return m.index[token*m.spec.TopK : (token+1)*m.spec.TopK]
}

// roundTrip checks the sums: a token's row comes back once from each expert, with the weight 1.
func (m *member) roundTrip(phase string) error {
	hooks := phase == "low-latency hooks"
	l := m.ll
	if !l.spec.FP8 {
		l.combine.X = l.dispatch.RecvX // the experts leave rows as they are
	}
	dispatch := func() error { return l.finish(l.LowLatencyDispatch(&l.dispatch, l.call())) }
	combine := func() error { return l.finish(l.LowLatencyCombine(&l.combine, l.call())) }
	if !hooks {
		l.dispatch.Phases, l.combine.Phases = core.SendRecv, core.SendRecv
		if err := errors.Join(dispatch()); err != nil {
			return err
		}
		if err := combine(); err != nil {
			return err
		}
	} else {
		for _, half := range []core.Phase{core.Send, core.Recv} {
			l.dispatch.Phases = half
			if err := dispatch(); err != nil {
				return err
			}
		}
		for _, half := range []core.Phase{core.Send, core.Recv} {
			l.combine.Phases = half
			if err := combine(); err != nil {
				return err
			}
		}
	}
	if l.spec.FP8 {
		return nil // the rows that come back are zeros
	}
	return m.compare(l.combine.CombinedX, func(int) float32 { return float32(m.spec.TopK) })
}

// masked is a round trip in which ranks may be lost: their experts add nothing. In the call in which a rank is masked
// its share is undefined.
func (m *member) masked(number int64, e *faultEvent) error {
	if number%3 == 2 {
		return errors.Join(m.other.Dispatch(), m.other.Combine())
	}
	before, err := m.masks()
	if err != nil {
		return err
	}
	l := m.ll
	l.combine.X = l.dispatch.RecvX
	if err := l.Dispatch(); err != nil {
		return err
	}
	if err := l.Combine(); err != nil {
		return err
	}
	after, err := m.masks()
	if err != nil {
		return err
	}
	if e != nil && len(after) > 0 {
		e.Masks = after
	}
	if len(before) != len(after) {
		return nil
	}
	lost := map[int64]bool{}
	for _, rank := range after {
		lost[int64(rank)] = true
	}
	return m.compare(l.combine.CombinedX, func(token int) (terms float32) {
		for _, expert := range m.experts(token) {
			if !lost[expert/int64(m.spec.Experts/m.spec.Ranks)] {
				terms++
			}
		}
		return terms
	})
}

// masks lists the masked ranks.
func (m *member) masks() (ranks []int, err error) {
	call := &core.Call{}
	if m.calls.event != nil {
		call.Stream = m.buffer.Info().CommStream
	}
	if err := m.buffer.QueryMask(m.maskWords, call); err != nil {
		return nil, err
	}
	if m.calls.event != nil {
		if err := m.calls.finish(m.calls.event.Record(call.Stream)); err != nil {
			return nil, err
		}
	}
	words := make([]int32, m.spec.Ranks)
	if err := get(m.calls.mem, words, m.maskWords); err != nil {
		return nil, err
	}
	for rank, masked := range words {
		if masked != 0 {
			ranks = append(ranks, rank)
		}
	}
	return ranks, nil
}

var errWrong = errors.New("wrong result")

// compare checks that each token of out is this rank's token times terms.
func (m *member) compare(out uintptr, terms func(token int) float32) error {
	got := make([]uint16, len(m.x))
	if err := get(m.calls.mem, got, out); err != nil {
		return err
	}
	for i, bits := range got {
		if want := core.FromBF16(m.x[i]) * terms(i/m.spec.Hidden); core.FromBF16(bits) != want {
			return fmt.Errorf("%w: token %d, channel %d: got %v, want %v", errWrong, i/m.spec.Hidden, i%m.spec.Hidden, core.FromBF16(bits), want)
		}
	}
	return nil
}

// regroup is a new group of the ranks that are left; both modes work in it.
func (r *faultRank) regroup(o *faultOrder) error {
	m, err := o.open(o.Name)
	if err != nil {
		return err
	}
	err = m.bothModes()
	status.Keep(&err, m.close())
	return err
}

// settle makes and ends a group of this rank alone, so that what a process takes once is not counted as left over.
func (r *faultRank) settle(o *faultOrder) error {
	own := *o
	own.Rank, own.Ranks, own.PerNode, own.Phase, own.Name = 0, 1, 1, "normal", fmt.Sprintf("%s-alone-%d", o.Name, os.Getpid())
	own.StartMS, own.LimitMS = 60_000, 60_000
	if err := r.regroup(&own); err != nil {
		return err
	}
	r.base = countLeftovers()
	return nil
}

// leftovers are what a process holds beside memory.
type leftovers struct{ descriptors, goroutines, threads, mappings int }

func countLeftovers() leftovers {
	l := leftovers{goroutines: runtime.NumGoroutine()}
	if files, err := os.ReadDir("/proc/self/fd"); err == nil {
		l.descriptors = len(files)
	}
	tasks, _ := os.ReadDir("/proc/self/task")
	for _, t := range tasks {
		if name, err := os.ReadFile("/proc/self/task/" + t.Name() + "/comm"); err == nil && strings.HasPrefix(string(name), "deepep-") {
			l.threads++
		}
	}
	maps, _ := os.ReadFile("/proc/self/maps")
	for line := range strings.Lines(string(maps)) {
		if strings.Contains(line, "memfd:deepep") || strings.Contains(line, ".page") {
			l.mappings++
		}
	}
	return l
}

// leftOver waits a moment for what is ending, then says what there is more than before the first round.
func (r *faultRank) leftOver() string {
	var now leftovers
	for range 100 {
		now = countLeftovers()
		if now.descriptors <= r.base.descriptors && now.goroutines <= r.base.goroutines+1 && now.threads <= r.base.threads && now.mappings <= r.base.mappings {
			return ""
		}
		time.Sleep(10 * time.Millisecond)
	}
	return fmt.Sprintf("%+v, before the first round %+v", now, r.base)
}
