package core

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/deepep-go/deepep/internal/status"
	"github.com/deepep-go/deepep/internal/testutil/proctest"
)

func TestMain(m *testing.M) {
	if info, err := QueryEngine(EngineCPU); err != nil || !info.Available { // an example cannot skip itself
		flag.Parse()
		_ = flag.Set("test.skip", "^Example")
		fmt.Fprintln(os.Stderr, "examples are skipped: they need the CPU kernel library (make kernels)")
	}
	proctest.Main(m, map[string]func(*proctest.Child) error{"rank": playRank})
}

// playRank is a rank in a process of its own: it runs commands, a line each, and answers with "ok" or
// "failed <code> <milliseconds> <text>".
func playRank(c *proctest.Child) error {
	p := &player{}
	for {
		words := strings.Fields(c.Receive())
		if words[0] == "exit" {
			return nil
		}
		begin := time.Now()
		if err := p.obey(words); err != nil {
			c.Send("failed %d %d %s", status.CodeOf(err), time.Since(begin).Milliseconds(), strings.ReplaceAll(err.Error(), "\n", " "))
			continue
		}
		if p.text != "" {
			c.Send("ok %s", p.text)
			p.text = ""
			continue
		}
		c.Send("ok %d", p.answer)
	}
}

type player struct {
	group *Group
	*Buffer
	rank, size int
	out        Arrived
	in         *Tokens
	answer     int // of the command, where it has one
	text       string
}

func (p *player) obey(words []string) (err error) {
	switch words[0] {
	case "join": // dir name rank size
		return p.join(words[1], words[2], words[3], words[4], nil)
	case "lose": // index
		index, _ := strconv.Atoi(words[1])
		p.text, err = loseOne(index)
		return err
	case "join-losing": // dir name rank size index
		loss := &losing{}
		loss.index, _ = strconv.Atoi(words[5])
		err := p.join(words[1], words[2], words[3], words[4], loss)
		p.text = loss.what
		return err
	case "buffer": // options
		return p.make(words[1:])
	case "dispatch":
		return p.DispatchTokens(p.tokens(), &p.out)
	case "combine":
		return p.CombineTokens(p.out.X, nil, &p.out, &Combined{})
	case "barrier":
		return p.Barrier(&Call{})
	case "send", "hook", "roundtrip":
		return p.lowLatency(words[0])
	case "ready":
		return p.WaitReady(-1)
	case "check":
		return p.Check()
	case "fork":
		p.answer, err = proctest.Fork()
		return err
	case "key":
		key, err := p.JoinKey()
		p.text = key
		return err
	case "knock": // key rank options
		return p.knock(words[1], words[2], words[3:])
	case "regroup", "renumber", "soon": // members
		o := RegroupOptions{Renumber: words[0] != "regroup", Timeout: 10 * time.Second}
		if words[0] == "soon" {
			o.Timeout = 500 * time.Millisecond
		}
		for _, word := range words[1:] {
			n, _ := strconv.Atoi(word)
			o.Members = append(o.Members, n)
		}
		begin := time.Now()
		err := p.Regroup(context.Background(), o)
		p.answer = int(time.Since(begin).Microseconds())
		p.size, p.in = p.Group().Size(), nil
		p.rank = p.Group().Rank()
		return err
	case "persist": // members or members
		first, second, _ := strings.Cut(strings.Join(words[1:], " "), " or ")
		var err error
		for limit := time.Now().Add(10 * time.Second); time.Now().Before(limit); first = second {
			if err = p.obey(strings.Fields("renumber " + first)); err == nil {
				p.answer = len(strings.Fields(first)) - 2
				return nil
			}
		}
		return err
	case "joins":
		joins, err := p.AgreedJoins(context.Background())
		p.answer = len(joins)
		return err
	case "masks":
		masks := make([]int32, p.size)
		err := p.QueryMask(uintptr(unsafe.Pointer(&masks[0])), &Call{})
		p.text = strings.ReplaceAll(fmt.Sprint(masks), " ", "")
		return err
	case "destroy":
		return errors.Join(p.Buffer.Destroy(), p.group.Destroy())
	}
	return fmt.Errorf("no command %q", words[0])
}

func (p *player) join(dir, name, rank, size string, loss *losing) (err error) {
	p.rank, _ = strconv.Atoi(rank)
	p.size, _ = strconv.Atoi(size)
	ex, err := OpenFile(context.Background(), FileOptions{Rank: p.rank, Size: p.size, Dir: dir, Name: name})
	if err != nil {
		return err
	}
	if loss != nil {
		loss.Exchanger, ex = ex, loss
	}
	p.group, err = NewGroup(context.Background(), GroupOptions{Exchanger: ex, Timeout: 10 * time.Second})
	return err
}

