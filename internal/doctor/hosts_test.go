package doctor

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strings"
	"testing/fstest"
)

// host is an invented machine: files, environment, results of libraries.
type host struct {
	files   fstest.MapFS
	env     []string
	denied  map[string]bool // files that may not be opened
	shmSize uint64
	nvml    *NVML
	cuda    *CUDA
	verbs   *Verbs
	nvmlErr error
	opt     Options
}

const gib = 1 << 30

func (h *host) file(name, text string) *host {
	h.files[name] = &fstest.MapFile{Data: []byte(text)}
	return h
}

func (h *host) link(name, target string) *host {
	h.files[name] = &fstest.MapFile{Data: []byte(target), Mode: fs.ModeSymlink | 0o777}
	return h
}

// remove deletes a file, or a folder with its content.
func (h *host) remove(prefix string) *host {
	for name := range h.files {
		if name == prefix || strings.HasPrefix(name, prefix+"/") {
			delete(h.files, name)
		}
	}
	return h
}

func (h *host) setenv(kv ...string) *host { h.env = append(h.env, kv...); return h }

// replace edits a file, which must contain the old text.
func (h *host) replace(name, old, new string) *host {
	f := h.files[name]
	if f == nil || !strings.Contains(string(f.Data), old) {
		panic("made-up host: " + name + " does not hold " + old)
	}
	return h.file(name, strings.ReplaceAll(string(f.Data), old, new))
}

func (h *host) root() Root {
	notThere := func(lib string) error {
		return errors.New(lib + ": cannot open shared object file: No such file or directory")
	}
	return Root{
		FS:      h.files,
		Environ: h.env,
		Access: func(p string) error {
			if h.denied[p] {
				return fs.ErrPermission
			}
			return nil
		},
		Space: func(string) (uint64, uint64, error) { return h.shmSize, h.shmSize - 1<<20, nil },
		NVML: func(context.Context) (*NVML, error) {
			if h.nvml == nil {
				return nil, errors.Join(h.nvmlErr, notThere("libnvidia-ml.so.1"))
			}
			return h.nvml, nil
		},
		CUDA: func(context.Context) (*CUDA, error) {
			if h.cuda == nil {
				return nil, notThere("libcuda.so.1")
			}
			return h.cuda, nil
		},
		Verbs: func(context.Context) (*Verbs, error) {
			if h.verbs == nil {
				return nil, notThere("libibverbs.so.1")
			}
			return h.verbs, nil
		},
	}
}

const limitsUnlimited = `Limit                     Soft Limit           Hard Limit           Units
Max locked memory         unlimited            unlimited            bytes
Max address space         unlimited            unlimited            bytes
`

// plainHost is a machine with neither GPU nor RDMA.
func plainHost() *host {
	h := &host{files: fstest.MapFS{}, denied: map[string]bool{}, shmSize: 64 * gib}
	h.file("proc/sys/kernel/hostname", "node-a\n")
	h.file("proc/sys/kernel/osrelease", "6.8.0-45-generic\n")
	h.file("proc/sys/kernel/yama/ptrace_scope", "1\n")
	h.file("proc/self/limits", limitsUnlimited)
	h.file("proc/self/status", "Name:\tpython3\nPid:\t4242\nPPid:\t4200\nCapEff:\t0000000000000000\nCpus_allowed:\tff\nCpus_allowed_list:\t0-15\n")
	h.file("proc/self/cgroup", "0::/user.slice/session-3.scope\n")
	h.file("proc/self/maps", "")
	h.link("proc/self/ns/ipc", initialIPC)
	h.file("proc/meminfo", "MemTotal:       65536000 kB\nMemFree:        60000000 kB\nMemAvailable:   62914560 kB\n")
	h.file("proc/cmdline", "BOOT_IMAGE=/vmlinuz root=/dev/sda1 ro quiet\n")
	h.file("sys/fs/cgroup/cpu.max", "max 100000\n")
	h.file("usr/bin/python3.12", "")
	h.link("usr/bin/python3", "python3.12")
	return h
}

// pciFunction adds a device to the tree below parent and links it from the bus.
func (h *host) pciFunction(parent, bus, vendor, class string, numa int) string {
	dir := path.Join(parent, bus)
	h.file(path.Join(dir, "vendor"), vendor+"\n")
	h.file(path.Join(dir, "class"), class+"\n")
	h.file(path.Join(dir, "numa_node"), fmt.Sprintf("%d\n", numa))
	h.link(path.Join("sys/bus/pci/devices", bus), "../../../"+strings.TrimPrefix(dir, "sys/"))
	return dir
}

