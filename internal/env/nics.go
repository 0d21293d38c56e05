package env

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/deepep-go/deepep/internal/plan"
)

// Names of the settings of NICs: this library's, then NVSHMEM's; values that differ are an error. EP_OVERRIDE_RDMA_SL is
// V2's.
var (
	nicNames     = []string{"DEEPEP_NICS", "NVSHMEM_HCA_LIST"}
	nicMapping   = []string{"DEEPEP_NIC_MAPPING", "NVSHMEM_HCA_PE_MAPPING"}
	serviceLevel = []string{"DEEPEP_SERVICE_LEVEL", "NVSHMEM_IB_SL", "EP_OVERRIDE_RDMA_SL"}
	trafficClass = []string{"DEEPEP_TRAFFIC_CLASS", "NVSHMEM_IB_TRAFFIC_CLASS"}
)

// Switches of NVSHMEM: each rank has the NIC that a list gives it; each rank has all NICs of its share. The last is that
// of releases after 3.4.5.
const (
	mapNICs     = "NVSHMEM_ENABLE_NIC_PE_MAPPING"
	shareNICs   = "NVSHMEM_IBGDA_ENABLE_MULTI_PORT"
	shareNICsV2 = "NVSHMEM_ENABLE_MULTI_PORT"
)

// NICs are the settings of the NICs that the transport on GPUs (NVSHMEM) uses.
type NICs struct {
	PerRank      int    // DEEPEP_NUM_NICS: NICs of a rank; 0: one, or what Share says
	Names        string // DEEPEP_NICS, NVSHMEM_HCA_LIST: those that ranks may use; "": all
	Mapping      string // DEEPEP_NIC_MAPPING, NVSHMEM_HCA_PE_MAPPING: those of each rank of a host, in turn; "": the nearest
	NamesFrom    string // the variable that Names comes from
	MappingFrom  string // likewise
	ServiceLevel int    // DEEPEP_SERVICE_LEVEL, NVSHMEM_IB_SL, EP_OVERRIDE_RDMA_SL: 0
	TrafficClass int    // DEEPEP_TRAFFIC_CLASS, NVSHMEM_IB_TRAFFIC_CLASS: 0

	Share      bool   // NVSHMEM_IBGDA_ENABLE_MULTI_PORT, NVSHMEM_ENABLE_MULTI_PORT: a rank uses its share of the host's NICs
	SingleFrom string // the variable by which NVSHMEM gives each rank one NIC whatever else is set; "": none
}

// nics reads the settings of NICs.
func (p *parser) nics() NICs {
	n := NICs{
		PerRank:      p.number("DEEPEP_NUM_NICS", 0, 1, MaxNICs),
		ServiceLevel: p.number(p.agreed(serviceLevel), 0, 0, plan.MaxServiceLevel),
		TrafficClass: p.number(p.agreed(trafficClass), 0, 0, plan.MaxTrafficClass),
	}
	n.Names, n.NamesFrom = p.nicList(false, nicNames)
	n.Mapping, n.MappingFrom = p.nicList(true, nicMapping)
	for _, name := range []string{shareNICs, shareNICsV2} {
		switch v := p.value(name); {
		case v == "":
		case Truth(v):
			n.Share = true
		default:
			n.SingleFrom = name
		}
	}
	if Truth(p.value(mapNICs)) {
		n.SingleFrom = mapNICs
	} else if n.Mapping != "" {
		n.SingleFrom = n.MappingFrom
	}
	return n
}

// agreed is the first name that is set. Another one with another value is an error: NVSHMEM would read its own.
func (p *parser) agreed(names []string) string {
	first := p.firstSet(names...)
	for _, other := range names {
		if v := p.value(other); v != "" && v != p.value(first) {
			p.reject(other, v, fmt.Sprintf("%q, which %s says, or not set", p.value(first), first))
		}
	}
	return first
}

func (p *parser) nicList(mapping bool, names []string) (list, from string) {
	name := p.agreed(names)
	v := p.value(name)
	if v == "" {
		return "", ""
	}
	if _, ok := plan.ParseNICs(v, mapping); !ok {
		p.reject(name, v, map[bool]string{false: plan.NICListForm, true: plan.NICMappingForm}[mapping])
		return "", ""
	}
	return v, name
}

// Truth reads a switch as NVSHMEM does.
func Truth(v string) bool {
	switch strings.ToLower(strings.TrimSpace(v)) {
	case "", "0", "n", "no", "f", "false", "off":
		return false
	}
	return true
}

// OfRank is how many NICs NVSHMEM gives each rank; 0: its share of the host's. Without a setting that is one, however
// many there are.
func (n *NICs) OfRank() int {
	switch {
	case n.SingleFrom != "":
		return 1
	case n.PerRank > 0:
		return n.PerRank
	case n.Share:
		return 0
	}
	return 1
}

// List are the NICs that ranks may use.
func (n *NICs) List() plan.NICList {
	mapping := n.Names == "" && n.Mapping != ""
	text := n.Names
	if mapping {
		text = n.Mapping
	}
	if text == "" {
		return plan.NICList{}
	}
	list, _ := plan.ParseNICs(text, mapping) // nics has checked it
	return list
}

// Lines are the variables that NVSHMEM must have for the settings, "NAME=VALUE" each. Those that the user has set for
// NVSHMEM are among them.
func (n *NICs) Lines() []string {
	var lines []string
	set := func(name, value string) { lines = append(lines, name+"="+value) }
	if n.Names != "" {
		set("NVSHMEM_HCA_LIST", n.Names)
	}
	if n.Mapping != "" {
		set("NVSHMEM_HCA_PE_MAPPING", n.Mapping)
		set(mapNICs, "1")
	}
	if n.ServiceLevel > 0 {
		set("NVSHMEM_IB_SL", strconv.Itoa(n.ServiceLevel))
	}
	if n.TrafficClass > 0 {
		set("NVSHMEM_IB_TRAFFIC_CLASS", strconv.Itoa(n.TrafficClass))
	}
	if n.OfRank() > 1 {
		set(shareNICs, "1")
		set(shareNICsV2, "1")
	}
	return lines
}

// Contradiction is a setting of NICs that another one keeps from what it asks for.
type Contradiction struct{ Variable, Cause, Fix string }

// Contradictions finds them. Construction warns of them, and the doctor lists them.
func (n *NICs) Contradictions() []Contradiction {
	var found []Contradiction
	if n.Names != "" && n.Mapping != "" {
		found = append(found, Contradiction{n.MappingFrom, "a list of NICs is set too, and NVSHMEM then ignores the mapping of NICs to ranks",
			"unset " + n.NamesFrom + " or " + n.MappingFrom})
	}
	if n.PerRank > 1 && n.SingleFrom != "" {
		found = append(found, Contradiction{"DEEPEP_NUM_NICS", fmt.Sprintf("it asks for %d NICs a rank, and NVSHMEM gives each rank one because of %s", n.PerRank, n.SingleFrom),
			"unset " + n.SingleFrom + ", or DEEPEP_NUM_NICS"})
	}
	return found
}
