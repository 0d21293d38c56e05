package doctor

import (
	"os"
	"strings"
)

// nicVariables are what NVSHMEM reads to choose among a host's NICs.
var nicVariables = []string{"NVSHMEM_HCA_LIST", "NVSHMEM_HCA_PREFIX", "NVSHMEM_ENABLE_NIC_PE_MAPPING"}

// NICsHere is NICs of this machine, with the variables read through get.
func NICsHere(get func(name string) string) (count int, oneEach bool) {
	root := Root{FS: os.DirFS("/")}
	for _, name := range nicVariables {
		if value := get(name); value != "" {
			root.Environ = append(root.Environ, name+"="+value)
		}
	}
	return NICs(root)
}

// NICs counts the RDMA devices that NVSHMEM can use on a host: those with an active port and a name that begins with
// NVSHMEM_HCA_PREFIX (mlx5), unless NVSHMEM_HCA_LIST leaves them out. oneEach: NVSHMEM_ENABLE_NIC_PE_MAPPING gives each
// rank a single one; without it ranks have those that are nearest to their GPUs.
func NICs(root Root) (count int, oneEach bool) {
	e := &exam{root: root}
	prefix, set := root.env("NVSHMEM_HCA_PREFIX")
	if !set || prefix == "" {
		prefix = "mlx5"
	}
	for _, n := range e.nicList() {
		if n.active() && strings.HasPrefix(n.name, prefix) && e.chosen(n) {
			count++
		}
	}
	mapping, _ := root.env("NVSHMEM_ENABLE_NIC_PE_MAPPING")
	return count, truth(mapping)
}
