package device

import (
	"context"
	"encoding/binary"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/deepep-go/deepep/internal/abi"
	"github.com/deepep-go/deepep/internal/kern"
	"github.com/deepep-go/deepep/internal/status"
)

// Message is what one rank gave to an exchange; the descriptors belong to the receiver.
type Message struct {
	Blob []byte
	FDs  []int
	Lost bool // the rank's process has ended, and the exchange goes on without it
}

// Exchange gathers a blob and descriptors from every rank of a group, in rank order. It is collective.
type Exchange func(ctx context.Context, blob []byte, fds []int) ([]Message, error)

// Symmetric is memory of the same size on every rank, mapped here.
type Symmetric struct {
	Local     *Memory
	Addresses []uint64 // of each rank's memory here; 0: not mapped
	rank      int
	peers     []*Memory
	kind      uint32  // how the memory is shared (abi.Share*)
	standIn   *Memory // in the place of ranks that do not exist; nil: there are none
	kept      bool    // Local was that of an earlier group
	crowd     bool    // ranks of this process use the memory without a mapping of their own
	describe  func(rank int) string
}

// Places says how memory is shared among ranks of which some shared memory before.
type Places struct {
	Rank   int
	Mapped []bool // whose memory is mapped
	Absent []bool // places without a process; nil: none
	// Describe names a rank for errors; nil: by its number alone.
	Describe func(rank int) string
	Crowd    []bool // ranks of this process whose memory is used where they have it, without a mapping; nil: none
	// The memory of before, nil: there is none; Was is each rank's number there, -1: new. It is kept where it is large
	// enough, unless Fresh is set: then somebody who is not among the ranks may still write to it.
	Before *Symmetric
	Was    []int
	Fresh  bool
}

func (p *Places) absent(rank int) bool { return p.Absent != nil && p.Absent[rank] }

func (p *Places) describe(rank int) string {
	if p.Describe == nil {
		return fmt.Sprintf("rank %d", rank)
	}
	return p.Describe(rank)
}

func (p *Places) crowd(rank int) bool { return p.Crowd != nil && p.Crowd[rank] }

// Share allocates memory on every rank and maps that of the ranks for which mapped is true. Collective: a rank whose
// allocation failed sends its error in the exchange.
func (d *Device) Share(ctx context.Context, rank int, bytes uint64, mapped []bool, exchange Exchange) (*Symmetric, error) {
	return d.ShareAmong(ctx, Places{Rank: rank, Mapped: mapped}, bytes, exchange)
}

// ShareAmong is Share among ranks that may keep memory of before.
func (d *Device) ShareAmong(ctx context.Context, p Places, bytes uint64, exchange Exchange) (*Symmetric, error) {
	s := &Symmetric{rank: p.Rank, describe: p.Describe, Addresses: make([]uint64, len(p.Mapped)), peers: make([]*Memory, len(p.Mapped))}
	offer, fds, failure := s.allocate(d, bytes, &p)
	all, err := exchange(ctx, offer, fds)
	closeAll(fds)
	if failure != nil {
		err = failure
	}
	if err == nil {
		err = s.mapPeers(d, bytes, &p, all)
	}
	for _, m := range all {
		closeAll(m.FDs)
	}
	if err != nil {
		_ = s.Release() // the first error counts
		return nil, err
	}
	return s, nil
}

// An offer is: kind u32, code u32, bytes u64, device and inode of the descriptor's file u64, blob, for a crowd the
// memory's name u64; or with code not 0 an error's text instead of blob and name.
const (
	offerHead = 32
	offerBlob = 64
	offerKept = 1 << 31 // in kind: the memory is that of before
)

// Kept reports whether this rank's memory is that of before.
func (s *Symmetric) Kept() bool { return s.kept }

// keepLocal takes over this rank's memory of before, if it may and fits.
func (s *Symmetric) keepLocal(bytes uint64, p *Places) bool {
	if p.Before == nil || p.Fresh || p.Before.Local == nil || p.Before.Local.Bytes < bytes {
		return false
	}
	s.Local, s.kept = p.Before.Local.Retain(), true
	return true
}

// keepPeer takes over the mapping of a rank's memory of before, if there is one.
func (s *Symmetric) keepPeer(rank int, bytes uint64, p *Places) bool {
	if p.Before == nil || p.Was[rank] < 0 || p.Was[rank] >= len(p.Before.peers) {
		return false
	}
	m := p.Before.peers[p.Was[rank]]
	if m == nil || m.Bytes < bytes {
		return false
	}
	s.peers[rank], s.Addresses[rank] = m.Retain(), m.Address
	return true
}

// fillPlace gives a rank that does not exist memory that nobody reads.
func (s *Symmetric) fillPlace(d *Device, rank int, bytes uint64, p *Places) (err error) {
	if s.keepPeer(rank, bytes, p) {
		return nil
	}
	if s.standIn == nil {
		if s.standIn, err = d.Alloc(bytes); err != nil {
			return err
		}
	}
	s.Addresses[rank] = s.standIn.Address
	return nil
}

