package main

import (
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"github.com/deepep-go/deepep/internal/status"
)

// judged is what the judge says of a round of three ranks in which rank 1 was killed 10 ms after zero.
func judged(change func(r *faultRound, j *faultJudge)) string {
	r := &faultRound{phase: "normal", fault: "kill", victim: 1, perNode: 3, limit: usualLimit}
	j := &faultJudge{round: r, at: uint64(10 * time.Millisecond), events: make([]faultEvent, 3), failed: make([]*faultEvent, 3)}
	for rank := range j.events {
		j.events[rank] = faultEvent{Event: "ended"}
		if rank != r.victim {
			j.failed[rank] = &faultEvent{At: uint64(20 * time.Millisecond), Code: status.PeerDead, Error: "dispatch #3 on rank 0: rank 1 (host h, pid 7, last call dispatch #3) died: killed"}
		}
	}
	change(r, j)
	s := &faultSession{slowest: map[string]time.Duration{}}
	return strings.Join(j.judge(s), "\n")
}

// The judge finds each broken promise, and none in a good round.
func TestFaultJudge(t *testing.T) {
	if said := judged(func(*faultRound, *faultJudge) {}); said != "" {
		t.Errorf("a good round: %s", said)
	}
	stop := func(r *faultRound, j *faultJudge) {
		r.fault, r.limit = "stop", shortLimit
		for _, rank := range []int{0, 2} {
			j.failed[rank].Code, j.failed[rank].Error = status.Timeout, "combine #9 on rank 0: rank 1 (host h, pid 7) did not arrive within 1.0 s: it is alive but late"
		}
	}
	if said := judged(stop); said != "" {
		t.Errorf("a good round with a stopped rank: %s", said)
	}
	if got := accused("rank 1 (host h, pid 1) has left: rank 2 (host h, pid 2) has left: rank 3 (host h, pid 3) not joined", 0); got != 3 {
		t.Errorf("a chain: %d", got)
	}
	for want, change := range map[string]func(r *faultRound, j *faultJudge){
		"rank 2: did not notice": func(_ *faultRound, j *faultJudge) { j.failed[2] = nil },
		"rank 0: names rank 2, not rank 1": func(_ *faultRound, j *faultJudge) {
			j.failed[0].Error = "dispatch #3 on rank 0: rank 2 (host h, pid 9) died"
		},
		"rank 0: names rank -1":                 func(_ *faultRound, j *faultJudge) { j.failed[0].Error = "notify #2 on rank 0 was stopped" },
		"only after 2.5s":                       func(_ *faultRound, j *faultJudge) { j.failed[2].At = uint64(2510 * time.Millisecond) },
		"destroy took 9000 ms":                  func(_ *faultRound, j *faultJudge) { j.events[0].DestroyMS = 9000 },
		"wrong result: token 3":                 func(_ *faultRound, j *faultJudge) { j.failed[0].Error = "wrong result: token 3" },
		"a dead rank is called late":            func(_ *faultRound, j *faultJudge) { j.failed[0].Code = status.Timeout },
		"destroy: no":                           func(_ *faultRound, j *faultJudge) { j.events[2].Error = "destroy: no" },
		"should not have noticed":               func(r *faultRound, _ *faultJudge) { r.fault = "pause" },
		"masks [], expected 1 alone":            func(r *faultRound, j *faultJudge) { r.phase, j.failed[0] = "masks", nil },
		"an error in place of a mask: dispatch": func(r *faultRound, _ *faultJudge) { r.phase = "masks" },
		"a living rank is called dead": func(r *faultRound, j *faultJudge) {
			stop(r, j)
			j.failed[0].Code = status.PeerDead
		},
	} {
		if said := judged(change); !strings.Contains(said, want) {
			t.Errorf("want %q, got %q", want, said)
		}
	}
}

