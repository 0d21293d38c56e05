package bootstrap

import (
	"errors"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/deepep-go/deepep/internal/testutil/proctest"
	"golang.org/x/sys/unix"
)

func TestParseStat(t *testing.T) {
	const tail = " 1 7 7 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 987654321 100 200"
	s, err := parseStat([]byte("42 (a) b ( c) S" + tail))
	if err != nil || s.pid != 42 || s.state != 'S' || s.start != 987654321 || s.ended() {
		t.Errorf("got %+v, %v", s, err)
	}
	if s, err := parseStat([]byte("42 (x) Z" + tail)); err != nil || !s.ended() {
		t.Errorf("a zombie: %+v, %v", s, err)
	}
	for _, bad := range []string{"", "42", "42 (x", "x (x) S" + tail, "42 (x) S 1 2 3", "42 ) ( S" + tail} {
		if _, err := parseStat([]byte(bad)); err == nil {
			t.Errorf("accepted %q", bad)
		}
	}
}

func FuzzParseStat(f *testing.F) {
	b, _ := os.ReadFile("/proc/self/stat")
	f.Add(b)
	f.Add([]byte("1 () R"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if s, err := parseStat(b); err == nil && s.pid < 0 {
			t.Errorf("%q gave %+v", b, s)
		}
	})
}

// sleeperRole runs until the parent sends a line or kills it.
func sleeperRole(c *proctest.Child) error {
	c.Send("start %d", currentIdentity().Start)
	c.Receive()
	return nil
}

func TestOpenProcess(t *testing.T) {
	checkFDs(t)
	self := currentIdentity()
	fd, err := openProcess(self.PID, self.Start)
	if err != nil {
		t.Fatalf("this process: %v", err)
	}
	unix.Close(fd)
	if _, err := openProcess(self.PID, self.Start+1); !errors.Is(err, errProcessGone) {
		t.Errorf("a reused pid was taken for the peer: %v", err)
	}
	p := proctest.Start(t, "sleeper", nil, nil)
	p.Expect("start")
	p.Kill()
	if _, err := openProcess(p.PID, 1); !errors.Is(err, errProcessGone) {
		t.Errorf("a process that has ended: %v", err)
	}
	null, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	if _, err := pidOf(int(null.Fd())); err == nil {
		t.Error("a file was taken for a pidfd")
	}
}

// Pidfds and probes see a death, of a zombie too, and take a stopped process for alive.
func TestProcWatch(t *testing.T) {
	if probeEvery > 100*time.Millisecond {
		t.Errorf("processes are looked up every %v: a death must be seen within 200 ms", probeEvery)
	}
	for name, probing := range map[string]bool{"pidfd": false, "probe": true} {
		t.Run(name, func(t *testing.T) {
			checkFDs(t)
			gone := make(chan int, 8)
			w, err := newProcWatch(func(rank int) { gone <- rank })
			if err != nil {
				t.Fatal(err)
			}
			defer w.close()
			procs := make(map[int]*proctest.Proc)
			for rank := range 3 {
				p := proctest.Start(t, "sleeper", nil, nil)
				var start uint64
				for _, r := range p.Expect("start") {
					start = start*10 + uint64(r-'0')
				}
				if probing {
					err = w.addProbe(rank, probe{p.PID, start})
				} else {
					err = w.addPID(rank, p.PID, start)
				}
				if err != nil || !w.watches(rank) {
					t.Fatalf("rank %d: %v", rank, err)
				}
				procs[rank] = p
			}
			procs[0].Signal(syscall.SIGSTOP)
			for _, rank := range []int{1, 2} {
				begin := time.Now()
				procs[rank].Signal(syscall.SIGKILL) // and stays a zombie
				if got := <-gone; got != rank {
					t.Fatalf("rank %d was reported for rank %d", got, rank)
				}
				if d := time.Since(begin); d > 2*time.Second { // 200 ms on a machine that is not busy
					t.Errorf("a death was seen after %v", d)
				}
			}
			select {
			case rank := <-gone:
				t.Errorf("rank %d is only stopped", rank)
			case <-time.After(3 * probeEvery):
			}
		})
	}
}

func TestProcWatchOfTheDeadAndTheReused(t *testing.T) {
	w, err := newProcWatch(func(int) { t.Error("callback called") })
	if err != nil {
		t.Fatal(err)
	}
	defer w.close()
	self := currentIdentity()
	if err := w.addPID(0, self.PID, self.Start+1); !errors.Is(err, errProcessGone) {
		t.Errorf("pidfd: a reused pid: %v", err)
	}
	if err := w.addProbe(1, probe{self.PID, self.Start + 1}); !errors.Is(err, errProcessGone) {
		t.Errorf("probe: a reused pid: %v", err)
	}
}

func TestProcWatchClosesWhileProcessesEnd(t *testing.T) {
	checkFDs(t)
	for range 20 {
		var mu sync.Mutex
		closed := false
		w, err := newProcWatch(func(int) {
			mu.Lock()
			defer mu.Unlock()
			if closed {
				t.Error("called after close")
			}
		})
		if err != nil {
			t.Fatal(err)
		}
		p := proctest.Start(t, "sleeper", nil, nil)
		fd, err := unix.PidfdOpen(p.PID, 0)
		if err != nil {
			t.Skip("needs pidfd_open (Linux 5.3)")
		}
		if err := w.addFD(0, fd); err != nil {
			t.Fatal(err)
		}
		p.Signal(syscall.SIGKILL)
		w.close()
		mu.Lock()
		closed = true
		mu.Unlock()
	}
}
