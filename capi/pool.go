package main

/*
#include "shim.h"
*/
import "C"

import (
	"sync"

	"github.com/deepep-go/deepep/core"
	"github.com/deepep-go/deepep/internal/pool"
	"github.com/deepep-go/deepep/internal/status"
)

var pools sync.Map // address of the segment: *pool.Pool

//export dpgo_pool_open
func dpgo_pool_open(segment C.uintptr_t) C.int32_t {
	return guard(func() error {
		s, ok := segments.LoadAndDelete(uintptr(segment))
		if !ok {
			return status.InvalidArg("segment", uintptr(segment), "the address of a segment that has not been released")
		}
		memory := s.(*core.Segment)
		pools.Store(uintptr(segment), pool.New(memory, memory.Address, memory.Bytes))
		return nil
	})
}

func openPool(segment C.uintptr_t) (*pool.Pool, error) {
	p, ok := pools.Load(uintptr(segment))
	if !ok {
		return nil, status.InvalidArg("segment", uintptr(segment), "one that deepep_pool_open took")
	}
	return p.(*pool.Pool), nil
}

//export dpgo_pool_room
func dpgo_pool_room(segment C.uintptr_t) (bytes C.uint64_t) {
	guard(func() error {
		p, err := openPool(segment)
		if err != nil {
			return err
		}
		bytes = C.uint64_t(p.Room())
		return nil
	})
	return bytes
}

//export dpgo_pool_close
func dpgo_pool_close(segment C.uintptr_t) C.int32_t {
	return guard(func() error {
		p, err := openPool(segment)
		if err != nil {
			return err
		}
		err = p.Close()
		forgetIfDone(segment, p)
		return err
	})
}

func forgetIfDone(segment C.uintptr_t, p *pool.Pool) {
	if p.Done() {
		pools.Delete(uintptr(segment))
	}
}

//export dpgo_pool_allocate
func dpgo_pool_allocate(segment C.uintptr_t, bytes C.size_t) (address C.uintptr_t) {
	guard(func() error {
		p, err := openPool(segment)
		if err != nil {
			return err
		}
		address = C.uintptr_t(p.Allocate(uint64(bytes)))
		return nil
	})
	return address
}

//export dpgo_pool_free
func dpgo_pool_free(pointer, stream C.uintptr_t) {
	guard(func() error {
		err := status.InvalidArg("pointer", uintptr(pointer), "a block of an open pool")
		pools.Range(func(segment, found any) bool {
			p := found.(*pool.Pool)
			if !p.Holds(uintptr(pointer)) {
				return true
			}
			err = p.Drain(uintptr(stream))
			if freed := p.Free(uintptr(pointer)); freed != nil {
				err = freed
			}
			forgetIfDone(C.uintptr_t(segment.(uintptr)), p)
			return false
		})
		return err
	})
}
