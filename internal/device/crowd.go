package device

import (
	"encoding/binary"
	"sync"

	"github.com/deepep-go/deepep/internal/status"
)

// shared is the memory of this process that ranks of it use without a mapping of their own, by name: a process may have
// 65530 mappings, fewer than 256 ranks would need that map each other's.
var shared = struct {
	sync.Mutex
	last uint64
	by   map[uint64]*Memory
}{by: make(map[uint64]*Memory)}

// share names the memory until its last use ends.
func (m *Memory) share() uint64 {
	shared.Lock()
	defer shared.Unlock()
	if m.name == 0 {
		shared.last++
		m.name = shared.last
		shared.by[m.name] = m
	}
	return m.name
}

// unshare is for the end of the last use.
func (m *Memory) unshare() {
	shared.Lock()
	defer shared.Unlock()
	if m.name != 0 {
		delete(shared.by, m.name)
	}
}

// find counts one more use of named memory; nil if its last use has ended.
func find(name uint64) *Memory {
	shared.Lock()
	defer shared.Unlock()
	m := shared.by[name]
	for m != nil {
		uses := m.refs.Load()
		if uses == 0 {
			return nil
		}
		if m.refs.CompareAndSwap(uses, uses+1) {
			break
		}
	}
	return m
}

// useShared takes the memory of a rank, who in errors, where that rank has it.
func (s *Symmetric) useShared(rank int, who string, bytes uint64, offer []byte) error {
	if len(offer) != offerHead+offerBlob+8 {
		return status.Errorf(status.Internal, "%s offered its memory in %d bytes", who, len(offer))
	}
	m := find(binary.LittleEndian.Uint64(offer[offerHead+offerBlob:]))
	if m == nil {
		return status.Errorf(status.Aborted, "%s has released its memory", who)
	}
	if s.peers[rank], s.Addresses[rank] = m, m.Address; m.Bytes < bytes {
		return status.Errorf(status.Mismatch, "%s offers %d bytes of memory, %d are needed", who, m.Bytes, bytes)
	}
	return nil
}
