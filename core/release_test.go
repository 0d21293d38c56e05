package core

import (
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// sleep releases and restores the memory.
func (m *member) sleep() {
	m.must(m.Release(-1))
	m.check(errors.Is(m.Barrier(&Call{}), ErrInvalidState), "a barrier without memory")
	m.must(m.Restore(-1))
}

func TestReleaseAndRestore(t *testing.T) {
	rounds := 12
	if testing.Short() {
		rounds = 3
	}
	for seed, g := range []grouping{{1, 3}, {2, 2}, {3, 1}} {
		t.Run(g.String(), func(t *testing.T) {
			softly(t, seed)
			low := lowLatencyShape{g.ranks(), 7, 8, 256, 3, 2}
			o := low.room(t)
			room := normalRoom(t, g, 2*256)
			o.NumNVLBytes, o.NumRDMABytes = room.NumNVLBytes, max(o.NumRDMABytes, room.NumRDMABytes)
			onNodes(t, g.ranks(), g.perNode, o, func(m *member) {
				address, _, err := m.Region(false)
				m.must(err)
				for range rounds {
					m.normalRounds(normal{g.ranks(), 24, 40, 3, 2}, 1)
					m.lowLatencyRounds(low, 1)
					m.sleep()
				}
				m.normalRounds(normal{g.ranks(), 24, 40, 3, 2}, 2)
				m.lowLatencyHalves(6, 256, 2, 2*g.ranks())
				again, _, err := m.Region(false)
				m.must(err)
				m.check(address == again, "the region moved")
				s, err := m.Stats(OpLLDispatch)
				m.must(err)
				m.check(s.Calls == uint64(rounds)+8, "%d calls are counted", s.Calls)
				m.must(m.Release(-1)) // Destroy comes without a Restore
			})
		})
	}
	goleak.VerifyNone(t)
}

func TestHandlesAndTokensOfBeforeARelease(t *testing.T) {
	o := roomFor(t, 2, 8, 64, 4)
	o.NumNVLBytes = 1 << 20
	onRanks(t, 2, o, func(m *member) {
		f := newFixed(m, 5, 2, 4, 64)
		f.layout(m)
		token, err := f.notify(m, 0)
		m.must(err)
		m.must(m.Barrier(&Call{})) // both have the counts
		m.sleep()
		_, err = m.WaitCounts(token, 0, nil)
		m.check(errors.Is(err, ErrInvalidArgument), "a token of before: %v", err)
		err = m.Combine(&CombineArgs{Hidden: 64, Handle: &f.handle}, &Call{})
		m.check(errors.Is(err, ErrInvalidArgument) && contains(err, "one of before release()"), "%v", err)
		m.normalRounds(normal{2, 5, 64, 2, 2}, 1)
	})
}

// Threads that call while another one releases get their result or the named error, and nothing in between.
func TestReleaseWhileThreadsCall(t *testing.T) {
	o := roomFor(t, 1, 8, 128, 4)
	onRanks(t, 1, o, func(m *member) {
		var ended atomic.Bool
		var threads sync.WaitGroup
		for range 3 {
			threads.Go(func() {
				for !ended.Load() {
					if err := m.Barrier(&Call{}); err != nil && !contains(err, "the buffer's memory is released") {
						t.Error(err)
					}
					time.Sleep(200 * time.Microsecond)
				}
			})
		}
		for range 60 {
			for err := m.Release(0); err != nil; err = m.Release(time.Millisecond) {
				m.check(errors.Is(err, ErrInterrupted), "%v", err)
			}
			m.must(m.Restore(-1))
		}
		ended.Store(true)
		threads.Wait()
		m.must(m.Barrier(&Call{}))
	})
}

// A rank that does not come ends the others' Restore by name; all may call again afterwards.
func TestRestoreAgainAfterAnError(t *testing.T) {
	const limit = 700 * time.Millisecond
	o := roomFor(t, 3, 8, 128, 6)
	within(t, limit, 3, 0, o, func(m *member) {
		m.must(m.Release(-1))
		if m.rank == 1 {
			time.Sleep(limit * 3 / 2)
		}
		err := m.Restore(-1)
		m.check(errors.Is(err, ErrTimeout), "%v", err)
		if m.rank != 1 {
			m.check(contains(err, "rank 1"), "%v", err)
		}
		m.check(errors.Is(m.Barrier(&Call{}), ErrInvalidState), "a barrier without memory")
		var ended error
		for range 20 { // the first to come waits for a rank that may not have left yet
			if ended = m.Restore(-1); ended == nil {
				break
			}
		}
		m.must(ended)
		m.must(m.Barrier(&Call{}))
	})
}

func TestDestroyDuringARestore(t *testing.T) {
	o, gone := roomFor(t, 2, 8, 128, 4), make(chan bool)
	onRanks(t, 2, o, func(m *member) {
		m.must(m.Release(-1))
		if m.rank == 1 {
			<-gone
			return
		}
		defer close(gone)
		began := time.Now()
		m.check(errors.Is(m.Restore(50*time.Millisecond), ErrInterrupted), "a restore by one rank")
		m.must(m.Destroy())
		m.check(time.Since(began) < 2*time.Second, "it took %v", time.Since(began))
		m.check(errors.Is(m.Restore(0), ErrInvalidState), "a restore of a destroyed buffer")
	})
	goleak.VerifyNone(t)
}

func contains(err error, text string) bool { return err != nil && strings.Contains(err.Error(), text) }
