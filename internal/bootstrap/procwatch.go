package bootstrap

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// probeEvery is the period of looking up processes without a pidfd in /proc. A death must be seen within 200 ms.
const probeEvery = 50 * time.Millisecond

// procWatch reports the ends of processes. The Go runtime's poller waits on one epoll set of all pidfds, so that no
// thread blocks and closing the set ends the goroutine. Processes without a pidfd are looked up by a ticker.
type procWatch struct {
	gone func(rank int) // called from the watcher's goroutines, once for a rank
	set  *os.File
	raw  syscall.RawConn
	stop chan struct{}
	wg   sync.WaitGroup

	mu      sync.Mutex
	fds     map[int]int // rank → pidfd
	probes  map[int]probe
	probing bool
	closed  bool
}

type probe struct {
	pid   int
	start uint64
}

func newProcWatch(gone func(rank int)) (*procWatch, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("epoll_create1: %w", err)
	}
	fd = Above(fd)
	if err := unix.SetNonblock(fd, true); err != nil { // os.File then registers it with the runtime's poller
		unix.Close(fd)
		return nil, fmt.Errorf("fcntl: %w", err)
	}
	w := &procWatch{
		gone: gone, set: os.NewFile(uintptr(fd), "process watch"), stop: make(chan struct{}),
		fds: make(map[int]int), probes: make(map[int]probe),
	}
	if w.raw, err = w.set.SyscallConn(); err != nil {
		w.set.Close()
		return nil, err
	}
	w.wg.Go(func() { guard("process watch", nil, w.run) })
	return w, nil
}

// watches reports whether a rank is watched.
func (w *procWatch) watches(rank int) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	_, byFD := w.fds[rank]
	_, byProbe := w.probes[rank]
	return byFD || byProbe
}

// addFD watches a pidfd's process. It takes the descriptor over, on error too.
func (w *procWatch) addFD(rank, pidfd int) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if _, twice := w.fds[rank]; twice || w.closed {
		return unix.Close(pidfd)
	}
	ev := unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(rank)}
	if err := w.control(unix.EPOLL_CTL_ADD, pidfd, &ev); err != nil {
		unix.Close(pidfd)
		return fmt.Errorf("watching rank %d: %w", rank, err)
	}
	w.fds[rank] = pidfd
	delete(w.probes, rank) // a pidfd is more reliable than a pid
	return nil
}

func (w *procWatch) control(op, fd int, ev *unix.EpollEvent) error {
	var inner error
	if err := w.raw.Control(func(set uintptr) { inner = unix.EpollCtl(int(set), op, fd, ev) }); err != nil {
		return err
	}
	return inner
}

// addPID watches a process of this PID namespace; errProcessGone if it has ended already.
func (w *procWatch) addPID(rank, pid int, start uint64) error {
	fd, err := openProcess(pid, start)
	if err == nil {
		return w.addFD(rank, fd)
	}
	if errors.Is(err, errProcessGone) {
		return err
	}
	return w.addProbe(rank, probe{pid, start})
}

func (w *procWatch) addProbe(rank int, p probe) error {
	if !procMatchesPIDs() {
		return errors.New("neither a pidfd nor /proc shows the process")
	}
	if processEnded(p.pid, p.start) {
		return errProcessGone
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return nil
	}
	w.probes[rank] = p
	if !w.probing {
		w.probing = true
		w.wg.Go(func() { guard("process probe", nil, w.runProbes) })
	}
	return nil
}

func (w *procWatch) run() {
	var events [16]unix.EpollEvent
	for {
		n := 0
		err := w.raw.Read(func(set uintptr) bool {
			var err error
			for err = unix.EINTR; err == unix.EINTR; {
				n, err = unix.EpollWait(int(set), events[:], 0)
			}
			return err != nil || n > 0
		})
		if err != nil || n < 0 {
			return // closed
		}
		for _, ev := range events[:n] {
			if rank := int(ev.Fd); w.drop(rank) {
				w.gone(rank)
			}
		}
	}
}

// drop ends the watch of a rank. It returns false if the rank was not watched.
func (w *procWatch) drop(rank int) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	fd, ok := w.fds[rank]
	if !ok {
		return false
	}
	delete(w.fds, rank)
	if err := w.control(unix.EPOLL_CTL_DEL, fd, nil); err != nil && !w.closed {
		return false
	}
	unix.Close(fd)
	return true
}

func (w *procWatch) runProbes() {
	tick := time.NewTicker(probeEvery)
	defer tick.Stop()
	for {
		select {
		case <-w.stop:
			return
		case <-tick.C:
		}
		for _, rank := range w.endedProbes() {
			w.gone(rank)
		}
	}
}

func (w *procWatch) endedProbes() []int {
	w.mu.Lock()
	defer w.mu.Unlock()
	var ended []int
	for rank, p := range w.probes {
		if processEnded(p.pid, p.start) {
			ended = append(ended, rank)
			delete(w.probes, rank)
		}
	}
	return ended
}

// close ends the goroutines and waits for them. gone must not call it.
func (w *procWatch) close() {
	w.mu.Lock()
	if w.closed {
		w.mu.Unlock()
		return
	}
	w.closed = true
	close(w.stop)
	w.mu.Unlock()
	w.set.Close()
	w.wg.Wait()
	for _, fd := range w.fds {
		unix.Close(fd)
	}
}
