package main

import (
	"fmt"
	"sync"

	"github.com/deepep-go/deepep/core"
	"github.com/deepep-go/deepep/internal/status"
)

// table maps the numbers that C holds as pointers to Go objects. Numbers are never used twice.
type table struct {
	mu   sync.RWMutex
	last uintptr
	all  map[uintptr]any
}

var handles = table{all: map[uintptr]any{}}

func (t *table) add(object any) uintptr {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.last++
	t.all[t.last] = object
	return t.last
}

// take removes an object and returns it; nil if there is none.
func (t *table) take(id uintptr) any {
	t.mu.Lock()
	defer t.mu.Unlock()
	object := t.all[id]
	delete(t.all, id)
	return object
}

// find is the object of type T behind a handle, or an error that names the argument.
func find[T any](id uintptr, name string) (T, error) {
	handles.mu.RLock()
	object, ok := handles.all[id].(T)
	handles.mu.RUnlock()
	if !ok {
		return object, status.InvalidArg(name, fmt.Sprintf("%#x", id), "a live handle of that kind")
	}
	return object, nil
}

func buffer(id uintptr) (*core.Buffer, error) { return find[*core.Buffer](id, "buffer") }

// release takes a handle of type T out of the table and ends it; 0 is fine.
func release[T interface{ Destroy() error }](id uintptr, name string) error {
	if id == 0 {
		return nil
	}
	object, err := find[T](id, name)
	if err != nil {
		return err
	}
	if handles.take(id) == nil {
		return nil // another thread was first
	}
	return object.Destroy()
}
