package doctor

import (
	"fmt"
	"net/netip"
	"path"
	"strconv"
)

// gid is one entry of a port's table.
type gid struct {
	index int
	value string // as sysfs prints it
	kind  string // "RoCE v2", "IB/RoCE v1"
	addr  netip.Addr
}

// gids reads the used entries of a port.
func (e *exam) gids(p port) []gid {
	var list []gid
	for _, f := range e.root.glob(p.folder + "/gids/*") {
		g := gid{value: e.root.text(f)}
		addr, err := netip.ParseAddr(g.value)
		if err != nil || addr.IsUnspecified() || g.value == "fe80:0000:0000:0000:0000:0000:0000:0000" {
			continue
		}
		g.addr = addr.Unmap()
		g.index, _ = strconv.Atoi(path.Base(f))
		// The kernel returns EINVAL for the type of an unused entry.
		g.kind = e.root.text(path.Join(p.folder, "gid_attrs/types", path.Base(f)))
		list = append(list, g)
	}
	return list
}

// best is the recommended entry of a RoCE port: version 2, routable, IPv4 first.
func best(list []gid) (gid, bool) {
	found, at := -1, -1
	for i, g := range list {
		score := 0
		switch {
		case g.kind != "RoCE v2":
			continue
		case g.addr.Is4():
			score = 3
		case !g.addr.IsLinkLocalUnicast():
			score = 2
		default:
			score = 1
		}
		if score > found {
			found, at = score, i
		}
	}
	if at < 0 {
		return gid{}, false
	}
	return list[at], true
}

// gidVariables choose an entry for every RoCE port of the process.
var gidVariables = []string{"NVSHMEM_IB_GID_INDEX", "NCCL_IB_GID_INDEX"}

// checkGIDs names the recommended index for each RoCE port and compares the variables with it.
func checkGIDs(e *exam) {
	roce := 0
	for _, n := range e.nicList() {
		for _, p := range n.ports {
			if p.layer == "Ethernet" && p.state == "ACTIVE" {
				roce++
				e.gidLine(p)
			}
		}
	}
	if roce == 0 {
		e.na(Line{Read: "no active RoCE port", File: "/sys/class/infiniband"})
	}
}

func (e *exam) gidLine(p port) {
	list := e.gids(p)
	l := Line{Subject: p.subject, File: "/" + p.folder + "/gids"}
	use, ok := best(list)
	if !ok {
		l.Read = fmt.Sprintf("%s, none of RoCE v2", plural(len(list), "GID"))
		l.Cause = "RoCE v2 needs an IP address on the interface of this port"
		l.Fix = "give " + orDash(e.netdev(p)) + " an address (ip addr add …), and `cma_roce_mode -d DEVICE -p " + p.number + " -m 2`"
		e.fail(l)
		return
	}
	l.Read = fmt.Sprintf("use index %d: %s, %s", use.index, use.kind, use.addr)
	l.Facts = map[string]string{"index": strconv.Itoa(use.index)}
	for _, name := range gidVariables {
		if problem := e.gidProblem(name, list, use); problem != "" {
			l.Cause = problem
			l.Fix = fmt.Sprintf("export %s=%d, or unset it where each host should choose", name, use.index)
			e.fail(l)
			return
		}
	}
	if use.addr.IsLinkLocalUnicast() {
		l.Cause = "the only RoCE v2 GID is link-local: it reaches hosts of the same Ethernet segment alone"
		l.Fix = "give " + orDash(e.netdev(p)) + " an IPv4 address"
		e.warn(l)
		return
	}
	e.ok(l)
}

// gidProblem is the problem of the entry that a variable chooses.
func (e *exam) gidProblem(name string, list []gid, use gid) string {
	index, set, valid := e.root.envInt(name)
	switch {
	case !set || (valid && index < 0): // negative: NVSHMEM chooses
		return ""
	case !valid:
		v, _ := e.root.env(name)
		return fmt.Sprintf("%s=%s is not a number", name, v)
	}
	for _, g := range list {
		if g.index != index {
			continue
		}
		if g.kind == use.kind && g.addr.Is4() == use.addr.Is4() {
			return ""
		}
		return fmt.Sprintf("%s=%d chooses %s, %s, which does not reach peers that use RoCE v2 over %s", name, index, orDash(g.kind), g.addr, family(use.addr))
	}
	return fmt.Sprintf("%s=%d chooses an entry that is empty on this port", name, index)
}

func family(a netip.Addr) string {
	if a.Is4() {
		return "IPv4"
	}
	return "IPv6"
}

// netdev is the network interface of a RoCE port.
func (e *exam) netdev(p port) string {
	for _, f := range e.root.glob(p.folder + "/gid_attrs/ndevs/*") {
		if name := e.root.text(f); name != "" {
			return name
		}
	}
	device := path.Dir(path.Dir(p.folder))
	for _, f := range e.root.glob(device + "/device/net/*") {
		return path.Base(f)
	}
	return ""
}
