package doctor

import "github.com/deepep-go/deepep/internal/plan"

// Options is the plan with which the checks compare the host. Zero fields are not compared.
type Options struct {
	For     For
	Version string // of this library
	PID     int    // examine this process's limits, environment, namespaces and maps; 0: this process
	Ranks   int    // ranks on this host
	Plan    Plan
	// Topology is the planned group, on all hosts; zero: not known.
	Topology plan.Topology
	Kernels  []KernelLibrary
	// Searched: Kernels and NVSHMEM are what was found in the places where libraries are looked for. Else nobody looked.
	Searched bool
	// NVSHMEM is the version that libdeepep_nvshmem.so was built with, "" if unknown.
	NVSHMEM string
	// StartMethod is multiprocessing's, if the caller knows it: fork, spawn or forkserver.
	StartMethod string
}

// Plan is the planned use of one rank.
type Plan struct {
	DeviceBytes uint64 // GPU memory
	HostBytes   uint64 // host memory; for the CPU engine its buffers
	SMs         int    // multiprocessors for communication
	QPsPerPeer  int    // queue pairs of a rank toward a peer, on all of its NICs together
	QPPeers     int    // peers that it has queue pairs to
	NICs        int    // of a rank; 0: its share of those found
	QPDepth     int    // work requests a queue pair
	MaxTokens   int    // B, num_max_dispatch_tokens_per_rank
}

// KernelLibrary is a CUDA kernel library that was found.
type KernelLibrary struct {
	Path    string
	Cubins  []int  // architectures with machine code, 90 for sm_90
	PTX     []int  // architectures with PTX, compiled by the driver for newer devices
	Toolkit int    // CUDA version it was built with, 13000; 0 if unknown
	Reason  string // why it cannot be loaded or finds no device; "" if it works or was not tried
}

// has reports whether the library runs on a device: it has machine code of the same major and at most the same minor
// number, or PTX of at most its capability.
func (k KernelLibrary) has(major, minor int) bool {
	cc := major*10 + minor
	for _, a := range k.Cubins {
		if a/10 == major && a <= cc {
			return true
		}
	}
	for _, a := range k.PTX {
		if a <= cc {
			return true
		}
	}
	return false
}
