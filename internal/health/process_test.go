package health

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/deepep-go/deepep/internal/bootstrap"
	"github.com/deepep-go/deepep/internal/status"
	"github.com/deepep-go/deepep/internal/testutil/proctest"
)

var roles = map[string]func(*proctest.Child) error{"rank": rankRole}

// join makes this process a rank of a group that starts through a folder.
func join(ctx context.Context, dir string, rank, size int, host string, o Options) (member, error) {
	ex, err := bootstrap.OpenFile(ctx, bootstrap.FileOptions{Rank: rank, Size: size, Dir: dir, Name: "g"})
	if err != nil {
		return member{}, err
	}
	h := bootstrap.HelloOptions{Version: "1"}
	if host != "" {
		ex, h.Interface = proctest.OnMachine(host, ex), "lo"
	}
	ch, err := bootstrap.Open(ctx, ex, h)
	if err != nil {
		return member{}, err
	}
	w, err := Start(ctx, ch, o)
	return member{w, ch}, err
}

// rankRole runs the parent's commands.
func rankRole(c *proctest.Child) error {
	rank, _ := strconv.Atoi(c.Arg("rank"))
	size, _ := strconv.Atoi(c.Arg("size"))
	m, err := join(context.Background(), c.Arg("dir"), rank, size, c.Arg("host"), quick())
	if err != nil {
		return err
	}
	c.Send("here")
	for {
		switch c.Receive() {
		case "call":
			m.SetLastCall(LastCall{Op: 3, Number: 17, Phase: 2, Buffer: 1})
			c.Send("called")
		case "fork":
			pid, err := proctest.Fork()
			if err != nil {
				return err
			}
			c.Send("forked %d", pid)
		case "cut": // ends the connections, not the process
			if err := shutdownSockets(); err != nil {
				return err
			}
			c.Send("cut")
		case "exec": // replaces the process's program
			return syscall.Exec("/bin/sleep", []string{"sleep", "60"}, nil)
		case "leave":
			m.Watcher.Close()
			m.ch.Close()
			return nil
		case "exit":
			syscall.Exit(0) // os.Exit lingers for a second under the race detector
		}
	}
}

// shutdownSockets ends every connection of this process without leaving the group, as a broken network would.
func shutdownSockets() error {
	names, err := filepath.Glob("/proc/self/fd/*")
	for _, n := range names {
		if to, _ := os.Readlink(n); strings.HasPrefix(to, "socket:") {
			fd, _ := strconv.Atoi(filepath.Base(n))
			_ = unix.Shutdown(fd, unix.SHUT_RDWR)
		}
	}
	return err
}

// family is this process as rank 0 with child processes as the other ranks.
type family struct {
	t     *testing.T
	me    member
	procs []*proctest.Proc // by rank; 0 is nil
	died  chan Death
	left  chan int
}

func start(t *testing.T, size int, hosts bool) *family {
	t.Helper()
	return startWith(t, size, hosts, quick())
}

func startWith(t *testing.T, size int, hosts bool, o Options) *family {
	t.Helper()
	f := &family{t: t, procs: make([]*proctest.Proc, size), died: make(chan Death, size), left: make(chan int, size)}
	dir := t.TempDir()
	host := func(rank int) string {
		if !hosts {
			return ""
		}
		return fmt.Sprint("host", rank)
	}
	for r := 1; r < size; r++ {
		args := map[string]string{"rank": strconv.Itoa(r), "size": strconv.Itoa(size), "dir": dir, "host": host(r)}
		f.procs[r] = proctest.Start(t, "rank", args, nil)
	}
	var err error
	if f.me, err = join(proctest.Context(t), dir, 0, size, host(0), o); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		f.me.Watcher.Close()
		f.me.ch.Close()
	})
	for _, p := range f.procs[1:] {
		p.Expect("here")
	}
	f.me.OnDeath(func(d Death) { f.died <- d })
	f.me.OnLeft(func(rank int) { f.left <- rank })
	return f
}