// allocate allocates this rank's memory and returns the offer, which with an error holds its text.
func (s *Symmetric) allocate(d *Device, bytes uint64, places *Places) (offer []byte, fds []int, err error) {
	if !s.keepLocal(bytes, places) {
		s.Local, err = d.Alloc(bytes)
	}
	if err == nil {
		s.Addresses[s.rank] = s.Local.Address
	}
	if err == nil && slices.Contains(places.Crowd, true) {
		if s.crowd = true; !d.hostStream {
			err = status.Errorf(status.Unsupported, "so many ranks of one process: those of GPUs are at most 64 a process")
		}
	}
	offer, fds, err = s.export(err)
	if err == nil && s.crowd {
		offer = binary.LittleEndian.AppendUint64(offer, s.Local.share())
	}
	return offer, fds, err
}

// export returns the offer of this rank's memory, or of the error because of which there is none.
func (s *Symmetric) export(before error) (offer []byte, fds []int, err error) {
	offer, err = make([]byte, offerHead+offerBlob), before
	p := &abi.MemExportParams{FD: -1}
	if err == nil {
		p.Mem = s.Local.mem
		err = kern.Error("dk_mem_export", s.Local.dev.Lib.MemExport(p), p.DeviceError)
	}
	if err != nil {
		binary.LittleEndian.PutUint32(offer[4:], uint32(status.CodeOf(err)))
		return append(offer[:offerHead], err.Error()...), nil, err
	}
	s.kind = p.Kind
	kind := p.Kind
	if s.kept {
		kind |= offerKept
	}
	binary.LittleEndian.PutUint32(offer, kind)
	binary.LittleEndian.PutUint64(offer[8:], s.Local.Bytes)
	copy(offer[offerHead:], p.Blob[:])
	if p.Kind == abi.ShareFD && p.FD >= 0 {
		unix.CloseOnExec(int(p.FD))
		fds = []int{int(p.FD)}
		dev, ino := fileOf(int(p.FD))
		binary.LittleEndian.PutUint64(offer[16:], dev)
		binary.LittleEndian.PutUint64(offer[24:], ino)
	}
	return offer, fds, nil
}

// fileOf tells a descriptor's file from others; zeros if there is none.
func fileOf(fd int) (dev, ino uint64) {
	var s unix.Stat_t
	if unix.Fstat(fd, &s) != nil {
		return 0, 0
	}
	return uint64(s.Dev), s.Ino
}

// checkFile refuses memory that came from a descriptor which was not the offered file's: something else in one of the
// processes has closed that one, and its number was another's. It is called once the memory is mapped.
func checkFile(p *abi.MemImportParams, m *Message) error {
	if p.Kind != abi.ShareFD {
		return nil
	}
	dev, ino := fileOf(int(p.FD))
	if dev != binary.LittleEndian.Uint64(m.Blob[16:]) || ino != binary.LittleEndian.Uint64(m.Blob[24:]) {
		return status.Errorf(status.System, "its descriptor is another file's: something else in this process, or in the rank's, has closed it on the way")
	}
	return nil
}

// checkOffers returns the first rank's error.
func checkOffers(all []Message, places *Places) error {
	for rank, m := range all {
		if places.absent(rank) {
			continue
		}
		if len(m.Blob) < offerHead {
			return status.Errorf(status.Internal, "%s offered its memory in %d bytes", places.describe(rank), len(m.Blob))
		}
		if code := binary.LittleEndian.Uint32(m.Blob[4:]); code != 0 {
			return status.Errorf(status.Code(code), "%s failed: %s", places.describe(rank), m.Blob[offerHead:])
		}
	}
	return nil
}

// readOffer reads what a rank, who in errors, offers: at least so many bytes.
func readOffer(d *Device, who string, bytes uint64, m *Message) (*abi.MemImportParams, error) {
	p := &abi.MemImportParams{Device: d.handle, Bytes: binary.LittleEndian.Uint64(m.Blob[8:]), Kind: binary.LittleEndian.Uint32(m.Blob) &^ offerKept, FD: -1}
	if p.Bytes < bytes || len(m.Blob) < offerHead+offerBlob {
		return nil, status.Errorf(status.Mismatch, "%s offers %d bytes of memory, %d are needed", who, p.Bytes, bytes)
	}
	copy(p.Blob[:], m.Blob[offerHead:])
	if p.Kind == abi.ShareFD {
		if len(m.FDs) != 1 {
			return nil, status.Errorf(status.Internal, "%s sent %d descriptors for its memory", who, len(m.FDs))
		}
		p.FD = int32(m.FDs[0])
	}
	return p, nil
}

