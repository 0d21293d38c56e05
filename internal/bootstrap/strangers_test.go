package bootstrap

import (
	"context"
	"io"
	"net"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/deepep-go/deepep/internal/status"
	"github.com/deepep-go/deepep/internal/testutil/proctest"
)

// crowd keeps many connections that behave as one says, and replaces those that are sent away, until stop.
func crowd(t *testing.T, network, address string, many int, behave func(net.Conn)) {
	t.Helper()
	stop := make(chan struct{})
	ended := make(chan struct{}, many)
	for range many {
		go func() {
			defer func() { ended <- struct{}{} }()
			for {
				select {
				case <-stop:
					return
				default:
				}
				c, err := net.DialTimeout(network, address, time.Second)
				if err != nil {
					time.Sleep(time.Millisecond)
					continue
				}
				_ = c.SetDeadline(time.Now().Add(proctest.Limit))
				done := make(chan struct{})
				go func() {
					select {
					case <-stop:
					case <-done:
					}
					c.Close()
				}()
				behave(c)
				close(done)
				time.Sleep(5 * time.Millisecond) // the crowd shares the ranks' cores; 30,000 times a second is enough
			}
		}()
	}
	t.Cleanup(func() {
		close(stop)
		for range many {
			<-ended
		}
	})
}

func silent(c net.Conn) { _, _ = io.Copy(io.Discard, c) }

// drip sends a join request byte by byte.
func drip(c net.Conn) {
	head, _ := (&frame{kind: kindJoin, rank: 1, blob: make([]byte, joinBytes)}).encodeHead()
	for _, b := range head {
		if _, err := c.Write([]byte{b}); err != nil {
			return
		}
		time.Sleep(300 * time.Millisecond)
	}
}

func talk(text string) func(net.Conn) {
	return func(c net.Conn) {
		_, _ = io.WriteString(c, text)
		silent(c)
	}
}

// lies announces a body of n bytes.
func lies(n uint32) func(net.Conn) {
	head, _ := (&frame{kind: kindJoin, rank: 1}).encodeHead()
	head[8], head[9], head[10], head[11] = byte(n), byte(n>>8), byte(n>>16), byte(n>>24)
	return talk(string(head) + "some of it")
}

func hangUp(c net.Conn) {
	if tcp, ok := c.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0) // a reset
	}
}

// However strangers crowd rank 0's port, the group starts at once.
func TestStrangersDoNotHoldUpTheStart(t *testing.T) {
	many := 150 // more than have room
	for name, behave := range map[string]func(net.Conn){
		"silent": silent, "drip": drip, "HTTP": talk("GET / HTTP/1.1\r\nHost: x\r\n\r\n"), "garbage": talk("\x00\xff\x13garbage garbage garbage garbage garbage"),
		"giant": lies(0xffffffff), "large": lies(64 << 20), "resets": hangUp,
	} {
		t.Run(name, func(t *testing.T) {
			checkFDs(t)
			a := freeAddress(t)
			crowd(t, "tcp", a, many, behave)
			began := time.Now()
			noErrors(t, each(3, func(r int) error {
				if r != 0 {
					time.Sleep(200 * time.Millisecond) // the strangers come first
				}
				ex, err := DialTCP(proctest.Context(t), TCPOptions{Rank: r, Size: 3, Address: a, Secret: "s"})
				if err != nil {
					return err
				}
				defer ex.Close()
				_, err = ex.AllGather(proctest.Context(t), []byte{byte(r)})
				return err
			}))
			if took := time.Since(began); took > handshakeTime+3*time.Second {
				t.Errorf("the start took %v", took)
			}
		})
	}
}

