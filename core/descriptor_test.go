package core

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/deepep-go/deepep/internal/testutil/proctest"
)

// loseOne closes the descriptor with this index among those of the process, as something else in it may do, and says
// which it was; "none" past the last one.
func loseOne(index int) (what string, err error) {
	files, err := filepath.Glob("/proc/self/fd/*")
	if err != nil {
		return "", err
	}
	for _, file := range files {
		fd, _ := strconv.Atoi(filepath.Base(file))
		target, err := os.Readlink(file)
		if err != nil || fd <= 2 { // the folder's own, and the pipes to the test
			continue
		}
		if index--; index < 0 {
			return fmt.Sprintf("descriptor %d, %s", fd, target), unix.Close(fd)
		}
	}
	return "none", nil
}

// losing is an Exchanger after whose gather the process loses a descriptor: the others dial, or are dialled, by then.
type losing struct {
	Exchanger
	index int
	what  string
}

func (l *losing) AllGather(ctx context.Context, blob []byte) ([][]byte, error) {
	all, err := l.Exchanger.AllGather(ctx, blob)
	if err == nil {
		l.what, err = loseOne(l.index)
	}
	return all, err
}

// Whatever descriptor a rank loses to something else in its process, while its group is made or before a step: within
// 2 s the others name that rank, or nobody notices. It may end, or fail by itself.
func TestLostDescriptors(t *testing.T) {
	stride := 6 // of the descriptors: a few in the short run
	if os.Getenv("DEEPEP_TEST_FULL") == "1" {
		stride = 1
	}
	for number, before := range []string{"join", "buffer", "dispatch", "renumber"} {
		for index := 2 * number % stride; ; index += stride {
			c := &crew{t: t, dir: t.TempDir()}
			needEngine(t)
			for range 3 {
				c.all = append(c.all, proctest.Start(t, "rank", nil, nil))
			}
			what, outcome := c.loseBefore(before, index)
			for _, p := range c.all {
				p.Kill()
			}
			if what == "none" {
				break
			}
			t.Logf("before %s: %s: %s", before, what, outcome)
		}
	}
}

// loseBefore takes ranks through all steps, and lets rank 1 lose a descriptor before one of them.
func (c *crew) loseBefore(before string, index int) (what, outcome string) {
	const victim = 1
	lost := false
	for _, step := range []string{"join", "buffer", "dispatch", "combine", "renumber 0 1 2", "dispatch", "combine"} {
		if name, _, _ := strings.Cut(step, " "); name == before && !lost && before != "join" {
			c.all[victim].Send("lose %d", index)
			if what = strings.TrimPrefix(c.all[victim].Next(), "ok "); what == "none" {
				return what, ""
			}
			lost = true
		}
		begin := time.Now()
		for rank, p := range c.all {
			switch {
			case step != "join":
				p.TrySend(step)
			case before == "join" && rank == victim:
				p.Send("join-losing %s g %d 3 %d", c.dir, rank, index)
			default:
				p.Send("join %s g %d 3", c.dir, rank)
			}
		}
		if c.noticed(begin, fmt.Sprintf("before %s, index %d, %s, in %s", before, index, what, step)) {
			return what, "named"
		}
		said := c.all[victim].Next()
		if step == "join" && before == "join" {
			if what, lost = strings.TrimPrefix(said, "ok "), true; what == "none" {
				return what, ""
			}
		}
	}
	return what, "unnoticed"
}

// noticed reads how a step ended at ranks 0 and 2. An error comes in time and names rank 1.
func (c *crew) noticed(begin time.Time, where string) (failed bool) {
	c.t.Helper()
	for _, rank := range []int{0, 2} {
		reply := c.all[rank].Expect("")
		if strings.HasPrefix(reply, "ok") {
			continue
		}
		failed = true
		if took := time.Since(begin); took > 5*time.Second { // 2 s on a machine that is not busy
			c.t.Errorf("%s: rank %d failed after %v: %s", where, rank, took, reply)
		}
		if accused := strings.LastIndex(reply, "rank 1 (host "); accused < strings.LastIndex(reply, "rank 0 (host ") || accused < strings.LastIndex(reply, "rank 2 (host ") {
			c.t.Errorf("%s: rank %d does not name rank 1: %s", where, rank, reply)
		}
	}
	return failed
}