// A round is drawn from its number and the seed alone, and every phase and fault is drawn.
func TestFaultRoundsAreRepeatable(t *testing.T) {
	s := &faultSession{faultsFlags: &faultsFlags{ranks: 4, engine: "cpu", seed: 3}, missing: map[string]string{}}
	seen := map[string]bool{}
	for number := range 2000 {
		r := s.draw(number)
		if again := s.draw(number); again.String() != r.String() || again.seed != r.seed {
			t.Fatalf("%v, then %v", r, again)
		}
		seen[r.phase], seen[r.fault] = true, true
		if 4%r.perNode != 0 {
			t.Errorf("%v", r)
		}
	}
	for _, name := range slices.Concat(faultPhases, kindNames()) {
		if !seen[name] {
			t.Errorf("%s was never drawn", name)
		}
	}
}

func TestFaultFlags(t *testing.T) {
	for want, args := range map[string][]string{
		"phases: \"x\"": {"--phases", "x"}, "faults: \"y\"": {"--faults", "y"}, "rounds: 0": {"--rounds", "0"},
		"ranks: 1": {"--ranks", "1"}, "jobs: -1": {"--jobs", "-1"}, "engine: \"tpu\"": {"--engine", "tpu"},
	} {
		if _, stderr, code := deepep(t, append([]string{"faults"}, args...)...); code != exitUsage || !strings.Contains(stderr, want) {
			t.Errorf("%v: %d %s", args, code, stderr)
		}
	}
}

// A job draws what its parent would: each flag that both have reaches it.
func TestFaultJobsHaveTheFlags(t *testing.T) {
	given := map[string]string{
		"ranks": "6", "ranks-per-node": "3", "seed": "41", "engine": "cuda", "phases": "normal,warm-up", "faults": "kill,stop",
	}
	f, job := &faultsFlags{}, &faultsFlags{}
	here, there := pflag.NewFlagSet("faults", pflag.ContinueOnError), pflag.NewFlagSet("faults-job", pflag.ContinueOnError)
	f.add(here)
	job.add(there)
	here.VisitAll(func(flag *pflag.Flag) {
		if err := here.Set(flag.Name, given[flag.Name]); err != nil {
			t.Errorf("--%s: %v", flag.Name, err)
		}
	})
	if err := there.Parse(f.jobArgs()[1:]); err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(job, f) {
		t.Errorf("the job has %+v, want %+v", job, f)
	}
}

// The summary counts each round once, by fault, outcome and phase, and keeps the longest times.
func TestFaultTables(t *testing.T) {
	var out strings.Builder
	total := &faultsTotal{flags: &faultsFlags{rounds: 3, seed: 7}, out: &out, began: time.Now(), jobs: 2}
	total.leaveOut(map[string]string{"full": "no mount namespace could be made"})
	for _, r := range []roundResult{
		{Text: "round 0", Phase: "normal", Fault: "kill", Outcome: outcomeNamed, Slowest: map[string]time.Duration{"kill": 30 * time.Millisecond}},
		{Text: "round 1", Phase: "construct", Fault: "kill", Outcome: outcomeNamed, Slowest: map[string]time.Duration{"kill" + inStart: time.Second}},
		{Text: "round 2", Phase: "normal", Fault: "pause", Outcome: outcomeBroken, Bad: []string{"rank 1: should not have noticed"}},
	} {
		total.add(&r)
	}
	total.report()
	tables := total.tables()
	for _, want := range []string{
		"| kill | 2 | 2 |  |  |  | 0.030 s | 1.000 s |", "| pause | 1 |  |  |  | 1 |  |  |",
		"| phase | kill | pause |", "| normal | 1 | 1 |", "| construct | 1 |  |", "| masks |  |  |", "Left out: full: no mount namespace could be made.",
	} {
		if !strings.Contains(tables, want) {
			t.Errorf("no %q in\n%s", want, tables)
		}
	}
	for _, want := range []string{"FAILED round 2\n  rank 1: should not have noticed", "left out: full", "slowest to be named: 0.030 s  in a start: 1.000 s", "2 passed, 1 failed, 1 skipped"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, out.String())
		}
	}
}
