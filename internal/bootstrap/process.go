package bootstrap

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// identity describes a process and its machine to its peers.
type identity struct {
	Host    string // host name, for texts alone
	Boot    string // the kernel's boot id: equal for all containers of a machine
	NetNS   string // network namespace: the reach of abstract sockets
	PIDNS   string // PID namespace, with the time namespace, which shifts start times
	PID     int
	Start   uint64 // field 22 of /proc/self/stat; 0: unknown
	UID     int
	Process string // random for each process: ranks that are its goroutines share it
}

var processToken = sync.OnceValue(rand.Text)

func currentIdentity() identity {
	id := identity{PID: os.Getpid(), UID: os.Geteuid(), Process: processToken()}
	id.Host, _ = os.Hostname()
	boot, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	id.Boot = string(bytes.TrimSpace(boot))
	id.NetNS, _ = os.Readlink("/proc/self/ns/net")
	pid, _ := os.Readlink("/proc/self/ns/pid")
	clock, _ := os.Readlink("/proc/self/ns/time") // absent before Linux 5.6
	if pid != "" {
		id.PIDNS = pid + " " + clock
	}
	if b, err := os.ReadFile("/proc/self/stat"); err == nil {
		if s, err := parseStat(b); err == nil {
			id.Start = s.start
		}
	}
	return id
}

// machine is equal for processes that can share memory and reach each other's abstract sockets. If /proc hides the boot
// id, the host name replaces it.
func (id identity) machine() string {
	if id.Boot == "" {
		return id.Host + "|" + id.NetNS
	}
	return id.Boot + "|" + id.NetNS
}

// procStat holds the fields of /proc/<pid>/stat that this package uses.
type procStat struct {
	pid   int
	state byte
	start uint64
}

// ended reports whether the process is a zombie or dead: the kernel has freed its memory and descriptors.
func (s procStat) ended() bool { return s.state == 'Z' || s.state == 'X' || s.state == 'x' }

// parseStat reads "pid (name) state …". The name may contain blanks and parentheses, so that the last ')' ends it.
func parseStat(b []byte) (procStat, error) {
	open, end := bytes.IndexByte(b, '('), bytes.LastIndexByte(b, ')')
	if open < 0 || end < open {
		return procStat{}, errors.New("process status without a name")
	}
	pid, err := strconv.Atoi(string(bytes.TrimSpace(b[:open])))
	if err != nil || pid < 0 {
		return procStat{}, errors.New("process status without a pid")
	}
	fields := bytes.Fields(b[end+1:]) // fields[0] is field 3, the state
	const startField = 22 - 3
	if len(fields) <= startField || len(fields[0]) != 1 {
		return procStat{}, fmt.Errorf("process status with %d fields", len(fields))
	}
	start, err := strconv.ParseUint(string(fields[startField]), 10, 64)
	if err != nil {
		return procStat{}, fmt.Errorf("process start time: %w", err)
	}
	return procStat{pid, fields[0][0], start}, nil
}

// errProcessGone means that the process has ended. Another process may have its pid.
var errProcessGone = errors.New("process has ended")

// openProcess returns a pidfd of the process with this pid and start time, or errProcessGone, or another error if the
// system has no pidfd_open (before Linux 5.3, or forbidden by a sandbox).
func openProcess(pid int, start uint64) (int, error) {
	fd, err := unix.PidfdOpen(pid, 0) // sets close-on-exec
	if errors.Is(err, unix.ESRCH) {
		return -1, errProcessGone
	}
	if err != nil {
		return -1, fmt.Errorf("pidfd_open: %w", err)
	}
	if err := checkStart(fd, start); err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// checkStart compares the start time of a pidfd's process. It reads the pid from the descriptor, because the mounted
// /proc may belong to another PID namespace than this process.
func checkStart(pidfd int, start uint64) error {
	shown, err := pidOf(pidfd)
	if err != nil {
		return err
	}
	s, err := readStat(shown)
	if err != nil {
		return err
	}
	if s.start != start || s.ended() {
		return errProcessGone
	}
	return nil
}

// pidOf reads the pid that /proc shows for a pidfd; any other descriptor is an error.
func pidOf(pidfd int) (int, error) {
	b, err := os.ReadFile("/proc/self/fdinfo/" + strconv.Itoa(pidfd))
	if err != nil {
		return 0, fmt.Errorf("pidfd: %w", err)
	}
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(line, "Pid:"); ok {
			pid, err := strconv.Atoi(strings.TrimSpace(v))
			if err == nil && pid == -1 {
				return 0, errProcessGone
			}
			return pid, err
		}
	}
	return 0, errors.New("descriptor is not a pidfd")
}

func readStat(pid int) (procStat, error) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return procStat{}, errProcessGone
	}
	if err != nil {
		return procStat{}, err
	}
	return parseStat(b)
}

// procMatchesPIDs reports whether the mounted /proc belongs to this process's PID namespace: only then can it look up
// pids.
func procMatchesPIDs() bool {
	b, err := os.ReadFile("/proc/self/stat")
	if err != nil {
		return false
	}
	s, err := parseStat(b)
	return err == nil && s.pid == os.Getpid()
}

// processEnded looks up a process by pid and start time, for kernels without pidfd.
func processEnded(pid int, start uint64) bool {
	s, err := readStat(pid)
	if err != nil {
		return errors.Is(err, errProcessGone)
	}
	return s.start != start || s.ended()
}