func (s *Symmetric) mapPeers(d *Device, bytes uint64, places *Places, all []Message) error {
	if err := checkOffers(all, places); err != nil {
		return err
	}
	for rank := range all {
		if rank == s.rank || !places.Mapped[rank] {
			continue
		}
		if places.absent(rank) {
			if err := s.fillPlace(d, rank, bytes, places); err != nil {
				return err
			}
			continue
		}
		if binary.LittleEndian.Uint32(all[rank].Blob)&offerKept != 0 && s.keepPeer(rank, bytes, places) {
			continue
		}
		if places.crowd(rank) {
			if err := s.useShared(rank, places.describe(rank), bytes, all[rank].Blob); err != nil {
				return err
			}
			continue
		}
		p, err := readOffer(d, places.describe(rank), bytes, &all[rank])
		if err != nil {
			return err
		}
		if code := d.Lib.MemImport(p); code != 0 {
			return fmt.Errorf("mapping %d bytes of rank %d: %w", p.Bytes, rank, kern.Error("dk_mem_import", code, p.DeviceError))
		}
		s.peers[rank] = d.memory(p.Mem, p.Address, p.Bytes)
		s.Addresses[rank] = p.Address
		if err := checkFile(p, &all[rank]); err != nil {
			return fmt.Errorf("mapping %d bytes of rank %d: %w", p.Bytes, rank, err)
		}
	}
	return nil
}

// Release unmaps the peers' memory and releases this rank's. No kernel may use either. nil is no error.
func (s *Symmetric) Release() error {
	if s == nil {
		return nil
	}
	err := s.ReleaseLocal()
	status.Keep(&err, s.ReleasePeers())
	return err
}

// ReleaseLocal releases this rank's memory alone. Idempotent.
func (s *Symmetric) ReleaseLocal() error {
	local := s.Local
	s.Local = nil
	return local.Release()
}

// ReleasePeers unmaps the peers' memory alone. Idempotent.
func (s *Symmetric) ReleasePeers() error {
	var err error
	for rank, m := range s.peers {
		status.Keep(&err, m.Release())
		s.peers[rank] = nil
	}
	status.Keep(&err, s.standIn.Release())
	s.standIn = nil
	return err
}

// CanGiveBack refuses memory whose addresses cannot be kept without it.
func (s *Symmetric) CanGiveBack() error {
	if s.crowd {
		return status.Errorf(status.Unsupported, "more than 64 ranks of one process share the buffer's memory: it cannot be given back by each of them")
	}
	if s.kind == abi.ShareBlob || s.Local.symmetricHeap {
		return status.Errorf(status.Unsupported, "%s has no virtual memory for the buffer: its memory cannot be given back and keep its addresses",
			s.Local.dev.Name)
	}
	return nil
}

// GiveBack gives back this rank's memory and the peers' mappings, and keeps their addresses. No kernel may use them.
// What is given back already stays so; the first error counts.
func (s *Symmetric) GiveBack() error {
	err := s.Local.giveBack()
	for _, m := range s.peers {
		if m != nil {
			status.Keep(&err, m.giveBack())
		}
	}
	return err
}

// Leave gives everything back but the addresses of this rank's memory, of which a caller may still have a view: what it
// reads there is zeros. The addresses stay taken until the process ends.
func (s *Symmetric) Leave() error {
	err := s.ReleasePeers()
	if s.Local != nil {
		status.Keep(&err, s.Local.Leave())
	}
	return err
}

// Leave ends one use, as Release, but keeps the memory's addresses, which read zeros, until the process ends.
func (m *Memory) Leave() error {
	m.keep.Store(true)
	return m.Release()
}

// Again makes memory anew at the addresses from before GiveBack. Collective, as Share. After an error GiveBack undoes
// what was made.
func (s *Symmetric) Again(ctx context.Context, exchange Exchange) error {
	offer, fds, failure := s.export(s.Local.again(&abi.MemRestoreParams{Kind: abi.ShareNone, FD: -1}))
	all, err := exchange(ctx, offer, fds)
	closeAll(fds)
	if failure != nil {
		err = failure
	}
	if err == nil {
		err = s.mapAgain(all)
	}
	for _, m := range all {
		closeAll(m.FDs)
	}
	return err
}

func (s *Symmetric) mapAgain(all []Message) error {
	places := &Places{Describe: s.describe}
	if err := checkOffers(all, places); err != nil {
		return err
	}
	for rank, m := range s.peers {
		if m == nil {
			continue
		}
		p, err := readOffer(m.dev, places.describe(rank), m.Bytes, &all[rank])
		if err == nil {
			err = m.again(&abi.MemRestoreParams{Kind: p.Kind, FD: p.FD, Blob: p.Blob})
		}
		if err == nil {
			err = checkFile(p, &all[rank])
		}
		if err != nil {
			return fmt.Errorf("mapping %d bytes of rank %d again: %w", m.Bytes, rank, err)
		}
	}
	return nil
}

func closeAll(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
}
