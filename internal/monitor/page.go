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

// Page is a statistics page that this process owns.
type Page struct {
	path  string // "" for memory without a file name
	bytes []byte
	owner int // pid; a forked child must not remove its parent's page
}

var pageNumber atomic.Uint32

// Create makes a page. dir is the folder, "" for the usual ones: under /dev/shm, else under the temporary folder if
// that is in memory, else memory without a file name, which only this process can read. With a named folder there is no
// fallback.
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
	pid := os.Getpid()
	start, err := startTime(pid)
	if err != nil {
		return nil, status.Errorf(status.System, "statistics page: %w", err)
	}
	p := &Page{owner: pid}
	l := layoutOf(m.NumRanks, m.TraceLen)
	name := fileName{pid: pid, start: start, number: pageNumber.Add(1), namespace: pidNamespace()}
	if p.bytes, p.path, err = mapAnywhere(dir, name.String(), l.total); err != nil {
		return nil, status.Errorf(status.System, "statistics page: %w", err)
	}
	p.fill(m, l, start)
	return p, nil
}

// mapAnywhere maps a new file in the first folder in which it can.
func mapAnywhere(dir, name string, size int) (mapped []byte, path string, err error) {
	dirs := []string{dir}
	if dir == "" {
		dirs = Folders()
	}
	var failures []error
	for _, d := range dirs {
		path := filepath.Join(d, name)
		var err error
		for range folderAttempts {
			if mapped, err = mapIn(d, path, size, dir != ""); !errors.Is(err, os.ErrNotExist) {
				break
			}
		}
		if err == nil {
			return mapped, path, nil
		}
		failures = append(failures, err)
	}
	if dir != "" {
		return nil, "", errors.Join(failures...)
	}
	mapped, err = mapUnnamed(size)
	if err != nil {
		return nil, "", errors.Join(append(failures, err)...)
	}
	return mapped, "", nil
}

// folderAttempts bounds the retries when another process removes the folder, as empty, between our mkdir and our
// create.
const folderAttempts = 100

// mapIn makes the folder if it is absent, and the file in it.
func mapIn(dir, path string, size int, named bool) ([]byte, error) {
	err := makeFolder(dir)
	if err == nil && !named {
		err = inMemory(dir)
	}
	if err != nil {
		return nil, err
	}
	sweep(dir)
	return mapNamed(path, size)
}

// mapNamed makes a file, allocates its space at once (a later write to a full tmpfs would raise SIGBUS) and locks it
// while it is mapped, so that a reader in another PID namespace sees whether its owner is alive.
func mapNamed(path string, size int) ([]byte, error) {
	fd, err := unix.Open(path, unix.O_CREAT|unix.O_EXCL|unix.O_RDWR|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, &os.PathError{Op: "create", Path: path, Err: err}
	}
	defer unix.Close(fd)
	mapped, err := mapFile(fd, size)
	if err == nil {
		err = unix.Flock(fd, unix.LOCK_SH|unix.LOCK_NB)
	}
	if err != nil {
		_ = unix.Unlink(path) // the error below is the reason
		return nil, &os.PathError{Op: "map", Path: path, Err: err}
	}
	return mapped, nil
}

func mapUnnamed(size int) ([]byte, error) {
	fd, err := unix.MemfdCreate("deepep-stats", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("memfd_create", err)
	}
	defer unix.Close(fd)
	return mapFile(fd, size)
}

func mapFile(fd, size int) ([]byte, error) {
	switch err := unix.Fallocate(fd, 0, 0, int64(size)); {
	case errors.Is(err, unix.EOPNOTSUPP):
		if _, err := unix.Pwrite(fd, make([]byte, size), 0); err != nil {
			return nil, os.NewSyscallError("pwrite", err)
		}
	case err != nil:
		return nil, os.NewSyscallError("fallocate", err)
	}
	mapped, err := unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	return mapped, os.NewSyscallError("mmap", err)
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

// Path is the page's file, "" for memory without a file name.
func (p *Page) Path() string { return p.path }

// SetState sets the buffer's state. Not after Unmap.
func (p *Page) SetState(s State) { atomic.StoreUint32(&p.header().State, uint32(s)) }

// Snapshot reads the page while kernels write it. Each counter is whole, but a call may be in one counter and not yet
// in another.
func (p *Page) Snapshot() (*Stats, error) {
	b := make([]byte, len(p.bytes))
	for i := 0; i < len(b); i += 8 {
		word := atomic.LoadUint64((*uint64)(unsafe.Pointer(&p.bytes[i])))
		*(*uint64)(unsafe.Pointer(&b[i])) = word
	}
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
	if err := os.Remove(p.path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return status.Errorf(status.System, "statistics page: %w", err)
	}
	_ = unix.Rmdir(filepath.Dir(p.path)) // fails unless the folder is empty
	return nil
}

// Unmap unmaps the memory, to which no kernel may write any more. Call it after Remove.
func (p *Page) Unmap() error {
	b := p.bytes
	p.bytes = nil
	if b == nil {
		return nil
	}
	return os.NewSyscallError("munmap", unix.Munmap(b))
}