// A join that was seen on one connection is refused on another, and the start goes on.
func TestJoinsCannotBeReplayed(t *testing.T) {
	a := freeAddress(t)
	started := make(chan error, 1)
	go func() {
		ex, err := DialTCP(proctest.Context(t), TCPOptions{Rank: 0, Size: 3, Address: a, Secret: "s"})
		if err == nil {
			ex.Close()
		}
		started <- err
	}()
	dial := func() (net.Conn, frame) {
		var c net.Conn
		proctest.Eventually(t, proctest.Limit, "rank 0 listens", func() (ok bool) {
			var err error
			c, err = net.Dial("tcp", a)
			return err == nil
		})
		_ = c.SetDeadline(time.Now().Add(proctest.Limit))
		f, err := readFrame(c, 0)
		if err != nil {
			t.Fatal(err)
		}
		return c, f
	}
	first, challenge := dial()
	defer first.Close()
	j := joinRequest{size: 3, nonce: randomNonce()}
	j.proof = proof("s", roleJoiner, challenge.nonce, j.nonce, [16]byte{}, 2, 3)
	second, other := dial()
	defer second.Close()
	if challenge.nonce == other.nonce {
		t.Error("two connections have one challenge")
	}
	for _, nonce := range [][16]byte{challenge.nonce, other.nonce} {
		c, f := dial()
		defer c.Close()
		if nonce == other.nonce {
			nonce = f.nonce // the replay says that it answers this connection's challenge
		}
		if err := writeFrame(c, &frame{kind: kindJoin, rank: 2, nonce: nonce, blob: j.encode()}); err != nil {
			t.Fatal(err)
		}
		if answer, err := readFrame(c, handshakeBlob); err != nil || answer.kind != kindRefuse {
			t.Errorf("a replayed join: %+v %v", answer, err)
		}
	}
	noErrors(t, dialAll(t, TCPOptions{Rank: 1, Size: 3, Address: a, Secret: "s"}, TCPOptions{Rank: 2, Size: 3, Address: a, Secret: "s"}))
	if err := <-started; err != nil {
		t.Error(err)
	}
}

// Rank 0 does not say "did not come" alone of a rank that came with another secret.
func TestRefusedSecretsAreCounted(t *testing.T) {
	a := freeAddress(t)
	var told atomic.Bool
	over := endsWhen(t, told.Load)
	_ = each(2, func(r int) error {
		if r == 1 {
			defer told.Store(true)
			_, err := DialTCP(proctest.Context(t), TCPOptions{Rank: 1, Size: 3, Address: a, Secret: "another"})
			wantError(t, err, status.Mismatch, "another secret")
			return nil
		}
		_, err := DialTCP(over, TCPOptions{Rank: 0, Size: 3, Address: a, Secret: "s"})
		wantError(t, err, status.Timeout, "ranks 1-2 did not come", "a rank 1 with another secret was refused (1 times, last from 127.0.0.1:")
		return nil
	})
}

// crowdRole keeps many silent connections to a socket.
func crowdRole(c *proctest.Child) error {
	many, _ := strconv.Atoi(c.Arg("many"))
	var all []net.Conn
	for range many {
		conn, err := net.Dial("unix", "@"+c.Arg("socket"))
		if err != nil {
			break // the backlog is full
		}
		all = append(all, conn)
	}
	c.Send("crowded %d", len(all))
	c.Receive()
	return nil
}

// Connections of another user to the abstract sockets, whose names are in /proc/net/unix for all to read, do not hold up
// the start.
func TestOtherUsersDoNotHoldUpTheStart(t *testing.T) {
	const size, many = 3, 300
	attr := &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 54321, Gid: 54321}}
	all := make([]*Pending, size)
	ex := NewLocal(size)
	noErrors(t, each(size, func(r int) (err error) {
		all[r], err = Begin(proctest.Context(t), ex[r], HelloOptions{Version: "1", Build: "b"})
		return err
	}))
	var strangers []*proctest.Proc
	for r := range size {
		p, err := proctest.TryStart(t, "crowd", map[string]string{"socket": all[0].hellos[r].Socket, "many": strconv.Itoa(many)}, attr)
		if err != nil {
			for _, pending := range all {
				pending.Close()
			}
			t.Skipf("needs root, to run a process as another user: %v", err)
		}
		strangers = append(strangers, p)
	}
	for _, p := range strangers {
		p.Expect("crowded")
	}
	began := time.Now()
	channels := make([]*Channel, size)
	noErrors(t, each(size, func(r int) (err error) {
		channels[r], err = all[r].Connect(proctest.Context(t))
		return err
	}))
	for _, c := range channels {
		c.Close()
	}
	if took := time.Since(began); took > handshakeTime {
		t.Errorf("the start took %v", took)
	}
}

