package bootstrap

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/deepep-go/deepep/internal/status"
	"github.com/deepep-go/deepep/internal/testutil/proctest"
)

func openErrors(t *testing.T, n int, change func(rank int, h *HelloOptions)) []error {
	t.Helper()
	return openErrorsOn(t, NewLocal(n), change)
}

func openErrorsOn(t *testing.T, ex []Exchanger, change func(rank int, h *HelloOptions)) []error {
	t.Helper()
	return each(len(ex), func(r int) error {
		h := HelloOptions{Version: "1", Build: "b"}
		change(r, &h)
		c, err := Open(proctest.Context(t), ex[r], h)
		if err == nil {
			c.Close()
		}
		return err
	})
}

func TestMismatchReachesEveryRank(t *testing.T) {
	checkFDs(t)
	for _, err := range openErrors(t, 3, func(r int, h *HelloOptions) {
		if r == 1 {
			h.Version = "2"
		}
	}) {
		wantError(t, err, status.Mismatch, `ranks 0, 2 have "1"`, `rank 1 has "2"`)
	}
	for _, err := range openErrors(t, 3, func(r int, h *HelloOptions) { h.Build = fmt.Sprint("build", r/2) }) {
		wantError(t, err, status.Mismatch, `ranks 0-1 have "build0"`, `rank 2 has "build1"`)
	}
}

// A rank that cannot start still gathers, so that the others do not wait for it.
func TestFailureOfOneRankReachesEveryRank(t *testing.T) {
	errs := openErrors(t, 2, func(r int, h *HelloOptions) {
		if r == 1 {
			h.Interface = "nosuch0"
		}
	})
	wantError(t, errs[0], status.Aborted, "rank 1 (host ", "cannot start", "nosuch0")
	wantError(t, errs[1], status.InvalidArgument, "argument interface (DEEPEP_INTERFACE): got nosuch0")
}

func TestDifferentHostsNeedAnInterface(t *testing.T) {
	ex := onMachines(2, func(r int) string { return fmt.Sprint("host", r) })
	for _, err := range openErrorsOn(t, ex, func(int, *HelloOptions) {}) {
		wantError(t, err, status.Unsupported, "rank 0 (host host0) and rank 1 (host host1)", "DEEPEP_INTERFACE")
	}
}

func beginAll(t *testing.T, n int) []*Pending {
	t.Helper()
	p, ex := make([]*Pending, n), NewLocal(n)
	noErrors(t, each(n, func(r int) (err error) {
		p[r], err = Begin(proctest.Context(t), ex[r], HelloOptions{Version: "1", Extra: []byte{byte(r)}})
		ex[r].Close() // not needed any more
		return err
	}))
	return p
}

func TestBeginThenConnect(t *testing.T) {
	p := beginAll(t, 3)
	for r := range p {
		if peers := p[r].Peers(); len(peers) != 3 || peers[2].Extra[0] != 2 || p[r].Nonce() != p[0].Nonce() {
			t.Errorf("rank %d sees %+v", r, peers)
		}
	}
	noErrors(t, each(3, func(r int) error {
		c, err := p[r].Connect(proctest.Context(t))
		if err != nil {
			return err
		}
		defer c.Close()
		if c.Nonce() != p[0].Nonce() || c.Rank() != r || c.Size() != 3 {
			return fmt.Errorf("rank %d of %d", c.Rank(), c.Size())
		}
		_, err = p[r].Connect(proctest.Context(t))
		wantError(t, err, status.InvalidState)
		_, err = c.Exchange(proctest.Context(t), "x", nil, nil)
		return err
	}))
}

func TestConnectNamesLateRanks(t *testing.T) {
	checkFDs(t)
	p := beginAll(t, 3)
	defer p[2].Close()
	errs := each(2, func(r int) error {
		_, err := p[r].Connect(soon(t))
		return err
	})
	for _, err := range errs { // the second may get the reason from the first, which leaves
		wantError(t, err, status.Timeout, "rank 2 (host ", "not joined after 0.")
	}
}

// A rank that is missing, but says elsewhere that it waits too, is not to blame.
func TestConnectSparesRanksThatWait(t *testing.T) {
	p := beginAll(t, 4)
	for _, late := range p[1:] {
		defer late.Close()
	}
	p[0].Follows(func(rank int) (int, bool) { return -1, rank != 2 })
	_, err := p[0].Connect(soon(t))
	wantError(t, err, status.Timeout, "connecting: rank 2 (host ", " not joined after 0.", "s (ranks 1, 3 wait too)")
	if strings.Contains(err.Error(), "rank 3 (") {
		t.Errorf("the error blames a rank that waits: %v", err)
	}
}

