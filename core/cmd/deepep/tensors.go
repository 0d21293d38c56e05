package main

import (
	"time"
	"unsafe"

	"github.com/deepep-go/deepep/core"
	"github.com/deepep-go/deepep/internal/abi"
	"github.com/deepep-go/deepep/internal/device"
	"github.com/deepep-go/deepep/internal/kern"
	"github.com/deepep-go/deepep/internal/status"
)

// tensors allocates memory of an engine's device for timed calls.
type tensors struct {
	dev    *device.Device
	memory []*device.Memory
	err    error // the first one; after it alloc returns 0
}

// openTensors opens the device that a buffer is on.
func openTensors(b *core.Buffer) (*tensors, error) {
	info := b.Info()
	library, err := loadKernels(info.Engine)
	if err != nil {
		return nil, err
	}
	dev, err := device.Open(library, info.Device, 0)
	if err != nil {
		return nil, err
	}
	return &tensors{dev: dev}, nil
}

// alloc returns memory that it has written, so that a page's first touch is not timed.
func (t *tensors) alloc(bytes int) uintptr {
	if t.err != nil {
		return 0
	}
	m, err := t.dev.Alloc(uint64(max(bytes, 1)))
	if err != nil {
		t.err = err
		return 0
	}
	t.memory = append(t.memory, m)
	p := &abi.FillParams{Device: t.dev.Handle(), Dst: m.Address, Bytes: uint64(bytes)}
	if t.err = kern.Error("dk_fill", t.dev.Lib.Fill(p), p.DeviceError); t.err == nil {
		t.err = t.finish()
	}
	return uintptr(m.Address)
}

// from returns memory with the contents of a slice.
func from[T any](t *tensors, values []T) uintptr {
	bytes := len(values) * int(unsafe.Sizeof(*new(T)))
	to := t.alloc(bytes)
	if t.err == nil && bytes > 0 {
		t.err = t.copy(to, uintptr(unsafe.Pointer(unsafe.SliceData(values))), bytes)
	}
	return to
}

// copy copies bytes and waits for the end.
func (t *tensors) copy(to, from uintptr, bytes int) error {
	p := &abi.CopyParams{Device: t.dev.Handle(), Dst: uint64(to), Src: uint64(from), Bytes: uint64(bytes)}
	if err := kern.Error("dk_copy", t.dev.Lib.Copy(p), p.DeviceError); err != nil {
		return err
	}
	return t.finish()
}

// finish waits for the work on the default stream.
func (t *tensors) finish() error {
	done, err := t.dev.NewEvent()
	if err != nil {
		return err
	}
	if err = done.Record(0); err == nil {
		_, err = done.Wait(time.Minute)
	}
	status.Keep(&err, done.Destroy())
	return err
}

// free frees the memory allocated since the last free. No running work may use it.
func (t *tensors) free() {
	for _, m := range t.memory {
		if err := m.Release(); err != nil && t.err == nil {
			t.err = err
		}
	}
	t.memory = t.memory[:0]
}

func (t *tensors) close() error {
	t.free()
	if err := t.dev.Release(); t.err == nil {
		t.err = err
	}
	return t.err
}