func (f *family) ask(rank int, what, answer string) string {
	f.t.Helper()
	f.procs[rank].Send("%s", what)
	return f.procs[rank].Expect(answer)
}

func (f *family) fork(rank int) {
	f.t.Helper()
	pid, err := strconv.Atoi(f.ask(rank, "fork", "forked"))
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { unix.Kill(pid, unix.SIGKILL) })
}

// death waits for a death and checks that the watcher saw it in time.
func (f *family) death(rank int, limit time.Duration) Death {
	f.t.Helper()
	begin := time.Now()
	select {
	case d := <-f.died:
		if took := time.Since(begin); took > limit {
			f.t.Errorf("seen after %v, want %v", took, limit)
		}
		if d.Rank != rank || d.PID != f.procs[rank].PID || d.Host == "" {
			f.t.Errorf("the death of rank %d, pid %d was reported as %+v", rank, f.procs[rank].PID, d)
		}
		return d
	case <-time.After(proctest.Limit):
		f.t.Fatalf("the death of rank %d was not seen", rank)
	}
	return Death{}
}

// noDeath waits for longer than DeadAfter.
func (f *family) noDeath() {
	f.t.Helper()
	select {
	case d := <-f.died:
		f.t.Errorf("a death was seen: %v", d.Err())
	case <-time.After(2 * quick().DeadAfter):
	}
}

// A death must be seen within 200 ms (bootstrap's TestProcWatch compares the period); the rest is for the scheduling of a
// busy machine.
const seenWithin = 2 * time.Second

func TestKillIsSeenWithLastCall(t *testing.T) {
	for _, forked := range []bool{false, true} {
		t.Run(fmt.Sprint("forked ", forked), func(t *testing.T) {
			// With this DeadAfter only the end of the process shows the death.
			f := startWith(t, 3, false, Options{DeadAfter: time.Hour})
			f.ask(1, "call", "called")
			if forked {
				f.fork(1)
			}
			waiting := make(chan error, 1)
			go func() {
				_, err := f.me.ch.Exchange(proctest.Context(t), "x", nil, nil)
				waiting <- err
			}()
			f.procs[1].Signal(syscall.SIGKILL)
			d := f.death(1, seenWithin)
			if d.Last != (LastCall{3, 17, 2, 1}) || d.LastName != "dispatch #17 (receive)" || d.How != "its process has ended" {
				t.Errorf("death %+v", d)
			}
			if err := <-waiting; !errors.Is(err, status.ErrPeerDead) || !strings.Contains(err.Error(), fmt.Sprintf("pid %d", f.procs[1].PID)) {
				t.Errorf("the exchange ended with %v", err)
			}
			text := d.Err().Error()
			if !errors.Is(d.Err(), status.ErrPeerDead) || !strings.HasSuffix(text, "last call dispatch #17 (receive)) is dead: its process has ended") {
				t.Errorf("error %s", text)
			}
			if got, dead := f.me.Dead(1); !dead || got != d {
				t.Errorf("Dead says %+v", got)
			}
			if _, dead := f.me.Dead(2); dead || f.me.Left(2) || f.me.Left(1) {
				t.Error("rank 2 lives, and rank 1 did not leave")
			}
			if got := f.me.Describe(1); !strings.Contains(got, "last call dispatch #17 (receive), dead since ") {
				t.Errorf("described as %s", got)
			}
			late := make(chan Death, 1)
			f.me.OnDeath(func(d Death) { late <- d })
			if got := <-late; got != d {
				t.Errorf("a late subscriber got %+v", got)
			}
		})
	}
}

func TestExitWithoutLeavingIsDeath(t *testing.T) {
	f := start(t, 2, false)
	f.procs[1].Send("exit")
	f.death(1, seenWithin)
	if code := f.procs[1].Wait(); code != 0 {
		t.Errorf("exit code %d", code)
	}
}

