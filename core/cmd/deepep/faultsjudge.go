package main

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/deepep-go/deepep/internal/status"
)

// faultJudge compares what the ranks said with what is promised.
type faultJudge struct {
	round  *faultRound
	at     uint64        // of the fault
	what   string        // of the fault
	events []faultEvent  // how each rank ended the round
	failed []*faultEvent // the error of its calls
	masked []faultEvent  // when the survivors masked the victim
}

// lostAnyway reports whether a rank that has ended may have.
func (j *faultJudge) lostAnyway(rank int, err error) bool {
	return rank == j.round.victim && errors.Is(err, errEnded) && slices.Contains(append([]string{"close"}, deaths...), j.round.fault)
}

// accusation finds the ranks that an error describes as its cause.
var accusation = regexp.MustCompile(`rank (\d+) \([^)]*\)`)

// accused is the rank that an error names as its first cause, which comes last in a chain (rank 1 has left, because rank
// 2 has left, because rank 3 did not come); -1: none, or only the rank that says it.
func accused(text string, by int) int {
	last := -1
	for _, found := range accusation.FindAllStringSubmatch(text, -1) {
		if rank, err := strconv.Atoi(found[1]); err == nil && rank != by {
			last = rank
		}
	}
	return last
}

func (j *faultJudge) judge(s *faultSession) (bad []string) {
	r := j.round
	say := func(rank int, format string, args ...any) {
		bad = append(bad, fmt.Sprintf("rank %d: ", rank)+fmt.Sprintf(format, args...))
	}
	for rank := range j.events {
		e, failed := j.events[rank], j.failed[rank]
		if rank == r.victim && r.fault != "pause" && r.fault != "full" && r.fault != "congestion" {
			continue // any error will do, so long as it ends
		}
		if e.Error != "" {
			say(rank, "%s", e.Error)
		}
		if e.DestroyMS > destroyed.Milliseconds() {
			say(rank, "destroy took %d ms", e.DestroyMS)
		}
		if failed != nil && strings.Contains(failed.Error, errWrong.Error()) {
			say(rank, "%s", failed.Error)
			continue
		}
		if r.phase == "destroy" {
			if failed != nil {
				say(rank, "destroy: %s", failed.Error)
			}
			continue
		}
		switch {
		case r.phase == "masks" && r.fault != "pause" && r.fault != "full" && r.fault != "close":
			j.judgeMask(rank, say)
		case r.fault == "pause" || r.fault == "full" || r.fault == "congestion":
			if failed != nil {
				say(rank, "should not have noticed: %s", failed.Error)
			}
		case failed == nil:
			if r.fault != "close" { // which may do no harm
				say(rank, "did not notice")
			}
		default:
			s.outcome = outcomeNamed
			took := time.Duration(failed.At - min(j.at, failed.At))
			s.slowest[r.kind()] = max(s.slowest[r.kind()], took)
			j.judgeError(rank, failed, took, say)
		}
	}
	for _, e := range j.masked {
		s.outcome = outcomeMasked
		took := time.Duration(e.At - min(j.at, e.At))
		s.slowest[r.kind()] = max(s.slowest[r.kind()], took)
		if took > j.allowed() {
			bad = append(bad, fmt.Sprintf("masked only after %v", took))
		}
	}
	return bad
}

// said is every rank's error, which a broken promise is understood by.
func (j *faultJudge) said() (all []string) {
	if j.what != "" {
		all = append(all, "(it was "+j.what+")")
	}
	for rank, failed := range j.failed {
		if failed != nil {
			all = append(all, fmt.Sprintf("(rank %d said after %v: %s)", rank, time.Duration(failed.At-min(j.at, failed.At)), failed.Error))
		}
	}
	return all
}

func (j *faultJudge) judgeMask(rank int, say func(int, string, ...any)) {
	if failed := j.failed[rank]; failed != nil {
		say(rank, "an error in place of a mask: %s", failed.Error)
	} else if masks := j.events[rank].Masks; len(masks) != 1 || masks[0] != j.round.victim {
		say(rank, "masks %v, expected %d alone", masks, j.round.victim)
	}
}

// allowed is how long after the fault the others must know.
func (j *faultJudge) allowed() time.Duration {
	r := j.round
	switch {
	case r.startLimit() > 0: // in construction deaths are seen once the channel stands; before, the start has its own limit
		return r.startLimit() + afterLimit
	case r.fault == "stop" || r.fault == "partition":
		return r.limit + afterLimit
	}
	return deathLimit
}

func (j *faultJudge) judgeError(rank int, failed *faultEvent, took time.Duration, say func(int, string, ...any)) {
	r := j.round
	if took > j.allowed() {
		say(rank, "an error only after %v: %s", took, failed.Error)
	}
	named := accused(failed.Error, rank)
	starts := r.phase == "construct" || r.phase == "regroup"
	if starts && named < 0 && regexp.MustCompile(`\brank `+strconv.Itoa(r.victim)+`\b`).MatchString(failed.Error) {
		named = r.victim // the first exchange knows ranks by number alone
	}
	// Some ranks see only another one that the victim has held up: one that has given up and left, which this rank saw
	// first. Its own error leads on.
	indirect := starts || strings.Contains(failed.Error, "has left the group")
	for hops := 0; indirect && hops < len(j.failed) && named >= 0 && named != r.victim && j.failed[named] != nil; hops++ {
		named = accused(j.failed[named].Error, named)
	}
	if named != r.victim {
		say(rank, "names rank %d, not rank %d: %s", named, r.victim, failed.Error)
	}
	switch {
	case (r.fault == "stop" || r.fault == "partition") && failed.Code == status.PeerDead && !strings.Contains(failed.Error, "has left the group"):
		say(rank, "a living rank is called dead: %s", failed.Error)
	case slices.Contains(deaths, r.fault) && failed.Code == status.Timeout && r.phase != "construct":
		say(rank, "a dead rank is called late: %s", failed.Error)
	}
}
