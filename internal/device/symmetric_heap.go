package device

import (
	"runtime"
	"unsafe"

	"github.com/deepep-go/deepep/internal/abi"
	"github.com/deepep-go/deepep/internal/kern"
	"github.com/deepep-go/deepep/internal/status"
)

// SymmetricHeapOptions are the settings with which a transport that has memory of its own (NVSHMEM) starts.
type SymmetricHeapOptions struct {
	Rank, Ranks, Peers int    // Peers: ranks of a node
	QPsPerNIC, Depth   int    // toward each peer, on each NIC of the rank
	MNNVL              bool   // NVLink between hosts may be used
	Settings           string // lines "NAME=VALUE" for the transport's library
}

func (o *SymmetricHeapOptions) flags() uint32 {
	if o.MNNVL {
		return abi.TransportMNNVL
	}
	return 0
}

// SymmetricHeap is a rank's attachment to such a transport: attached once, detached with its last memory.
type SymmetricHeap struct {
	Version    string // of the transport's library
	Note       string // which of the user's settings contradict the options; "": none
	dev        *Device
	attachment uint64
	ranks      int
}

// SymmetricHeapID makes the id by which all ranks attach. One rank calls it.
func (d *Device) SymmetricHeapID(o SymmetricHeapOptions) ([]byte, error) {
	settings := append([]byte(o.Settings), 0)
	p := &abi.TransportUniqueIDParams{
		NumRanks: int32(o.Ranks), NumNVLPeers: int32(o.Peers), NumQPsPerNIC: int32(o.QPsPerNIC), QPDepth: int32(o.Depth), Flags: o.flags(),
		HostSettings: uint64(uintptr(unsafe.Pointer(unsafe.SliceData(settings)))),
	}
	code := d.Lib.TransportUniqueID(p)
	runtime.KeepAlive(settings)
	if code != 0 {
		return nil, withReason(kern.Error("dk_transport_unique_id", code, p.DeviceError), p.Reason[:])
	}
	return append([]byte(nil), p.ID[:]...), nil
}

// Attach starts the transport, or shares the one that runs. Collective; it waits for all ranks without a limit.
func (d *Device) Attach(o SymmetricHeapOptions, id []byte) (*SymmetricHeap, error) {
	settings := append([]byte(o.Settings), 0)
	p := &abi.TransportAttachParams{
		Device: d.handle, Rank: int32(o.Rank), NumRanks: int32(o.Ranks), NumNVLPeers: int32(o.Peers), NumQPsPerNIC: int32(o.QPsPerNIC), QPDepth: int32(o.Depth), Flags: o.flags(),
		HostSettings: uint64(uintptr(unsafe.Pointer(unsafe.SliceData(settings)))),
	}
	if len(id) != len(p.ID) {
		return nil, status.Errorf(status.Internal, "the transport's id came as %d bytes, not %d", len(id), len(p.ID))
	}
	copy(p.ID[:], id)
	code := d.Lib.TransportAttach(p)
	runtime.KeepAlive(settings)
	if code != 0 {
		return nil, withReason(kern.Error("dk_transport_attach", code, p.DeviceError), p.Reason[:])
	}
	return &SymmetricHeap{Version: kern.Text(p.Version[:]), Note: kern.Text(p.Reason[:]), dev: d.Retain(), attachment: p.Attachment, ranks: o.Ranks}, nil
}

func withReason(err error, reason []byte) error {
	if text := kern.Text(reason); text != "" {
		return status.Errorf(status.CodeOf(err), "%w: %s", err, text)
	}
	return err
}

// Share allocates memory of the symmetric heap. Addresses has where loads and stores reach the other ranks' part.
// Collective; it waits.
func (h *SymmetricHeap) Share(rank int, bytes uint64) (*Symmetric, error) {
	s := &Symmetric{rank: rank, Addresses: make([]uint64, h.ranks), peers: make([]*Memory, h.ranks)}
	p := &abi.TransportAllocParams{Attachment: h.attachment, Bytes: bytes, HostPeerBlocks: uint64(uintptr(unsafe.Pointer(unsafe.SliceData(s.Addresses))))}
	if code := h.dev.Lib.TransportAlloc(p); code != 0 {
		return nil, status.Errorf(status.Code(code), "allocating %d bytes of the transport's symmetric heap: %w", bytes, kern.Error("dk_transport_alloc", code, p.DeviceError))
	}
	s.Local = h.dev.memory(p.Mem, p.Address, p.OutBytes)
	s.Local.symmetricHeap = true
	return s, nil
}

// Detach ends the attachment. The last one of a process shuts the transport's library down and waits for all ranks to
// do so.
func (h *SymmetricHeap) Detach() error {
	p := &abi.TransportDetachParams{Attachment: h.attachment}
	err := kern.Error("dk_transport_detach", h.dev.Lib.TransportDetach(p), p.DeviceError)
	status.Keep(&err, h.dev.Release())
	return err
}