// config makes a configuration space with one ACS capability.
func acsConfig(control uint16) string {
	b := make([]byte, 4096)
	const aer, acs = 0x100, 0x148
	binary.LittleEndian.PutUint32(b[aer:], 0x0001|1<<16|acs<<20)
	binary.LittleEndian.PutUint32(b[acs:], acsCapability|1<<16)
	binary.LittleEndian.PutUint16(b[acs+acsControl:], control)
	return string(b)
}

// switchAt adds a PCI switch with its root port to the tree and returns a function for the folder of its downstream
// port n.
func (h *host) switchAt(domainBus, numa int) func(n int) string {
	rootBus := fmt.Sprintf("pci0000:%02x", domainBus)
	rootPort := h.pciFunction("sys/devices/"+rootBus, fmt.Sprintf("0000:%02x:01.0", domainBus), "0x8086", "0x060400", numa)
	up := h.pciFunction(rootPort, fmt.Sprintf("0000:%02x:00.0", domainBus+1), "0x1000", "0x060400", numa)
	h.file(rootPort+"/config", acsConfig(0))
	return func(n int) string {
		dir := h.pciFunction(up, fmt.Sprintf("0000:%02x:%02x.0", domainBus+2, n), "0x1000", "0x060400", numa)
		h.file(dir+"/config", acsConfig(0))
		return dir
	}
}

func (h *host) addGPU(parent string, bus, minor, numa int) {
	address := fmt.Sprintf("0000:%02x:00.0", bus)
	h.pciFunction(parent, address, nvidiaVendor, "0x030200", numa)
	h.file("proc/driver/nvidia/gpus/"+address+"/information",
		fmt.Sprintf("Model: \t\t NVIDIA H800\nIRQ:   \t\t 300\nBus Location: \t %s\nDevice Minor: \t %d\n", address, minor))
	h.file(fmt.Sprintf("dev/nvidia%d", minor), "")
	h.nvml.GPUs = append(h.nvml.GPUs, NVMLGPU{
		Bus: address, Name: "NVIDIA H800", UUID: fmt.Sprintf("GPU-%d", minor), Major: 9,
		MemoryTotal: 80 * gib, MemoryFree: 79 * gib, Fabric: FabricCompleted,
	})
	h.cuda.GPUs = append(h.cuda.GPUs, CUDAGPU{Bus: address, Major: 9, SMs: 132, DMABuf: true, GPURDMA: true})
}

func (h *host) addNIC(parent, name string, bus, numa int, layer string) {
	address := fmt.Sprintf("0000:%02x:00.0", bus)
	dir := h.pciFunction(parent, address, "0x15b3", "0x020700", numa)
	h.link(dir+"/driver", "../../../../../../bus/pci/drivers/mlx5_core")
	h.link("sys/class/infiniband/"+name, "../../"+strings.TrimPrefix(dir, "sys/")+"/infiniband/"+name)
	ib := dir + "/infiniband/" + name
	h.link(ib+"/device", "../../../"+address)
	h.file(ib+"/fw_ver", "28.39.1002\n")
	h.file(ib+"/ports/1/state", "4: ACTIVE\n")
	h.file(ib+"/ports/1/phys_state", "5: LinkUp\n")
	h.file(ib+"/ports/1/rate", "400 Gb/sec (4X NDR)\n")
	h.file(ib+"/ports/1/link_layer", layer+"\n")
	n := len(h.verbs.Devices)
	h.file(fmt.Sprintf("sys/class/infiniband_verbs/uverbs%d/ibdev", n), name+"\n")
	h.file(fmt.Sprintf("dev/infiniband/uverbs%d", n), "")
	h.verbs.Devices = append(h.verbs.Devices, VerbsDevice{Name: name, MaxQP: 131072, MaxQPWR: 32768})
	if layer == "Ethernet" {
		h.addGIDs(ib+"/ports/1", name, n)
	}
}

