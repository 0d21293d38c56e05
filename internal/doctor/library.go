package doctor

import (
	"path"
	"strings"
)

// BuildGPU and BuildNodes are the fixes for libraries that are not there.
const (
	BuildGPU   = "`make cuda` builds libdeepep_cuda.so (README, GPUs); DEEPEP_KERNELS names its folder if it lies elsewhere"
	BuildNodes = "`make cuda nvshmem` builds libdeepep_nvshmem.so (README, GPUs), which lies beside libdeepep_cuda.so"
)

// SeesGPU reports whether a process sees an NVIDIA GPU: a device file, and a driver that knows a GPU. It starts nothing.
func SeesGPU(root Root) bool {
	return len(root.glob("dev/nvidia[0-9]*")) > 0 && (root.exists("proc/driver/nvidia/version") || len(root.glob("proc/driver/nvidia/gpus/*")) > 0)
}

// checkLibrary finds GPUs that no kernel library of this installation can use: engine "auto" is then the CPU engine, and
// nodes cannot be joined.
func checkLibrary(e *exam) {
	here := len(e.usableGPUs()) > 0 || SeesGPU(e.root)
	switch {
	case !e.opt.Searched:
		e.na(Line{Read: "not looked for", File: "libdeepep_cuda.so"})
		return
	case !here && len(e.opt.Kernels) == 0:
		e.na(Line{Read: "no GPU, none needed", File: "libdeepep_cuda.so"})
		return
	case len(e.opt.Kernels) == 0:
		e.fail(Line{Read: "GPUs are here, libdeepep_cuda.so is not", File: "libdeepep_cuda.so",
			Cause: "this installation was built without it (left_out.txt beside its libraries says why); engine \"auto\" is then the CPU engine, and tensors on GPUs are refused", Fix: BuildGPU})
	default:
		var found []string
		for _, k := range e.opt.Kernels {
			found = append(found, k.Path)
		}
		e.ok(Line{Read: strings.Join(found, ", "), File: path.Base(found[0])})
	}
	e.nodesLibrary()
}

// nodesLibrary adds the line about the library that joins nodes. Where nobody said that nodes are to be joined, RDMA
// devices beside the GPUs suggest it.
func (e *exam) nodesLibrary() {
	planned := e.opt.Topology.Ranks > 0
	several := planned && e.opt.Topology.Nodes() > 1 || !planned && e.opt.For == ForInternode
	l := Line{Subject: "nodes", File: "libdeepep_nvshmem.so"}
	switch {
	case e.opt.NVSHMEM != "":
		l.Read = "built with NVSHMEM " + e.opt.NVSHMEM
		e.ok(l)
	case several || !planned && e.opt.For == ForAny && len(e.nicList()) > 0:
		l.Read, l.Fix = "libdeepep_nvshmem.so is not here", BuildNodes
		l.Cause = "ranks on GPUs of other nodes are reached through it alone: construction refuses a buffer of several nodes"
		e.when(several, l)
	default:
		l.Read = "not here, and not needed inside one node"
		e.na(l)
	}
}
