package proctest

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"
)

// Limit bounds every wait of a test, so that only a test that fails waits for so long.
const Limit = 20 * time.Second

// Context ends after Limit, or with the test.
func Context(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), Limit)
	t.Cleanup(cancel)
	return ctx
}

// Proc is a child process as its test sees it.
type Proc struct {
	PID   int
	t     testing.TB
	cmd   *exec.Cmd
	in    io.WriteCloser
	lines chan string
	ended bool
}

// Start runs a role in a child process that ends with the test. attr may be nil; namespaces go there.
func Start(t testing.TB, role string, args map[string]string, attr *syscall.SysProcAttr) *Proc {
	t.Helper()
	p, err := TryStart(t, role, args, attr)
	if err != nil {
		t.Fatalf("starting %s: %v", role, err)
	}
	return p
}

// TryStart is Start for children that the system may refuse, such as those in namespaces.
func TryStart(t testing.TB, role string, args map[string]string, attr *syscall.SysProcAttr) (*Proc, error) {
	t.Helper()
	text, err := json.Marshal(args)
	if err != nil {
		return nil, err
	}
	p := &Proc{t: t, cmd: exec.Command("/proc/self/exe"), lines: make(chan string, 64)}
	p.cmd.Env = append(os.Environ(), roleVariable+"="+role, argsVariable+"="+string(text))
	p.cmd.SysProcAttr, p.cmd.Stderr = attr, os.Stderr
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	p.PID = p.cmd.Process.Pid
	read := make(chan struct{})
	go func() {
		defer close(read)
		defer close(p.lines)
		for s := bufio.NewScanner(out); s.Scan(); {
			select {
			case p.lines <- s.Text():
			default: // the test has stopped reading
			}
		}
	}()
	t.Cleanup(func() {
		p.Kill()
		out.Close() // a forked copy of the child may hold the other end
		<-read
	})
	return p, nil
}

// Send sends a line to the child.
func (p *Proc) Send(format string, args ...any) {
	p.t.Helper()
	if _, err := fmt.Fprintf(p.in, format+"\n", args...); err != nil {
		p.t.Fatalf("sending to process %d: %v", p.PID, err)
	}
}

// TrySend is Send to a child that may have ended.
func (p *Proc) TrySend(format string, args ...any) { _, _ = fmt.Fprintf(p.in, format+"\n", args...) }

// Next waits for the next line of a child that may have ended; then "".
func (p *Proc) Next() string {
	select {
	case line := <-p.lines:
		return line
	case <-time.After(Limit):
		return ""
	}
}

// Expect waits for the child's next line, which must begin with word, and returns the rest of the line; with "" it takes
// any line and returns the whole.
func (p *Proc) Expect(word string) string {
	p.t.Helper()
	select {
	case line, ok := <-p.lines:
		if ok && word == "" {
			return line
		}
		if first, rest, _ := strings.Cut(line, " "); ok && first == word {
			return rest
		}
		p.t.Fatalf("process %d sent %q (open: %v), expected %q", p.PID, line, ok, word)
	case <-time.After(Limit):
		p.t.Fatalf("process %d did not send %q", p.PID, word)
	}
	return ""
}

// Signal sends a signal.
func (p *Proc) Signal(s syscall.Signal) {
	p.t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		p.t.Fatalf("signal %v to %d: %v", s, p.PID, err)
	}
}

// Kill ends the child with SIGKILL and waits for it, so that no zombie is left.
func (p *Proc) Kill() {
	if p.ended {
		return
	}
	p.ended = true
	p.cmd.Process.Kill()
	p.cmd.Process.Wait()
	p.in.Close()
}

// Wait waits until the child ends and returns its exit code.
func (p *Proc) Wait() int {
	p.ended = true
	state, err := p.cmd.Process.Wait()
	p.in.Close()
	if err != nil {
		p.t.Fatalf("waiting for %d: %v", p.PID, err)
	}
	return state.ExitCode()
}

// Eventually waits until the condition holds, and fails the test if it does not within the limit.
func Eventually(t testing.TB, limit time.Duration, what string, holds func() bool) time.Duration {
	t.Helper()
	begin := time.Now()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for !holds() {
		if time.Since(begin) > limit {
			t.Fatalf("not within %v: %s", limit, what)
		}
		<-tick.C
	}
	return time.Since(begin)
}
