package plan

import (
	"fmt"
	"strconv"
	"strings"
)

// Limits of what a packet's header has room for: 4 bits of service level, 8 bits of traffic class.
const (
	MaxServiceLevel = 15
	MaxTrafficClass = 255
)

// NIC is an entry of a list of NICs.
type NIC struct {
	Name  string // mlx5_0
	Port  int    // 0: all of them
	Ranks int    // of a mapping: ranks of a host that the entry is for; 0: not said
}

// NICList are the NICs that a transport may use.
type NICList struct {
	NICs   []NIC
	Except bool // all others
}

// What the two forms of a list look like, for errors.
const (
	NICListForm    = "names of NICs and ports, as mlx5_0:1,mlx5_1, all after a ^ that leaves them out"
	NICMappingForm = "names of NICs, ports and numbers of ranks, as mlx5_0:1:2,mlx5_1:1:2"
)

// ParseNICs reads name[:port] entries, or with mapping name:port:ranks entries, with commas between them. ok: the text
// has the form.
func ParseNICs(text string, mapping bool) (list NICList, ok bool) {
	if !mapping {
		text, list.Except = strings.CutPrefix(text, "^")
	}
	for entry := range strings.SplitSeq(text, ",") {
		parts := strings.Split(strings.TrimSpace(entry), ":")
		n := NIC{Name: parts[0]}
		if !isDeviceName(n.Name) || mapping && len(parts) != 3 || len(parts) > 3 {
			return NICList{}, false
		}
		for i, to := range []*int{&n.Port, &n.Ranks}[:len(parts)-1] {
			number, err := strconv.Atoi(parts[i+1])
			if err != nil || number < 1 || number > MaxRanks {
				return NICList{}, false
			}
			*to = number
		}
		list.NICs = append(list.NICs, n)
	}
	return list, true
}

func isDeviceName(s string) bool {
	plain := func(r rune) bool {
		return r == '_' || r == '-' || r == '.' || '0' <= r && r <= '9' || 'a' <= r && r <= 'z' || 'A' <= r && r <= 'Z'
	}
	return s != "" && len(s) < 64 && strings.IndexFunc(s, func(r rune) bool { return !plain(r) }) < 0
}

// Has reports whether the list lets a device be used.
func (l NICList) Has(name string) bool {
	if len(l.NICs) == 0 {
		return true
	}
	for _, n := range l.NICs {
		if n.Name == name {
			return !l.Except
		}
	}
	return l.Except
}

func (n NIC) String() string {
	if n.Port == 0 {
		return n.Name
	}
	return fmt.Sprintf("%s:%d", n.Name, n.Port)
}
