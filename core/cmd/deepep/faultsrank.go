package main

import (
	"bufio"
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

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

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
