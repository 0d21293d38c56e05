package monitor

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Entry is one page that was found.
type Entry struct {
	Path    string
	Stats   *Stats // nil if Err is set
	Err     error  // the page cannot be read or is damaged
	Dead    bool   // its process has ended
	Removed bool   // it was dead, and its file is gone now
}

// errUnfinished is a page whose owner has not filled it yet.
var errUnfinished = errors.New("not filled yet")

// List reads all pages of the folders (none given: Folders), sorted by group,
// buffer and rank, damaged ones last. Pages of dead processes are read once
// more and removed. An absent folder holds no pages; a folder that others may
// write to is an error.
func List(dirs ...string) ([]Entry, error) {
	if len(dirs) == 0 {
		dirs = Folders()
	}
	var entries []Entry
	var failures []error
	for _, dir := range dirs {
		list, err := listFolder(dir)
		if err != nil {
			failures = append(failures, err)
		}
		entries = append(entries, list...)
	}
	slices.SortFunc(entries, func(a, b Entry) int {
		switch {
		case a.Stats == nil && b.Stats == nil:
			return strings.Compare(a.Path, b.Path)
		case a.Stats == nil:
			return 1
		case b.Stats == nil:
			return -1
		}
		return cmp.Or(
			strings.Compare(a.Stats.Group, b.Stats.Group),
			cmp.Compare(a.Stats.Buffer, b.Stats.Buffer),
			cmp.Compare(a.Stats.Rank, b.Stats.Rank),
			strings.Compare(a.Path, b.Path))
	})
	return entries, errors.Join(failures...)
}

func listFolder(dir string) ([]Entry, error) {
	var st unix.Stat_t
	if err := unix.Lstat(dir, &st); err != nil {
		if errors.Is(err, os.ErrNotExist) {
			return nil, nil
		}
		return nil, &os.PathError{Op: "lstat", Path: dir, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR || st.Mode&0o022 != 0 {
		return nil, fmt.Errorf("%s: not a folder that only its owner writes to (mode %04o)", dir, st.Mode&0o777)
	}
	files, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var entries []Entry
	for _, f := range files {
		if !strings.HasSuffix(f.Name(), suffix) {
			continue
		}
		e := open(filepath.Join(dir, f.Name()), st.Uid)
		if errors.Is(e.Err, errUnfinished) || errors.Is(e.Err, os.ErrNotExist) {
			continue // being made, or just removed by its owner
		}
		entries = append(entries, e)
	}
	return entries, nil
}

// maxPage bounds what is read: the largest page of 1024 ranks and the longest trace is below 3 MiB.
const maxPage = 8 << 20

// open reads one page. It does not map it: a file that is cut short meanwhile
// would be a SIGBUS in a mapping and is an error here.
func open(path string, owner uint32) Entry {
	e := Entry{Path: path}
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		e.Err = &os.PathError{Op: "open", Path: path, Err: err}
		return e
	}
	defer unix.Close(fd)
	name, err := parseName(filepath.Base(path))
	if err != nil {
		e.Err = fmt.Errorf("%s: %w", path, err)
		return e
	}
	e.Stats, e.Err = readPage(fd, name, owner)
	if e.Err != nil {
		e.Stats, e.Err = nil, fmt.Errorf("%s: %w", path, e.Err)
	}
	if !alive(name, fd) {
		e.Dead = true
		e.Removed = os.Remove(path) == nil
	}
	return e
}

func readPage(fd int, name fileName, owner uint32) (*Stats, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, os.NewSyscallError("fstat", err)
	}
	switch {
	case st.Mode&unix.S_IFMT != unix.S_IFREG:
		return nil, errors.New("not a regular file")
	case st.Uid != owner:
		return nil, fmt.Errorf("belongs to user %d, its folder to %d", st.Uid, owner)
	case st.Size > maxPage:
		return nil, fmt.Errorf("damaged: %d bytes, a page has at most %d", st.Size, maxPage)
	}
	b := make([]byte, st.Size)
	n, err := readFull(fd, b)
	if err != nil {
		return nil, err
	}
	s, err := decode(b[:n])
	if err != nil {
		return nil, err
	}
	if s.PID != name.pid || s.StartTime != name.start {
		return nil, fmt.Errorf("damaged: page of process %d started at %d, file of %d started at %d", s.PID, s.StartTime, name.pid, name.start)
	}
	return s, nil
}

func readFull(fd int, b []byte) (int, error) {
	n := 0
	for n < len(b) {
		m, err := unix.Pread(fd, b[n:], int64(n))
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return n, os.NewSyscallError("pread", err)
		case m == 0:
			return n, nil // cut short meanwhile
		default:
			n += m
		}
	}
	return n, nil
}
