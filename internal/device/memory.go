package device

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/deepep-go/deepep/internal/abi"
	"github.com/deepep-go/deepep/internal/kern"
	"github.com/deepep-go/deepep/internal/status"
)

// Memory is device memory, of this rank or mapped from a peer.
type Memory struct {
	Address       uint64
	Bytes         uint64
	dev           *Device
	mem           uint64
	symmetricHeap bool // freed by the transport, together with all ranks
	given         bool // back: the addresses alone are left
	refs          atomic.Int32
	keep          atomic.Bool // the addresses, at the end of the last use; see Leave
	name          uint64      // by which ranks of this process find it; 0: they do not
}

// Alloc allocates at least so many bytes, zeroed.
func (d *Device) Alloc(bytes uint64) (*Memory, error) {
	p := &abi.MemAllocParams{Device: d.handle, Bytes: bytes}
	if code := d.Lib.MemAlloc(p); code != 0 {
		err := kern.Error("dk_mem_alloc", code, p.DeviceError)
		if errors.Is(err, status.ErrInvalidArgument) { // a size that no allocator takes is too much memory
			err = status.Errorf(status.OutOfMemory, "%w", err)
		}
		return nil, status.Errorf(status.CodeOf(err), "allocating %d bytes on %s %s: %w", bytes, d.Lib.Kind, d.Name, err)
	}
	return d.memory(p.Mem, p.Address, p.OutBytes), nil
}

func (d *Device) memory(mem, address, bytes uint64) *Memory {
	m := &Memory{Address: address, Bytes: bytes, dev: d.Retain(), mem: mem}
	m.refs.Store(1)
	return m
}

// Retain counts one more user.
func (m *Memory) Retain() *Memory { m.refs.Add(1); return m }

// Release ends one use; the last one frees or unmaps, memory of a symmetric heap together with all ranks. No kernel may
// use it.
func (m *Memory) Release() error {
	if m == nil || m.refs.Add(-1) != 0 {
		return nil
	}
	m.unshare()
	var err error
	if m.keep.Load() {
		err = m.giveBack()
	} else {
		err = m.free()
	}
	status.Keep(&err, m.dev.Release())
	return err
}

func (m *Memory) free() error {
	if m.symmetricHeap {
		p := &abi.TransportFreeParams{Mem: m.mem}
		return kern.Error("dk_transport_free", m.dev.Lib.TransportFree(p), p.DeviceError)
	}
	p := &abi.MemFreeParams{Mem: m.mem}
	return kern.Error("dk_mem_free", m.dev.Lib.MemFree(p), p.DeviceError)
}

// giveBack gives the memory back and keeps its addresses, once.
func (m *Memory) giveBack() error {
	if m.given {
		return nil
	}
	p := &abi.MemReleaseParams{Mem: m.mem}
	err := kern.Error("dk_mem_release", m.dev.Lib.MemRelease(p), p.DeviceError)
	m.given = err == nil
	return err
}

// again puts memory to the addresses.
func (m *Memory) again(p *abi.MemRestoreParams) error {
	p.Mem = m.mem
	err := kern.Error("dk_mem_restore", m.dev.Lib.MemRestore(p), p.DeviceError)
	if err != nil {
		return status.Errorf(status.CodeOf(err), "restoring %d bytes on %s %s: %w", m.Bytes, m.dev.Lib.Kind, m.dev.Name, err)
	}
	m.given = false
	return nil
}

// Drain waits for the present work of a stream of the memory's device. A stream under capture has none to wait for.
func (m *Memory) Drain(s Stream) error {
	if capturing, err := m.dev.Capturing(s); capturing || err != nil {
		return err
	}
	ev, err := m.dev.NewEvent()
	if err != nil {
		return err
	}
	err = ev.Record(s)
	for done := false; !done && err == nil; {
		done, err = ev.Wait(time.Second)
	}
	status.Keep(&err, ev.Destroy())
	return err
}

// HostPage is zeroed host memory that kernels can read and write.
type HostPage struct {
	Host    []byte
	Address uint64 // as kernels see it
	dev     *Device
	mapped  bool // by NewHostPage; else the caller unmaps
}

// NewHostPage maps memory and registers it. It lies outside Go's heap, so that it may outlive every Go object.
func (d *Device) NewHostPage(bytes int) (*HostPage, error) {
	size := (bytes + unix.Getpagesize() - 1) / unix.Getpagesize() * unix.Getpagesize()
	host, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, status.Errorf(status.CodeOf(err), "mapping %d bytes of host memory: %w", size, err)
	}
	page, err := d.Register(host)
	if err != nil {
		_ = unix.Munmap(host) // the first error counts
		return nil, err
	}
	page.mapped = true
	return page, nil
}

// Register makes host memory that the caller mapped visible to kernels.
func (d *Device) Register(host []byte) (*HostPage, error) {
	p := &abi.HostRegisterParams{Device: d.handle, Host: addressOf(host), Bytes: uint64(len(host))}
	if code := d.Lib.HostRegister(p); code != 0 {
		return nil, fmt.Errorf("registering %d bytes of host memory: %w", len(host), kern.Error("dk_host_register", code, p.DeviceError))
	}
	return &HostPage{Host: host, Address: p.Address, dev: d.Retain()}, nil
}

// HostAddress is the page's address in this process.
func (h *HostPage) HostAddress() uint64 { return addressOf(h.Host) }

// Close unregisters the page, and unmaps one of NewHostPage. No kernel may use it any more.
func (h *HostPage) Close() error {
	if h == nil {
		return nil
	}
	p := &abi.HostUnregisterParams{Device: h.dev.handle, Host: addressOf(h.Host)}
	err := kern.Error("dk_host_unregister", h.dev.Lib.HostUnregister(p), p.DeviceError)
	if h.mapped {
		if e := unix.Munmap(h.Host); err == nil && e != nil {
			err = status.Errorf(status.System, "munmap: %w", e)
		}
	}
	status.Keep(&err, h.dev.Release())
	return err
}
