package device

import "sync"

// params lends the parameter structs of one call of the kernel interface. A call needs its struct on the heap (see
// dl.Call); a struct that is used again keeps a launch free of garbage.
type params[P any] struct{ idle sync.Pool }

func (l *params[P]) take(values P) *P {
	p, ok := l.idle.Get().(*P)
	if !ok {
		p = new(P)
	}
	*p = values
	return p
}

func (l *params[P]) give(p *P) { l.idle.Put(p) }
