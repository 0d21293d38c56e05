package kern

import (
	"unsafe"

	"github.com/deepep-go/deepep/internal/dl"
)

// transportHeap holds the addresses of the functions of a transport that has a start and memory of its own. A library has
// all of them or none.
type transportHeap struct {
	uniqueID, attach, detach, alloc, free uintptr
}

// symbols names every function and the place of its address.
func (f *transportHeap) symbols() map[string]*uintptr {
	return map[string]*uintptr{
		"dk_transport_unique_id": &f.uniqueID,
		"dk_transport_attach":    &f.attach,
		"dk_transport_detach":    &f.detach,
		"dk_transport_alloc":     &f.alloc,
		"dk_transport_free":      &f.free,
	}
}

// HasTransportHeap says whether blocks come from the transport's own memory. Without it the functions below must not be
// called.
func (l *Library) HasTransportHeap() bool { return l.fn.heap.attach != 0 }

// int32_t dk_transport_unique_id(dk_transport_unique_id_params *p);
func (l *Library) TransportUniqueID(p *TransportUniqueIDParams) int32 {
	p.Size = uint32(unsafe.Sizeof(*p))
	return dl.Call(l.fn.heap.uniqueID, unsafe.Pointer(p))
}

// int32_t dk_transport_attach(dk_transport_attach_params *p);
func (l *Library) TransportAttach(p *TransportAttachParams) int32 {
	p.Size = uint32(unsafe.Sizeof(*p))
	return dl.Call(l.fn.heap.attach, unsafe.Pointer(p))
}

// int32_t dk_transport_detach(dk_transport_detach_params *p);
func (l *Library) TransportDetach(p *TransportDetachParams) int32 {
	p.Size = uint32(unsafe.Sizeof(*p))
	return dl.Call(l.fn.heap.detach, unsafe.Pointer(p))
}

// int32_t dk_transport_alloc(dk_transport_alloc_params *p);
func (l *Library) TransportAlloc(p *TransportAllocParams) int32 {
	p.Size = uint32(unsafe.Sizeof(*p))
	return dl.Call(l.fn.heap.alloc, unsafe.Pointer(p))
}

// int32_t dk_transport_free(dk_transport_free_params *p);
func (l *Library) TransportFree(p *TransportFreeParams) int32 {
	p.Size = uint32(unsafe.Sizeof(*p))
	return dl.Call(l.fn.heap.free, unsafe.Pointer(p))
}
