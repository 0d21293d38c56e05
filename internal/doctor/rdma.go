package doctor

import (
	"fmt"
	"path"
	"strconv"
	"strings"

	"github.com/deepep-go/deepep/internal/plan"
)

// moduleLoaded reports whether a kernel module is loaded.
func (e *exam) moduleLoaded(name string) bool {
	if e.root.exists("sys/module/" + name) {
		return true
	}
	_, found := keyed(e.root.text("proc/modules"), name)
	return found
}

// checkGPURDMA checks that a NIC can access GPU memory, through nvidia_peermem or dma-buf.
func checkGPURDMA(e *exam) {
	if len(e.gpuList()) == 0 || len(e.nicList()) == 0 {
		e.na(Line{Read: "needs a GPU and an RDMA device", File: "/sys/module/nvidia_peermem"})
		return
	}
	for _, name := range []string{"nvidia_peermem", "nv_peer_mem"} {
		if e.moduleLoaded(name) {
			e.ok(Line{Read: name + " loaded", File: "/sys/module/" + name, Facts: map[string]string{"way": name}})
			return
		}
	}
	kernel, _ := parseVersion(e.root.text("proc/sys/kernel/osrelease"))
	_, open := driverVersion(e.root.text("proc/driver/nvidia/version"))
	cuda, err := e.askCUDA()
	dmabuf := !kernel.less(version{5, 12}) && open
	why := fmt.Sprintf("kernel %d.%d, ", kernel[0], kernel[1]) + map[bool]string{true: "open", false: "proprietary"}[open] + " driver"
	if err == nil && len(cuda.GPUs) > 0 {
		dmabuf = cuda.GPUs[0].DMABuf
		why = fmt.Sprintf("CUDA says dma-buf export: %t", dmabuf)
	}
	if dmabuf {
		l := Line{Read: "dma-buf (" + why + "), nvidia_peermem not loaded", File: "/sys/module/nvidia_peermem", Facts: map[string]string{"way": "dma-buf"}}
		if v, _ := e.root.env("NVSHMEM_IB_DISABLE_DMABUF"); v != "" && v != "0" {
			l.Cause = "NVSHMEM_IB_DISABLE_DMABUF forbids the only way that is there"
			l.Fix = "unset NVSHMEM_IB_DISABLE_DMABUF, or " + e.onHost() + "modprobe nvidia_peermem"
			e.fail(l)
			return
		}
		e.ok(l)
		return
	}
	e.fail(Line{
		Read:  "neither nvidia_peermem nor dma-buf (" + why + ")",
		File:  "/sys/module/nvidia_peermem",
		Cause: "no NIC can read or write GPU memory; dma-buf needs kernel 5.12 and the open driver",
		Fix:   e.onHost() + "modprobe nvidia_peermem, and a line `nvidia_peermem` in /etc/modules-load.d/nvidia.conf",
	})
}

// checkGdrdrv checks GDRCopy, which is needed only if the CPU writes the doorbells.
func checkGdrdrv(e *exam) {
	const file = "dev/gdrdrv"
	handler, _ := e.root.env("NVSHMEM_IBGDA_NIC_HANDLER")
	needed := handler == "cpu"
	l := Line{File: "/" + file, Read: "/" + file}
	switch {
	case !e.root.exists(file):
		l.Read = "not there"
		if needed {
			l.Cause = "NVSHMEM_IBGDA_NIC_HANDLER=cpu needs GDRCopy"
			l.Fix = e.onHost() + "install gdrcopy's kernel module and `modprobe gdrdrv`; container: --device /dev/gdrdrv; or unset the variable"
			e.fail(l)
			return
		}
		l.Read += " (optional: GPU-initiated RDMA does without GDRCopy)"
		e.na(l)
	case e.root.access(file) != nil:
		l.Read = "not to be opened: " + e.root.access(file).Error()
		l.Cause = "GDRCopy is installed but this user may not use it"
		l.Fix = e.onHost() + "chmod 0666 /dev/gdrdrv (udev: KERNEL==\"gdrdrv\", MODE=\"0666\"); container: --device /dev/gdrdrv"
		e.when(needed, l)
	default:
		l.Read = "gdrdrv " + orDash(e.root.text("sys/module/gdrdrv/version"))
		l.Facts = map[string]string{"version": e.root.text("sys/module/gdrdrv/version")}
		e.ok(l)
	}
}

