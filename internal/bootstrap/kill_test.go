package bootstrap

import (
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/deepep-go/deepep/internal/status"
	"github.com/deepep-go/deepep/internal/testutil/proctest"
	"golang.org/x/sys/unix"
)

// joinRole is a rank of a group that starts through a folder. It can stop before it connects, fork, and exchange on
// command.
func joinRole(c *proctest.Child) error {
	ctx := contextOfChild()
	var rank, size int
	fmt.Sscan(c.Arg("rank"), &rank)
	fmt.Sscan(c.Arg("size"), &size)
	ex, err := OpenFile(ctx, FileOptions{Rank: rank, Size: size, Dir: c.Arg("dir"), Name: "g"})
	if err != nil {
		return err
	}
	p, err := Begin(ctx, ex, HelloOptions{Version: "1", noPidfd: c.Arg("nopidfd") != ""})
	if err != nil {
		return err
	}
	var ch *Channel
	for {
		switch c.Receive() {
		case "fork":
			pid, err := proctest.Fork()
			if err != nil {
				return err
			}
			c.Send("forked %d", pid)
		case "connect":
			if ch, err = p.Connect(ctx); err != nil {
				c.Send("failed %v", err)
			} else {
				c.Send("connected")
			}
		case "exchange":
			_, err := ch.Exchange(ctx, "x", []byte("from the child"), nil)
			c.Send("exchanged %v", err)
		case "close":
			c.Send("closed %v", ch.Close())
		}
	}
}

// childGroup is this process as rank 0 with child processes as the other ranks, all after Begin.
type childGroup struct {
	t       *testing.T
	procs   map[int]*proctest.Proc
	pending *Pending
}

func startChildren(t *testing.T, size int, args map[string]string, attr *syscall.SysProcAttr) *childGroup {
	t.Helper()
	g := &childGroup{t: t, procs: make(map[int]*proctest.Proc)}
	dir := t.TempDir()
	for r := 1; r < size; r++ {
		own := map[string]string{"rank": fmt.Sprint(r), "size": fmt.Sprint(size), "dir": dir}
		for k, v := range args {
			own[k] = v
		}
		p, err := proctest.TryStart(t, "join", own, attr)
		if err != nil {
			t.Skipf("needs leave to make namespaces: %v", err)
		}
		g.procs[r] = p
	}
	ex, err := OpenFile(proctest.Context(t), FileOptions{Rank: 0, Size: size, Dir: dir, Name: "g"})
	if err != nil {
		t.Fatal(err)
	}
	if g.pending, err = Begin(proctest.Context(t), ex, HelloOptions{Version: "1", noPidfd: args["nopidfd"] != ""}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { g.pending.Close() })
	return g
}

func (g *childGroup) connect() *Channel {
	g.t.Helper()
	for _, p := range g.procs {
		p.Send("connect")
	}
	ch, err := g.pending.Connect(proctest.Context(g.t))
	if err != nil {
		g.t.Fatal(err)
	}
	for _, p := range g.procs {
		p.Expect("connected")
	}
	g.t.Cleanup(func() { ch.Close() })
	return ch
}

// fork makes a copy of a rank's process that outlives it and keeps its sockets open.
func (g *childGroup) fork(rank int) {
	g.t.Helper()
	var pid int
	g.procs[rank].Send("fork")
	fmt.Sscan(g.procs[rank].Expect("forked"), &pid)
	g.t.Cleanup(func() { unix.Kill(pid, unix.SIGKILL) })
}

// timely runs f and fails if f takes longer than the report of a death may.
func timely(t *testing.T, f func()) {
	t.Helper()
	begin := time.Now()
	f()
	if d := time.Since(begin); d > time.Second {
		t.Errorf("took %v", d)
	}
}

// A rank is killed before it connects. Only the watch of its process shows it: a forked copy keeps its listener open.
func TestKillBeforeConnect(t *testing.T) {
	for _, nopidfd := range []string{"", "yes"} {
		g := startChildren(t, 3, map[string]string{"nopidfd": nopidfd}, nil)
		g.fork(2)
		g.procs[1].Send("connect")
		done := make(chan error, 1)
		go func() {
			_, err := g.pending.Connect(proctest.Context(t))
			done <- err
		}()
		timely(t, func() {
			g.procs[2].Kill()
			wantError(t, <-done, status.PeerDead, "rank 2 (host ", fmt.Sprintf("pid %d) is dead", g.procs[2].PID))
			if said := g.procs[1].Expect("failed"); !strings.Contains(said, "rank 2") {
				t.Errorf("rank 1 said %q", said)
			}
		})
	}
}

