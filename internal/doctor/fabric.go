package doctor

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// running reports whether a process of this name (its first 15 letters) runs. A container does not show the host's
// processes.
func (e *exam) running(name string) bool {
	if len(name) > 15 {
		name = name[:15] // the kernel keeps 15 letters
	}
	for _, f := range e.root.glob("proc/[0-9]*/comm") {
		if e.root.text(f) == name {
			return true
		}
	}
	return false
}

// checkFabricManager checks the fabric manager: on GPUs with NVSwitches CUDA starts only after it has set up the links.
func checkFabricManager(e *exam) {
	switches := e.nvidiaFunctions("0x0680")
	nvml, err := e.askNVML()
	var states []FabricState
	if err == nil {
		for _, g := range nvml.GPUs {
			states = append(states, g.Fabric)
		}
	}
	supported, notDone := 0, -1
	for i, s := range states {
		if s != FabricNotSupported {
			supported++
			if s != FabricCompleted && notDone < 0 {
				notDone = i
			}
		}
	}
	file := "libnvidia-ml.so.1"
	switch {
	case len(switches) == 0 && supported == 0:
		e.na(Line{Read: "no NVSwitch", File: "/" + pciDevices})
	case notDone >= 0:
		l := Line{Read: fmt.Sprintf("GPU %d: fabric state %s", notDone, states[notDone]), File: file,
			Cause: "the fabric manager has not set up the NVLinks; CUDA fails with error 802, system not yet initialized"}
		l.Fix = e.onHost() + "systemctl enable --now nvidia-fabricmanager (its version must equal the driver's); journalctl -u nvidia-fabricmanager says why it stopped"
		e.fail(l)
	case supported > 0:
		e.ok(Line{Read: "fabric state completed on " + plural(supported, "GPU"), File: file, Facts: map[string]string{"state": "completed"}})
	case e.running("nv-fabricmanager"):
		e.ok(Line{Read: plural(len(switches), "NVSwitch") + "es, nv-fabricmanager runs", File: "/proc"})
	default:
		l := Line{Read: fmt.Sprintf("NVSwitches: %d, nv-fabricmanager not seen", len(switches)), File: "/proc",
			Cause: "without it CUDA fails with error 802, system not yet initialized",
			Fix:   "systemctl enable --now nvidia-fabricmanager (its version must equal the driver's)"}
		if e.inContainer() {
			l.Read += " (a container does not show the host's processes)"
			l.Cause, l.Fix = "", ""
			e.na(l)
			return
		}
		e.fail(l)
	}
}

// checkIMEX checks the channels of the IMEX service, through which nodes of one NVLink domain (GB200) share memory.
func checkIMEX(e *exam) {
	const channel, config = "dev/nvidia-caps-imex-channels/channel0", "etc/nvidia-imex/nodes_config.cfg"
	nvml, err := e.askNVML()
	cluster := false
	if err == nil {
		for _, g := range nvml.GPUs {
			cluster = cluster || g.Cluster
		}
	}
	if !cluster && !e.root.exists("dev/nvidia-caps-imex-channels") {
		e.na(Line{Read: "GPUs are in no multi-node NVLink domain", File: "/dev/nvidia-caps-imex-channels"})
		return
	}
	l := Line{File: "/" + channel, Read: "channel0"}
	switch {
	case !e.root.exists(channel):
		l.Read = "no IMEX channel"
		l.Cause = "NVSHMEM cannot map GPUs of other hosts (allow_mnnvl): exporting a fabric handle fails"
		l.Fix = e.onHost() + "options nvidia NVreg_CreateImexChannel0=1 in /etc/modprobe.d/nvidia.conf and reboot; container: --device /dev/nvidia-caps-imex-channels/channel0"
		e.warn(l)
	case e.root.access(channel) != nil:
		l.Read = "channel0: " + e.root.access(channel).Error()
		l.Cause = "the channel may not be opened, so GPUs of other nodes cannot be mapped"
		l.Fix = "container: --device /dev/nvidia-caps-imex-channels/channel0; host: check the mode of " + l.File
		e.warn(l)
	default:
		nodes := 0
		for line := range strings.Lines(e.root.text(config)) {
			if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "#") {
				nodes++
			}
		}
		if nodes > 0 {
			l.Read += fmt.Sprintf(", %s in /%s", plural(nodes, "node"), config)
			l.Facts = map[string]string{"nodes": strconv.Itoa(nodes)}
		}
		e.ok(l)
	}
}