// knock joins the group of a buffer as a new process.
func (p *player) knock(key, rank string, options []string) (err error) {
	place, _ := strconv.Atoi(rank)
	p.group, err = JoinGroup(context.Background(), JoinOptions{Key: key, Rank: place, Engine: EngineCPU, Device: -1, Timeout: 10 * time.Second})
	if err != nil {
		return err
	}
	p.rank, p.size = p.group.Rank(), p.group.Size()
	return p.make(options)
}

func (p *player) make(options []string) (err error) {
	o := BufferOptions{Engine: EngineCPU, Device: -1, NumNVLBytes: 1 << 20, NumRDMABytes: 8 << 20, LowLatency: true, Timeout: 30 * time.Second}
	for _, option := range options {
		switch option {
		case "shrink":
			o.Shrink = true
		case "background":
			o.Background = true
		case "hasty":
			o.Timeout = 500 * time.Millisecond
		}
	}
	p.Buffer, err = p.group.NewBuffer(context.Background(), o)
	return err
}

// tokens go to every rank.
func (p *player) tokens() *Tokens {
	if p.in == nil {
		p.in = &Tokens{Hidden: 128, NumTopK: p.size, NumExperts: 2 * p.size}
		for range 5 {
			p.in.X = append(p.in.X, make([]uint16, 128)...)
			for to := range p.size {
				p.in.TopKIdx = append(p.in.TopKIdx, int64(2*to))
				p.in.TopKWeights = append(p.in.TopKWeights, 1)
			}
		}
	}
	return p.in
}

// crew is ranks as processes, seen from the test.
type crew struct {
	t   *testing.T
	all []*proctest.Proc
	dir string
}

func newCrew(t *testing.T, size int) *crew {
	t.Helper()
	needEngine(t)
	c := &crew{t: t, dir: t.TempDir()}
	for range size {
		c.all = append(c.all, proctest.Start(t, "rank", nil, nil))
	}
	ranks := make([]int, size)
	for i := range ranks {
		ranks[i] = i
	}
	c.join("first", ranks)
	return c
}

// join makes a group of some of the processes; their ranks there are their places in the list.
func (c *crew) join(name string, members []int) {
	c.t.Helper()
	for rank, i := range members {
		c.all[i].Send("join %s %s %d %d", c.dir, name, rank, len(members))
	}
	c.expectOK(members)
}

func (c *crew) tell(members []int, format string, args ...any) {
	c.t.Helper()
	for _, i := range members {
		c.all[i].Send(format, args...)
	}
}

func (c *crew) expectOK(members []int) {
	c.t.Helper()
	for _, i := range members {
		c.all[i].Expect("ok")
	}
}

// do sends a command and expects success.
func (c *crew) do(members []int, format string, args ...any) {
	c.t.Helper()
	c.tell(members, format, args...)
	c.expectOK(members)
}

// fork lets a rank make a copy of its process that lives on after it, to the end of the test.
func (c *crew) fork(i int) {
	c.t.Helper()
	c.tell([]int{i}, "fork")
	pid, err := strconv.Atoi(c.all[i].Expect("ok"))
	if err != nil || pid < 2 {
		c.t.Fatalf("forked process %d: %v", pid, err)
	}
	c.t.Cleanup(func() { _ = syscall.Kill(pid, syscall.SIGKILL) }) // it may have ended already
}

// failure reads an error: its code, how long the call took, and the text.
func (c *crew) failure(i int) (code status.Code, took time.Duration, text string) {
	c.t.Helper()
	words := strings.SplitN(c.all[i].Expect("failed"), " ", 3)
	n, _ := strconv.Atoi(words[0])
	ms, _ := strconv.Atoi(words[1])
	return status.Code(n), time.Duration(ms) * time.Millisecond, words[2]
}

// expectDeath checks that survivors say who died, with pid, soon after.
func (c *crew) expectDeath(members []int, victim int, since time.Time) {
	c.t.Helper()
	for _, i := range members {
		code, _, text := c.failure(i)
		if late := time.Since(since); late > 2*time.Second {
			c.t.Errorf("rank %d learned of the death after %v", i, late)
		}
		if code != status.PeerDead && code != status.Aborted {
			c.t.Errorf("rank %d: code %d", i, code)
		}
		for _, part := range []string{fmt.Sprintf("rank %d (", victim), "pid " + strconv.Itoa(c.all[victim].PID)} {
			if !strings.Contains(text, part) {
				c.t.Errorf("rank %d: %q is not in %q", i, part, text)
			}
		}
	}
}

// killDuring kills the victim while the survivors are in an operation, and checks their errors.
func (c *crew) killDuring(op string, survivors []int, victim int) {
	c.t.Helper()
	c.tell(survivors, "%s", op)
	time.Sleep(100 * time.Millisecond) // they are waiting for the victim by now; if not, all the better
	since := time.Now()
	c.all[victim].Kill()
	c.expectDeath(survivors, victim, since)
}

