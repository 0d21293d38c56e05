package bootstrap

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/deepep-go/deepep/internal/status"
	"github.com/deepep-go/deepep/internal/testutil/proctest"
	"golang.org/x/sys/unix"
)

// memfd makes a descriptor whose content names its owner.
func memfd(t testing.TB, text string) int {
	t.Helper()
	fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := unix.Write(fd, []byte(text)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	return fd
}

// contentOf reads a received memfd from its start and closes it.
func contentOf(fd int) (string, error) {
	defer unix.Close(fd)
	flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
	if err != nil || flags&unix.FD_CLOEXEC == 0 {
		return "", fmt.Errorf("descriptor %d is not close-on-exec (%v)", fd, err)
	}
	b := make([]byte, 64)
	n, err := unix.Pread(fd, b, 0)
	return string(b[:max(n, 0)]), err
}

func TestExchangeCarriesBlobsAndDescriptors(t *testing.T) {
	checkFDs(t)
	const n = 4
	channels := open(t, n, nil)
	noErrors(t, each(n, func(r int) error {
		c := channels[r]
		mine := []int{memfd(t, fmt.Sprintf("first of %d", r)), memfd(t, fmt.Sprintf("second of %d", r))}[:r%3]
		got, err := c.Exchange(proctest.Context(t), "memory", bytes.Repeat([]byte{byte(r)}, r*1000), mine)
		if err != nil {
			return err
		}
		for rank, m := range got {
			if len(m.Blob) != rank*1000 || rank > 0 && m.Blob[0] != byte(rank) || len(m.FDs) != rank%3 {
				return fmt.Errorf("from rank %d: %d bytes, %d descriptors", rank, len(m.Blob), len(m.FDs))
			}
			for i, fd := range m.FDs {
				want := fmt.Sprintf("%s of %d", []string{"first", "second"}[i], rank)
				if text, err := contentOf(fd); err != nil || text != want {
					return fmt.Errorf("descriptor %d of rank %d holds %q, %v", i, rank, text, err)
				}
			}
		}
		return nil
	}))
	if a, b := channels[0].Nonce(), channels[3].Nonce(); a != b || a == [16]byte{} {
		t.Errorf("nonces %x and %x", a, b)
	}
	for _, p := range channels[1].Peers() {
		if !p.SameHost || !p.SamePIDNamespace || !p.SameProcess || p.PID != os.Getpid() || p.StartTime == 0 {
			t.Errorf("rank %d: %+v", p.Rank, p)
		}
	}
}

func TestManyExchangesAtOnce(t *testing.T) {
	const n, tags, rounds = 3, 8, 20
	channels := open(t, n, nil)
	noErrors(t, each(n, func(r int) error {
		return errors.Join(each(tags, func(tag int) error {
			for round := range rounds {
				text := func(rank int) string { return fmt.Sprint(rank, tag, round) }
				got, err := channels[r].Exchange(proctest.Context(t), fmt.Sprint("tag ", tag), []byte(text(r)), nil)
				if err != nil {
					return err
				}
				for rank := range got {
					if string(got[rank].Blob) != text(rank) {
						return fmt.Errorf("got %q, want %q", got[rank].Blob, text(rank))
					}
				}
			}
			return nil
		})...)
	}))
	for r, c := range channels {
		if len(c.boxes) != 0 || c.pending[(r+1)%n] != 0 {
			t.Errorf("rank %d keeps %d boxes of past exchanges", r, len(c.boxes))
		}
	}
}

// Rank 1 does not come. Ranks 2 and 3 wait for it in one exchange, rank 0 for all three in the next: it blames rank 1.
func TestExchangeSparesRanksThatWait(t *testing.T) {
	channels := open(t, 4, nil)
	stopped, stop := context.WithCancelCause(context.Background())
	defer stop(context.DeadlineExceeded)
	errs := make(chan error, 2)
	for _, r := range []int{2, 3} {
		go func() {
			_, err := channels[r].Exchange(stopped, "first", nil, nil)
			errs <- err
		}()
	}
	if _, err := channels[0].ExchangeAmong(proctest.Context(t), "first", nil, []int{0}, false); err != nil {
		t.Fatal(err)
	}
	over := endsWhen(t, func() bool { return channels[0].Awaits(2) == 1 && channels[0].Awaits(3) == 1 })
	_, err := channels[0].Exchange(over, "second", nil, nil)
	wantError(t, err, status.Timeout, `exchange "second": nothing from rank 1 (host `, " s (ranks 2-3 wait too)")
	if strings.Contains(err.Error(), "rank 2 (") || strings.Contains(err.Error(), "rank 3 (") {
		t.Errorf("the error blames a rank that waits: %v", err)
	}
	stop(context.DeadlineExceeded)
	for range 2 {
		wantError(t, <-errs, status.Timeout, "nothing from rank 1 (host ")
	}
	for _, r := range []int{2, 3} {
		if _, err := channels[r].ExchangeAmong(proctest.Context(t), "third", nil, []int{r}, false); err != nil {
			t.Fatal(err)
		}
	}
	proctest.Eventually(t, proctest.Limit, "ranks 2 and 3 go on, and wait no more", func() bool { return channels[0].Awaits(2) < 0 && channels[0].Awaits(3) < 0 })
}

// Rank 0 does not come. Rank 1 waits for it, and its deadline is a moment before that of rank 2, which waits for both.
func TestExchangeSparesARankThatHasGivenUp(t *testing.T) {
	channels := open(t, 3, nil)
	over, end := context.WithCancelCause(context.Background())
	end(context.DeadlineExceeded)
	_, err := channels[1].Exchange(over, "first", nil, nil)
	wantError(t, err, status.Timeout, "nothing from rank 0 (host ")
	proctest.Eventually(t, proctest.Limit, "rank 2 hears that rank 1 has waited", func() bool { return channels[2].Awaits(1) == 0 })
	_, err = channels[2].Exchange(over, "second", nil, nil)
	wantError(t, err, status.Timeout, "nothing from rank 0 (host ", "(rank 1 waits too)")
	if _, err := channels[0].ExchangeAmong(proctest.Context(t), "second", nil, []int{0}, false); err != nil {
		t.Fatal(err)
	}
	proctest.Eventually(t, proctest.Limit, "rank 0's message", func() bool {
		channels[2].mu.Lock()
		defer channels[2].mu.Unlock()
		return channels[2].boxes[boxKey{0, "second"}] == nil // it was dropped
	})
}

// Rank 0 dies when it has sent its message to rank 2 and not to rank 1, which gives up and keeps its channel: rank 2
// does not wait for rank 1 until its own deadline.
func TestExchangeWithARankWhoseMessageCameBeforeItDied(t *testing.T) {
	channels := open(t, 3, nil)
	if _, err := channels[0].ExchangeAmong(proctest.Context(t), "shapes", nil, []int{0}, false); err != nil {
		t.Fatal(err)
	}
	proctest.Eventually(t, proctest.Limit, "rank 0's message", func() bool {
		channels[2].mu.Lock()
		defer channels[2].mu.Unlock()
		return channels[2].boxes[boxKey{0, "shapes"}] != nil
	})
	for _, c := range channels[1:] {
		c.update(0, func(s *PeerState) { s.Ended = true }, c.endedError(0))
	}
	ctx, cancel := context.WithTimeout(context.Background(), proctest.Limit)
	defer cancel()
	_, err := channels[2].Exchange(ctx, "shapes", nil, nil)
	wantError(t, err, status.PeerDead, `exchange "shapes": rank 0 (host `, "its process has ended")
}

// Rank 3 alone is missing, because it waits for rank 1 elsewhere, whose message here has come: the error names rank 1 last.
func TestExchangeNamesWhomTheMissingRankWaitsFor(t *testing.T) {
	channels := open(t, 4, nil)
	stopped, stop := context.WithCancelCause(context.Background())
	defer stop(context.DeadlineExceeded)
	ended := make(chan error, 1)
	go func() {
		_, err := channels[3].Exchange(stopped, "first", nil, nil)
		ended <- err
	}()
	for _, r := range []int{0, 1, 2} {
		for _, tag := range []string{"first", "second"} {
			if r == 0 && tag == "second" || r == 1 && tag == "first" {
				continue
			}
			if _, err := channels[r].ExchangeAmong(proctest.Context(t), tag, nil, []int{r}, false); err != nil {
				t.Fatal(err)
			}
		}
	}
	proctest.Eventually(t, proctest.Limit, "the messages come, and rank 3 says that it waits", func() bool {
		channels[0].mu.Lock()
		came := channels[0].boxes[boxKey{1, "second"}] != nil && channels[0].boxes[boxKey{2, "second"}] != nil
		channels[0].mu.Unlock()
		return came && channels[0].Awaits(3) == 1
	})
	over, end := context.WithCancelCause(context.Background())
	end(context.DeadlineExceeded)
	_, err := channels[0].Exchange(over, "second", nil, nil)
	wantError(t, err, status.Timeout, `exchange "second": nothing from rank 3 (host `, " s, which waits for rank 1 (host ")
	stop(context.DeadlineExceeded)
	wantError(t, <-ended, status.Timeout, "nothing from rank 1 (host ")
}

func TestExchangeOfTheLargestBlob(t *testing.T) {
	channels := open(t, 2, nil)
	blob := bytes.Repeat([]byte("0123456789abcdef"), MaxBlob/16)
	noErrors(t, each(2, func(r int) error {
		got, err := channels[r].Exchange(proctest.Context(t), "large", blob, nil)
		if err == nil && !bytes.Equal(got[1-r].Blob, blob) {
			err = errors.New("changed on the way")
		}
		return err
	}))
	_, err := channels[0].Exchange(proctest.Context(t), "large", make([]byte, MaxBlob+1), nil)
	wantError(t, err, status.InvalidArgument, "argument blob", "67108865")
	_, err = channels[0].Exchange(proctest.Context(t), "large", nil, make([]int, MaxFDs+1))
	wantError(t, err, status.InvalidArgument, "argument fds", "65 descriptors")
	_, err = channels[0].Exchange(proctest.Context(t), "", nil, nil)
	wantError(t, err, status.InvalidArgument, "argument tag")
	_, err = channels[0].Exchange(proctest.Context(t), "bad", nil, []int{-1})
	wantError(t, err, status.System, "bad file descriptor")
}

// The timeout error names the late rank, and the next exchange with that tag does not get its late message.
func TestExchangeTimeoutNamesAndRealigns(t *testing.T) {
	checkFDs(t)
	channels := open(t, 3, nil)
	over := endsWhen(t, func() bool { return channels[0].Awaits(2) == 1 && channels[2].Awaits(0) == 1 })
	errs := each(3, func(r int) error {
		if r == 1 {
			return nil
		}
		_, err := channels[r].Exchange(over, "x", []byte("first"), []int{memfd(t, "first")})
		return err
	})
	for _, r := range []int{0, 2} {
		wantError(t, errs[r], status.Timeout, `exchange "x": nothing from rank 1 (host `, fmt.Sprintf("pid %d)", os.Getpid()))
	}
	noErrors(t, each(3, func(r int) error {
		rounds := []string{"second"}
		if r == 1 {
			rounds = []string{"first", "second"} // what the others gave up
		}
		for _, text := range rounds {
			got, err := channels[r].Exchange(proctest.Context(t), "x", []byte(text), []int{memfd(t, text)})
			if err != nil {
				return err
			}
			for rank, m := range got {
				if held, err := contentOf(m.FDs[0]); err != nil || held != text || string(m.Blob) != text {
					return fmt.Errorf("from rank %d in round %s: %q and %q, %v", rank, text, m.Blob, held, err)
				}
			}
		}
		return nil
	}))
}

func TestExchangeCancelled(t *testing.T) {
	channels := open(t, 2, nil)
	ctx, cancel := context.WithCancelCause(proctest.Context(t))
	cancel(status.Errorf(status.Aborted, "the buffer was destroyed"))
	_, err := channels[0].Exchange(ctx, "x", nil, nil)
	wantError(t, err, status.Aborted, "nothing from rank 1", "the buffer was destroyed")
	ctx, stop := context.WithCancel(proctest.Context(t))
	stop()
	_, err = channels[0].Exchange(ctx, "y", nil, nil)
	wantError(t, err, status.Interrupted, "nothing from rank 1")
}

func TestExchangeTagInUse(t *testing.T) {
	channels := open(t, 2, nil)
	first := make(chan error, 1)
	ctx, cancel := context.WithCancel(proctest.Context(t))
	go func() {
		_, err := channels[0].Exchange(ctx, "x", nil, nil)
		first <- err
	}()
	proctest.Eventually(t, proctest.Limit, "the first exchange is under way", func() bool {
		channels[0].mu.Lock()
		defer channels[0].mu.Unlock()
		return channels[0].active["x"] != nil
	})
	_, err := channels[0].Exchange(proctest.Context(t), "x", nil, nil)
	wantError(t, err, status.InvalidState, `exchange "x" is under way`)
	cancel()
	wantError(t, <-first, status.Interrupted)
}

// Fail ends the exchanges that wait for the rank and later ones, and no others.
func TestFail(t *testing.T) {
	channels := open(t, 3, nil)
	noErrors(t, each(3, func(r int) error {
		if r == 1 {
			return nil // late, so that the others wait
		}
		if r == 2 {
			_, err := channels[2].Exchange(soon(t), "x", nil, nil)
			wantError(t, err, status.Timeout)
			return nil
		}
		time.AfterFunc(20*time.Millisecond, func() { channels[0].Fail(1, status.Errorf(status.PeerDead, "rank 1 was seen dead")) })
		begin := time.Now()
		_, err := channels[0].Exchange(proctest.Context(t), "x", nil, nil)
		wantError(t, err, status.PeerDead, `exchange "x"`, "rank 1 was seen dead")
		_, err = channels[0].Exchange(proctest.Context(t), "y", nil, nil)
		wantError(t, err, status.PeerDead, `exchange "y"`, "rank 1 was seen dead")
		if d := time.Since(begin); d > 2*time.Second {
			t.Errorf("took %v", d)
		}
		return nil
	}))
	channels[2].Fail(0, nil)
	_, err := channels[2].Exchange(proctest.Context(t), "z", nil, nil)
	wantError(t, err, status.PeerDead, "rank 0", "is dead")
	// Messages that a failed rank still sends are dropped.
	if _, err := channels[1].Exchange(soon(t), "late", []byte("late"), nil); err == nil {
		t.Error("rank 0 sent nothing, yet the exchange passed")
	}
	_, err = channels[0].Exchange(soon(t), "late", nil, nil)
	wantError(t, err, status.PeerDead, "rank 1 was seen dead")
}

func TestLeavingSendsItsReason(t *testing.T) {
	channels := open(t, 3, nil)
	changed := make(chan int, 16)
	cancel := channels[0].OnChange(func(rank int) { changed <- rank })
	defer cancel()
	waiting := make(chan error, 1)
	go func() {
		_, err := channels[0].Exchange(proctest.Context(t), "x", nil, nil)
		waiting <- err
	}()
	channels[2].CloseWith(status.Errorf(status.OutOfMemory, "no room for 5 GiB"))
	wantError(t, <-waiting, status.OutOfMemory, "rank 2 (host ", "has left the group: no room for 5 GiB")
	if rank := <-changed; rank != 2 {
		t.Errorf("change of rank %d", rank)
	}
	proctest.Eventually(t, proctest.Limit, "rank 2 is closed", func() bool { return channels[0].State(2).Closed })
	if s := channels[0].State(2); !s.Left || s.Ended {
		t.Errorf("state %+v", s)
	}
	_, err := channels[2].Exchange(proctest.Context(t), "x", nil, nil)
	wantError(t, err, status.InvalidState, "this rank's channel is closed")
	if err := channels[2].Close(); err != nil {
		t.Error(err)
	}
	if err := channels[2].Note(0, nil); err == nil {
		t.Error("a note after Close")
	}
}

// A rank may close right after an exchange: its message still reaches every rank.
func TestClosingRightAfterAnExchange(t *testing.T) {
	checkFDs(t)
	for range 30 {
		channels := open(t, 3, nil)
		noErrors(t, each(3, func(r int) error {
			defer channels[r].Close()
			_, err := channels[r].Exchange(proctest.Context(t), "x", make([]byte, 300_000), nil)
			return err
		}))
	}
}

func TestCloseEndsPendingExchangesAndIsBounded(t *testing.T) {
	checkFDs(t)
	channels := open(t, 2, nil)
	waiting := make(chan error, 1)
	go func() {
		_, err := channels[0].Exchange(proctest.Context(t), "x", nil, []int{memfd(t, "x")})
		waiting <- err
	}()
	proctest.Eventually(t, proctest.Limit, "the message is there", func() bool {
		channels[1].mu.Lock()
		defer channels[1].mu.Unlock()
		return len(channels[1].boxes) == 1 // it stays unclaimed, with its descriptor
	})
	begin := time.Now()
	each(4, func(int) error { return channels[0].Close() })
	wantError(t, <-waiting, status.InvalidState)
	if d := time.Since(begin); d > time.Second {
		t.Errorf("took %v", d)
	}
}

func TestNotes(t *testing.T) {
	channels := open(t, 2, nil)
	got := make(chan string, 16)
	channels[1].OnNote(func(rank int, note []byte) { got <- fmt.Sprint(rank, string(note)) })
	if err := channels[0].Note(1, []byte("beat")); err != nil {
		t.Fatal(err)
	}
	if text := <-got; text != "0beat" {
		t.Errorf("got %q", text)
	}
	wantError(t, channels[0].Note(1, make([]byte, MaxNote+1)), status.InvalidArgument, "argument note")
}

// Ranks on different hosts are joined by TCP: blobs pass, descriptors only among those of one host.
func TestTwoHosts(t *testing.T) {
	checkFDs(t)
	const n = 4
	ex := onMachines(n, func(r int) string { return fmt.Sprint("host", r/2) })
	channels := openOn(t, ex, func(_ int, h *HelloOptions) { h.Interface = "lo" })
	noErrors(t, each(n, func(r int) error {
		blob := bytes.Repeat([]byte{byte(r)}, 200_000)
		got, err := channels[r].ExchangeLocalFDs(proctest.Context(t), "x", blob, []int{memfd(t, fmt.Sprint(r))})
		if err != nil {
			return err
		}
		for rank, m := range got {
			if len(m.Blob) != len(blob) || m.Blob[0] != byte(rank) {
				return fmt.Errorf("blob of rank %d: %d bytes", rank, len(m.Blob))
			}
			local := rank/2 == r/2
			if local != (len(m.FDs) == 1) || local != channels[r].Peers()[rank].SameHost {
				return fmt.Errorf("rank %d: %d descriptors, same host %v", rank, len(m.FDs), channels[r].Peers()[rank].SameHost)
			}
			for _, fd := range m.FDs {
				if text, err := contentOf(fd); err != nil || text != fmt.Sprint(rank) {
					return fmt.Errorf("descriptor of rank %d holds %q, %v", rank, text, err)
				}
			}
		}
		return nil
	}))
	_, err := channels[1].Exchange(proctest.Context(t), "y", nil, []int{0})
	wantError(t, err, status.Unsupported, "rank 2 (host host1", "rank 3 (host host1", "not on this machine")
	if strings.Contains(err.Error(), "rank 0") {
		t.Errorf("the error names rank 0, which is on this host: %v", err)
	}
}
