package health

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/deepep-go/deepep/internal/bootstrap"
	"github.com/deepep-go/deepep/internal/status"
	"github.com/deepep-go/deepep/internal/testutil/proctest"
)

func TestMain(m *testing.M) { proctest.Main(m, roles) }

// quick makes tests short: DeadAfter is 300 ms.
func quick() Options {
	return Options{Heartbeat: 20 * time.Millisecond, DeadAfter: 300 * time.Millisecond}
}

type member struct {
	*Watcher
	ch *bootstrap.Channel
}

// group starts n goroutine ranks; host names each rank's machine, nil: all the same.
func group(t testing.TB, n int, host func(rank int) string) []member {
	t.Helper()
	all, ex := make([]member, n), bootstrap.NewLocal(n)
	var wg sync.WaitGroup
	for r := range n {
		wg.Go(func() {
			h := bootstrap.HelloOptions{Version: "1"}
			if host != nil {
				ex[r], h.Interface = proctest.OnMachine(host(r), ex[r]), "lo"
			}
			ch, err := bootstrap.Open(proctest.Context(t), ex[r], h)
			if err != nil {
				t.Error(err)
				return
			}
			w, err := Start(proctest.Context(t), ch, quick())
			if err != nil {
				t.Error(err)
			}
			all[r] = member{w, ch}
		})
	}
	wg.Wait()
	if t.Failed() {
		t.FailNow()
	}
	t.Cleanup(func() {
		for _, m := range all {
			m.Watcher.Close()
			m.ch.Close()
		}
	})
	return all
}

func TestPeersSeeLastCallAndHeartbeat(t *testing.T) {
	for name, host := range map[string]func(int) string{"one host": nil, "two hosts": func(r int) string { return fmt.Sprint("host", r) }} {
		t.Run(name, func(t *testing.T) {
			all := group(t, 2, host)
			if got := all[0].Describe(1); !strings.Contains(got, "last call none, heartbeat 0.") {
				t.Errorf("before any call: %s", got)
			}
			all[1].SetLastCall(LastCall{Op: 5, Number: 3, Phase: 1, Buffer: 2})
			proctest.Eventually(t, proctest.Limit, "rank 0 sees rank 1's call", func() bool {
				return strings.Contains(all[0].Describe(1), "last call low_latency_dispatch #3 (send), heartbeat 0.")
			})
			if got := all[1].Describe(1); !strings.HasPrefix(got, "rank 1 (host ") || !strings.Contains(got, fmt.Sprintf(", pid %d, last call low_latency_dispatch #3 (send), this rank)", os.Getpid())) {
				t.Errorf("of itself: %s", got)
			}
			beats, last := 0, all[0].Stalled(1)
			proctest.Eventually(t, proctest.Limit, "five heartbeats that are new", func() bool {
				s := all[0].Stalled(1)
				if s < last && s < 100*time.Millisecond {
					beats++
				}
				last = s
				return beats == 5
			})
			if s := all[0].Stalled(0); s != 0 {
				t.Errorf("this rank's heartbeat is %v old", s)
			}
		})
	}
}

func TestLeavingIsNoDeath(t *testing.T) {
	for name, host := range map[string]func(int) string{"one host": nil, "two hosts": func(r int) string { return fmt.Sprint("host", r) }} {
		t.Run(name, func(t *testing.T) {
			all := group(t, 3, host)
			left, died := make(chan int, 8), make(chan Death, 8)
			all[0].OnLeft(func(rank int) { left <- rank })
			all[0].OnDeath(func(d Death) { died <- d })
			all[2].Watcher.Close()
			if rank := <-left; rank != 2 || !all[0].Left(2) || all[0].Left(1) {
				t.Errorf("rank %d left", rank)
			}
			all[1].ch.Close() // before the watcher
			if rank := <-left; rank != 1 || !all[0].Left(1) {
				t.Errorf("rank %d left", rank)
			}
			all[2].ch.Close()
			// Longer than DeadAfter.
			time.Sleep(2 * quick().DeadAfter)
			select {
			case d := <-died:
				t.Errorf("a death was seen: %v", d.Err())
			default:
			}
			if got := all[0].Describe(2); !strings.HasSuffix(got, "has left)") {
				t.Errorf("described as %s", got)
			}
			if _, dead := all[0].Dead(1); dead {
				t.Error("rank 1 is dead")
			}
		})
	}
}

