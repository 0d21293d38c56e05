package doctor

// NVML holds the values that the NVIDIA management library returns.
type NVML struct {
	Driver string // version of the library, which must equal that of the loaded module
	GPUs   []NVMLGPU
	// NVLink[i][j]: devices i and j can reach each other over NVLink.
	NVLink [][]bool
}

// NVMLGPU is one device in NVML's order.
type NVMLGPU struct {
	Bus         string // PCI address in sysfs' form, 0000:1b:00.0
	Name        string
	UUID        string
	MIG         bool
	Major       int // compute capability
	Minor       int
	MemoryTotal uint64      // bytes
	MemoryFree  uint64      // bytes
	Fabric      FabricState // registration with the NVLink fabric
	Cluster     bool        // part of a multi-node NVLink domain
}

// FabricState is a GPU's registration with the NVLink fabric, as NVML returns it.
type FabricState int

// The states, numbered as NVML does.
const (
	FabricNotSupported FabricState = iota
	FabricNotStarted
	FabricInProgress
	FabricCompleted
)

func (s FabricState) String() string {
	switch s {
	case FabricNotSupported:
		return "not supported"
	case FabricNotStarted:
		return "not started"
	case FabricInProgress:
		return "in progress"
	case FabricCompleted:
		return "completed"
	}
	return "unknown"
}

// CUDA holds the values that the CUDA driver library returns, in CUDA's order of devices (with CUDA_VISIBLE_DEVICES).
type CUDA struct {
	Version int // 13000 is CUDA 13.0
	GPUs    []CUDAGPU
	// Peer[i][j]: device i can map memory of device j.
	Peer [][]bool
}

// CUDAGPU is one device in CUDA's order.
type CUDAGPU struct {
	Bus     string
	Major   int // compute capability
	Minor   int
	SMs     int
	DMABuf  bool // memory can be exported as a dma-buf
	GPURDMA bool // GPUDirect RDMA is supported
	Fabric  bool // memory can be exported as a fabric handle
}

// Verbs holds the values that libibverbs returns.
type Verbs struct {
	Devices []VerbsDevice
}

// VerbsDevice is one RDMA device. Err is set if it could not be opened.
type VerbsDevice struct {
	Name    string
	Err     string
	MaxQP   int
	MaxQPWR int
}
