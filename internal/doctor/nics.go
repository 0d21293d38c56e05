package doctor

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/deepep-go/deepep/internal/env"
	"github.com/deepep-go/deepep/internal/plan"
)

// NICsHere is NICs of this machine, with the variables read through get.
func NICsHere(get func(name string) string) int {
	e := &exam{root: Root{FS: os.DirFS("/")}}
	s, _ := env.Load(get) // construction has loaded the same
	return len(e.usableNICs(&s.RDMA.NICs, prefixOf(get(prefixVariable))))
}

const prefixVariable = "NVSHMEM_HCA_PREFIX"

func prefixOf(value string) string {
	if value == "" {
		return "mlx5"
	}
	return value
}

// usableNICs are the RDMA devices that NVSHMEM can use: those with an active port and a name that begins with
// NVSHMEM_HCA_PREFIX (mlx5), unless a list leaves them out.
func (e *exam) usableNICs(s *env.NICs, prefix string) []nic {
	var usable []nic
	list := s.List()
	for _, n := range e.nicList() {
		if n.active() && strings.HasPrefix(n.name, prefix) && list.Has(n.name) {
			usable = append(usable, n)
		}
	}
	return usable
}

// nicSettings are the settings of NICs in the examined environment; zero where construction refuses them, which the
// check settings reports.
func (e *exam) nicSettings() (s env.NICs, prefix string) {
	get := func(name string) string { v, _ := e.root.env(name); return v }
	if all, err := env.Load(get); err == nil {
		s = all.RDMA.NICs
	}
	return s, prefixOf(get(prefixVariable))
}

// nicsOfRank is how many NICs a rank of this host uses.
func (e *exam) nicsOfRank() int {
	s, prefix := e.nicSettings()
	switch {
	case e.opt.Plan.NICs > 0:
		return e.opt.Plan.NICs
	case s.OfRank() > 0:
		return s.OfRank()
	}
	return plan.DevicesOfRank(len(e.usableNICs(&s, prefix)), e.ranks())
}

// checkNICs says which NICs ranks use and how, and finds names in the settings that no NIC of this host has.
func checkNICs(e *exam) {
	s, prefix := e.nicSettings()
	l := Line{File: "/sys/class/infiniband", Read: "no RDMA device"}
	if len(e.nicList()) == 0 {
		e.na(l)
		return
	}
	for _, n := range s.List().NICs {
		e.namedNIC(n, &s, prefix)
	}
	usable, ranks, each := e.usableNICs(&s, prefix), e.ranks(), e.nicsOfRank()
	l.Read = fmt.Sprintf("%s of %d: %s", plural(len(usable), "usable NIC"), len(e.nicList()), orDash(deviceNames(usable)))
	l.Read += fmt.Sprintf("; %d a rank, service level %d, traffic class %d", each, s.ServiceLevel, s.TrafficClass)
	l.Facts = map[string]string{"usable": deviceNames(usable), "nics_of_rank": strconv.Itoa(each), "service_level": strconv.Itoa(s.ServiceLevel),
		"traffic_class": strconv.Itoa(s.TrafficClass)}
	share := plan.DevicesOfRank(len(usable), ranks)
	switch {
	case len(usable) == 0:
		l.Cause = "NVSHMEM takes devices with an active port, a name that begins with " + prefix + ", and a place in its list where there is one"
		l.Fix = "see the lines port and verbs; NVSHMEM_HCA_PREFIX gives another beginning, DEEPEP_NICS (NVSHMEM_HCA_LIST) the list"
		e.when(e.opt.For == ForInternode, l)
	case ranks > 0 && s.SingleFrom == "" && each > share:
		l.Cause = fmt.Sprintf("%d NICs a rank are asked for, and %s have %s between them", each, plural(ranks, "rank"), plural(len(usable), "usable NIC"))
		l.Fix = fmt.Sprintf("export DEEPEP_NUM_NICS=%d, or fewer ranks on this host", share)
		e.when(e.opt.For == ForInternode, l)
	case ranks > 0 && each == 1 && share > 1:
		l.Read += fmt.Sprintf(" (there are %d for each of %s: DEEPEP_NUM_NICS=%d uses them)", share, plural(ranks, "rank"), share)
		e.ok(l)
	default:
		e.ok(l)
	}
}

// namedNIC checks an entry of the list of NICs against the devices of this host.
func (e *exam) namedNIC(n plan.NIC, s *env.NICs, prefix string) {
	from, value := s.NamesFrom, s.Names
	if s.Names == "" {
		from, value = s.MappingFrom, s.Mapping
	}
	l := Line{Subject: n.String(), Read: from + "=" + value, File: "/sys/class/infiniband/" + n.Name}
	found, port := e.findNIC(n)
	switch {
	case found == nil:
		l.Cause = "this host has no RDMA device of that name; NVSHMEM goes on without it"
		l.Fix = "name some of " + deviceNames(e.nicList()) + ", or take it out of " + from
	case n.Port > 0 && port == nil:
		l.Cause = fmt.Sprintf("the device has no port %d; NVSHMEM goes on without it", n.Port)
		l.Fix = fmt.Sprintf("name one of its %s, or the device alone", plural(len(found.ports), "port"))
	case s.List().Except:
		return
	case !strings.HasPrefix(n.Name, prefix):
		l.Cause = "NVSHMEM looks at devices whose names begin with " + prefix + " alone"
		l.Fix = "export NVSHMEM_HCA_PREFIX with a beginning of that name"
	case port != nil && port.state != "ACTIVE" || port == nil && !found.active():
		l.Cause = "its port is not active; NVSHMEM goes on without it"
		l.Fix = "see the line port, or take it out of " + from
	default:
		return
	}
	e.when(e.opt.For == ForInternode && !s.List().Except, l)
}

// findNIC returns the device of an entry, and the port that the entry names.
func (e *exam) findNIC(entry plan.NIC) (*nic, *port) {
	for _, n := range e.nicList() {
		if n.name != entry.Name {
			continue
		}
		for _, p := range n.ports {
			if p.number == strconv.Itoa(entry.Port) {
				return &n, &p
			}
		}
		return &n, nil
	}
	return nil, nil
}

func deviceNames(nics []nic) string {
	names := make([]string, len(nics))
	for i, n := range nics {
		names[i] = n.name
	}
	return strings.Join(names, " ")
}
