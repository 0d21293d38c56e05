package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/deepep-go/deepep/internal/status"
	"github.com/deepep-go/deepep/internal/testutil/proctest"
)

// freeAddress returns a loopback address without a listener.
func freeAddress(t testing.TB) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// makers returns, for each kind of exchanger, a function that makes rank r of n.
func makers(t testing.TB, n int) map[string]func(ctx context.Context, r int) (Exchanger, error) {
	dir, address, local, inner := t.TempDir(), freeAddress(t), NewLocal(n), NewLocal(n)
	return map[string]func(context.Context, int) (Exchanger, error){
		"local": func(_ context.Context, r int) (Exchanger, error) { return local[r], nil },
		"callback": func(_ context.Context, r int) (Exchanger, error) {
			return NewCallback(r, n, inner[r].AllGather), nil
		},
		"tcp": func(ctx context.Context, r int) (Exchanger, error) {
			return DialTCP(ctx, TCPOptions{Rank: r, Size: n, Address: address, Secret: "s"})
		},
		"file": func(ctx context.Context, r int) (Exchanger, error) {
			return OpenFile(ctx, FileOptions{Rank: r, Size: n, Dir: dir, Name: "group"})
		},
	}
}

func TestAllGather(t *testing.T) {
	for _, n := range []int{1, 2, 5} {
		for kind, mk := range makers(t, n) {
			t.Run(fmt.Sprintf("%s of %d", kind, n), func(t *testing.T) {
				checkFDs(t)
				noErrors(t, each(n, func(r int) error { return gatherRounds(proctest.Context(t), mk, r, n) }))
			})
		}
	}
}

func gatherRounds(ctx context.Context, mk func(context.Context, int) (Exchanger, error), r, n int) error {
	ex, err := mk(ctx, r)
	if err != nil {
		return err
	}
	defer ex.Close()
	if ex.Rank() != r || ex.Size() != n {
		return fmt.Errorf("rank %d of %d", ex.Rank(), ex.Size())
	}
	for round := range 4 {
		size := []int{0, 1, 70_000, 3}[round]
		text := func(rank int) string { return strings.Repeat(string(rune('a'+rank)), size*(rank+1)) }
		mine := []byte(text(r))
		all, err := ex.AllGather(ctx, mine)
		if err != nil {
			return fmt.Errorf("round %d: %w", round, err)
		}
		if len(all) != n {
			return fmt.Errorf("%d blobs", len(all))
		}
		for rank, b := range all {
			if string(b) != text(rank) {
				return fmt.Errorf("round %d: blob of rank %d has %d bytes, or the wrong ones", round, rank, len(b))
			}
		}
		if len(mine) > 0 {
			mine[0] = '#' // the blob is the caller's again: no rank may see this
		}
	}
	return nil
}

func TestAllGatherRefusesHugeBlobs(t *testing.T) {
	huge := make([]byte, MaxBlob+1)
	for kind, mk := range makers(t, 1) {
		t.Run(kind, func(t *testing.T) {
			ex, err := mk(proctest.Context(t), 0)
			if err != nil {
				t.Fatal(err)
			}
			defer ex.Close()
			_, err = ex.AllGather(proctest.Context(t), huge)
			wantError(t, err, status.InvalidArgument, "argument blob", "67108865", "at most 67108864")
		})
	}
}

// A gather without one of the ranks ends with the context, and the exchanger is then unusable.
func TestAllGatherEndsWithContext(t *testing.T) {
	for kind, mk := range makers(t, 2) {
		t.Run(kind, func(t *testing.T) {
			ex := make([]Exchanger, 2)
			noErrors(t, each(2, func(r int) (err error) { ex[r], err = mk(proctest.Context(t), r); return }))
			for _, r := range []int{0, 1} {
				defer ex[r].Close()
			}
			_, err := ex[0].AllGather(soon(t), []byte("x"))
			wantError(t, err, status.Timeout, "rank 1")
			if kind == "callback" {
				return
			}
			if _, err := ex[0].AllGather(proctest.Context(t), []byte("x")); err == nil {
				t.Error("a second gather went through")
			}
		})
	}
}

