package main

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// inflict makes the fault, and returns when it was. undo ends what lasts; it may be called again.
func (s *faultSession) inflict(r *faultRound) (at uint64, undo func(), err error) {
	undo = func() {}
	p := s.all[r.victim]
	switch r.fault {
	case "exit", "exec", "segv", "exception", "close":
		e, err := p.await("fault", orderLimit)
		if err != nil && r.phase != "destroy" && r.phase != "construct" {
			return 0, undo, fmt.Errorf("the victim: %w", err)
		}
		if err != nil {
			e.At = monotonic()
		}
		p.dirty, p.what = r.fault != "exception", e.What
		return e.At, undo, nil
	}
	time.Sleep(r.delay)
	at = monotonic()
	switch r.fault {
	case "kill":
		p.dirty = true
		err = p.cmd.Process.Kill()
	case "stop", "pause":
		err = p.cmd.Process.Signal(syscall.SIGSTOP)
		undo = func() { _ = p.cmd.Process.Signal(syscall.SIGCONT) }
		if r.fault == "pause" {
			time.Sleep(unnoticed)
			undo()
		}
	case "full":
		undo = func() { _ = os.Remove(fillingFile) }
		err = fill()
	case "partition", "congestion":
		var thaw func()
		if thaw, err = freeze(p.cmd.Process.Pid, "deepep-nic"); err != nil {
			return at, undo, fmt.Errorf("stopping the NIC: %w", err)
		}
		undo = sync.OnceFunc(thaw)
		if r.fault == "congestion" {
			time.Sleep(unnoticed)
			undo()
		}
	}
	return at, undo, err
}

// fill writes to /dev/shm until it is full.
func fill() error {
	f, err := os.Create(fillingFile)
	if err != nil {
		return err
	}
	defer f.Close()
	for block := make([]byte, 64<<10); ; {
		if _, err := f.Write(block); errors.Is(err, syscall.ENOSPC) {
			return nil
		} else if err != nil {
			return err
		}
	}
}

// freeze stops the threads of a process that have a name ("": its first thread alone), until thaw.
func freeze(pid int, name string) (thaw func(), err error) {
	done, stopped := make(chan struct{}), make(chan error)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		runtime.LockOSThread()         // a tracer is a thread
		defer runtime.UnlockOSThread() // it goes on: the end of a thread kills the processes that it started (Pdeathsig)
		tids, err := threadsNamed(pid, name)
		for _, tid := range tids {
			if err == nil {
				err = stopThread(tid)
			}
		}
		stopped <- err
		<-done
		for _, tid := range tids {
			_ = unix.PtraceDetach(tid) // fails where the process was killed
		}
	}()
	thaw = func() {
		close(done)
		<-ended
	}
	if err := <-stopped; err != nil {
		thaw()
		return nil, err
	}
	return thaw, nil
}

func stopThread(tid int) error {
	if err := unix.PtraceSeize(tid); err != nil {
		return os.NewSyscallError("ptrace", err)
	}
	if err := unix.PtraceInterrupt(tid); err != nil {
		return os.NewSyscallError("ptrace", err)
	}
	_, err := unix.Wait4(tid, nil, unix.WALL, nil)
	return os.NewSyscallError("wait4", err)
}

func threadsNamed(pid int, name string) (tids []int, err error) {
	if name == "" {
		return []int{pid}, nil
	}
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	for _, t := range tasks {
		comm, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/comm", pid, t.Name()))
		var tid int
		if _, scanned := fmt.Sscan(t.Name(), &tid); err == nil && scanned == nil && strings.TrimSpace(string(comm)) == name {
			tids = append(tids, tid)
		}
	}
	if err == nil && len(tids) == 0 {
		err = fmt.Errorf("process %d has no thread %s", pid, name)
	}
	return tids, err
}
