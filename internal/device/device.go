package device

import (
	"sync/atomic"

	"github.com/deepep-go/deepep/internal/abi"
	"github.com/deepep-go/deepep/internal/kern"
	"github.com/deepep-go/deepep/internal/status"
)

// Device is an open device of a kernel library.
type Device struct {
	Lib          *kern.Library
	Ordinal      int // as the library counts
	NumSMs       int // that this process may use
	CC           [2]int
	TotalBytes   uint64
	UUID         [16]byte // ranks with the same one share the device
	Name         string
	ISA          string
	handle       uint64
	refs         atomic.Int32
	hostStream   bool
	canBeGraphed bool
}

// Open opens a device; ordinal -1 is the current one. isa forces an instruction set or architecture, 0 takes the best.
func Open(lib *kern.Library, ordinal int, isa uint32) (*Device, error) {
	p := &abi.DeviceOpenParams{Ordinal: int32(ordinal), ISA: isa}
	if code := lib.DeviceOpen(p); code != 0 {
		err := kern.Error("dk_device_open", code, p.DeviceError)
		if lib.NumDevices == 0 {
			return nil, status.Errorf(status.CodeOf(err), "engine %s has no device (%s): %w", lib.Kind, lib.Reason, err)
		}
		return nil, status.Errorf(status.CodeOf(err), "opening device %d of %d of engine %s: %w", ordinal, lib.NumDevices, lib.Kind, err)
	}
	d := &Device{
		Lib: lib, handle: p.Device, Ordinal: int(p.OutOrdinal), NumSMs: int(p.NumSMs), CC: [2]int{int(p.CCMajor), int(p.CCMinor)},
		TotalBytes: p.TotalBytes, UUID: p.UUID, Name: kern.Text(p.Name[:]), ISA: kern.Text(p.ISAName[:]),
		hostStream: lib.Has(abi.CapHostStream), canBeGraphed: lib.Has(abi.CapGraph),
	}
	d.refs.Store(1)
	return d, nil
}

// Handle is the library's handle of the device.
func (d *Device) Handle() uint64 { return d.handle }

// HostStream reports whether stream 0 is the calling thread, which has no queue.
func (d *Device) HostStream() bool { return d.hostStream }

// Graphs reports whether streams can be captured.
func (d *Device) Graphs() bool { return d.canBeGraphed }

// Retain counts one more user.
func (d *Device) Retain() *Device { d.refs.Add(1); return d }

// Release ends one use; the last one closes the device.
func (d *Device) Release() error {
	if d.refs.Add(-1) != 0 {
		return nil
	}
	p := &abi.DeviceCloseParams{Device: d.handle}
	return kern.Error("dk_device_close", d.Lib.DeviceClose(p), p.DeviceError)
}