// Every rank names the one that did not come, not rank 0 who waits for it, and nothing is left in the folder.
func TestFileNamesTheMissingRank(t *testing.T) {
	for missing := 1; missing < 3; missing++ {
		dir := t.TempDir()
		over := endsWhen(t, func() bool { return joinFiles(dir, "g") == 2 })
		errs := each(4, func(r int) error {
			if r == missing {
				return nil
			}
			_, err := OpenFile(over, FileOptions{Rank: r, Size: 4, Dir: dir, Name: "g"})
			return err
		})
		for r, err := range errs {
			if r != missing {
				wantError(t, err, status.Timeout, "nothing from rank "+strconv.Itoa(missing)+" in folder")
			}
		}
		if left := entries(t, dir); left != "" {
			run, _ := filepath.Glob(filepath.Join(dir, "*", "*"))
			t.Errorf("left behind: %s %v", left, run)
		}
	}
}

// Every rank that did not write its part of a gather is named, not just the first one that is waited for.
func TestFileGatherNamesAllMissingRanks(t *testing.T) {
	dir := t.TempDir()
	all := make([]Exchanger, 4)
	noErrors(t, each(4, func(r int) (err error) {
		all[r], err = OpenFile(proctest.Context(t), FileOptions{Rank: r, Size: 4, Dir: dir, Name: "g"})
		return err
	}))
	for _, ex := range all {
		defer ex.Close()
	}
	_, err := all[2].AllGather(soon(t), []byte("x"))
	wantError(t, err, status.Timeout, "nothing from ranks 0-1, 3 in folder")
}

// Rank 0 names all that are late, and they do not blame it, who waits too.
func TestTCPGatherNamesAllMissingRanks(t *testing.T) {
	a := freeAddress(t)
	all := make([]Exchanger, 4)
	noErrors(t, each(4, func(r int) (err error) {
		all[r], err = DialTCP(proctest.Context(t), TCPOptions{Rank: r, Size: 4, Address: a, Secret: "s"})
		return err
	}))
	for _, ex := range all {
		defer ex.Close()
	}
	over, end := context.WithTimeout(context.Background(), 600*time.Millisecond) // by then rank 2's blob is there
	defer end()
	for r, err := range each(3, func(r int) error {
		if r == 1 {
			return nil
		}
		_, err := all[r].AllGather(over, []byte("x"))
		return err
	}) {
		if r != 1 {
			wantError(t, err, status.Timeout, "rank 0 has nothing from ranks 1, 3")
		}
	}
}

// A rank whose limit is shorter than rank 0's reads the join files itself.
func TestFileFollowersReadTheJoinFiles(t *testing.T) {
	dir := t.TempDir()
	leader := make(chan error, 1)
	go func() {
		_, err := OpenFile(proctest.Context(t), FileOptions{Rank: 0, Size: 3, Dir: dir, Name: "g"})
		leader <- err
	}()
	over := endsWhen(t, func() bool { return joinFiles(dir, "g") == 1 })
	_, err := OpenFile(over, FileOptions{Rank: 2, Size: 3, Dir: dir, Name: "g"})
	wantError(t, err, status.Timeout, "nothing from rank 1 in folder")
	_, err = OpenFile(proctest.Context(t), FileOptions{Rank: 1, Size: 3, Dir: dir, Name: "g"})
	noErrors(t, []error{err, <-leader}) // whose gather then says that rank 2 has left
}
