package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// faultSession plays rounds one after the other, with rank processes of its own.
type faultSession struct {
	*faultsFlags
	folder  string
	all     []*faultProcess // by rank; nil: to be started
	missing map[string]string
	slowest map[string]time.Duration // by kind, in this round
	outcome string                   // of this round
}

// faultProcess is a rank's process. It plays many rounds, until a fault ends it.
type faultProcess struct {
	cmd    *exec.Cmd
	in     io.WriteCloser
	events chan faultEvent // closed when the process has ended
	failed *faultEvent     // its error of this round
	ended  *faultEvent     // its end of this round, where something else was awaited
	what   string          // of its fault of this round
	dirty  bool            // not to be used again
}

const (
	orderLimit  = 60 * time.Second // for what has no fault in it
	unnoticed   = 100 * time.Millisecond
	deathLimit  = 2 * time.Second
	destroyed   = 2500 * time.Millisecond
	afterLimit  = 2 * time.Second // beyond the deadline
	stopMargin  = 50              // calls from the fastest rank's count to the common end, while one rank makes none
	fillingFile = "/dev/shm/filling"
	// The pages that construction touches: a sixteenth of a round's time, where all of them were three quarters.
	preinit = "DEEPEP_PREINIT_BYTES=1048576"
)

// open makes the session ready to play; close ends its processes.
func (s *faultSession) open() (err error) {
	if s.folder, err = os.MkdirTemp("", "deepep-faults-"); err != nil {
		return err
	}
	s.all = make([]*faultProcess, s.ranks)
	s.probe()
	if !slices.ContainsFunc(kindNames(), func(k string) bool { return s.wants(k) && s.missing[k] == "" }) {
		return errors.New("no fault is left")
	}
	return nil
}

func (s *faultSession) close() {
	s.endAll()
	_ = os.RemoveAll(s.folder) // in the folder for temporary files
}

// playNumber plays the round of a number.
func (s *faultSession) playNumber(number int) roundResult {
	r := s.draw(number)
	s.slowest, s.outcome = map[string]time.Duration{}, outcomeUnnoticed
	began := time.Now()
	bad, err := s.round(r)
	if err != nil {
		bad = append(bad, err.Error())
	}
	if len(bad) > 0 {
		s.endAll()
		s.outcome = outcomeBroken
	}
	return roundResult{
		Number: number, Text: r.String(), Phase: r.phase, Fault: r.fault, Outcome: s.outcome, Moves: r.moves, Bad: bad, Slowest: s.slowest, Took: time.Since(began),
	}
}

// probe finds out which faults cannot be made here.
func (s *faultSession) probe() {
	if s.engine != "cpu" {
		s.missing["partition"], s.missing["congestion"] = "the NIC is the software's on the CPU engine alone", "likewise"
		return
	}
	cmd := exec.Command("/bin/sleep", "10")
	if err := cmd.Start(); err != nil {
		return
	}
	defer func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // killed
	}()
	if thaw, err := freeze(cmd.Process.Pid, ""); err != nil {
		s.missing["partition"], s.missing["congestion"] = "ptrace: "+err.Error(), "likewise"
	} else {
		thaw()
	}
}

func (s *faultSession) start(rank int) error {
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	p := &faultProcess{cmd: exec.Command(exe, "faults-rank"), events: make(chan faultEvent, 64)}
	p.cmd.Env = append(os.Environ(), "DEEPEP_LOG=off", preinit)
	// A group of its own: where a shell ends that has started all this, the kernel continues what is stopped in its group.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		return err
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := p.cmd.Start(); err != nil {
		return err
	}
	go func() {
		defer close(p.events)
		for lines := bufio.NewScanner(out); lines.Scan(); {
			var e faultEvent
			if json.Unmarshal(lines.Bytes(), &e) == nil {
				p.events <- e
			}
		}
	}()
	s.all[rank] = p
	return nil
}

func (p *faultProcess) order(o faultOrder) error {
	b, err := json.Marshal(o)
	if err == nil {
		_, err = p.in.Write(append(b, '\n'))
	}
	return err
}

var errEnded = errors.New("its process ended")

// await waits for an event and keeps errors that come before it.
func (p *faultProcess) await(name string, limit time.Duration) (faultEvent, error) {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	for {
		select {
		case e, open := <-p.events:
			switch {
			case !open:
				return e, errEnded
			case e.Event == "error":
				p.failed = &e
			case e.Event == name:
				return e, nil
			case e.Event == "ended": // earlier than expected
				p.ended = &e
				return e, fmt.Errorf("ended instead of %q: %s%s", name, e.Error, p.reason())
			}
		case <-timer.C:
			return faultEvent{}, fmt.Errorf("no %q within %v", name, limit)
		}
	}
}

