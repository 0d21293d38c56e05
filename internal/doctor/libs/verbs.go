package libs

//lint:file-ignore U1000 fields of C structs keep their places, read or not

import (
	"context"
	"errors"
	"fmt"

	"github.com/deepep-go/deepep/internal/dl"
	"github.com/deepep-go/deepep/internal/doctor"
)

// ibvDeviceAttr is the beginning of struct ibv_device_attr; tail has room for the rest (the whole is 232 bytes).
type ibvDeviceAttr struct {
	fwVersion                           [64]byte
	nodeGUID, sysImageGUID              uint64
	maxMRSize, pageSizeCap              uint64
	vendorID, vendorPartID, hardwareVer uint32
	maxQP, maxQPWR                      int32
	tail                                [512]byte
}

// Verbs queries libibverbs for every device and its limits.
func Verbs(ctx context.Context) (*doctor.Verbs, error) {
	l, err := open("libibverbs.so.1", "libibverbs.so")
	if err != nil {
		return nil, err
	}
	fns := map[string]uintptr{}
	for _, name := range []string{"ibv_get_device_list", "ibv_free_device_list", "ibv_get_device_name", "ibv_open_device", "ibv_close_device", "ibv_query_device"} {
		if fns[name], err = l.fn(name); err != nil {
			return nil, err
		}
	}
	count := new(int32)
	list := dl.CallArgs(fns["ibv_get_device_list"], pointer(count))
	if list == 0 {
		return nil, errors.New("ibv_get_device_list gave no list: is the module ib_uverbs loaded?")
	}
	defer dl.CallArgs(fns["ibv_free_device_list"], list)
	out := &doctor.Verbs{}
	for _, device := range dl.Words(list, int(*count)) {
		if err := stopped(ctx, "verbs"); err != nil {
			return nil, err
		}
		name := dl.CallArgs(fns["ibv_get_device_name"], device)
		out.Devices = append(out.Devices, verbsDevice(fns, device, dl.CString(name)))
	}
	return out, nil
}

func verbsDevice(fns map[string]uintptr, device uintptr, name string) doctor.VerbsDevice {
	d := doctor.VerbsDevice{Name: name}
	handle := dl.CallArgs(fns["ibv_open_device"], device)
	if handle == 0 {
		d.Err = "ibv_open_device failed"
		return d
	}
	defer dl.CallArgs(fns["ibv_close_device"], handle)
	attr := new(ibvDeviceAttr)
	if r := dl.CallArgs(fns["ibv_query_device"], handle, pointer(attr)); uint32(r) != 0 {
		d.Err = fmt.Sprintf("ibv_query_device: error %d", uint32(r))
		return d
	}
	d.MaxQP, d.MaxQPWR = int(attr.maxQP), int(attr.maxQPWR)
	return d
}