func TestLeavingThenExitIsNoDeath(t *testing.T) {
	f := start(t, 2, false)
	f.procs[1].Send("leave")
	f.procs[1].Wait()
	if rank := <-f.left; rank != 1 {
		t.Errorf("rank %d left", rank)
	}
	f.noDeath()
}

func TestStoppedIsLateNotDead(t *testing.T) {
	f := start(t, 2, false)
	f.procs[1].Signal(syscall.SIGSTOP)
	f.noDeath()
	if s := f.me.Stalled(1); s < quick().DeadAfter {
		t.Errorf("heartbeat %v old", s)
	}
	f.procs[1].Signal(syscall.SIGCONT)
	proctest.Eventually(t, proctest.Limit, "the heartbeat is back", func() bool { return f.me.Stalled(1) < 100*time.Millisecond })
}

// A process that runs another program is not a rank: its connections are closed and it has no heartbeat.
func TestExecIsSeenByTheHeartbeat(t *testing.T) {
	f := start(t, 2, false)
	f.procs[1].Send("exec")
	d := f.death(1, seenWithin+quick().DeadAfter)
	if !strings.Contains(d.How, "connection is closed and its heartbeat is ") {
		t.Errorf("seen as %q", d.How)
	}
}

// A rank with closed connections and a heartbeat is alive.
func TestClosedConnectionAloneIsNoDeath(t *testing.T) {
	f := start(t, 2, false)
	f.ask(1, "cut", "cut")
	proctest.Eventually(t, proctest.Limit, "the connection is closed", func() bool { return f.me.ch.State(1).Closed })
	f.noDeath()
	f.procs[1].Signal(syscall.SIGKILL)
	f.death(1, seenWithin)
}

// A process of another machine cannot be watched: an old heartbeat and a closed connection together mean death.
func TestKillOnAnotherMachine(t *testing.T) {
	f := start(t, 2, true)
	f.ask(1, "call", "called")
	proctest.Eventually(t, proctest.Limit, "the call has arrived", func() bool { return strings.Contains(f.me.Describe(1), "dispatch #17") })
	f.procs[1].Signal(syscall.SIGKILL)
	d := f.death(1, seenWithin+quick().DeadAfter)
	if d.LastName != "dispatch #17 (receive)" || !strings.Contains(d.How, "heartbeat is ") || d.Host != "host1" {
		t.Errorf("death %+v", d)
	}
}

func TestStoppedOnAnotherMachineIsLate(t *testing.T) {
	f := start(t, 2, true)
	f.procs[1].Signal(syscall.SIGSTOP)
	f.noDeath()
	f.procs[1].Signal(syscall.SIGCONT)
	proctest.Eventually(t, proctest.Limit, "the heartbeat is back", func() bool { return f.me.Stalled(1) < 100*time.Millisecond })
}

// After cancel no callback runs; cancel waits for a running one; the watch goes on after a panic in a callback.
func TestCallbacks(t *testing.T) {
	f := start(t, 4, false)
	never := f.me.OnDeath(func(Death) { t.Error("called after cancel") })
	never()
	f.me.OnDeath(func(Death) { panic("in the callback") })
	running, goOn := make(chan struct{}), make(chan struct{})
	slow := f.me.OnDeath(func(Death) {
		running <- struct{}{}
		<-goOn
	})
	f.procs[1].Signal(syscall.SIGKILL)
	<-running
	over := make(chan struct{})
	go func() {
		slow()
		close(over)
	}()
	select {
	case <-over:
		t.Error("cancel did not wait for the running call")
	case <-time.After(50 * time.Millisecond):
	}
	close(goOn)
	<-over
	f.death(1, proctest.Limit)
	f.procs[2].Signal(syscall.SIGKILL)
	f.death(2, seenWithin)
	f.procs[3].Signal(syscall.SIGKILL)
	f.death(3, seenWithin)
}
