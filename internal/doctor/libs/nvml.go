package libs

//lint:file-ignore U1000 fields of C structs keep their places, read or not

import (
	"context"
	"errors"

	"github.com/deepep-go/deepep/internal/dl"
	"github.com/deepep-go/deepep/internal/doctor"
)

// nvmlPciInfo is nvmlPciInfo_t.
type nvmlPciInfo struct {
	legacy                                           [16]byte
	domain, bus, device, pciDeviceID, pciSubSystemID uint32
	busID                                            [32]byte
}

// nvmlFabricInfo is nvmlGpuFabricInfo_t.
type nvmlFabricInfo struct {
	clusterUUID [16]byte
	status      int32
	cliqueID    uint32
	state       uint8
}

// nvmlMemory is nvmlMemory_t.
type nvmlMemory struct{ total, free, used uint64 }

const (
	nvmlNotSupported  = 3
	nvmlP2PIndexLink  = 2 // NVML_P2P_CAPS_INDEX_NVLINK
	nvmlP2PStatusOK   = 0
	nvmlNameLength    = 96
	nvmlVersionLength = 80
)

// NVML queries libnvidia-ml.
func NVML(ctx context.Context) (*doctor.NVML, error) {
	l, err := open("libnvidia-ml.so.1", "libnvidia-ml.so")
	if err != nil {
		return nil, err
	}
	l.wrong = func(code uintptr) string {
		f, err := l.fn("nvmlErrorString")
		if err != nil {
			return "error"
		}
		s := dl.CallArgs(f, code)
		return dl.CString(s)
	}
	if err := l.call("nvmlInit_v2"); err != nil {
		return nil, err
	}
	defer func() { _ = l.call("nvmlShutdown") }() // its error does not change the result

	version, count := new([nvmlVersionLength]byte), new(uint32)
	if err := l.call("nvmlSystemGetDriverVersion", pointer(version), nvmlVersionLength); err != nil {
		return nil, err
	}
	if err := l.call("nvmlDeviceGetCount_v2", pointer(count)); err != nil {
		return nil, err
	}
	out := &doctor.NVML{Driver: text(version[:])}
	handles := make([]uintptr, *count)
	for i := range handles {
		if err := stopped(ctx, "nvml"); err != nil {
			return nil, err
		}
		h := new(uintptr)
		if err := l.call("nvmlDeviceGetHandleByIndex_v2", i, pointer(h)); err != nil {
			return nil, err
		}
		handles[i] = *h
		g, err := l.nvmlGPU(*h)
		if err != nil {
			return nil, err
		}
		out.GPUs = append(out.GPUs, g)
	}
	out.NVLink = l.nvlinks(handles)
	return out, nil
}

func (l *library) nvmlGPU(h uintptr) (doctor.NVMLGPU, error) {
	var g doctor.NVMLGPU
	name, uuid, pci := new([nvmlNameLength]byte), new([nvmlNameLength]byte), new(nvmlPciInfo)
	memory, fabric := new(nvmlMemory), new(nvmlFabricInfo)
	major, minor, mig, pending := new(int32), new(int32), new(uint32), new(uint32)
	err := errors.Join(
		l.call("nvmlDeviceGetName", h, pointer(name), nvmlNameLength),
		l.call("nvmlDeviceGetUUID", h, pointer(uuid), nvmlNameLength),
		l.call("nvmlDeviceGetPciInfo_v3", h, pointer(pci)),
		l.call("nvmlDeviceGetCudaComputeCapability", h, pointer(major), pointer(minor)),
		l.call("nvmlDeviceGetMemoryInfo", h, pointer(memory)),
		// Devices without MIG or without a fabric return "not supported"; old drivers lack the second function.
		ignore(l.call("nvmlDeviceGetMigMode", h, pointer(mig), pointer(pending)), nvmlNotSupported),
	)
	if err != nil {
		return g, err
	}
	if l.call("nvmlDeviceGetGpuFabricInfo", h, pointer(fabric)) == nil {
		g.Fabric = doctor.FabricState(fabric.state)
		g.Cluster = fabric.clusterUUID != [16]byte{}
	}
	g.Bus, g.Name, g.UUID = sysfsBus(text(pci.busID[:])), text(name[:]), text(uuid[:])
	g.Major, g.Minor, g.MIG = int(*major), int(*minor), *mig == 1
	g.MemoryTotal, g.MemoryFree = memory.total, memory.free
	return g, nil
}

// ignore drops one error code.
func ignore(err error, code uintptr) error {
	var f *failure
	if errors.As(err, &f) && f.code == code {
		return nil
	}
	return err
}

// nvlinks queries for every pair of devices whether NVLink joins them.
func (l *library) nvlinks(handles []uintptr) [][]bool {
	m := make([][]bool, len(handles))
	status := new(uint32)
	for i, a := range handles {
		m[i] = make([]bool, len(handles))
		for j, b := range handles {
			if i == j {
				m[i][j] = true
				continue
			}
			err := l.call("nvmlDeviceGetP2PStatus", a, b, nvmlP2PIndexLink, pointer(status))
			m[i][j] = err == nil && *status == nvmlP2PStatusOK
		}
	}
	return m
}
