package device

import (
	"unsafe"

	"github.com/deepep-go/deepep/internal/kern"
	"github.com/deepep-go/deepep/internal/status"
)

// HeapOptions are what a transport with a start and memory of its own (NVSHMEM) is told before it starts.
type HeapOptions struct {
	Rank, Ranks, Peers int // Peers: ranks of a node
	QPs, Depth         int // toward each peer
}

// Heap is a rank's part of such a transport: what is attached once, and detached with its last memory.
type Heap struct {
	Version    string // of the transport's library
	Note       string // settings of the user that stand against what was wanted; "": none
	dev        *Device
	attachment uint64
	ranks      int
}

// HeapID is what one rank asks for and all attach by.
func (d *Device) HeapID(o HeapOptions) ([]byte, error) {
	p := &kern.TransportUniqueIDParams{NumRanks: int32(o.Ranks), NumNVLPeers: int32(o.Peers), NumQPs: int32(o.QPs), QPDepth: int32(o.Depth)}
	if code := d.Lib.TransportUniqueID(p); code != 0 {
		return nil, withReason(kern.Error("dk_transport_unique_id", code, p.DeviceError), p.Reason[:])
	}
	return append([]byte(nil), p.ID[:]...), nil
}

// Attach starts the transport, or shares the one that runs. Collective; it waits for all ranks, and knows no limit.
func (d *Device) Attach(o HeapOptions, id []byte) (*Heap, error) {
	p := &kern.TransportAttachParams{Device: d.handle, Rank: int32(o.Rank), NumRanks: int32(o.Ranks), NumNVLPeers: int32(o.Peers), NumQPs: int32(o.QPs), QPDepth: int32(o.Depth)}
	if len(id) != len(p.ID) {
		return nil, status.Errorf(status.Internal, "the transport's id came as %d bytes, not %d", len(id), len(p.ID))
	}
	copy(p.ID[:], id)
	if code := d.Lib.TransportAttach(p); code != 0 {
		return nil, withReason(kern.Error("dk_transport_attach", code, p.DeviceError), p.Reason[:])
	}
	return &Heap{Version: kern.Text(p.Version[:]), Note: kern.Text(p.Reason[:]), dev: d.Retain(), attachment: p.Attachment, ranks: o.Ranks}, nil
}

func withReason(err error, reason []byte) error {
	if text := kern.Text(reason); text != "" {
		return status.Errorf(status.CodeOf(err), "%w: %s", err, text)
	}
	return err
}

// Share allocates memory of the heap, and says where loads and stores reach that of the others. Collective; it waits.
func (h *Heap) Share(rank int, bytes uint64) (*Symmetric, error) {
	s := &Symmetric{rank: rank, Addresses: make([]uint64, h.ranks), peers: make([]*Memory, h.ranks)}
	p := &kern.TransportAllocParams{Attachment: h.attachment, Bytes: bytes, HostPeerBlocks: uint64(uintptr(unsafe.Pointer(unsafe.SliceData(s.Addresses))))}
	if code := h.dev.Lib.TransportAlloc(p); code != 0 {
		return nil, status.Errorf(status.Code(code), "allocating %d bytes of the transport's heap: %w", bytes, kern.Error("dk_transport_alloc", code, p.DeviceError))
	}
	s.Local = h.dev.memory(p.Mem, p.Address, p.OutBytes)
	s.Local.heap = true
	return s, nil
}

// Detach ends this rank's part. The last one of a process ends the transport's library, and waits for all ranks to do so.
func (h *Heap) Detach() error {
	p := &kern.TransportDetachParams{Attachment: h.attachment}
	err := kern.Error("dk_transport_detach", h.dev.Lib.TransportDetach(p), p.DeviceError)
	status.Keep(&err, h.dev.Release())
	return err
}
