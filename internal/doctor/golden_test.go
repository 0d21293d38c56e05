package doctor

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/deepep-go/deepep/internal/plan"
)

var update = flag.Bool("update", false, "write the golden files")

// hosts is the table of invented machines. first is the check whose FAIL must come first, "" for none; the golden file
// has the whole report.
var hosts = []struct {
	name  string
	use   For
	first string
	make  func() *host
}{
	{"healthy-h800-infiniband", ForInternode, "", func() *host { return gpuHost("InfiniBand") }},
	{"healthy-h800-roce", ForAny, "", func() *host {
		return gpuHost("Ethernet").setenv("NVSHMEM_IB_GID_INDEX=3", "NVSHMEM_IB_TRAFFIC_CLASS=106")
	}},
	{"no-gpu", ForAny, "", plainHost},
	{"no-gpu-for-cpu", ForCPU, "", plainHost},
	{"no-gpu-for-intranode", ForIntranode, "gpu", plainHost},
	{"container-no-ipc-lock", ForInternode, "memlock", func() *host {
		h := gpuHost("InfiniBand").file(".dockerenv", "").remove("etc/modprobe.d/nvidia.conf")
		h.replace("proc/self/limits", "Max locked memory         unlimited            unlimited", "Max locked memory         65536                65536    ")
		h.link("proc/self/ns/ipc", "ipc:[4026532871]")
		h.shmSize = 64 << 20
		return h
	}},
	{"roce-wrong-gid", ForInternode, "gid", func() *host { return gpuHost("Ethernet").setenv("NVSHMEM_IB_GID_INDEX=0") }},
	{"roce-no-address", ForInternode, "gid", func() *host {
		h := gpuHost("Ethernet")
		dir := h.portFolder("mlx5_2")
		h.remove(dir + "/gids/1").remove(dir + "/gids/2").remove(dir + "/gids/3")
		return h
	}},
	{"nics-named-wrong", ForInternode, "nics", func() *host {
		return gpuHost("InfiniBand").setenv("DEEPEP_NICS=mlx5_0,mlx5_8", "DEEPEP_NUM_NICS=2", "NVSHMEM_ENABLE_NIC_PE_MAPPING=1", "DEEPEP_TRAFFIC_CLASS=106")
	}},
	{"keys-on-disk-not-live", ForInternode, "driver-params", func() *host {
		return gpuHost("InfiniBand").file("proc/driver/nvidia/params", "EnableStreamMemOPs: 0\nRegistryDwords: \"\"\n")
	}},
	{"keys-without-options-nvidia", ForInternode, "driver-params", func() *host {
		h := gpuHost("InfiniBand").file("proc/driver/nvidia/params", "EnableStreamMemOPs: 0\nRegistryDwords: \"\"\n")
		return h.file("etc/modprobe.d/nvidia.conf", "# for RDMA\nNVreg_EnableStreamMemOPs=1 NVreg_RegistryDwords=\"PeerMappingOverride=1;\"\n")
	}},
	{"two-gpus-on-one-nic", ForInternode, "", func() *host {
		h := gpuHost("InfiniBand")
		return h.moveNIC("mlx5_1", 0xe0, 1)
	}},
	{"gpu-visible-not-in-container", ForIntranode, "gpu", func() *host {
		h := gpuHost("InfiniBand").file(".dockerenv", "")
		for i := range 8 {
			h.remove("dev/nvidia" + string(rune('0'+i)))
		}
		h.nvml, h.cuda = nil, nil
		return h
	}},
	{"driver-library-mismatch", ForIntranode, "driver", func() *host {
		h := gpuHost("InfiniBand")
		h.nvml, h.cuda = nil, nil
		h.nvmlErr = errors.New("nvmlInit: Driver/library version mismatch (18)")
		return h
	}},
	{"no-code-for-this-gpu", ForIntranode, "compute", func() *host {
		h := gpuHost("InfiniBand")
		h.opt.Kernels[0].Cubins, h.opt.Kernels[0].PTX = []int{100, 120}, []int{120}
		return h
	}},
	{"old-driver-own-build", ForIntranode, "", func() *host {
		h := gpuHost("InfiniBand").file("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.90.07  Release Build\n")
		h.nvml.Driver, h.opt.Kernels[0].Toolkit = "550.90.07", 0
		return h
	}},
	{"library-finds-no-device", ForIntranode, "compute", func() *host {
		h := gpuHost("InfiniBand").file("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.90.07  Release Build\n")
		h.nvml.Driver, h.opt.Kernels[0].Toolkit = "550.90.07", 0
		h.opt.Kernels[0].Reason = "CUDA driver version is insufficient for CUDA runtime version (error 35)"
		return h
	}},
	{"old-driver-old-gpu", ForIntranode, "driver", func() *host {
		h := gpuHost("InfiniBand")
		h.file("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\n")
		h.nvml.Driver = "535.183.01"
		for i := range h.nvml.GPUs {
			h.nvml.GPUs[i].Name, h.nvml.GPUs[i].Major, h.nvml.GPUs[i].Minor = "Tesla V100-SXM2-32GB", 7, 0
			h.nvml.GPUs[i].Fabric = FabricNotSupported
		}
		return h
	}},
	{"fabric-manager-down", ForIntranode, "fabric-manager", func() *host {
		h := gpuHost("InfiniBand")
		for i := range h.nvml.GPUs {
			h.nvml.GPUs[i].Fabric = FabricInProgress
		}
		return h
	}},
	{"pcie-cards-two-islands", ForIntranode, "peer-access", func() *host {
		h := gpuHost("InfiniBand")
		for i := range 8 {
			h.nvml.GPUs[i].Fabric = FabricNotSupported
			for j := range 8 {
				h.nvml.NVLink[i][j] = i/4 == j/4
				h.cuda.Peer[i][j] = i/4 == j/4
			}
		}
		return h.remove("sys/bus/pci/devices/0000:f1:00.0").remove("sys/bus/pci/devices/0000:f2:00.0").
			remove("sys/bus/pci/devices/0000:f3:00.0").remove("sys/bus/pci/devices/0000:f4:00.0")
	}},
	{"nvlink-domain-without-channel", ForIntranode, "", func() *host {
		h := gpuHost("InfiniBand")
		for i := range h.nvml.GPUs {
			h.nvml.GPUs[i].Name, h.nvml.GPUs[i].Major, h.nvml.GPUs[i].Cluster = "NVIDIA GB200", 10, true
		}
		return h
	}},
	{"mig-and-plan-too-big", ForIntranode, "mig", func() *host {
		h := gpuHost("InfiniBand")
		for i := range h.nvml.GPUs {
			h.nvml.GPUs[i].MIG = true
			h.nvml.GPUs[i].MemoryFree = 2 * gib
			h.cuda.GPUs[i].SMs = 16
		}
		return h
	}},
	{"variables-in-conflict", ForInternode, "gpu-rdma", func() *host {
		h := gpuHost("InfiniBand").setenv("NVSHMEM_IB_TRAFFIC_CLASS=16", "NVSHMEM_IBGDA_QP_DEPTH=1024", "NVSHMEM_QP_DEPTH=1024",
			"NVSHMEM_IB_ENABLE_IBGDA=0", "NVSHMEM_IBGDA_NIC_HANDLER=cpu", "NVSHMEM_IBGDA_RC_MAP_BY=thread", "NVSHMEM_DISABLE_P2P=1",
			"NVSHMEM_IBGDA_NUM_RC_PER_PE=0", "NVSHMEM_IB_DISABLE_DMABUF=1", "NVSHMEM_HCA_PE_MAPPING=mlx5_0:1:2", "NVSHMEM_REMOTE_TRANSPORT=ibrc", "NCCL_P2P_DISABLE=1")
		h.opt.Plan.MaxTokens = 1024
		h.denied["dev/gdrdrv"] = true
		return h.remove("sys/module/nvidia_peermem")
	}},
	{"nvshmem-copies-differ", ForInternode, "nvshmem", func() *host {
		h := gpuHost("InfiniBand").setenv("NVSHMEM_HOME=/opt/nvshmem")
		h.file("opt/nvshmem/lib/libnvshmem_host.so.3", "NVSHMEM v3.2.5\x00")
		h.file("opt/nvshmem/include/non_abi/nvshmem_version.h", strings.ReplaceAll(nvshmemHeader, "MINOR_VERSION 4", "MINOR_VERSION 3"))
		h.file("opt/nccl/lib/libnccl.so.2", "NCCL version 2.21.5+cuda12.4\x00")
		return h
	}},
	{"nvshmem-device-half-differs", ForInternode, "nvshmem", func() *host {
		h := gpuHost("InfiniBand")
		h.opt.NVSHMEM = "3.5.19"
		return h
	}},
	{"qp-budget-too-small", ForInternode, "qp-budget", func() *host {
		h := gpuHost("InfiniBand")
		h.verbs.Devices[0].MaxQP = 64
		h.verbs.Devices[1].MaxQPWR = 512
		return h
	}},
	{"ports-down-and-slow", ForInternode, "", func() *host {
		h := gpuHost("InfiniBand")
		h.file(h.portFolder("mlx5_3")+"/state", "1: DOWN\n").file(h.portFolder("mlx5_3")+"/phys_state", "3: Disabled\n")
		h.file(h.portFolder("mlx5_4")+"/state", "2: INIT\n")
		h.file(h.portFolder("mlx5_5")+"/rate", "100 Gb/sec (4X EDR)\n")
		return h
	}},
	{"no-peermem-proprietary", ForInternode, "gpu-rdma", func() *host {
		h := gpuHost("InfiniBand").remove("sys/module/nvidia_peermem").remove("dev/gdrdrv")
		h.file("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Wed Sep 17\n")
		h.cuda = nil
		return h
	}},
	{"verbs-not-permitted", ForInternode, "verbs", func() *host {
		h := gpuHost("InfiniBand")
		h.denied["dev/infiniband/uverbs0"] = true
		h.remove("dev/infiniband/uverbs1")
		h.verbs.Devices[2].Err = "provider libmlx5-rdmav34.so not found"
		return h
	}},
	{"iommu-and-acs", ForInternode, "", func() *host {
		h := gpuHost("InfiniBand").file("sys/class/iommu/dmar0/name", "")
		h.replace("proc/cmdline", "quiet", "quiet intel_iommu=on")
		for name, f := range h.files {
			if strings.HasSuffix(name, "/config") {
				f.Data = []byte(acsConfig(0x1d))
			}
		}
		return h
	}},
	{"small-container", ForCPU, "address-space", func() *host {
		h := plainHost().file("run/.containerenv", "")
		h.replace("proc/self/limits", "Max address space         unlimited            unlimited", "Max address space         2147483648           2147483648")
		h.file("proc/self/cgroup", "0::/\n").file("sys/fs/cgroup/cpu.max", "150000 100000\n")
		h.file("sys/fs/cgroup/memory.max", "4294967296\n").file("sys/fs/cgroup/memory.current", "3221225472\n")
		h.replace("proc/sys/kernel/yama/ptrace_scope", "1", "3")
		h.shmSize = 64 << 20
		h.opt.Ranks, h.opt.Plan.HostBytes = 4, 512<<20
		return h
	}},
	{"settings-misspelt", ForAny, "", func() *host {
		return plainHost().setenv("DEEPEP_TIMEOUT=5", "DEEPEP_ENGINE=cpu", "DEEPEP_LIBRARY=/opt/libdeepep.so", "DEEPEP_ZERO_COPY_BYTES=0", "DEEPEP_NUM_QPS_PER_RANK=8",
			"DEEPEP_BUILD=cpu", "DEEPEP_RECYCLE_OUTPUTS=0", "DEEPEP_TORCH_FACE=1")
	}},
	{"settings-switch-bad", ForCPU, "settings", func() *host {
		return plainHost().setenv("DEEPEP_RECYCLE_OUTPUTS=off", "DEEPEP_TORCH_FACE= 0 ")
	}},
	{"gpu-without-library", ForAny, "library", func() *host {
		h := gpuHost("InfiniBand")
		h.opt.Kernels, h.opt.NVSHMEM = nil, ""
		return h
	}},
	{"nodes-without-library", ForInternode, "library", func() *host {
		h := gpuHost("InfiniBand")
		h.opt.NVSHMEM, h.opt.Topology = "", plan.Topology{Ranks: 64, Peers: 8}
		return h
	}},
	{"more-ranks-than-gpus", ForInternode, "", func() *host {
		h := gpuHost("InfiniBand")
		h.opt.Topology = plan.Topology{Ranks: 32, Peers: 16}
		return h
	}},
	{"queue-settings-of-guides", ForInternode, "settings", func() *host {
		return gpuHost("InfiniBand").setenv("NVSHMEM_IBGDA_QP_DEPTH=1024", "DEEP_EP_NUM_MAX_RDMA_TOKENS=2048", "DEEPEP_QP_ORDER=spread")
	}},
	{"queue-settings-on-one-node", ForInternode, "", func() *host {
		h := gpuHost("InfiniBand").setenv("NVSHMEM_IBGDA_QP_DEPTH=1024", "DEEP_EP_NUM_MAX_RDMA_TOKENS=2048", "DEEPEP_QP_ORDER=spread")
		h.opt.Topology = plan.Topology{Ranks: 8, Peers: 8}
		return h
	}},
	{"too-many-nodes", ForInternode, "settings", func() *host {
		h := gpuHost("InfiniBand").setenv("NUM_MAX_RDMA_PEERS=2")
		h.opt.Topology = plan.Topology{Ranks: 24, Peers: 8}
		return h
	}},
	{"settings-bad", ForCPU, "settings", func() *host { return plainHost().setenv("DEEPEP_TIMEOUT_MS=soon", "DEEPEP_ENGINE=rocm") }},
	{"python-too-old", ForCPU, "python", func() *host {
		h := plainHost().remove("usr/bin/python3").file("venv/pyvenv.cfg", "home = /usr/bin\nversion = 3.8.10\n")
		return h.setenv("VIRTUAL_ENV=/venv")
	}},
	{"forked-after-load", ForCPU, "python", func() *host {
		h := plainHost()
		for _, f := range []string{"limits", "status", "cgroup"} {
			h.file("proc/77/"+f, string(h.files["proc/self/"+f].Data))
		}
		h.replace("proc/77/status", "PPid:\t4200", "PPid:\t70")
		h.file("proc/77/cmdline", "python3\x00train.py\x00").file("proc/70/cmdline", "python3\x00train.py\x00")
		h.file("proc/70/maps", "7f00-7f01 r-xp 0 00:00 1 /usr/lib/libdeepep.so\n")
		h.link("proc/77/exe", "/usr/bin/python3.11").link("proc/77/ns/ipc", initialIPC)
		h.opt.PID = 77
		return h
	}},
}

