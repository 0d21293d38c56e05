package monitor

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Entry is one page that List found.
type Entry struct {
	Path  string
	Stats *Stats // nil if Err is set
	Err   error  // the page cannot be read or is damaged
	Dead  bool   // its process has ended; List removes the page DeadFor later
}

// DeadFor is how long List shows the page of a dead process, so that every reader of the host sees it, not only the
// first.
const DeadFor = 30 * time.Second

// errUnfinished means that the owner has not filled the page yet.
var errUnfinished = errors.New("not filled yet")

// List reads all pages of the folders (none given: Folders), sorted by group, buffer and rank, damaged ones last. It
// marks pages of dead processes, and removes those that have been marked for DeadFor. An absent folder holds no pages;
// a folder that other users may write to is an error.
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
	seen := map[string]bool{} // a page that another process renames may be listed by both names
	for _, f := range files {
		if !isPage(f.Name()) {
			continue
		}
		e, gone := open(filepath.Join(dir, f.Name()), st.Uid)
		if name, err := parseName(f.Name()); errors.Is(e.Err, os.ErrNotExist) && err == nil && !name.dead {
			name.dead = true // another process may have marked it between ReadDir and open
			e, gone = open(filepath.Join(dir, name.String()), st.Uid)
		}
		if gone || errors.Is(e.Err, errUnfinished) || errors.Is(e.Err, os.ErrNotExist) {
			continue // removed by this call or by its owner, or not filled yet
		}
		if !seen[e.Path] {
			seen[e.Path] = true
			entries = append(entries, e)
		}
	}
	return entries, nil
}

// maxPage bounds the bytes read: the largest page, of 1024 ranks with the longest trace, is below 3 MiB.
const maxPage = 8 << 20

// open reads one page. It does not map the file: if another process truncated it, a mapping would raise SIGBUS, a read
// is an error. gone means that the page was of a dead process and is removed.
func open(path string, owner uint32) (e Entry, gone bool) {
	e = Entry{Path: path}
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		e.Err = &os.PathError{Op: "open", Path: path, Err: err}
		return e, false
	}
	defer unix.Close(fd)
	name, err := parseName(filepath.Base(path))
	if err != nil {
		e.Err = fmt.Errorf("%s: %w", path, err)
		return e, false
	}
	e.Stats, e.Err = readPage(fd, name, owner)
	if e.Err != nil {
		e.Stats, e.Err = nil, fmt.Errorf("%s: %w", path, e.Err)
	}
	e.Dead = name.dead || !alive(name, fd)
	if e.Dead {
		e.Path, gone = retire(path, name, e.Err != nil)
	}
	return e, gone
}

// retire renames the page of a dead process to mark it, and removes it if it has been marked for DeadFor or is damaged.
func retire(path string, name fileName, damaged bool) (now string, gone bool) {
	if !name.dead && !damaged {
		name.dead = true
		marked := filepath.Join(filepath.Dir(path), name.String())
		t := time.Now()
		// If this fails, another reader has renamed it first, or the folder is another user's (root reads all).
		if os.Chtimes(path, t, t) == nil && os.Rename(path, marked) == nil {
			return marked, false
		}
		return path, false
	}
	st, err := os.Stat(path)
	if err != nil {
		return path, true
	}
	if age := time.Since(st.ModTime()); damaged || age > DeadFor || age < -DeadFor {
		return path, os.Remove(path) == nil && !damaged
	}
	return path, false
}

// sweep marks and removes pages of dead processes, as List does. Without it, jobs that are always killed would fill the
// folder on hosts where no process lists it.
func sweep(dir string) {
	files, err := os.ReadDir(dir)
	if err != nil {
		return // Create returns what is wrong with the folder
	}
	for _, f := range files {
		name, err := parseName(f.Name())
		if err != nil || !name.dead && (name.namespace != pidNamespace() || alive(name, -1)) {
			continue
		}
		retire(filepath.Join(dir, f.Name()), name, false)
	}
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
			return n, nil // truncated since Fstat
		default:
			n += m
		}
	}
	return n, nil
}