// checkVerbs checks the RDMA devices, their device files and drivers.
func checkVerbs(e *exam) {
	nics := e.nicList()
	if len(nics) == 0 {
		e.missing(Line{
			Read:  "no RDMA device",
			File:  "/sys/class/infiniband",
			Cause: "there is no RDMA NIC, its driver is not loaded, or the container does not show it",
			Fix:   "one node needs none: use --for intranode; else install the NIC's driver (mlx5_ib), container: --device /dev/infiniband",
		})
		return
	}
	for _, n := range nics {
		e.verbsDevice(n)
	}
}

func (e *exam) verbsDevice(n nic) {
	l := Line{Subject: n.name, File: "/sys/class/infiniband/" + n.name}
	firmware := e.root.text(path.Join("sys/class/infiniband", n.name, "fw_ver"))
	l.Read = fmt.Sprintf("%s, firmware %s", orDash(n.driver), orDash(firmware))
	l.Facts = map[string]string{"driver": n.driver, "firmware": firmware}
	uverbs := e.uverbs(n.name)
	switch {
	case uverbs == "" || !e.root.exists("dev/infiniband/"+uverbs):
		l.Read += ", no device file"
		l.File = "/dev/infiniband"
		l.Cause = "verbs open a device through /dev/infiniband/uverbsN, which is not here"
		l.Fix = "container: --device /dev/infiniband (Kubernetes: the RDMA device plugin); host: modprobe ib_uverbs"
		e.fail(l)
		return
	case e.root.access("dev/infiniband/"+uverbs) != nil:
		l.File = "/dev/infiniband/" + uverbs
		l.Read += ", " + e.root.access("dev/infiniband/"+uverbs).Error()
		l.Cause = "this user may not open the device file"
		l.Fix = e.onHost() + "chmod 0666 " + l.File + " (udev: KERNEL==\"uverbs*\", MODE=\"0666\")"
		e.fail(l)
		return
	}
	verbs, err := e.askVerbs()
	if err == nil {
		for _, d := range verbs.Devices {
			if d.Name == n.name && d.Err != "" {
				l.Read += ", " + d.Err
				l.Cause = "libibverbs sees the device but cannot open it"
				l.Fix = "install the provider of this device (package rdma-core or ibverbs-providers; libmlx5) in the container, of the host's version or later"
				e.fail(l)
				return
			}
		}
	}
	if n.driver != "mlx5_core" && n.driver != "" && n.driver != "." {
		l.Cause = "GPU-initiated RDMA (IBGDA) works with mlx5 devices only"
		l.Fix = "leave it out with NVSHMEM_HCA_LIST; with no mlx5 device at all NVSHMEM_REMOTE_TRANSPORT=ibrc or libfabric is slower, and low-latency mode may not work"
		e.warn(l)
		return
	}
	e.ok(l)
}

// uverbs is the name of the device file of an RDMA device.
func (e *exam) uverbs(device string) string {
	for _, f := range e.root.glob("sys/class/infiniband_verbs/uverbs*/ibdev") {
		if e.root.text(f) == device {
			return path.Base(path.Dir(f))
		}
	}
	return ""
}

// checkPorts checks state, rate and link layer of every port.
func checkPorts(e *exam) {
	nics := e.nicList()
	if len(nics) == 0 {
		e.na(Line{Read: "no RDMA device", File: "/sys/class/infiniband"})
		return
	}
	best, active := 0, 0
	for _, n := range nics {
		for _, p := range n.ports {
			best = max(best, rate(p))
			if p.state == "ACTIVE" {
				active++
			}
		}
	}
	for _, n := range nics {
		for _, p := range n.ports {
			e.portLine(n, p, best, active)
		}
	}
}