// portFolder is the real folder of a device's first port.
func (h *host) portFolder(name string) string {
	return h.root().resolve("sys/class/infiniband/"+name) + "/ports/1"
}

// moveNIC moves a device to a separate root port elsewhere in the tree.
func (h *host) moveNIC(name string, domainBus, numa int) *host {
	old := h.root().resolve("sys/class/infiniband/" + name)
	bus := strings.TrimPrefix(h.root().link(old+"/device"), "../../../")
	oldDir := strings.TrimSuffix(old, "/infiniband/"+name)
	parent := h.switchAt(domainBus, numa)(0)
	for from, f := range h.files {
		if rest, ok := strings.CutPrefix(from, oldDir+"/"); ok {
			h.files[parent+"/"+bus+"/"+rest] = f
			delete(h.files, from)
		}
	}
	h.pciFunction(parent, bus, "0x15b3", "0x020700", numa)
	return h.link("sys/class/infiniband/"+name, "../../"+strings.TrimPrefix(parent, "sys/")+"/"+bus+"/infiniband/"+name)
}

func TestGoldenHosts(t *testing.T) {
	for _, c := range hosts {
		t.Run(c.name, func(t *testing.T) {
			h := c.make()
			h.opt.For, h.opt.Version = c.use, "1.2.3"
			r, err := Run(context.Background(), h.root(), h.opt)
			if err != nil {
				t.Fatal(err)
			}
			var out bytes.Buffer
			if err := r.WriteText(&out, false, nil); err != nil {
				t.Fatal(err)
			}
			compareGolden(t, c.name+".txt", out.Bytes())

			first, found := FirstFail(context.Background(), h.root(), h.opt)
			if got := first.Check; got != c.first || found != (c.first != "") {
				t.Errorf("first FAIL is %q, want %q", got, c.first)
			}
			if (r.Status == Fail) != found {
				t.Errorf("status %s, but FirstFail found %v", r.Status, found)
			}
		})
	}
}

