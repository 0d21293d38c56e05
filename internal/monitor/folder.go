package monitor

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Folders lists the folders of this user's pages, in order of preference. For root it adds the folders of all users.
func Folders() []string {
	mine := fmt.Sprintf("deepep-%d", os.Geteuid())
	folders := []string{filepath.Join("/dev/shm", mine), filepath.Join(os.TempDir(), mine)}
	if os.Geteuid() != 0 {
		return folders
	}
	for _, base := range []string{"/dev/shm", os.TempDir()} {
		others, _ := filepath.Glob(filepath.Join(base, "deepep-[0-9]*")) // the pattern is well formed
		for _, o := range others {
			if o != folders[0] && o != folders[1] && ofUser.MatchString(o) {
				folders = append(folders, o)
			}
		}
	}
	return folders
}

// ofUser leaves out names that only begin like those of a user's folder.
var ofUser = regexp.MustCompile(`/deepep-[0-9]+$`)

// makeFolder makes a folder that the owner alone may enter. An existing one must be just that: all users may write to
// /dev/shm.
func makeFolder(dir string) error {
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	var st unix.Stat_t
	if err := unix.Lstat(dir, &st); err != nil {
		return &os.PathError{Op: "lstat", Path: dir, Err: err}
	}
	switch {
	case st.Mode&unix.S_IFMT != unix.S_IFDIR:
		return fmt.Errorf("%s is not a folder", dir)
	case st.Uid != uint32(os.Geteuid()):
		return fmt.Errorf("%s belongs to user %d, not to %d", dir, st.Uid, os.Geteuid())
	case st.Mode&0o077 != 0:
		return fmt.Errorf("%s has mode %04o; only its owner may enter (0700)", dir, st.Mode&0o777)
	}
	return nil
}

// inMemory refuses folders on a disk: the system would write pages back again and again, and CUDA cannot register them
// (cudaHostRegister of a file on ext4 fails, of one in /dev/shm it works).
func inMemory(dir string) error {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return &os.PathError{Op: "statfs", Path: dir, Err: err}
	}
	if st.Type != unix.TMPFS_MAGIC && st.Type != unix.RAMFS_MAGIC {
		return fmt.Errorf("%s lies on a disk, not in memory", dir)
	}
	return nil
}

// fileName is <pid>-<start time>-<number>-<PID namespace>.page. A reader that sees that the process has ended renames
// it to .dead.
type fileName struct {
	pid       int
	start     uint64
	number    uint32
	namespace uint64 // inode of the PID namespace in which pid counts; 0: unknown
	dead      bool
}

const (
	liveSuffix = ".page"
	deadSuffix = ".dead"
)

func isPage(base string) bool {
	return strings.HasSuffix(base, liveSuffix) || strings.HasSuffix(base, deadSuffix)
}

func (f fileName) String() string {
	suffix := liveSuffix
	if f.dead {
		suffix = deadSuffix
	}
	return fmt.Sprintf("%d-%d-%d-%d%s", f.pid, f.start, f.number, f.namespace, suffix)
}

func parseName(base string) (fileName, error) {
	var f fileName
	stem, dead := strings.CutSuffix(base, deadSuffix)
	if !dead {
		stem = strings.TrimSuffix(base, liveSuffix)
	}
	parts := strings.Split(stem, "-")
	if !isPage(base) || len(parts) != 4 {
		return f, fmt.Errorf("name is not <pid>-<start>-<number>-<namespace>%s", liveSuffix)
	}
	pid, err1 := strconv.ParseInt(parts[0], 10, 32)
	start, err2 := strconv.ParseUint(parts[1], 10, 64)
	number, err3 := strconv.ParseUint(parts[2], 10, 32)
	namespace, err4 := strconv.ParseUint(parts[3], 10, 64)
	if err := errors.Join(err1, err2, err3, err4); err != nil {
		return f, err
	}
	if pid <= 0 {
		return f, fmt.Errorf("pid %d", pid)
	}
	return fileName{int(pid), start, uint32(number), namespace, dead}, nil
}

// pidNamespace is the inode of this process's PID namespace; 0: unknown.
func pidNamespace() uint64 {
	var st unix.Stat_t
	if err := unix.Stat("/proc/self/ns/pid", &st); err != nil {
		return 0
	}
	return st.Ino
}

// startTime is when a process began, in clock ticks since boot. Pid and start time together identify a process. A
// zombie counts as ended.
func startTime(pid int) (uint64, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	return parseStat(string(b))
}

// parseStat reads field 22. Field 2, the name, may hold anything, so that the fields are counted from its last
// parenthesis.
func parseStat(text string) (uint64, error) {
	at := strings.LastIndexByte(text, ')')
	fields := strings.Fields(text[at+1:])
	const state, start = 0, 22 - 3
	if at < 0 || len(fields) <= start {
		return 0, errors.New("/proc stat line is too short")
	}
	if fields[state] == "Z" || fields[state] == "X" {
		return 0, os.ErrProcessDone
	}
	return strconv.ParseUint(fields[start], 10, 64)
}

// alive reports whether the process that made a page still runs.
func alive(f fileName, fd int) bool {
	if f.namespace != 0 && f.namespace == pidNamespace() {
		start, err := startTime(f.pid)
		return err == nil && start == f.start
	}
	// The pid is of another namespace. The owner holds a shared lock while it maps the page, so that the exclusive lock
	// is free only after its end. (A forked child holds the shared lock too, so that the page may seem alive after its
	// owner's end.)
	if err := unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return true
	}
	_ = unix.Flock(fd, unix.LOCK_UN) // closing fd releases it as well
	return false
}