// checkPeerAccess finds which GPUs can access each other's memory, and over which links.
func checkPeerAccess(e *exam) {
	cuda, err := e.askCUDA()
	nvml, errN := e.askNVML()
	if err != nil && errN != nil {
		e.na(Line{Read: "peer access not known: " + errors.Join(err, errN).Error(), File: "libcuda.so.1"})
		return
	}
	if err == nil && len(cuda.Peer) > 1 {
		e.peerMatrix(cuda)
	}
	if errN == nil && len(nvml.NVLink) > 1 {
		e.islands(nvml)
	}
	if (err != nil || len(cuda.Peer) <= 1) && (errN != nil || len(nvml.NVLink) <= 1) {
		e.na(Line{Read: "fewer than two GPUs", File: "libcuda.so.1"})
	}
}

func (e *exam) peerMatrix(cuda *CUDA) {
	var bad []string
	for i, row := range cuda.Peer {
		for j, can := range row {
			if i != j && !can {
				bad = append(bad, fmt.Sprintf("%d→%d", i, j))
			}
		}
	}
	l := Line{Read: fmt.Sprintf("all %d GPUs map each other", len(cuda.Peer)), File: "libcuda.so.1", Facts: map[string]string{"all": strconv.FormatBool(len(bad) == 0)}}
	if len(bad) == 0 {
		e.ok(l)
		return
	}
	shown := bad[:min(len(bad), 6)]
	l.Read = fmt.Sprintf("%s cannot map: %s", plural(len(bad), "pair"), strings.Join(shown, " "))
	if len(bad) > len(shown) {
		l.Read += " …"
	}
	l.Cause = "ranks of one node write straight into each other's memory; these devices do not allow it (no NVLink between them, a virtual machine, ACS or IOMMU, or a consumer card)"
	l.Fix = "choose GPUs of one island with CUDA_VISIBLE_DEVICES; nvidia-smi topo -p2p w shows the pairs; see the lines iommu and acs"
	e.when(e.opt.For != ForAny, l)
}

// islands lists the sets of GPUs that NVLink joins.
func (e *exam) islands(nvml *NVML) {
	groups := components(nvml.NVLink)
	var words []string
	alone := 0
	for _, g := range groups {
		if len(g) == 1 {
			alone++
			continue
		}
		words = append(words, joinInts(g))
	}
	l := Line{Subject: "nvlink", File: "libnvidia-ml.so.1"}
	switch {
	case len(groups) == 1:
		l.Read = fmt.Sprintf("one island of %d GPUs", len(groups[0]))
	case len(words) == 0:
		l.Read = fmt.Sprintf("none of the %d GPUs", len(nvml.NVLink))
	default:
		l.Read = "islands " + strings.Join(words, " | ")
		if alone > 0 {
			l.Read += fmt.Sprintf(", %d alone", alone)
		}
	}
	l.Facts = map[string]string{"islands": l.Read}
	if len(groups) > 1 {
		l.Cause = "ranks of different islands share no NVLink; their traffic goes over PCIe, several times slower"
		l.Fix = "place the ranks of one group within an island (CUDA_VISIBLE_DEVICES), or set DEEPEP_NUM_MAX_NVL_PEERS to the island's size"
		e.warn(l)
		return
	}
	e.ok(l)
}

// components are the connected sets of a graph, in order of their first member.
func components(linked [][]bool) [][]int {
	seen := make([]bool, len(linked))
	var groups [][]int
	for i := range linked {
		if seen[i] {
			continue
		}
		seen[i] = true
		group, queue := []int{i}, []int{i}
		for len(queue) > 0 {
			at := queue[0]
			queue = queue[1:]
			for j, yes := range linked[at] {
				if yes && j < len(seen) && !seen[j] {
					seen[j] = true
					group, queue = append(group, j), append(queue, j)
				}
			}
		}
		slices.Sort(group)
		groups = append(groups, group)
	}
	return groups
}

func joinInts(ns []int) string {
	words := make([]string, len(ns))
	for i, n := range ns {
		words[i] = strconv.Itoa(n)
	}
	return strings.Join(words, " ")
}
