package health

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/deepep-go/deepep/internal/bootstrap"
)

// pageBytes is one page, so that a mapping is exactly the file.
const pageBytes = 4096

// pageMagic is "DEPBEAT1".
const pageMagic = 0x3154414542504544

// page is the memory that peers map. The owner alone writes it, with atomic stores.
//
//	0 magic u64 · 8 rank u64 · 16 beat u64 (grows) · 24 last call u64 (packed) · 32 state u64
type page struct {
	magic, rank, beat, last, state uint64
}

const (
	stateLive = 1
	stateLeft = 2
)

// noteBytes is the length of a note to other machines: all five words of the page.
const noteBytes = 5 * 8

// view is a page's content at a moment.
type view struct {
	beat uint64
	last LastCall
	left bool
}

// decodeNote decodes a page's content, from a note or from a copy of mapped memory.
func decodeNote(b []byte, rank int) (view, error) {
	if len(b) != noteBytes {
		return view{}, fmt.Errorf("heartbeat of %d bytes, want %d", len(b), noteBytes)
	}
	word := func(i int) uint64 { return binary.LittleEndian.Uint64(b[8*i:]) }
	if word(0) != pageMagic {
		return view{}, fmt.Errorf("heartbeat with the magic %#x", word(0))
	}
	if word(1) != uint64(rank) {
		return view{}, fmt.Errorf("heartbeat of rank %d in place of rank %d", word(1), rank)
	}
	if s := word(4); s != stateLive && s != stateLeft {
		return view{}, fmt.Errorf("heartbeat with the state %d", s)
	}
	return view{beat: word(2), last: unpack(word(3)), left: word(4) == stateLeft}, nil
}

// words copies a page word by word.
func (p *page) words() []byte {
	b := make([]byte, 0, noteBytes)
	for _, w := range []*uint64{&p.magic, &p.rank, &p.beat, &p.last, &p.state} {
		b = binary.LittleEndian.AppendUint64(b, atomic.LoadUint64(w))
	}
	return b
}

// Bits of the packed last call, which one store changes: operation, phase, buffer, number. The highest operation, phase
// and buffer mean that value or any above; the number wraps after 10^12 calls.
const (
	opBits, phaseBits, bufferBits, numberBits = 6, 4, 14, 40
)

func pack(c LastCall) uint64 {
	top := func(v uint32, bits int) uint64 { return uint64(min(v, 1<<bits-1)) }
	return top(c.Op, opBits)<<(phaseBits+bufferBits+numberBits) | top(c.Phase, phaseBits)<<(bufferBits+numberBits) |
		top(c.Buffer, bufferBits)<<numberBits | c.Number&(1<<numberBits-1)
}

func unpack(w uint64) LastCall {
	return LastCall{
		Op: uint32(w >> (phaseBits + bufferBits + numberBits)), Phase: uint32(w >> (bufferBits + numberBits) & (1<<phaseBits - 1)),
		Buffer: uint32(w >> numberBits & (1<<bufferBits - 1)), Number: w & (1<<numberBits - 1),
	}
}

// mapping is a page in this process: this rank's, or a peer's, read only. Ranks of the crowd use the owner's.
type mapping struct {
	*page
	mem  []byte
	name uint64       // by which the crowd finds it; 0: it is shared with none of them
	uses atomic.Int32 // of the crowd, beside the owner's
}

// pages are those of this process that ranks of the crowd may use, by name.
var pages = struct {
	sync.Mutex
	last uint64
	by   map[uint64]*mapping
}{by: make(map[uint64]*mapping)}

// share names the page to ranks of this process.
func (m *mapping) share() []byte {
	pages.Lock()
	defer pages.Unlock()
	pages.last++
	m.name = pages.last
	pages.by[m.name] = m
	return binary.LittleEndian.AppendUint64(nil, m.name)
}

// sharedPage finds a page of this process; nil if its owner has left.
func sharedPage(name []byte) *mapping {
	if len(name) != 8 {
		return nil
	}
	pages.Lock()
	defer pages.Unlock()
	m := pages.by[binary.LittleEndian.Uint64(name)]
	if m != nil {
		m.uses.Add(1)
	}
	return m
}

// unmap ends one use; the last one unmaps.
func (m *mapping) unmap() {
	if m != nil && m.name != 0 {
		pages.Lock()
		defer pages.Unlock()
		if m.uses.Add(-1) >= 0 {
			return
		}
		delete(pages.by, m.name)
	}
	if m != nil && m.mem != nil {
		_ = unix.Munmap(m.mem)
		m.page, m.mem = nil, nil
	}
}

// seals forbid to truncate the file: a peer that reads its mapping would get SIGBUS.
const seals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL

// newPage makes this rank's page and a descriptor for its peers.
func newPage(rank int) (*mapping, int, error) {
	fd, err := unix.MemfdCreate("deepep-health", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, -1, fmt.Errorf("memfd_create: %w", err)
	}
	fd = bootstrap.Above(fd)
	if err := unix.Ftruncate(fd, pageBytes); err != nil {
		unix.Close(fd)
		return nil, -1, fmt.Errorf("ftruncate: %w", err)
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
		unix.Close(fd)
		return nil, -1, fmt.Errorf("sealing: %w", err)
	}
	m, err := mapPage(fd, unix.PROT_READ|unix.PROT_WRITE)
	if err != nil {
		unix.Close(fd)
		return nil, -1, err
	}
	m.rank = uint64(rank)
	atomic.StoreUint64(&m.state, stateLive)
	atomic.StoreUint64(&m.magic, pageMagic)
	return m, fd, nil
}

// peerPage maps a peer's page after checking that it is sealed, of the right size, and the right rank's.
func peerPage(fd, rank int) (*mapping, error) {
	got, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil || got&seals != seals {
		return nil, fmt.Errorf("page is not sealed memory (seals %#x, %v)", got, err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Size != pageBytes {
		return nil, fmt.Errorf("page of %d bytes, want %d (%v)", st.Size, pageBytes, err)
	}
	m, err := mapPage(fd, unix.PROT_READ)
	if err != nil {
		return nil, err
	}
	if _, err := decodeNote(m.words(), rank); err != nil {
		m.unmap()
		return nil, err
	}
	return m, nil
}

func mapPage(fd, prot int) (*mapping, error) {
	mem, err := unix.Mmap(fd, 0, pageBytes, prot, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("mmap: %w", err)
	}
	if len(mem) < int(unsafe.Sizeof(page{})) {
		return nil, errors.New("mmap gave less than a page")
	}
	return &mapping{page: (*page)(unsafe.Pointer(&mem[0])), mem: mem}, nil
}
