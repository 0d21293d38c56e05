package bootstrap

import (
	"io"
	"net"
	"testing"
	"time"

	"github.com/deepep-go/deepep/internal/status"
	"github.com/deepep-go/deepep/internal/testutil/proctest"
)

func dialAll(t *testing.T, options ...TCPOptions) []error {
	t.Helper()
	return each(len(options), func(i int) error {
		ex, err := DialTCP(proctest.Context(t), options[i])
		if err == nil {
			ex.Close()
		}
		return err
	})
}

func TestTCPSizeMismatch(t *testing.T) {
	a := freeAddress(t)
	errs := dialAll(t, TCPOptions{Rank: 0, Size: 3, Address: a}, TCPOptions{Rank: 1, Size: 2, Address: a})
	for _, err := range errs {
		wantError(t, err, status.Mismatch, "rank 0 has 3", "rank 1", "has 2")
	}
}

func TestTCPRankGivenTwice(t *testing.T) {
	a := freeAddress(t)
	errs := dialAll(t, TCPOptions{Rank: 0, Size: 3, Address: a}, TCPOptions{Rank: 1, Size: 3, Address: a}, TCPOptions{Rank: 1, Size: 3, Address: a})
	for _, err := range errs {
		wantError(t, err, status.Mismatch, "rank 1")
	}
}

func TestTCPTwoRanksZero(t *testing.T) {
	a := freeAddress(t)
	ended := make(chan error, 2)
	for range 2 {
		go func() {
			ex, err := DialTCP(proctest.Context(t), TCPOptions{Rank: 0, Size: 2, Address: a})
			if err == nil {
				ex.Close()
			}
			ended <- err
		}()
	}
	wantError(t, <-ended, status.System, "address already in use") // while the other one waits for rank 1
	noErrors(t, dialAll(t, TCPOptions{Rank: 1, Size: 2, Address: a}))
	noErrors(t, []error{<-ended})
}

// Rank 0 refuses other programs and ranks of other jobs, and the group starts.
func TestTCPStrangers(t *testing.T) {
	checkFDs(t)
	a := freeAddress(t)
	started := make(chan error, 1)
	go func() {
		ex, err := DialTCP(proctest.Context(t), TCPOptions{Rank: 0, Size: 2, Address: a, Secret: "right"})
		if err == nil {
			defer ex.Close()
			_, err = ex.AllGather(proctest.Context(t), nil)
		}
		started <- err
	}()
	_, err := DialTCP(proctest.Context(t), TCPOptions{Rank: 1, Size: 2, Address: a, Secret: "wrong"})
	wantError(t, err, status.Mismatch, "another secret")

	silent, err := net.Dial("tcp", a)
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	loud, err := net.Dial("tcp", a)
	if err != nil {
		t.Fatal(err)
	}
	defer loud.Close()
	io.WriteString(loud, "GET / HTTP/1.1\r\nHost: here\r\n\r\n and more of that")
	loud.SetReadDeadline(time.Now().Add(proctest.Limit))
	if _, err := io.ReadAll(loud); err != nil && !connectionGone(err) {
		t.Errorf("the other program was not refused: %v", err)
	}

	ex, err := DialTCP(proctest.Context(t), TCPOptions{Rank: 1, Size: 2, Address: a, Secret: "right"})
	if err != nil {
		t.Fatal(err)
	}
	defer ex.Close()
	if _, err := ex.AllGather(proctest.Context(t), nil); err != nil {
		t.Error(err)
	}
	if err := <-started; err != nil {
		t.Error(err)
	}
}

func TestTCPAnotherProgramListens(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	done := make(chan struct{})
	go func() {
		defer close(done)
		if c, err := l.Accept(); err == nil {
			io.WriteString(c, "220 mail.example.org ESMTP ready when you are\r\n")
			io.Copy(io.Discard, c)
			c.Close()
		}
	}()
	_, err = DialTCP(proctest.Context(t), TCPOptions{Rank: 1, Size: 2, Address: l.Addr().String()})
	wantError(t, err, status.System, "magic")
	<-done
}

func TestTCPNamesMissingRanks(t *testing.T) {
	a := freeAddress(t)
	errs := each(2, func(i int) error {
		_, err := DialTCP(soon(t), TCPOptions{Rank: i * 2, Size: 4, Address: a})
		return err
	})
	wantError(t, errs[0], status.Timeout, "rank", "1", "3", a)
	wantError(t, errs[1], status.Timeout)
	_, err := DialTCP(soon(t), TCPOptions{Rank: 1, Size: 2, Address: a})
	wantError(t, err, status.Timeout, "rank 1 found no rank 0 at "+a, "refused")
}

func TestTCPOverNamedInterface(t *testing.T) {
	a := freeAddress(t)
	noErrors(t, dialAll(t, TCPOptions{Rank: 0, Size: 2, Address: a, Interface: "lo"}, TCPOptions{Rank: 1, Size: 2, Address: a, Interface: "127.0.0.1"}))
}

func FuzzDecodeJoin(f *testing.F) {
	f.Add(joinRequest{size: 3, nonce: randomNonce()}.encode())
	f.Fuzz(func(t *testing.T, b []byte) {
		if j, err := decodeJoin(b); err == nil && string(j.encode()) != string(b) {
			t.Error("a join request changed in decoding")
		}
		if err := decodeRefusal(b); status.CodeOf(err) == status.OK {
			t.Error("a refusal without a kind")
		}
	})
}
