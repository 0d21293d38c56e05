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
	Stats *Stats    // nil if Err is set
	At    time.Time // when the owner last wrote the file
	Own   bool      // of this user, not of another one whose pages root reads
	Err   error     // the page cannot be read or is damaged
	Dead  bool      // its process has ended; List removes the page DeadFor later
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
		return nil, &os.PathError{Op: "lstat", Path: Printable(dir), Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR || st.Mode&0o022 != 0 {
		return nil, fmt.Errorf("%s: not a folder that only its owner writes to (mode %04o)", Printable(dir), st.Mode&0o777)
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
		e.Err = &os.PathError{Op: "open", Path: Printable(path), Err: err}
		return e, false
	}
	defer unix.Close(fd)
	name, err := parseName(filepath.Base(path))
	if err != nil {
		e.Err = fmt.Errorf("%s: %w", Printable(path), err)
		return e, false
	}
	e.Own = owner == uint32(os.Geteuid())
	e.Stats, e.At, e.Err = readPage(fd, name, owner)
	if e.Err != nil {
		e.Stats, e.Err = nil, fmt.Errorf("%s: %w", Printable(path), e.Err)
	}
	e.Dead = name.dead || !alive(name, fd)
	switch {
	case e.Dead && e.Own:
		e.Path, gone = retire(path, fd, name, e.Err != nil)
	case e.Dead: // its user removes it; a living process writes its page all the time
		gone = e.Err == nil && time.Since(e.At) > DeadFor
	}
	return e, gone
}

// retire renames the page of a dead process to mark it, and removes it if it has been marked for DeadFor or is damaged.
// The page is in this user's own folder, which no one else writes to, and fd is open on it: nothing is changed that
// another user could have put in its place.
func retire(path string, fd int, name fileName, damaged bool) (now string, gone bool) {
	if !name.dead && !damaged {
		name.dead = true
		marked := filepath.Join(filepath.Dir(path), name.String())
		// If this fails, another reader has renamed it first.
		if setTimes(fd) == nil && os.Rename(path, marked) == nil {
			return marked, false
		}
		return path, false
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return path, false
	}
	if age := time.Since(time.Unix(st.Mtim.Unix())); damaged || age > DeadFor || age < -DeadFor {
		return path, os.Remove(path) == nil && !damaged
	}
	return path, false
}

// setTimes is futimens with the present time: not by a path, which may have come to mean another file.
func setTimes(fd int) error {
	if _, _, errno := unix.Syscall6(unix.SYS_UTIMENSAT, uintptr(fd), 0, 0, 0, 0, 0); errno != 0 {
		return os.NewSyscallError("futimens", errno)
	}
	return nil
}

// sweep marks and removes pages of dead processes in this user's own folder, as List does. Without it, jobs that are
// always killed would fill the folder on hosts where no process lists it.
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
		path := filepath.Join(dir, f.Name())
		fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
		if err != nil {
			continue
		}
		retire(path, fd, name, false)
		unix.Close(fd)
	}
}

func readPage(fd int, name fileName, owner uint32) (s *Stats, at time.Time, err error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, at, os.NewSyscallError("fstat", err)
	}
	at = time.Unix(st.Mtim.Unix())
	switch {
	case st.Mode&unix.S_IFMT != unix.S_IFREG:
		return nil, at, errors.New("not a regular file")
	case st.Uid != owner:
		return nil, at, fmt.Errorf("belongs to user %d, its folder to %d", st.Uid, owner)
	case st.Size > maxPage:
		return nil, at, fmt.Errorf("damaged: %d bytes, a page has at most %d", st.Size, maxPage)
	}
	b := make([]byte, st.Size)
	n, err := readFull(fd, b)
	if err != nil {
		return nil, at, err
	}
	if s, err = decode(b[:n]); err != nil {
		return nil, at, err
	}
	if s.PID != name.pid || s.StartTime != name.start {
		return nil, at, fmt.Errorf("damaged: page of process %d started at %d, file of %d started at %d", s.PID, s.StartTime, name.pid, name.start)
	}
	return s, at, nil
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
