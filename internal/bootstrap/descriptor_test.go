package bootstrap

import (
	"context"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/deepep-go/deepep/internal/status"
	"github.com/deepep-go/deepep/internal/testutil/proctest"
	"golang.org/x/sys/unix"
)

// steal closes the descriptor of a connection as something else in the process may do, and gives its number to another
// file at once, so that no other test gets it. It returns the number.
func steal(t *testing.T, conn net.Conn) (fd int) {
	t.Helper()
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	raw, err := conn.(syscall.Conn).SyscallConn()
	if err == nil {
		err = raw.Control(func(number uintptr) {
			fd = int(number)
			err = unix.Dup3(int(null.Fd()), fd, unix.O_CLOEXEC)
		})
	}
	if err != nil {
		t.Fatal(err)
	}
	return fd
}

// giveUp closes the number that steal returned, and fails if it was not the other file's any more.
func giveUp(t *testing.T, fd int) {
	t.Helper()
	var now, null unix.Stat_t
	if err := unix.Stat(os.DevNull, &null); err != nil {
		t.Fatal(err)
	}
	if err := unix.Fstat(fd, &now); err != nil || now.Ino != null.Ino || now.Dev != null.Dev {
		t.Errorf("the other file's descriptor %d was closed (%v)", fd, err)
	}
	unix.Close(fd)
}

// Something else in rank 1's process has closed the descriptor of its connection to rank 0: rank 1 waits for a message
// that it can never read, and the others wait for rank 1. The last rank that an error names is the cause.
func TestDescriptorThatSomethingElseHasClosed(t *testing.T) {
	channels := open(t, 3, nil)
	fd := steal(t, channels[1].links[0].conn)
	timely(t, func() {
		_, err := channels[1].Exchange(proctest.Context(t), "x", nil, nil)
		wantError(t, err, status.System, "the connection to rank 0", "broke: something else in the process of rank 1 (host ", "has closed its descriptor")
		if at := strings.LastIndex(err.Error(), "rank "); at < 0 || !strings.HasPrefix(err.Error()[at:], "rank 1 (host ") {
			t.Errorf("rank 1 is not named last: %v", err)
		}
		channels[1].CloseWith(err)
		_, err = channels[2].Exchange(proctest.Context(t), "y", nil, nil)
		wantError(t, err, status.System, "rank 1 (host ", "has lost a connection", "something else in the process of rank 1 (host ")
		_, err = channels[0].Exchange(proctest.Context(t), "y", nil, nil)
		wantError(t, err, status.PeerDead, "rank 1 (host ", "closed its connection")
	})
	giveUp(t, fd)
}