// What the doctor tells a user to type ends the complaint: it asks what construction asks.
func TestTheFixOfQueueSettingsWorks(t *testing.T) {
	settings := func(exports ...string) (l Line) {
		h := gpuHost("InfiniBand").setenv("NVSHMEM_IBGDA_QP_DEPTH=1024", "DEEP_EP_NUM_MAX_RDMA_TOKENS=2048").setenv(exports...)
		l, _ = FirstFail(context.Background(), h.root(), Options{For: ForInternode})
		return l
	}
	l := settings()
	export, found := strings.CutPrefix(l.Fix, "export ")
	if l.Check != "settings" || !found {
		t.Fatalf("%s", l)
	}
	if after := settings(export); after.Check == "settings" {
		t.Errorf("after %q: %s", l.Fix, after)
	}
	h := gpuHost("InfiniBand").setenv("NVSHMEM_IBGDA_QP_DEPTH=1024", "DEEP_EP_NUM_MAX_RDMA_TOKENS=2048")
	r, err := Run(context.Background(), h.root(), Options{})
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range r.Lines {
		if l.Subject == "NVSHMEM_IBGDA_QP_DEPTH" && !strings.Contains(l.Fix, "NVSHMEM_QP_DEPTH=8192") {
			t.Errorf("this fix leads to the next refusal: %s", l)
		}
	}
}