// destroySoon lets members destroy their buffers, which no dead rank may hold up.
func (c *crew) destroySoon(members []int) {
	c.t.Helper()
	since := time.Now()
	c.do(members, "destroy")
	if d := time.Since(since); d > 2500*time.Millisecond {
		c.t.Errorf("destroy took %v", d)
	}
}

func TestDeathInAnOperation(t *testing.T) {
	all, survivors := []int{0, 1, 2}, []int{0, 2}
	for _, c := range []struct {
		name   string
		before []string // that all do
		op     string   // that the survivors are in when rank 1 dies
	}{
		{"dispatch", nil, "dispatch"}, {"combine", []string{"dispatch"}, "combine"}, {"barrier", nil, "barrier"},
		{"low latency", nil, "roundtrip"}, {"hook", []string{"roundtrip"}, "hook"},
	} {
		t.Run(c.name, func(t *testing.T) {
			crew := newCrew(t, 3)
			crew.do(all, "buffer")
			crew.fork(1) // a child that keeps every descriptor of the dead rank changes nothing
			for _, op := range c.before {
				crew.do(all, "%s", op)
			}
			crew.killDuring(c.op, survivors, 1)
			crew.tell(survivors, "barrier")
			for _, i := range survivors {
				if code, _, text := crew.failure(i); code != status.Aborted || !strings.Contains(text, "failed before") {
					t.Errorf("a call after the failure: %d %s", code, text)
				}
			}
			crew.destroySoon(survivors)
			crew.join("second", survivors)
			crew.do(survivors, "buffer")
			crew.do(survivors, "dispatch")
			crew.do(survivors, "combine")
			crew.do(survivors, "roundtrip")
		})
	}
}

func TestDeathDuringStartUp(t *testing.T) {
	for _, mode := range []string{"", "background"} {
		t.Run("mode "+mode, func(t *testing.T) {
			crew := newCrew(t, 3)
			crew.tell([]int{0, 2}, "buffer %s", mode)
			if mode == "background" {
				crew.expectOK([]int{0, 2})
				crew.tell([]int{0, 2}, "ready")
			}
			time.Sleep(50 * time.Millisecond)
			since := time.Now()
			crew.all[1].Kill()
			crew.expectDeath([]int{0, 2}, 1, since)
		})
	}
}

func TestShrinkGoesOnWithoutTheDead(t *testing.T) {
	for _, peers := range []int{3, 1} { // ranks of a node
		t.Run(fmt.Sprintf("%d ranks a node", peers), func(t *testing.T) {
			nodesOf(t, peers)
			crew := newCrew(t, 3)
			crew.do([]int{0, 1, 2}, "buffer shrink")
			crew.do([]int{0, 1, 2}, "roundtrip")
			crew.tell([]int{0, 2}, "roundtrip")
			time.Sleep(50 * time.Millisecond)
			since := time.Now()
			crew.all[1].Kill()
			crew.expectOK([]int{0, 2})
			if d := time.Since(since); d > 2*time.Second {
				t.Errorf("the call went on after %v", d)
			}
			crew.do([]int{0, 2}, "roundtrip")
			crew.do([]int{0, 2}, "check")
		})
	}
}

func TestLateIsNotDead(t *testing.T) {
	crew := newCrew(t, 2)
	crew.do([]int{0, 1}, "buffer hasty")
	crew.all[1].Signal(syscall.SIGSTOP)
	crew.tell([]int{0}, "dispatch")
	code, took, text := crew.failure(0)
	if code != status.Timeout || took < 400*time.Millisecond || took > 3*time.Second {
		t.Errorf("code %d after %v", code, took)
	}
	for _, part := range []string{"on rank 0: rank 1 (", "pid " + strconv.Itoa(crew.all[1].PID), "did not arrive within ", " s: it is alive but late"} {
		if !strings.Contains(text, part) {
			t.Errorf("%q is not in %q", part, text)
		}
	}
	crew.all[1].Signal(syscall.SIGCONT)
	crew.do([]int{0}, "destroy")
}

func TestWhoLeavesIsNamed(t *testing.T) {
	crew := newCrew(t, 2)
	crew.do([]int{0, 1}, "buffer")
	crew.do([]int{0, 1}, "dispatch")
	crew.tell([]int{0}, "combine")
	time.Sleep(50 * time.Millisecond)
	crew.do([]int{1}, "destroy")
	since := time.Now()
	_, _, text := crew.failure(0)
	if !strings.Contains(text, "rank 1 (") || !strings.Contains(text, "left the group") {
		t.Errorf("text %q", text)
	}
	if d := time.Since(since); d > 2*time.Second {
		t.Errorf("the error came after %v", d)
	}
	crew.do([]int{0}, "destroy")
}