func TestCloseIsIdempotentAndKeepsTheState(t *testing.T) {
	all := group(t, 2, nil)
	all[1].SetLastCall(LastCall{Op: 3, Number: 1})
	w := all[1].Watcher
	var wg sync.WaitGroup
	stop := make(chan struct{})
	for range 3 {
		wg.Go(func() {
			for n := uint64(0); ; n++ {
				w.SetLastCall(LastCall{Op: 3, Number: n})
				_ = w.Describe(int(n % 2))
				_ = w.Stalled(0)
				_ = w.Left(0)
				select {
				case <-stop:
					return
				default:
				}
			}
		})
	}
	for range 4 {
		wg.Go(func() { w.Close() })
	}
	proctest.Eventually(t, proctest.Limit, "rank 0 sees that rank 1 has left", func() bool { return all[0].Left(1) })
	close(stop)
	wg.Wait()
	if got := w.Describe(0); !strings.HasPrefix(got, "rank 0 (host ") {
		t.Errorf("after Close: %s", got)
	}
	w.SetLastCall(LastCall{Op: 4}) // must not write to the unmapped page
}

// Close unmaps the page only when no store is running.
func TestCloseWaitsForStores(t *testing.T) {
	w := group(t, 1, nil)[0].Watcher
	w.users.Add(1)
	closed := make(chan struct{})
	go func() {
		w.Close()
		close(closed)
	}()
	<-w.ended
	select {
	case <-closed:
		t.Error("the page was unmapped while it was in use")
	case <-time.After(50 * time.Millisecond):
	}
	w.users.Add(-1)
	<-closed
}

func TestCancelledSubscriberIsNotCalled(t *testing.T) {
	s := &subscriber{over: true} // cancelled between nextCall and deliver
	s.deliver(func() { t.Error("called") }, zap.NewNop())
}

func TestStartChecksItsOptions(t *testing.T) {
	all := group(t, 1, nil)
	_, err := Start(proctest.Context(t), all[0].ch, Options{Heartbeat: time.Second, DeadAfter: time.Millisecond})
	if !errors.Is(err, status.ErrInvalidArgument) || !strings.Contains(err.Error(), "1s, 1ms") {
		t.Errorf("got %v", err)
	}
	_, err = Start(proctest.Context(t), all[0].ch, Options{Heartbeat: -1})
	if !errors.Is(err, status.ErrInvalidArgument) {
		t.Errorf("got %v", err)
	}
}

func TestStartEndsWithContext(t *testing.T) {
	ex := bootstrap.NewLocal(2)
	var ch [2]*bootstrap.Channel
	var wg sync.WaitGroup
	for r := range 2 {
		wg.Go(func() { ch[r], _ = bootstrap.Open(proctest.Context(t), ex[r], bootstrap.HelloOptions{}) })
	}
	wg.Wait()
	defer ch[0].Close()
	defer ch[1].Close()
	ctx, cancel := context.WithTimeout(proctest.Context(t), 50*time.Millisecond)
	defer cancel()
	_, err := Start(ctx, ch[0], Options{})
	if !errors.Is(err, status.ErrTimeout) || !strings.Contains(err.Error(), "nothing from rank 1") {
		t.Errorf("got %v", err)
	}
}

func BenchmarkSetLastCall(b *testing.B) {
	all := group(b, 1, nil)
	n := uint64(0)
	for b.Loop() {
		n++
		all[0].SetLastCall(LastCall{Op: 3, Number: n, Phase: 1, Buffer: 1})
	}
}
