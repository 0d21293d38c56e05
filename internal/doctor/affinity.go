package doctor

import (
	"fmt"
	"slices"
	"strings"

	"github.com/deepep-go/deepep/internal/env"
)

// checkAffinity pairs GPUs with NICs by their distance in the PCI tree, as NVSHMEM and NCCL do, and finds NICs that
// GPUs share while others are unused.
func checkAffinity(e *exam) {
	gpus := e.usableGPUs()
	if len(gpus) == 0 {
		gpus = e.gpuList()
	}
	settings, _ := e.nicSettings()
	list := settings.List()
	var nics []nic
	for _, n := range e.nicList() {
		if n.active() && n.bus != "" && list.Has(n.name) {
			nics = append(nics, n)
		}
	}
	if len(gpus) == 0 || len(nics) == 0 {
		e.na(Line{Read: fmt.Sprintf("%s, %s", plural(len(gpus), "GPU"), plural(len(nics), "active NIC")), File: "/" + pciDevices})
		return
	}
	pairs := make([]pairing, len(gpus))
	load := map[string][]string{}
	for i, g := range gpus {
		pairs[i] = nearest(g, nics, load)
		load[pairs[i].nic.name] = append(load[pairs[i].nic.name], label(i, g))
	}
	idle := idleNICs(nics, load)
	for i, g := range gpus {
		e.pairLine(i, g, pairs[i], load, idle)
	}
}

type pairing struct {
	nic  nic
	far  distance
	ties int // NICs at the same distance
}

// nearest returns the NIC at the smallest distance, among equals the one with the fewest GPUs so far.
func nearest(g gpu, nics []nic, load map[string][]string) pairing {
	best := pairing{far: sys + 1}
	for _, n := range nics {
		d := between(g.chain, n.chain, g.numa, n.numa)
		switch {
		case d < best.far:
			best = pairing{nic: n, far: d, ties: 1}
		case d == best.far:
			best.ties++
			if len(load[n.name]) < len(load[best.nic.name]) {
				best.nic = n
			}
		}
	}
	return best
}

func idleNICs(nics []nic, load map[string][]string) []string {
	var idle []string
	for _, n := range nics {
		if len(load[n.name]) == 0 {
			idle = append(idle, n.name)
		}
	}
	return idle
}

func label(i int, g gpu) string { return fmt.Sprintf("GPU %d", i) }

func (e *exam) pairLine(i int, g gpu, p pairing, load map[string][]string, idle []string) {
	l := Line{
		Subject: label(i, g),
		Read:    fmt.Sprintf("%s, NUMA %d: %s, %s", g.bus, g.numa, p.nic.name, p.far),
		File:    "/" + pciDevices + "/" + g.bus,
		Facts:   map[string]string{"nic": p.nic.name, "distance": p.far.String()},
	}
	others := slices.DeleteFunc(slices.Clone(load[p.nic.name]), func(s string) bool { return s == l.Subject })
	mapping, _ := e.root.env("NVSHMEM_ENABLE_NIC_PE_MAPPING")
	switch {
	case len(others) > 0 && len(idle) > 0 && !env.Truth(mapping):
		l.Read += ", shared with " + strings.Join(others, ", ")
		l.Cause = fmt.Sprintf("the nearest NIC serves several GPUs while %s idles: the shared one halves the bandwidth of each", strings.Join(idle, ", "))
		l.Fix = "NVSHMEM_ENABLE_NIC_PE_MAPPING=1 with NVSHMEM_HCA_LIST=" + strings.Join(namesOf(load, idle), ",") + " deals them out in turn; better, move the card to the slot beside the GPU"
		e.warn(l)
	case p.far == sys && len(idle) == 0 && len(others) == 0:
		l.Cause = "GPU and NIC hang on different CPU sockets: every byte crosses the link between them"
		l.Fix = "move the NIC to a slot of the GPU's socket (lspci -tv shows the tree)"
		e.warn(l)
	default:
		if len(others) > 0 {
			l.Read += ", shared with " + strings.Join(others, ", ")
		}
		e.ok(l)
	}
}

// namesOf lists the used and the unused NICs, in order.
func namesOf(load map[string][]string, idle []string) []string {
	names := slices.Clone(idle)
	for n, gpus := range load {
		if len(gpus) > 0 {
			names = append(names, n)
		}
	}
	sortNatural(names)
	return names
}
