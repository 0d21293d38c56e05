package doctor

import (
	"path"
	"slices"
	"strings"
)

// gpu is an NVIDIA GPU in the PCI tree.
type gpu struct {
	bus   string   // 0000:1b:00.0
	chain []string // PCI functions from the root complex to it
	numa  int      // -1: unknown
	minor string   // number of its device file; "" if it has no driver
}

// nic is an RDMA device.
type nic struct {
	name   string // mlx5_0
	bus    string // "" if it is not a PCI device
	chain  []string
	numa   int
	driver string // mlx5_core
	ports  []port
}

// port is one port of an RDMA device.
type port struct {
	number  string
	state   string // ACTIVE
	phys    string // LinkUp
	rate    string // 400 Gb/sec (4X NDR)
	layer   string // InfiniBand or Ethernet
	folder  string
	subject string // mlx5_0/1
}

const (
	pciDevices   = "sys/bus/pci/devices"
	nvidiaVendor = "0x10de"
)

// pciClass returns the NVIDIA functions of a PCI class, given by its first digits.
func (e *exam) nvidiaFunctions(class string) []string {
	var buses []string
	for _, dir := range e.root.glob(pciDevices + "/*") {
		if e.root.text(path.Join(dir, "vendor")) == nvidiaVendor && strings.HasPrefix(e.root.text(path.Join(dir, "class")), class) {
			buses = append(buses, path.Base(dir))
		}
	}
	return buses
}

// chain is the path of a PCI function in the tree: pci0000:15, its root port, switches, itself. Without the tree it is
// the function alone.
func (e *exam) chain(bus string) []string {
	full := e.root.resolve(path.Join(pciDevices, bus))
	_, rest, found := strings.Cut(full, "sys/devices/")
	if !found {
		return []string{bus}
	}
	return strings.Split(rest, "/")
}

// gpuList lists the GPUs in the PCI tree in bus order, which is CUDA's order with CUDA_DEVICE_ORDER=PCI_BUS_ID.
func (e *exam) gpuList() []gpu {
	list, _ := e.gpus.get(func() ([]gpu, error) {
		var gpus []gpu
		for _, class := range []string{"0x0300", "0x0302"} { // VGA and 3D controllers
			for _, bus := range e.nvidiaFunctions(class) {
				g := gpu{bus: bus, chain: e.chain(bus), numa: e.numaNode(bus)}
				info := e.root.text(path.Join("proc/driver/nvidia/gpus", bus, "information"))
				g.minor, _ = keyed(info, "Device Minor")
				gpus = append(gpus, g)
			}
		}
		slices.SortFunc(gpus, func(a, b gpu) int { return strings.Compare(a.bus, b.bus) })
		return gpus, nil
	})
	return list
}

// usableGPUs lists the GPUs whose device file this process sees: a container shows the PCI tree of the whole host.
func (e *exam) usableGPUs() []gpu {
	var usable []gpu
	for _, g := range e.gpuList() {
		if g.minor != "" && e.root.exists("dev/nvidia"+g.minor) {
			usable = append(usable, g)
		}
	}
	return usable
}

func (e *exam) numaNode(bus string) int {
	n, ok := e.root.number(path.Join(pciDevices, bus, "numa_node"))
	if !ok {
		return -1
	}
	return int(n)
}

// nicList lists the RDMA devices with their ports.
func (e *exam) nicList() []nic {
	list, _ := e.nics.get(func() ([]nic, error) {
		var nics []nic
		for _, dir := range e.root.glob("sys/class/infiniband/*") {
			n := nic{name: path.Base(dir), numa: -1}
			if device := e.root.link(path.Join(dir, "device")); device != "" {
				n.bus = path.Base(device)
				n.chain, n.numa = e.chain(n.bus), e.numaNode(n.bus)
				n.driver = path.Base(e.root.link(path.Join(pciDevices, n.bus, "driver")))
			}
			for _, folder := range e.root.glob(dir + "/ports/*") {
				n.ports = append(n.ports, e.port(n.name, folder))
			}
			nics = append(nics, n)
		}
		return nics, nil
	})
	return list
}

func (e *exam) port(device, folder string) port {
	p := port{number: path.Base(folder), folder: folder}
	p.state = afterColon(e.root.text(path.Join(folder, "state")))
	p.phys = afterColon(e.root.text(path.Join(folder, "phys_state")))
	p.rate = e.root.text(path.Join(folder, "rate"))
	p.layer = e.root.text(path.Join(folder, "link_layer"))
	p.subject = device + "/" + p.number
	return p
}

// afterColon turns "4: ACTIVE" into "ACTIVE".
func afterColon(s string) string {
	if _, after, found := strings.Cut(s, ": "); found {
		return after
	}
	return s
}

func (n nic) active() bool {
	return slices.ContainsFunc(n.ports, func(p port) bool { return p.state == "ACTIVE" })
}

// distance between two PCI functions, in nvidia-smi's words, in ascending order.
type distance int

const (
	pix  distance = iota // at most one bridge between them
	pxb                  // several bridges, no host bridge
	phb                  // through the host bridge of one root complex
	node                 // between root complexes of one NUMA node
	sys                  // across NUMA nodes
)

func (d distance) String() string { return [...]string{"PIX", "PXB", "PHB", "NODE", "SYS"}[d] }

// between is the distance of two functions.
func between(a, b []string, numaA, numaB int) distance {
	common := 0
	for common < len(a) && common < len(b) && a[common] == b[common] {
		common++
	}
	switch {
	case common >= 2: // they share at least the root port
		// After the last common bridge a switch has an upstream and a downstream port, so that with one switch between
		// them at most a port and the function are left.
		if len(a)-common <= 2 && len(b)-common <= 2 {
			return pix
		}
		return pxb
	case common == 1:
		return phb
	case numaA == numaB && numaA >= 0:
		return node
	}
	return sys
}
