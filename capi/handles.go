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

// take removes an object from the table and returns it; nil if there is none.
func (t *table) take(id uintptr) any {
	t.mu.Lock()
	defer t.mu.Unlock()
	object := t.all[id]
	delete(t.all, id)
	return object
}

// find returns the object of type T that a handle stands for, or an error that names the argument.
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

// release removes a handle of type T from the table and destroys the object; 0 is no error.
func release[T interface{ Destroy() error }](id uintptr, name string) error {
	if id == 0 {
		return nil
	}
	object, err := find[T](id, name)
	if err != nil {
		return err
	}
	if handles.take(id) == nil {
		return nil // another thread has released it
	}
	return object.Destroy()
}
