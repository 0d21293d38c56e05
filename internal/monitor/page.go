package monitor

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/deepep-go/deepep/internal/abi"
	"github.com/deepep-go/deepep/internal/status"
)

// State is a buffer's state in its page.
type State uint32

// The states, as in dk_stats_page.
const (
	Live      State = abi.PageLive
	Failed    State = abi.PageFailed
	Destroyed State = abi.PageDestroyed
)

func (s State) String() string {
	switch s {
	case Live:
		return "live"
	case Failed:
		return "failed"
	case Destroyed:
		return "destroyed"
	}
	return fmt.Sprintf("state %d", uint32(s))
}

// Meta is what a page holds besides counters. Strings are cut to their field.
type Meta struct {
	Rank, NumRanks int
	Buffer         uint32 // number of the buffer in its group
	Group          string // at most 63 bytes; equal on all ranks of a group, different for other groups
	Host           string // at most 63
	Engine         string // at most 15: cpu, cuda
	Device         string // at most 63
	TraceLen       int    // calls that the trace keeps; 0: DefaultTrace
}

// DefaultTrace is how many calls the trace ring keeps: 32 KiB of them.
const DefaultTrace = 1024

const maxTrace = 1 << 16

// Page is a statistics page that this process owns: memory of its own, and a file to which the publisher copies it. The
// file is not mapped: whoever truncated it would end this process by SIGBUS.
type Page struct {
	path  string // "" for memory without a file
	inode uint64 // of the file: another one of this name is not written
	bytes []byte
	image []byte // what publish writes
	lock  []byte // an untouched mapping of the file, which keeps its lock without a descriptor
	owner int    // pid; a forked child must not remove its parent's page
}

var pageNumber atomic.Uint32

// Create makes a page. dir is the folder, "" for the usual ones: under /dev/shm, else under the temporary folder if
// that is in memory, else memory without a file, which only this process can read; so it is without /proc, where
// readers could not tell whether the process is alive. With a named folder there is no fallback.
func Create(dir string, m Meta) (*Page, error) {
	if m.TraceLen == 0 {
		m.TraceLen = DefaultTrace
	}
	if m.NumRanks < 1 || m.NumRanks > abi.MaxRanks {
		return nil, status.InvalidArg("num_ranks", m.NumRanks, fmt.Sprintf("1 to %d", abi.MaxRanks))
	}
	if m.Rank < 0 || m.Rank >= m.NumRanks {
		return nil, status.InvalidArg("rank", m.Rank, fmt.Sprintf("0 to %d", m.NumRanks-1))
	}
	if m.TraceLen < 0 || m.TraceLen > maxTrace {
		return nil, status.InvalidArg("trace_len", m.TraceLen, fmt.Sprintf("1 to %d", maxTrace))
	}
	p := &Page{owner: os.Getpid()}
	l := layoutOf(m.NumRanks, m.TraceLen)
	var err error
	if p.bytes, err = unix.Mmap(-1, 0, l.total, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS); err != nil {
		return nil, status.Errorf(status.System, "statistics page: mmap: %w", err)
	}
	start, err := startTime(p.owner)
	p.fill(m, l, start)
	if err == nil {
		name := fileName{pid: p.owner, start: start, number: pageNumber.Add(1), namespace: pidNamespace()}
		err = p.file(dir, name.String())
	}
	if err != nil && dir != "" {
		_ = unix.Munmap(p.bytes) // the error below is the reason
		return nil, status.Errorf(status.System, "statistics page: %w", err)
	}
	if p.path != "" {
		published.add(p)
	}
	return p, nil
}

// file makes the page's file in the first folder in which it can.
func (p *Page) file(dir, name string) error {
	dirs := []string{dir}
	if dir == "" {
		dirs = Folders()
	}
	var failures []error
	for _, d := range dirs {
		var err error
		for range folderAttempts {
			if err = p.fileIn(d, name, dir != ""); !errors.Is(err, os.ErrNotExist) {
				break
			}
		}
		if err == nil {
			return nil
		}
		failures = append(failures, err)
	}
	return errors.Join(failures...)
}

// folderAttempts bounds the retries when another process removes the folder, as empty, between our mkdir and our
// create.
const folderAttempts = 100

// fileIn makes the folder if it is absent, and the file in it. It leaves no empty folder.
func (p *Page) fileIn(dir, name string, named bool) error {
	if !named {
		if err := inMemory(filepath.Dir(dir)); err != nil {
			return err
		}
	}
	if err := makeFolder(dir); err != nil {
		return err
	}
	sweep(dir)
	err := p.create(filepath.Join(dir, name))
	if err != nil {
		_ = unix.Rmdir(dir) // fails unless the folder is empty
	}
	return err
}

// create writes the page to a new file. The file's lock lasts as long as the page's memory, so that a reader in another
// PID namespace sees whether the owner is alive.
func (p *Page) create(path string) error {
	fd, err := unix.Open(path, unix.O_CREAT|unix.O_EXCL|unix.O_RDWR|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return &os.PathError{Op: "create", Path: path, Err: err}
	}
	defer unix.Close(fd)
	if err := p.fillFile(fd); err != nil {
		_ = unix.Unlink(path) // the error below is the reason
		return &os.PathError{Op: "write", Path: path, Err: err}
	}
	p.path = path
	return nil
}