// Rank 1 alone is missing, because it waits for rank 2 elsewhere: the error names rank 2 last.
func TestConnectNamesWhomTheMissingRankWaitsFor(t *testing.T) {
	p := beginAll(t, 3)
	defer p[1].Close()
	for r := range 3 {
		p[r].Follows(func(rank int) (int, bool) { return 2, rank == 1 })
	}
	var first atomic.Pointer[Channel]
	p[0].onConnect = func(n *connector) { first.Store(n.c) }
	over := endsWhen(t, func() bool { // rank 2 has come, and has not said yet that it waits too
		c := first.Load()
		if c == nil {
			return false
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.links[2] != nil
	})
	errs := each(3, func(r int) (err error) {
		switch r {
		case 0:
			_, err = p[0].Connect(over)
		case 2:
			_, err = p[2].Connect(proctest.Context(t)) // until rank 0 leaves
		}
		return err
	})
	wantError(t, errs[0], status.Timeout, "rank 1 (host ", " not joined after 0.", " s, which waits for rank 2 (host ")
}

func TestConnectToRankThatGaveUp(t *testing.T) {
	p := beginAll(t, 2)
	p[0].Close()
	_, err := p[1].Connect(proctest.Context(t))
	wantError(t, err, status.PeerDead, "connecting to rank 0 (host ", "refused")
}

// Connections from other programs are refused and do not delay the start.
func TestConnectDespiteStrangers(t *testing.T) {
	checkFDs(t)
	p := beginAll(t, 2)
	address := &net.UnixAddr{Net: "unix", Name: "@" + p[0].self.Socket}
	dial := func() *net.UnixConn {
		c, err := net.DialUnix("unix", nil, address)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	silent, noise, wrong := dial(), dial(), dial()
	defer silent.Close()
	defer noise.Close()
	defer wrong.Close()
	noise.Write(make([]byte, 100))
	newLink(0, wrong).write(&frame{kind: kindHello, rank: 1, nonce: randomNonce(), blob: make([]byte, 4), fds: []int{int(os.Stdin.Fd())}})
	noErrors(t, each(2, func(r int) error {
		c, err := p[r].Connect(proctest.Context(t))
		if err == nil {
			_, err = c.Exchange(proctest.Context(t), "x", nil, nil)
			c.Close()
		}
		return err
	}))
}

// The answer to a hello of this group with wrong ranks gives the reason.
func TestHandshakeChecks(t *testing.T) {
	p := beginAll(t, 3)
	n := &connector{Pending: p[1], pidfd: -1}
	var err error
	if n.c, err = newChannel(1, p[1].nonce, p[1].peers); err != nil {
		t.Fatal(err)
	}
	defer n.c.Close()
	for _, q := range p {
		defer q.Close()
	}
	unixLink := &link{unix: &net.UnixConn{}}
	to := func(rank byte) []byte { return []byte{rank, 0, 0, 0} }
	for _, c := range []struct {
		f     frame
		l     *link
		words string
	}{
		{frame{kind: kindData, rank: 2, nonce: n.nonce, blob: to(1)}, unixLink, "not a hello"},
		{frame{kind: kindHello, rank: 2, blob: to(1)}, unixLink, "not a hello"},
		{frame{kind: kindHello, rank: 2, nonce: n.nonce, blob: to(1)[:3]}, unixLink, "not a hello"},
		{frame{kind: kindHello, rank: 2, nonce: n.nonce, blob: to(0)}, unixLink, "this is rank 1, not rank 0"},
		{frame{kind: kindHello, rank: 0, nonce: n.nonce, blob: to(1)}, unixLink, "rank 0 does not connect to rank 1"},
		{frame{kind: kindHello, rank: 3, nonce: n.nonce, blob: to(1)}, unixLink, "rank 3 does not connect"},
		{frame{kind: kindHello, rank: 2, nonce: n.nonce, blob: to(1)}, &link{}, "wrong kind of link"},
	} {
		if err := n.checkHello(c.l, &c.f); err == nil || !strings.Contains(err.Error(), c.words) {
			t.Errorf("got %v, want %q", err, c.words)
		}
	}
}

// A handshake that succeeds while the rank gives up leaves a connection that can carry the reason.
func TestHandshakeAsTheRankGivesUp(t *testing.T) {
	near, far := net.Pipe()
	defer near.Close()
	defer far.Close()
	ctx, cancel := context.WithCancel(proctest.Context(t))
	stop := boundHandshake(ctx, near, handshakeTime)
	cancel()
	if _, err := near.Write([]byte{1}); !timedOut(err) {
		t.Fatalf("a write after the end of ctx: %v", err)
	}
	stop()
	go func() { _, _ = io.Copy(io.Discard, far) }()
	if _, err := near.Write([]byte{1}); err != nil {
		t.Error(err)
	}
}

func TestContextEndsConnectAtOnce(t *testing.T) {
	p := beginAll(t, 2)
	defer p[1].Close()
	ctx, cancel := context.WithCancel(proctest.Context(t))
	time.AfterFunc(20*time.Millisecond, cancel)
	timely(t, func() {
		_, err := p[0].Connect(ctx)
		wantError(t, err, status.Interrupted, "rank 1")
	})
}