// addGIDs fills a table as mlx5 does: versions 1 and 2 of the link-local address, then of IPv4.
func (h *host) addGIDs(folder, name string, n int) {
	for i, g := range []struct{ value, kind string }{
		{fmt.Sprintf("fe80:0000:0000:0000:0a00:27ff:fe00:%04x", n), "IB/RoCE v1"},
		{fmt.Sprintf("fe80:0000:0000:0000:0a00:27ff:fe00:%04x", n), "RoCE v2"},
		{fmt.Sprintf("0000:0000:0000:0000:0000:ffff:0a01:%02x05", n), "IB/RoCE v1"},
		{fmt.Sprintf("0000:0000:0000:0000:0000:ffff:0a01:%02x05", n), "RoCE v2"},
		{"0000:0000:0000:0000:0000:0000:0000:0000", ""},
	} {
		h.file(fmt.Sprintf("%s/gids/%d", folder, i), g.value+"\n")
		h.file(fmt.Sprintf("%s/gid_attrs/types/%d", folder, i), g.kind+"\n")
		h.file(fmt.Sprintf("%s/gid_attrs/ndevs/%d", folder, i), fmt.Sprintf("eth%d\n", n))
	}
}

// fullMesh links every GPU with every other one.
func fullMesh(n int) [][]bool {
	m := make([][]bool, n)
	for i := range m {
		m[i] = make([]bool, n)
		for j := range m[i] {
			m[i][j] = true
		}
	}
	return m
}

const nvshmemHeader = "#define NVSHMEM_VENDOR_MAJOR_VERSION 3\n#define NVSHMEM_VENDOR_MINOR_VERSION 4\n#define NVSHMEM_VENDOR_PATCH_VERSION 5\n"

// gpuHost is a healthy machine: 8 H800 behind NVSwitches, 8 NICs, two GPUs and two NICs on each of four PCI switches.
func gpuHost(layer string) *host {
	h := plainHost()
	h.nvml, h.cuda, h.verbs = &NVML{Driver: "580.95.05"}, &CUDA{Version: 13000}, &Verbs{}
	h.file("proc/self/status", "Name:\tpython3\nPPid:\t4200\nCapEff:\t0000000000000000\nCpus_allowed_list:\t0-191\n")
	h.file("proc/meminfo", "MemTotal:       2113929216 kB\nMemAvailable:   2000000000 kB\n")
	h.file("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder@U22)\nGCC version:  gcc version 12.3.0\n")
	h.file("proc/driver/nvidia/params", "ResmanDebugLevel: 4294967295\nEnableStreamMemOPs: 1\nRegistryDwords: \"PeerMappingOverride=1;\"\nRegistryDwordsPerDevice: \"\"\n")
	h.file("etc/modprobe.d/nvidia.conf", optionsLine+"\n")
	for _, f := range []string{"dev/nvidiactl", "dev/nvidia-uvm", "dev/gdrdrv", "sys/module/nvidia_peermem/version"} {
		h.file(f, "")
	}
	h.file("sys/module/gdrdrv/version", "2.5\n")
	for s := range 4 {
		numa := s / 2
		down := h.switchAt(0x10+0x20*s, numa)
		for k := range 2 {
			h.addGPU(down(2*k), 0x18+0x20*s+4*k, 2*s+k, numa)
			h.addNIC(down(2*k+1), fmt.Sprintf("mlx5_%d", 2*s+k), 0x1a+0x20*s+4*k, numa, layer)
		}
	}
	for i := range 4 {
		h.pciFunction("sys/devices/pci0000:f0", fmt.Sprintf("0000:f%d:00.0", i+1), nvidiaVendor, "0x068000", 1)
	}
	h.nvml.NVLink, h.cuda.Peer = fullMesh(8), fullMesh(8)
	h.file("usr/local/lib/python3.12/dist-packages/nvidia/nvshmem/lib/libnvshmem_host.so.3", "\x7fELF...NVSHMEM v%s\x00NVSHMEM v3.4.5\x00")
	h.file("usr/local/lib/python3.12/dist-packages/nvidia/nvshmem/include/non_abi/nvshmem_version.h", nvshmemHeader)
	h.file("usr/local/lib/python3.12/dist-packages/nvidia/nccl/lib/libnccl.so.2", "\x7fELF...NCCL version 2.28.9+cuda13.0\x00")
	h.opt.NVSHMEM, h.opt.Searched = "3.4.5", true
	h.opt.Kernels = []KernelLibrary{{Path: "/opt/deepep/lib/libdeepep_cuda.so", Cubins: []int{80, 90, 100, 120}, PTX: []int{120}, Toolkit: 13000}}
	h.opt.Plan = Plan{DeviceBytes: 3 * gib, HostBytes: 64 << 20, SMs: 24, QPsPerPeer: 12, QPPeers: 8, QPDepth: 1024, MaxTokens: 128}
	return h
}
