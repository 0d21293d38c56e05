package libs

import (
	"context"

	"github.com/deepep-go/deepep/internal/dl"
	"github.com/deepep-go/deepep/internal/doctor"
)

// Attributes of a device, as CUdevice_attribute numbers them.
const (
	cuMultiprocessorCount = 16
	cuComputeMajor        = 75
	cuComputeMinor        = 76
	cuGPUDirectRDMA       = 116
	cuDMABuf              = 124
	cuHandleTypeFabric    = 128
	cuInvalidValue        = 1
	cuBusLength           = 32
)

// CUDA queries libcuda. It starts the driver in this process but makes no context.
func CUDA(ctx context.Context) (*doctor.CUDA, error) {
	l, err := open("libcuda.so.1", "libcuda.so")
	if err != nil {
		return nil, err
	}
	l.wrong = func(code uintptr) string {
		f, err := l.fn("cuGetErrorName")
		if err != nil {
			return "error"
		}
		name := new(uintptr)
		if r := dl.CallArgs(f, code, pointer(name)); uint32(r) != 0 {
			return "unknown error"
		}
		return dl.CString(*name)
	}
	if err := l.call("cuInit", 0); err != nil {
		return nil, err
	}
	version, count := new(int32), new(int32)
	if err := l.call("cuDriverGetVersion", pointer(version)); err != nil {
		return nil, err
	}
	if err := l.call("cuDeviceGetCount", pointer(count)); err != nil {
		return nil, err
	}
	out := &doctor.CUDA{Version: int(*version)}
	devices := make([]int32, *count)
	for i := range devices {
		if err := stopped(ctx, "cuda"); err != nil {
			return nil, err
		}
		d := new(int32)
		if err := l.call("cuDeviceGet", pointer(d), i); err != nil {
			return nil, err
		}
		devices[i] = *d
		g, err := l.cudaGPU(*d)
		if err != nil {
			return nil, err
		}
		out.GPUs = append(out.GPUs, g)
	}
	out.Peer, err = l.cudaPeers(devices)
	return out, err
}

func (l *library) cudaGPU(device int32) (doctor.CUDAGPU, error) {
	var g doctor.CUDAGPU
	bus := new([cuBusLength]byte)
	if err := l.call("cuDeviceGetPCIBusId", pointer(bus), cuBusLength, device); err != nil {
		return g, err
	}
	g.Bus = sysfsBus(text(bus[:]))
	for _, a := range []struct {
		number int
		store  func(int)
	}{
		{cuComputeMajor, func(v int) { g.Major = v }},
		{cuComputeMinor, func(v int) { g.Minor = v }},
		{cuMultiprocessorCount, func(v int) { g.SMs = v }},
		{cuGPUDirectRDMA, func(v int) { g.GPURDMA = v == 1 }},
		{cuDMABuf, func(v int) { g.DMABuf = v == 1 }},
		{cuHandleTypeFabric, func(v int) { g.Fabric = v == 1 }},
	} {
		v := new(int32)
		err := ignore(l.call("cuDeviceGetAttribute", pointer(v), a.number, device), cuInvalidValue)
		if err != nil { // an old driver without this attribute: the feature is absent
			return g, err
		}
		a.store(int(*v))
	}
	return g, nil
}

func (l *library) cudaPeers(devices []int32) ([][]bool, error) {
	m := make([][]bool, len(devices))
	can := new(int32)
	for i, a := range devices {
		m[i] = make([]bool, len(devices))
		for j, b := range devices {
			if i == j {
				m[i][j] = true
				continue
			}
			if err := l.call("cuDeviceCanAccessPeer", pointer(can), a, b); err != nil {
				return nil, err
			}
			m[i][j] = *can == 1
		}
	}
	return m, nil
}
