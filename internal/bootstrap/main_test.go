package bootstrap

import (
	"context"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/deepep-go/deepep/internal/status"
	"github.com/deepep-go/deepep/internal/testutil/proctest"
)

func TestMain(m *testing.M) { proctest.Main(m, roles) }

// soon is a context that ends while the test waits for it.
func soon(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 150*time.Millisecond)
	t.Cleanup(cancel)
	return ctx
}

// endsWhen is a context whose time is over as soon as the condition holds: what a rank has to do before that cannot come
// too late on a busy machine.
func endsWhen(t testing.TB, holds func() bool) context.Context {
	ctx, end := context.WithCancelCause(context.Background())
	t.Cleanup(func() { end(nil) })
	go func() {
		for limit := time.Now().Add(proctest.Limit); !holds() && ctx.Err() == nil && time.Now().Before(limit); {
			time.Sleep(time.Millisecond)
		}
		end(context.DeadlineExceeded)
	}()
	return ctx
}

// each runs f for every rank at once and gives the errors by rank.
func each(n int, f func(rank int) error) []error {
	errs := make([]error, n)
	var wg sync.WaitGroup
	for r := range n {
		wg.Go(func() { errs[r] = f(r) })
	}
	wg.Wait()
	return errs
}

func noErrors(t testing.TB, errs []error) {
	t.Helper()
	for r, err := range errs {
		if err != nil {
			t.Fatalf("rank %d: %v", r, err)
		}
	}
}

// wantError checks kind and words of an error.
func wantError(t testing.TB, err error, code status.Code, words ...string) {
	t.Helper()
	if err == nil {
		t.Fatalf("no error, expected %v with %q", code, words)
	}
	if status.CodeOf(err) != code {
		t.Errorf("error of kind %v, expected %v: %v", status.CodeOf(err), code, err)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("error does not say %q: %v", w, err)
		}
	}
}

// open joins n goroutine ranks; change may alter a rank's options.
func open(t testing.TB, n int, change func(rank int, h *HelloOptions)) []*Channel {
	t.Helper()
	return openOn(t, NewLocal(n), change)
}

// onMachines are the Exchangers of n goroutine ranks of the machines that machine names.
func onMachines(n int, machine func(rank int) string) []Exchanger {
	ex := NewLocal(n)
	for r := range ex {
		ex[r] = proctest.OnMachine(machine(r), ex[r])
	}
	return ex
}

func openOn(t testing.TB, ex []Exchanger, change func(rank int, h *HelloOptions)) []*Channel {
	t.Helper()
	n := len(ex)
	channels := make([]*Channel, n)
	noErrors(t, each(n, func(r int) (err error) {
		h := HelloOptions{Version: "1", Build: "b"}
		if change != nil {
			change(r, &h)
		}
		channels[r], err = Open(proctest.Context(t), ex[r], h)
		return err
	}))
	t.Cleanup(func() { each(n, func(r int) error { return channels[r].Close() }) })
	return channels
}

// checkFDs fails the test if it ends with more descriptors than it began with.
func checkFDs(t testing.TB) {
	t.Helper()
	if l, err := net.Listen("tcp", "127.0.0.1:0"); err == nil { // the first one opens the runtime's poller too
		l.Close()
	}
	before := openFDs(t)
	t.Cleanup(func() {
		// A moment may pass until the runtime's poller has let go of closed sockets.
		proctest.Eventually(t, proctest.Limit, fmt.Sprintf("at most %d open descriptors", before), func() bool { return openFDs(t) <= before })
	})
}

func openFDs(t testing.TB) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Skip("needs /proc")
	}
	return len(entries)
}