func (e *exam) portLine(n nic, p port, best, active int) {
	l := Line{
		Subject: p.subject,
		Read:    fmt.Sprintf("%s, %s, %s, %s", orDash(p.state), orDash(p.phys), orDash(p.rate), orDash(p.layer)),
		File:    "/" + p.folder,
		Facts:   map[string]string{"state": p.state, "rate": p.rate, "layer": p.layer},
	}
	switch {
	case p.state == "ACTIVE" && rate(p) < best:
		l.Cause = fmt.Sprintf("slower than this host's fastest port (%d Gb/s): a storage or management NIC, or a link that came up at a lower rate", best)
		l.Fix = "leave it out with NVSHMEM_HCA_LIST=^" + n.name + " if it is not meant for this traffic; else check cable, switch port and `mlxlink -d " + n.name + "`"
		e.warn(l)
	case p.state == "ACTIVE":
		e.ok(l)
	case p.state == "INIT" && p.layer == "InfiniBand":
		l.Cause = "the link is up but no subnet manager has configured the port"
		l.Fix = "start opensm (or the switch's subnet manager) on this fabric; ibstat shows SM lid 0 until then"
		e.when(active == 0, l)
	default:
		l.Cause = "the port has no link"
		l.Fix = "plug the cable, enable the switch port, `ip link set` the interface up for RoCE; or leave it out with NVSHMEM_HCA_LIST=^" + n.name
		e.when(active == 0, l)
	}
}

// rate is the Gb/s of "400 Gb/sec (4X NDR)".
func rate(p port) int {
	word, _, _ := strings.Cut(p.rate, " ")
	f, err := strconv.ParseFloat(word, 64)
	if err != nil {
		return 0
	}
	return int(f)
}

// checkQPBudget compares the planned queue pairs with the devices' limits.
func checkQPBudget(e *exam) {
	if len(e.nicList()) == 0 {
		e.na(Line{Read: "no RDMA device", File: "/sys/class/infiniband"})
		return
	}
	verbs, err := e.askVerbs()
	if err != nil {
		e.na(Line{Read: "limits not known: " + err.Error(), File: "libibverbs.so.1"})
		return
	}
	share := e.ranksPerNIC(e.nicsOfRank())
	for _, d := range verbs.Devices {
		if d.Err != "" {
			continue // the check verbs reports the reason
		}
		e.qpDevice(d, share)
	}
}

// ranksPerNIC is the largest number of this host's ranks that share a device, of which each uses so many.
func (e *exam) ranksPerNIC(each int) int {
	active := 0
	for _, n := range e.nicList() {
		if n.active() {
			active++
		}
	}
	ranks := e.ranks()
	if active == 0 || ranks == 0 {
		return 1
	}
	return (ranks*each + active - 1) / active
}

// fewerQPs says how many queue pairs toward a peer the device has room for.
func fewerQPs(most, peers int) string {
	if most == 0 {
		return fmt.Sprintf("fewer ranks a NIC: one queue pair toward each of %d peers is more than it has", peers)
	}
	return fmt.Sprintf("num_qps_per_rank at most %d (DEEPEP_NUM_QPS_PER_RANK=%d), or fewer ranks a NIC", most, most)
}

func (e *exam) qpDevice(d VerbsDevice, share int) {
	l := Line{
		Subject: d.Name,
		Read:    fmt.Sprintf("max_qp %d, max_qp_wr %d", d.MaxQP, d.MaxQPWR),
		File:    "libibverbs.so.1",
		Facts:   map[string]string{"max_qp": strconv.Itoa(d.MaxQP), "max_qp_wr": strconv.Itoa(d.MaxQPWR)},
	}
	p := e.opt.Plan
	devices := e.nicsOfRank()
	planned := plan.Queues{PerPeer: p.QPsPerPeer}.PerDevice(devices) * p.QPPeers
	if planned > 0 {
		l.Read += fmt.Sprintf("; planned %d × %s", planned, plural(share, "rank"))
	}
	if p.QPDepth > 0 {
		l.Read += fmt.Sprintf(", depth %d", p.QPDepth)
	}
	switch {
	case planned*share > d.MaxQP:
		l.Cause = "more queue pairs are planned than the device has"
		l.Fix = fewerQPs(d.MaxQP/(share*p.QPPeers)*devices, p.QPPeers)
		e.fail(l)
	case p.QPDepth > d.MaxQPWR:
		l.Cause = "a queue pair cannot be that deep on this device"
		l.Fix = fmt.Sprintf("NVSHMEM_QP_DEPTH at most %d, which allows num_max_dispatch_tokens_per_rank up to %d", d.MaxQPWR, d.MaxQPWR/2-1)
		e.fail(l)
	default:
		e.ok(l)
	}
}