// A rank is killed during an exchange, with and without a forked copy that keeps its sockets open.
func TestKillInExchange(t *testing.T) {
	for name, c := range map[string]struct{ fork, nopidfd string }{"plain": {}, "forked": {fork: "yes"}, "forked, no pidfd": {"yes", "yes"}} {
		t.Run(name, func(t *testing.T) {
			checkFDs(t)
			g := startChildren(t, 3, map[string]string{"nopidfd": c.nopidfd}, nil)
			ch := g.connect()
			if c.fork != "" {
				g.fork(2)
			}
			g.procs[1].Send("exchange")
			done := make(chan error, 1)
			go func() {
				_, err := ch.Exchange(proctest.Context(t), "x", nil, nil)
				done <- err
			}()
			timely(t, func() {
				g.procs[2].Kill()
				wantError(t, <-done, status.PeerDead, `exchange "x"`, "rank 2", fmt.Sprintf("pid %d", g.procs[2].PID))
				if said := g.procs[1].Expect("exchanged"); !strings.Contains(said, "rank 2") {
					t.Errorf("rank 1 said %q", said)
				}
				proctest.Eventually(t, proctest.Limit, "the end of rank 2 is known", func() bool { return ch.State(2).Ended })
			})
		})
	}
}

// A message that a rank sent before it died arrives, even if a forked copy keeps the socket open.
func TestMessageOfTheDead(t *testing.T) {
	g := startChildren(t, 2, nil, nil)
	ch := g.connect()
	g.fork(1)
	g.procs[1].Send("exchange")
	proctest.Eventually(t, proctest.Limit, "the message is there", func() bool {
		ch.mu.Lock()
		defer ch.mu.Unlock()
		return len(ch.boxes) == 1
	})
	g.procs[1].Kill()
	proctest.Eventually(t, proctest.Limit, "rank 1 is known to have ended", func() bool { return ch.State(1).Ended })
	got, err := ch.Exchange(proctest.Context(t), "x", nil, nil)
	if err != nil || string(got[1].Blob) != "from the child" {
		t.Errorf("got %v, %v", got, err)
	}
	_, err = ch.Exchange(proctest.Context(t), "x", nil, nil)
	wantError(t, err, status.PeerDead, "rank 1")
}

// The pid of another PID namespace cannot be looked up; the pidfd that the rank sent shows its death.
func TestKillInAnotherPIDNamespace(t *testing.T) {
	g := startChildren(t, 2, nil, &syscall.SysProcAttr{Cloneflags: pidNamespaceFlags(), UidMappings: ownUser(os.Geteuid()), GidMappings: ownUser(os.Getegid())})
	if p := g.pending.Peers()[1]; !p.SameHost || p.SamePIDNamespace || p.SameProcess || p.PID != 1 {
		t.Fatalf("rank 1 is not a process of another namespace: %+v", p)
	}
	ch := g.connect()
	g.fork(1)
	if fd, err := unix.PidfdOpen(os.Getpid(), 0); err != nil {
		t.Skipf("needs pidfd_open (Linux 5.3): %v", err)
	} else {
		unix.Close(fd)
	}
	timely(t, func() {
		g.procs[1].Kill()
		_, err := ch.Exchange(proctest.Context(t), "x", nil, nil)
		wantError(t, err, status.PeerDead, "rank 1")
		proctest.Eventually(t, proctest.Limit, "the end of rank 1 is known", func() bool { return ch.State(1).Ended })
	})
}

// pidNamespaceFlags: root makes a PID namespace alone; others need a user namespace with it.
func pidNamespaceFlags() uintptr {
	return unix.CLONE_NEWPID | unix.CLONE_NEWUSER
}

func ownUser(id int) []syscall.SysProcIDMap {
	return []syscall.SysProcIDMap{{ContainerID: id, HostID: id, Size: 1}}
}

func TestStoppedRankIsLateNotDead(t *testing.T) {
	g := startChildren(t, 2, nil, nil)
	ch := g.connect()
	g.procs[1].Signal(syscall.SIGSTOP)
	_, err := ch.Exchange(soon(t), "x", nil, nil)
	wantError(t, err, status.Timeout, "rank 1")
	if s := ch.State(1); s != (PeerState{}) {
		t.Errorf("state %+v", s)
	}
	g.procs[1].Signal(syscall.SIGCONT)
	g.procs[1].Send("exchange")
	g.procs[1].Expect("exchanged")
	g.procs[1].Send("exchange")
	if _, err := ch.Exchange(proctest.Context(t), "x", nil, nil); err != nil {
		t.Errorf("after it went on: %v", err)
	}
}

// A stopped peer does not read; frames queued for it must not delay Close for long.
func TestCloseDespiteStoppedRank(t *testing.T) {
	checkFDs(t)
	g := startChildren(t, 2, nil, nil)
	ch := g.connect()
	g.procs[1].Signal(syscall.SIGSTOP)
	_, err := ch.Exchange(soon(t), "x", make([]byte, MaxBlob), nil) // far more than a socket buffers
	wantError(t, err, status.Timeout, "rank 1")
	timely(t, func() { ch.Close() })
}
