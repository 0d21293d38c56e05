package main

/*
#include "shim.h"
*/
import "C"

import "github.com/deepep-go/deepep/core"

//export dpgo_event_create
func dpgo_event_create(id C.uintptr_t, out *C.uintptr_t) C.int32_t {
	return withBuffer(id, func(b *core.Buffer) error {
		event, err := b.NewEvent()
		if err == nil {
			*out = C.uintptr_t(handles.add(event))
		}
		return err
	})
}

//export dpgo_event_destroy
func dpgo_event_destroy(id C.uintptr_t) C.int32_t {
	return guard(func() error { return release[*core.Event](uintptr(id), "event") })
}

func withEvent(id C.uintptr_t, f func(*core.Event) error) C.int32_t {
	return guard(func() error {
		event, err := find[*core.Event](uintptr(id), "event")
		if err != nil {
			return err
		}
		return f(event)
	})
}

//export dpgo_event_record
func dpgo_event_record(id, stream C.uintptr_t) C.int32_t {
	return withEvent(id, func(e *core.Event) error { return e.Record(uintptr(stream)) })
}

//export dpgo_event_stream_wait
func dpgo_event_stream_wait(id, stream C.uintptr_t) C.int32_t {
	return withEvent(id, func(e *core.Event) error { return e.StreamWait(uintptr(stream)) })
}

//export dpgo_event_wait
func dpgo_event_wait(id C.uintptr_t, ms C.int64_t) C.int32_t {
	return withEvent(id, func(e *core.Event) error { return e.Wait(timeout(ms)) })
}