func (p *Page) fillFile(fd int) error {
	if err := unix.Flock(fd, unix.LOCK_SH|unix.LOCK_NB); err != nil {
		return os.NewSyscallError("flock", err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return os.NewSyscallError("fstat", err)
	}
	// Readers skip a file that begins with zeros, as one that is not filled yet: the mark is written last.
	if err := unix.Ftruncate(fd, int64(len(p.bytes))); err != nil {
		return os.NewSyscallError("ftruncate", err)
	}
	p.inode, p.image = st.Ino, make([]byte, len(p.bytes))
	p.copyTo(p.image)
	const mark = 8 // bytes
	if err := writeFull(fd, p.image[mark:], mark); err != nil {
		return err
	}
	if err := writeFull(fd, p.image[:mark], 0); err != nil {
		return err
	}
	var err error
	p.lock, err = unix.Mmap(fd, 0, pageSize, unix.PROT_NONE, unix.MAP_SHARED)
	return os.NewSyscallError("mmap", err)
}

func writeFull(fd int, b []byte, at int64) error {
	for len(b) > 0 {
		n, err := unix.Pwrite(fd, b, at)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return os.NewSyscallError("pwrite", err)
		}
		b, at = b[max(n, 0):], at+int64(max(n, 0))
	}
	return nil
}

// publish writes the page to its file. It opens the file anew: the program may have closed a descriptor that is not its
// own and given its number to another file. An error means that readers see an older page, or none.
func (p *Page) publish() error {
	p.copyTo(p.image)
	fd, err := unix.Open(p.path, unix.O_WRONLY|unix.O_CLOEXEC|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: p.path, Err: err}
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Ino != p.inode {
		return fmt.Errorf("%s was replaced by another file (%w)", p.path, os.ErrExist)
	}
	return writeFull(fd, p.image, 0)
}

// copyTo copies the page while kernels write it, word by word.
func (p *Page) copyTo(b []byte) {
	for i := 0; i < len(b); i += 8 {
		*(*uint64)(unsafe.Pointer(&b[i])) = atomic.LoadUint64((*uint64)(unsafe.Pointer(&p.bytes[i])))
	}
}

// layout holds the offsets of a page's parts.
type layout struct{ peers, trace, traceLen, total int }

// pageSize is the unit in which device libraries register memory.
const pageSize = 4096

var (
	headerBytes = int(unsafe.Sizeof(abi.StatsPage{}))
	recordBytes = int(unsafe.Sizeof(abi.TraceRecord{}))
)

func layoutOf(ranks, traceLen int) layout {
	l := layout{peers: align(headerBytes, 64), traceLen: traceLen}
	l.trace = align(l.peers+2*abi.NumOps*ranks*8, 64)
	l.total = align(l.trace+traceLen*recordBytes, pageSize)
	return l
}

func align(n, to int) int { return (n + to - 1) / to * to }

// header is the page's header in place. Mappings are page-aligned.
func (p *Page) header() *abi.StatsPage { return (*abi.StatsPage)(unsafe.Pointer(&p.bytes[0])) }

func (p *Page) fill(m Meta, l layout, start uint64) {
	h := p.header()
	h.Version, h.TotalBytes = abi.StatsVersion, uint32(l.total)
	h.PID, h.NumOps = uint32(p.owner), abi.NumOps
	h.StartTime, h.CreatedNS = start, uint64(time.Now().UnixNano())
	h.Rank, h.NumRanks = int32(m.Rank), int32(m.NumRanks)
	h.BufferID, h.State = m.Buffer, uint32(Live)
	h.PeersOffset, h.TraceOffset, h.TraceLen = uint64(l.peers), uint64(l.trace), uint64(l.traceLen)
	put(h.Group[:], m.Group)
	put(h.Host[:], m.Host)
	put(h.Engine[:], m.Engine)
	put(h.Device[:], m.Device)
	// Stored last: readers skip a page without it, instead of reporting a damaged one.
	atomic.StoreUint64(&h.Magic, abi.StatsMagic)
}

func put(field []byte, s string) { copy(field[:len(field)-1], s) }

// Bytes is the page's memory, page-aligned and a whole number of pages long, which the kernel library registers and
// writes. It is valid until Unmap.
func (p *Page) Bytes() []byte { return p.bytes }

// Path is the page's file, "" for memory without a file.
func (p *Page) Path() string { return p.path }

// SetState sets the buffer's state. Not after Unmap.
func (p *Page) SetState(s State) { atomic.StoreUint32(&p.header().State, uint32(s)) }

// Publish writes the page to its file now, as the publisher does every PublishEvery.
func (p *Page) Publish() error {
	published.mu.Lock()
	defer published.mu.Unlock()
	if p.path == "" || p.bytes == nil {
		return nil
	}
	return p.publish()
}

// Snapshot reads the page while kernels write it. Each counter is whole, but a call may be in one counter and not yet
// in another.
func (p *Page) Snapshot() (*Stats, error) {
	b := make([]byte, len(p.bytes))
	p.copyTo(b)
	return decode(b)
}

// Remove marks the page destroyed and removes its file, with the last page also the folder. The memory stays mapped. A
// second call and a call in a forked child do nothing.
func (p *Page) Remove() error {
	if os.Getpid() != p.owner {
		return nil
	}
	if p.bytes != nil {
		p.SetState(Destroyed)
	}
	if p.path == "" {
		return nil
	}
	published.remove(p)
	if err := os.Remove(p.path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return status.Errorf(status.System, "statistics page: %w", err)
	}
	_ = unix.Rmdir(filepath.Dir(p.path)) // fails unless the folder is empty
	return nil
}

// Unmap unmaps the memory, to which no kernel may write any more. Call it after Remove.
func (p *Page) Unmap() error {
	if p.bytes == nil {
		return nil
	}
	published.remove(p)
	err := os.NewSyscallError("munmap", unix.Munmap(p.bytes))
	if p.lock != nil {
		status.Keep(&err, os.NewSyscallError("munmap", unix.Munmap(p.lock)))
	}
	p.bytes, p.lock = nil, nil
	return err
}