// The Go runtime's own descriptors have low numbers, and it writes to whatever has them later.
func TestDescriptorsOfMemoryHaveHighNumbers(t *testing.T) {
	channels := open(t, 2, nil)
	memory, err := unix.MemfdCreate("deepep-test", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(memory)
	noErrors(t, each(2, func(rank int) error {
		got, err := channels[rank].Exchange(proctest.Context(t), "x", nil, []int{memory})
		for _, m := range got {
			for _, fd := range m.FDs {
				if fd < LowestFD {
					t.Errorf("rank %d has descriptor %d", rank, fd)
				}
			}
			closeFDs(m.FDs)
		}
		return err
	}))
	if err := channels[0].watch.raw.Control(func(fd uintptr) {
		if fd < LowestFD {
			t.Errorf("the process watch has descriptor %d", fd)
		}
	}); err != nil {
		t.Error(err)
	}
}

// begun are ranks of this process after Begin.
func begun(t *testing.T, n int) []*Pending {
	t.Helper()
	all := make([]*Pending, n)
	ex := NewLocal(n)
	noErrors(t, each(n, func(rank int) (err error) {
		all[rank], err = Begin(proctest.Context(t), ex[rank], HelloOptions{Version: "1"})
		return err
	}))
	t.Cleanup(func() {
		for _, p := range all {
			p.Close()
		}
	})
	return all
}

// joining is how a Connect has ended.
type joining struct {
	channel *Channel
	err     error
}

// dialled connects rank 1 in a goroutine, and returns rank 0's end of its connection once the hello is there.
func dialled(t *testing.T, ctx context.Context, all []*Pending) (atZero *link, dialer *connector, done chan joining) {
	t.Helper()
	found := make(chan *connector, 1)
	all[1].onConnect = func(n *connector) { found <- n }
	done = make(chan joining, 1)
	go func() {
		c, err := all[1].Connect(ctx)
		done <- joining{c, err}
	}()
	conn, err := all[0].listeners[0].Accept()
	if err != nil {
		t.Fatal(err)
	}
	atZero = newLink(1, conn)
	f, err := atZero.read(handshakeBlob)
	if err != nil || f.kind != kindHello {
		t.Fatalf("no hello: %v", err)
	}
	closeFDs(f.fds)
	return atZero, <-found, done
}

// A dialer's connection is closed while it waits for the welcome, which it never hears: it dials again.
func TestDescriptorClosedBeforeTheWelcome(t *testing.T) {
	all := begun(t, 2)
	atZero, dialer, done := dialled(t, proctest.Context(t), all)
	var lost net.Conn
	dialer.mu.Lock()
	for l := range dialer.dialing {
		lost = l.conn
	}
	dialer.mu.Unlock()
	fd := steal(t, lost)
	atZero.shut()
	timely(t, func() {
		other := make(chan joining, 1)
		go func() {
			c, err := all[0].Connect(proctest.Context(t))
			other <- joining{c, err}
		}()
		for _, one := range []joining{<-done, <-other} {
			if one.err != nil {
				t.Error(one.err)
			} else {
				defer one.channel.Close()
			}
		}
	})
	giveUp(t, fd)
}

// A rank that gives up before it has read the welcome tells the other one why: that one may count it as connected.
func TestFarewellBeforeTheWelcome(t *testing.T) {
	all := begun(t, 2)
	ctx, cancel := context.WithCancelCause(proctest.Context(t))
	atZero, _, done := dialled(t, ctx, all)
	defer atZero.shut()
	cancel(status.Errorf(status.OutOfMemory, "no room for 5 GiB"))
	f, err := atZero.read(MaxBlob)
	if err != nil || f.kind != kindBye || !strings.Contains(decodeRefusal(f.blob).Error(), "no room for 5 GiB") {
		t.Errorf("got %+v, %v", f, err)
	}
	wantError(t, (<-done).err, status.OutOfMemory, "no room for 5 GiB")
}

// Connections that end without a word are blamed in the order in which they ended.
func TestTheFirstLostConnectionIsBlamed(t *testing.T) {
	c := open(t, 3, nil)[0]
	c.mu.Lock()
	c.lost = []lost{{2, status.Errorf(status.PeerDead, "rank 2 went first")}, {1, status.Errorf(status.PeerDead, "rank 1 followed")}}
	c.mu.Unlock()
	c.failLost(1)
	_, err := c.Exchange(proctest.Context(t), "x", nil, nil)
	wantError(t, err, status.PeerDead, "rank 2 went first")
}

// A peer that has read a frame may leave before the writer returns, which must not count as a failed write.
func TestPeerLeavesWithTheFrame(t *testing.T) {
	for range 300 {
		pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		file := os.NewFile(uintptr(pair[0]), "socket")
		conn, err := net.FileConn(file)
		file.Close()
		if err != nil {
			t.Fatal(err)
		}
		gone := make(chan struct{})
		go func() {
			defer close(gone)
			unix.Recvmsg(pair[1], make([]byte, headerBytes), nil, 0)
			unix.Close(pair[1])
		}()
		null, err := os.Open(os.DevNull)
		if err != nil {
			t.Fatal(err)
		}
		err = newLink(1, conn).write(&frame{kind: kindWelcome, fds: []int{int(null.Fd())}})
		null.Close()
		<-gone
		conn.Close()
		if err != nil {
			t.Fatal(err)
		}
	}
}
