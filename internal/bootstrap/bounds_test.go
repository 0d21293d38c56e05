package bootstrap

import (
	"net"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/deepep-go/deepep/internal/status"
	"github.com/deepep-go/deepep/internal/testutil/proctest"
)

// After two exchanges of one tag timed out, their late messages are dropped and the third exchange gets its message.
func TestExchangeRealignsAfterTwoTimeouts(t *testing.T) {
	channels := open(t, 2, nil)
	for range 2 {
		_, err := channels[0].Exchange(soon(t), "x", []byte("given up"), nil)
		wantError(t, err, status.Timeout, "rank 1")
	}
	noErrors(t, each(2, func(r int) error {
		for _, text := range []string{"a", "b", "c"}[2-2*r:] { // rank 1 still does all three
			got, err := channels[r].Exchange(proctest.Context(t), "x", []byte(text), nil)
			if err != nil {
				return err
			}
			if want := map[string]string{"a": "given up", "b": "given up", "c": "c"}[text]; string(got[0].Blob) != want && r == 1 {
				t.Errorf("rank 1 met %q in its round %s", got[0].Blob, text)
			}
			if string(got[1].Blob) != text {
				t.Errorf("rank %d met %q of rank 1, want %q", r, got[1].Blob, text)
			}
		}
		return nil
	}))
}

// The messages that a peer may send ahead are bounded in bytes and in number. Above the bound the link ends.
func TestUnclaimedMessagesAreBounded(t *testing.T) {
	channels := open(t, 2, nil)
	c := channels[0]
	blob := make([]byte, MaxBlob)
	sent := 0
	for ; sent < 10; sent++ {
		if err := c.deliver(&frame{rank: 1, tag: "ahead", blob: blob}); err != nil {
			break
		}
	}
	if sent != maxUnclaimed/(MaxBlob+messageCost) {
		t.Errorf("%d of the largest blobs were taken", sent)
	}
	for sent = 0; sent < 1000; sent++ {
		if err := c.deliver(&frame{rank: 1, tag: "small"}); err != nil {
			break
		}
	}
	if sent == 0 || sent > maxUnclaimed/messageCost {
		t.Errorf("%d empty messages were taken", sent)
	}
}

// A frame that names another group or another rank ends the link.
func TestForeignFrameEndsTheLink(t *testing.T) {
	for name, f := range map[string]func(c *Channel) *frame{
		"group": func(c *Channel) *frame { return &frame{kind: kindData, rank: 1, nonce: randomNonce(), tag: "x"} },
		"rank":  func(c *Channel) *frame { return &frame{kind: kindData, rank: 2, nonce: c.nonce, tag: "x"} },
		"kind":  func(c *Channel) *frame { return &frame{kind: kindHello, rank: 1, nonce: c.nonce} },
	} {
		t.Run(name, func(t *testing.T) {
			checkFDs(t)
			channels := open(t, 3, nil)
			if err := channels[1].links[0].write(f(channels[1])); err != nil {
				t.Fatal(err)
			}
			_, err := channels[0].Exchange(proctest.Context(t), "x", nil, nil)
			wantError(t, err, status.System, "the connection to rank 1 (host ", "broke")
		})
	}
}

// A running file group keeps the blobs of two gathers at most.
func TestFileGathersDoNotPileUp(t *testing.T) {
	dir := t.TempDir()
	noErrors(t, each(2, func(r int) error {
		ex, err := OpenFile(proctest.Context(t), FileOptions{Rank: r, Size: 2, Dir: dir, Name: "g"})
		if err != nil {
			return err
		}
		defer ex.Close()
		for range 10 {
			if _, err := ex.AllGather(proctest.Context(t), []byte("x")); err != nil {
				return err
			}
			if blobs, _ := filepath.Glob(filepath.Join(dir, "g.run-*", "[0-9]*-*")); len(blobs) > 4 {
				t.Errorf("%d blobs lie in the folder", len(blobs))
			}
		}
		return nil
	}))
}

// A joiner refuses a rank 0 that does not know the secret.
func TestTCPFalseRankZero(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	done := make(chan struct{})
	go func() {
		defer close(done)
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		nonce := randomNonce()
		_ = writeFrame(c, &frame{kind: kindChallenge, nonce: nonce})
		if f, err := readFrame(c, handshakeBlob); err == nil {
			j, _ := decodeJoin(f.blob)
			p := proof("another", roleCoordinator, nonce, j.nonce, nonce, 1, 2)
			_ = writeFrame(c, &frame{kind: kindAccept, nonce: nonce, blob: p[:]})
		}
	}()
	_, err = DialTCP(proctest.Context(t), TCPOptions{Rank: 1, Size: 2, Address: l.Addr().String(), Secret: "right"})
	wantError(t, err, status.Mismatch, "does not come from a rank 0 that knows the secret")
	<-done
}

// dialRole connects to a socket and keeps the connection.
func dialRole(c *proctest.Child) error {
	conn, err := net.Dial("unix", "@"+c.Arg("socket"))
	if err != nil {
		return err
	}
	defer conn.Close()
	c.Send("connected")
	c.Receive()
	return nil
}

// The listener refuses a Unix peer of another user, whose id it gets from the kernel.
func TestOtherUsersAreRefused(t *testing.T) {
	name := "deepep-test-" + freshNonce()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: "@" + name})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for _, uid := range []int{os.Geteuid(), 54321} {
		var attr *syscall.SysProcAttr
		if uid != os.Geteuid() {
			attr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(uid)}}
		}
		p, err := proctest.TryStart(t, "dial", map[string]string{"socket": name}, attr)
		if err != nil {
			t.Skipf("needs root, to run a process as another user: %v", err)
		}
		conn, err := l.AcceptUnix()
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		p.Expect("connected")
		err = checkUser(conn)
		if uid == os.Geteuid() && err != nil {
			t.Errorf("this process's user: %v", err)
		}
		if uid != os.Geteuid() {
			wantError(t, err, status.Mismatch, "runs as uid 54321")
		}
	}
}