func (p *faultProcess) reason() string {
	if p.failed == nil {
		return ""
	}
	return p.failed.Error
}

func (s *faultSession) end(rank int) {
	p := s.all[rank]
	if s.all[rank] = nil; p == nil {
		return
	}
	_ = p.cmd.Process.Signal(syscall.SIGCONT)
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait() // killed, or ended by its fault
	_ = p.in.Close()
	for range p.events {
	}
}

func (s *faultSession) endAll() {
	for rank := range s.all {
		s.end(rank)
	}
}

// round plays a round and returns the promises that were broken.
func (s *faultSession) round(r *faultRound) (bad []string, err error) {
	folder := filepath.Join(s.folder, fmt.Sprint(r.number))
	if err := os.Mkdir(folder, 0o700); err != nil {
		return nil, err
	}
	defer os.RemoveAll(folder)
	for rank, p := range s.all {
		if p == nil {
			if err := s.start(rank); err != nil {
				return nil, err
			}
		}
		s.all[rank].failed, s.all[rank].ended, s.all[rank].what = nil, nil, ""
	}
	if err := s.prepare(r, folder); err != nil {
		return nil, err
	}
	j := &faultJudge{round: r, events: make([]faultEvent, s.ranks), failed: make([]*faultEvent, s.ranks)}
	at, undo, err := s.inflict(r)
	if err == nil && r.moves {
		err = s.moveSurvivors(r)
	}
	if err == nil {
		err = s.finish(r, j, undo)
	}
	undo()
	if err != nil {
		return nil, err
	}
	j.at, j.what = at, s.all[r.victim].what
	bad = j.judge(s)
	if len(bad) > 0 {
		return append(bad, j.said()...), nil
	}
	return s.regroup(r, folder), nil
}

func (s *faultSession) prepare(r *faultRound, folder string) error {
	o := faultOrder{
		Do: "prepare", Name: "round", Folder: folder, Engine: s.engine, Ranks: s.ranks, PerNode: r.perNode, Phase: r.phase, Seed: r.seed % 1000,
		LimitMS: int(r.limit.Milliseconds()), StartMS: int(orderLimit.Milliseconds()), DelayUS: int(r.delay.Microseconds()),
	}
	if limit := r.startLimit(); limit > 0 {
		o.StartMS = int(limit.Milliseconds())
	}
	for rank, p := range s.all {
		o.Place, o.Rank, o.Fault = rank, rank, ""
		o.Hold = r.moves && rank != r.victim
		if rank == r.victim && slices.Contains([]string{"exit", "exec", "segv", "exception", "close"}, r.fault) {
			o.Fault = r.fault
		}
		if err := p.order(o); err != nil {
			return err
		}
	}
	for rank, p := range s.all {
		if _, err := p.await("ready", orderLimit); err != nil {
			return fmt.Errorf("rank %d before the fault: %w", rank, err)
		}
	}
	for _, p := range s.all {
		if err := p.order(faultOrder{Do: "go"}); err != nil {
			return err
		}
	}
	return nil
}

// moveSurvivors lets the survivors' failed buffers go on in a group without the victim.
func (s *faultSession) moveSurvivors(r *faultRound) error {
	var members []int
	for rank, p := range s.all {
		if rank == r.victim {
			continue
		}
		if _, err := p.await("held", r.limit+orderLimit); err != nil {
			return fmt.Errorf("rank %d: %w (%s)", rank, err, p.reason())
		}
		members = append(members, rank)
	}
	for at, rank := range members {
		o := faultOrder{Do: "move", Members: members, Rank: at, Ranks: len(members), PerNode: len(members), Engine: s.engine, Phase: "normal", Seed: r.seed % 1000}
		if err := s.all[rank].order(o); err != nil {
			return err
		}
	}
	return nil
}

// finish waits until all ranks have ended the round; where no one should notice the fault, it lets them stop together.
func (s *faultSession) finish(r *faultRound, j *faultJudge, undo func()) error {
	if r.goesOn() {
		if err := s.stopTogether(r, j); err != nil {
			return err
		}
	}
	others := func(rank int) bool { return rank != r.victim }
	if err := s.collect(j, r, others); err != nil {
		return err
	}
	undo()                                                      // the victim goes on when the others have given up
	if slices.Contains(deaths, r.fault) || r.fault == "close" { // whatever becomes of the victim, it is its own doing
		return nil
	}
	return s.collect(j, r, func(rank int) bool { return rank == r.victim })
}

// goesOn reports whether the ranks, or the survivors, call on after the fault until they are told to stop.
func (r *faultRound) goesOn() bool {
	if r.phase == "destroy" {
		return false
	}
	return r.phase == "masks" || slices.Contains([]string{"pause", "full", "congestion", "close"}, r.fault)
}

