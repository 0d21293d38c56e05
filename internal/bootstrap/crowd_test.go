package bootstrap

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/deepep-go/deepep/internal/status"
	"github.com/deepep-go/deepep/internal/testutil/proctest"
)

func countFDs(t testing.TB) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// So many ranks of a process exchange without sockets, in order, and see who leaves and why.
func TestCrowd(t *testing.T) {
	const n = crowdSize
	before := countFDs(t)
	channels := open(t, n, nil)
	if fds := countFDs(t) - before; fds > 4*n { // a process watch each; a pair's sockets would be 4160
		t.Errorf("%d ranks opened %d descriptors", n, fds)
	}
	noErrors(t, each(n, func(r int) error {
		for round := range 3 {
			got, err := channels[r].Exchange(proctest.Context(t), "x", []byte(fmt.Sprint(r, round)), nil)
			if err != nil {
				return err
			}
			for rank := range got {
				if string(got[rank].Blob) != fmt.Sprint(rank, round) {
					return fmt.Errorf("got %q of rank %d in round %d", got[rank].Blob, rank, round)
				}
				got[rank].Blob[0] = '#' // each receiver has its own
			}
		}
		return nil
	}))
	for r, c := range channels {
		for _, p := range c.Peers() {
			if p.Crowd != (p.Rank != r) {
				t.Fatalf("rank %d: %+v", r, p)
			}
		}
	}
	_, err := channels[0].Exchange(soon(t), "late", nil, nil)
	wantError(t, err, status.Timeout, `exchange "late": nothing from rank 1 (`)
	channels[7].CloseWith(status.Errorf(status.OutOfMemory, "rank 7 has no memory"))
	noErrors(t, each(n, func(r int) error {
		if r == 7 {
			return nil
		}
		_, err := channels[r].Exchange(proctest.Context(t), "after", nil, nil)
		if !errors.Is(err, status.ErrOutOfMemory) || !strings.Contains(err.Error(), "rank 7 (") || !strings.Contains(err.Error(), "no memory") {
			return fmt.Errorf("after rank 7 has left: %w", err)
		}
		return nil
	}))
}

// A rank that gives up before the others have come is named to them.
func TestCrowdOfARankThatGivesUp(t *testing.T) {
	const n = crowdSize
	pending := make([]*Pending, n)
	exchangers := NewLocal(n)
	noErrors(t, each(n, func(r int) (err error) {
		pending[r], err = Begin(proctest.Context(t), exchangers[r], HelloOptions{Version: "1"})
		return err
	}))
	_, err := pending[3].Connect(soon(t))
	wantError(t, err, status.Timeout, "connecting: rank 0 (")
	var failed []error
	for r := range pending {
		if r != 3 {
			channel, err := pending[r].Connect(soon(t))
			if err == nil {
				channel.Close()
				t.Fatalf("rank %d is connected", r)
			}
			failed = append(failed, err)
			break
		}
	}
	for r := range pending {
		pending[r].Close()
	}
	wantError(t, failed[0], status.Timeout, "not joined")
	if len(crowds.by) != 0 {
		t.Errorf("%d crowds are kept", len(crowds.by))
	}
}

// A sender that is not read fails after so many frames, as over a socket.
func TestInboxBounds(t *testing.T) {
	b := newInbox(2)
	for i := range queueFrames {
		if !b.put(letter{frame: frame{rank: 1}}) {
			t.Fatalf("frame %d was refused", i)
		}
	}
	l := &link{home: 1, near: b}
	if b.put(letter{frame: frame{rank: 1}}) || !b.put(letter{frame: frame{rank: 0}}) || l.hasRoom() || !(&link{home: 0, near: b}).hasRoom() {
		t.Errorf("%d frames of rank 1, %d of rank 0", b.has(1), b.has(0))
	}
	l.endWriting() // always fits
	frames, ok := b.take()
	if last := frames[len(frames)-1]; !ok || len(frames) != queueFrames+2 || !last.end || last.rank != 1 || b.has(1) != 0 {
		t.Errorf("%d frames were taken", len(frames))
	}
	b.ignore(1)
	b.put(letter{frame: frame{rank: 1}})
	b.close()
	if frames, ok := b.take(); ok || frames != nil {
		t.Errorf("%d frames of a closed inbox", len(frames))
	}
}