// When a rank leaves during a gather, the others return at once.
func TestAllGatherEndsWhenARankLeaves(t *testing.T) {
	for kind, mk := range makers(t, 3) {
		if kind == "callback" {
			continue // the caller's business
		}
		t.Run(kind, func(t *testing.T) {
			ex := make([]Exchanger, 3)
			noErrors(t, each(3, func(r int) (err error) { ex[r], err = mk(proctest.Context(t), r); return }))
			begin := time.Now()
			errs := each(3, func(r int) error {
				defer ex[r].Close()
				if r == 2 {
					return ex[r].Close()
				}
				_, err := ex[r].AllGather(proctest.Context(t), nil)
				return err
			})
			if errs[0] == nil || !strings.Contains(errs[0].Error(), "rank 2") || errs[1] == nil || !strings.Contains(errs[1].Error(), "rank 2") {
				t.Errorf("errors must name rank 2: %v", errs)
			}
			if d := time.Since(begin); d > 5*time.Second {
				t.Errorf("ended after %v", d)
			}
		})
	}
}

func TestCallbackChecksItsResult(t *testing.T) {
	give := func(blobs ...string) func(context.Context, []byte) ([][]byte, error) {
		return func(context.Context, []byte) ([][]byte, error) {
			var out [][]byte
			for _, b := range blobs {
				out = append(out, []byte(b))
			}
			return out, nil
		}
	}
	ctx := proctest.Context(t)
	_, err := NewCallback(1, 2, give("a")).AllGather(ctx, []byte("b"))
	wantError(t, err, status.Mismatch, "1 blobs", "2 ranks")
	_, err = NewCallback(1, 2, give("b", "a")).AllGather(ctx, []byte("b"))
	wantError(t, err, status.Mismatch, "rank 1")
	_, err = NewCallback(2, 2, give("a", "b")).AllGather(ctx, []byte("b"))
	wantError(t, err, status.InvalidArgument, "argument rank", "got 2", "0 to 1")
	_, err = NewCallback(0, 2, nil).AllGather(ctx, nil)
	wantError(t, err, status.InvalidArgument)
	_, err = NewCallback(0, 1, func(context.Context, []byte) ([][]byte, error) { return nil, errors.New("boom") }).AllGather(ctx, nil)
	if err == nil || !strings.Contains(err.Error(), "boom") {
		t.Errorf("the callback's error is lost: %v", err)
	}
}

func TestExchangersRefuseBadOptions(t *testing.T) {
	ctx, dir := proctest.Context(t), t.TempDir()
	for _, c := range []struct {
		tcp   TCPOptions
		words string
	}{
		{TCPOptions{Rank: 3, Size: 3, Address: "127.0.0.1:1"}, "argument rank: got 3, allowed 0 to 2"},
		{TCPOptions{Size: 0}, "argument size: got 0"},
		{TCPOptions{Size: 2, Address: "nowhere"}, `argument address: got "nowhere"`},
		{TCPOptions{Size: 2, Address: "127.0.0.1:0"}, "a port from 1 to 65535"},
		{TCPOptions{Size: 2, Address: "127.0.0.1:70000"}, "a port from 1 to 65535"},
		{TCPOptions{Size: 2, Address: "192.0.2.1:99"}, "a loopback address"},
		{TCPOptions{Size: 2, Address: "0.0.0.0:99"}, "a loopback address"},
		{TCPOptions{Size: 2, Address: "127.0.0.1:99", Interface: "nosuch0"}, "argument interface (DEEPEP_INTERFACE): got nosuch0"},
		{TCPOptions{Size: 2, Address: "127.0.0.1:99", Interface: "192.0.2.1"}, "an address that this host has"},
	} {
		_, err := DialTCP(ctx, c.tcp)
		wantError(t, err, status.InvalidArgument, c.words)
	}
	for _, c := range []struct {
		file  FileOptions
		words string
	}{
		{FileOptions{Rank: -1, Size: 3, Dir: dir, Name: "n"}, "argument rank: got -1"},
		{FileOptions{Size: 2, Dir: dir, Name: "../x"}, `argument name: got "../x"`},
		{FileOptions{Size: 2, Dir: dir, Name: "a.run-b"}, "argument name"},
		{FileOptions{Size: 2, Dir: filepath.Join(dir, "none"), Name: "n"}, "argument directory"},
	} {
		_, err := OpenFile(ctx, c.file)
		wantError(t, err, status.InvalidArgument, c.words)
	}
	if left, _ := os.ReadDir(dir); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
}

func TestRankList(t *testing.T) {
	for want, ranks := range map[string][]int{"rank 3": {3}, "ranks 0-2, 5": {0, 1, 2, 5}, "ranks 1, 3": {1, 3}, "ranks 0-1": {0, 1}} {
		if got := rankList(ranks); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}