// collect waits for the ends of some ranks.
func (s *faultSession) collect(j *faultJudge, r *faultRound, of func(rank int) bool) error {
	for rank, p := range s.all {
		if !of(rank) {
			continue
		}
		var e faultEvent
		var err error
		if p.ended != nil {
			e = *p.ended
		} else {
			e, err = p.await("ended", r.limit+orderLimit)
		}
		if err != nil && !j.lostAnyway(rank, err) {
			return fmt.Errorf("rank %d: %w (%s)", rank, err, p.reason())
		}
		j.events[rank], j.failed[rank] = e, p.failed
	}
	return nil
}

// stopTogether asks the ranks how far they are and tells them a number of calls after which to stop.
func (s *faultSession) stopTogether(r *faultRound, j *faultJudge) error {
	masked := r.phase == "masks" && !slices.Contains([]string{"pause", "full", "close"}, r.fault)
	for rank, p := range s.all {
		if masked && rank != r.victim {
			e, err := p.await("masked", r.limit+orderLimit)
			if err != nil {
				return fmt.Errorf("rank %d: %w (%s)", rank, err, p.reason())
			}
			j.masked = append(j.masked, e)
		}
	}
	time.Sleep(20 * time.Millisecond) // calls after the fault
	// One rank makes no new call until the others know the number: they can go a few calls beyond it and no further.
	parked := (r.victim + 1) % s.ranks
	if _, err := s.ask(parked, faultOrder{Do: "park"}, "parked", r); err != nil {
		return err
	}
	var told []int // in this order, the parked one last
	for i := range s.ranks {
		if rank := (parked + 1 + i) % s.ranks; !masked || rank != r.victim {
			told = append(told, rank)
		}
	}
	var most int64
	for _, rank := range told {
		e, err := s.ask(rank, faultOrder{Do: "count"}, "count", r)
		if err != nil {
			return err
		}
		most = max(most, e.Count)
	}
	until := faultOrder{Do: "until", UntilNum: most + stopMargin}
	if masked {
		_ = s.all[r.victim].order(until) // which may have ended, or be stopped
	}
	for _, rank := range told {
		if _, err := s.ask(rank, until, "stopping", r); err != nil {
			return err
		}
	}
	return nil
}

// ask gives a rank an order and waits for its answer, but for a rank that has ended the round, which collect finds, and
// for one that closed a descriptor of its own.
func (s *faultSession) ask(rank int, o faultOrder, answer string, r *faultRound) (faultEvent, error) {
	p := s.all[rank]
	if p.order(o) != nil || p.ended != nil { // the order stands for a rank that has ended the round too: "until" opens its gate
		return faultEvent{}, nil
	}
	e, err := p.await(answer, r.limit+orderLimit)
	if err != nil && p.ended == nil && !(rank == r.victim && r.fault == "close") {
		return e, fmt.Errorf("rank %d: %w (%s)", rank, err, p.reason())
	}
	return e, nil
}

// regroup lets the survivors make a new group, and looks for what the round has left over.
func (s *faultSession) regroup(r *faultRound, folder string) (bad []string) {
	var members []int
	for rank, p := range s.all {
		if p.dirty || p.failed != nil && rank == r.victim && r.fault != "exception" && r.fault != "stop" {
			s.end(rank)
			continue
		}
		members = append(members, rank)
	}
	o := faultOrder{
		Do: "regroup", Name: "again", Folder: folder, Engine: s.engine, Ranks: len(members), PerNode: r.perNode, Phase: "normal", Seed: r.seed % 1000,
		LimitMS: int(usualLimit.Milliseconds()), StartMS: int(orderLimit.Milliseconds()),
	}
	if len(members)%o.PerNode != 0 {
		o.PerNode = 1
	}
	if r.perNode == s.ranks {
		o.PerNode = len(members)
	}
	for at, rank := range members {
		o.Place, o.Rank = rank, at
		if err := s.all[rank].order(o); err != nil {
			bad = append(bad, fmt.Sprintf("rank %d: %v", rank, err))
		}
	}
	for _, rank := range members {
		e, err := s.all[rank].await("regrouped", orderLimit)
		switch {
		case err != nil:
			bad = append(bad, fmt.Sprintf("rank %d, new group: %v", rank, err))
		case e.Error != "":
			bad = append(bad, fmt.Sprintf("rank %d, new group: %s", rank, e.Error))
		case e.Left != "":
			bad = append(bad, fmt.Sprintf("rank %d leaves over: %s", rank, e.Left))
		}
		pages, _ := filepath.Glob(fmt.Sprintf("/dev/shm/deepep-%d/%d-*.page", os.Geteuid(), s.all[rank].cmd.Process.Pid))
		if len(pages) > 0 {
			bad = append(bad, fmt.Sprintf("rank %d leaves over %s", rank, strings.Join(pages, ", ")))
		}
	}
	return bad
}