func TestGoldenJSON(t *testing.T) {
	h := plainHost()
	r, err := Run(context.Background(), h.root(), Options{For: ForIntranode, Version: "1.2.3"})
	if err != nil {
		t.Fatal(err)
	}
	out, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	compareGolden(t, "no-gpu.json", append(out, '\n'))
}

// Every WARN and FAIL of every host has a cause, a file and a fix.
func TestProblemsAreComplete(t *testing.T) {
	seen := map[string]bool{}
	for _, c := range hosts {
		h := c.make()
		h.opt.For = c.use
		r, err := Run(context.Background(), h.root(), h.opt)
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range r.Lines {
			problem := l.Status == Warn || l.Status == Fail
			if problem {
				seen[l.Check] = true
			}
			if l.Read == "" || problem && (l.Cause == "" || l.Fix == "" || l.File == "") {
				t.Errorf("%s: incomplete line: %+v", c.name, l)
			}
			if strings.Contains(l.Read, "the check itself failed") {
				t.Errorf("%s: %s", c.name, l)
			}
		}
	}
	for _, name := range Names() {
		if !seen[name] {
			t.Errorf("no made-up host has a problem with %s", name)
		}
	}
}

func compareGolden(t *testing.T, name string, got []byte) {
	t.Helper()
	file := filepath.Join("testdata", name)
	if *update {
		if err := os.MkdirAll("testdata", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, got, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatalf("%v (go test -update writes it)", err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%s differs (go test -update writes it)\n--- got ---\n%s\n--- want ---\n%s", name, got, want)
	}
}
