package kern

import (
	"unsafe"

	"github.com/deepep-go/deepep/internal/dl"
)

// transport holds the addresses of the transport functions. A library has all of them or none.
type transport struct {
	open, close, put, quiet, query, lose uintptr
}

// symbols names every function and the place of its address.
func (f *transport) symbols() map[string]*uintptr {
	return map[string]*uintptr{
		"dk_transport_open":  &f.open,
		"dk_transport_close": &f.close,
		"dk_transport_put":   &f.put,
		"dk_transport_quiet": &f.quiet,
		"dk_transport_query": &f.query,
		"dk_transport_lose":  &f.lose,
	}
}

// HasTransport says whether the library reaches ranks beyond loads and stores. Without it the functions below must not be
// called.
func (l *Library) HasTransport() bool { return l.fn.transport.open != 0 }

// int32_t dk_transport_open(dk_transport_open_params *p);
func (l *Library) TransportOpen(p *TransportOpenParams) int32 {
	p.Size = uint32(unsafe.Sizeof(*p))
	return dl.Call(l.fn.transport.open, unsafe.Pointer(p))
}

// int32_t dk_transport_close(dk_transport_close_params *p);
func (l *Library) TransportClose(p *TransportCloseParams) int32 {
	p.Size = uint32(unsafe.Sizeof(*p))
	return dl.Call(l.fn.transport.close, unsafe.Pointer(p))
}

// int32_t dk_transport_put(dk_transport_put_params *p);
func (l *Library) TransportPut(p *TransportPutParams) int32 {
	p.Size = uint32(unsafe.Sizeof(*p))
	return dl.Call(l.fn.transport.put, unsafe.Pointer(p))
}

// int32_t dk_transport_quiet(dk_transport_quiet_params *p);
func (l *Library) TransportQuiet(p *TransportQuietParams) int32 {
	p.Size = uint32(unsafe.Sizeof(*p))
	return dl.Call(l.fn.transport.quiet, unsafe.Pointer(p))
}

// int32_t dk_transport_query(dk_transport_query_params *p);
func (l *Library) TransportQuery(p *TransportQueryParams) int32 {
	p.Size = uint32(unsafe.Sizeof(*p))
	return dl.Call(l.fn.transport.query, unsafe.Pointer(p))
}

// int32_t dk_transport_lose(dk_transport_lose_params *p);
func (l *Library) TransportLose(p *TransportLoseParams) int32 {
	p.Size = uint32(unsafe.Sizeof(*p))
	return dl.Call(l.fn.transport.lose, unsafe.Pointer(p))
}
