package bootstrap

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/deepep-go/deepep/internal/status"
)

// interfaceArgument names what users set: the variable, or the option that goes before it.
const interfaceArgument = "interface (DEEPEP_INTERFACE)"

// interfaceAddress resolves a network interface, given by its name or by an address of this host, to an address: IPv4
// before IPv6, link-local ones only if there is no other.
func interfaceAddress(name string) (netip.Addr, error) {
	if addr, err := netip.ParseAddr(name); err == nil {
		return checkAddress(addr)
	}
	nic, err := net.InterfaceByName(name)
	if err != nil {
		return netip.Addr{}, status.InvalidArg(interfaceArgument, name, "the name or address of a network interface of this host: "+interfaceNames())
	}
	addrs, err := nic.Addrs()
	if err != nil {
		return netip.Addr{}, status.Errorf(status.System, "addresses of interface %s (DEEPEP_INTERFACE): %w", name, err)
	}
	var found []netip.Addr
	for _, a := range addrs {
		if p, err := netip.ParsePrefix(a.String()); err == nil {
			found = append(found, p.Addr())
		}
	}
	if len(found) == 0 {
		return netip.Addr{}, status.InvalidArg(interfaceArgument, name, "an interface that has an address")
	}
	best := slices.MinFunc(found, func(a, b netip.Addr) int { return addressRank(a) - addressRank(b) })
	if best.IsLinkLocalUnicast() && best.Is6() {
		best = best.WithZone(name)
	}
	return best, nil
}

func addressRank(a netip.Addr) int {
	rank := 0
	if a.Is6() {
		rank++
	}
	if a.IsLinkLocalUnicast() {
		rank += 2
	}
	return rank
}

// checkAddress returns addr if this host has it.
func checkAddress(addr netip.Addr) (netip.Addr, error) {
	if addr.IsLoopback() { // all of 127.0.0.0/8 is this host, but only its first address is listed
		return addr, nil
	}
	all, err := net.InterfaceAddrs()
	if err != nil {
		return netip.Addr{}, status.Errorf(status.System, "addresses of this host: %w", err)
	}
	for _, a := range all {
		if p, err := netip.ParsePrefix(a.String()); err == nil && p.Addr() == addr.WithZone("") {
			return addr, nil
		}
	}
	return netip.Addr{}, status.InvalidArg(interfaceArgument, addr, "an address that this host has")
}

func interfaceNames() string {
	nics, err := net.Interfaces()
	if err != nil || len(nics) == 0 {
		return fmt.Sprintf("none found (%v)", err)
	}
	names := make([]string, len(nics))
	for i, n := range nics {
		names[i] = n.Name
	}
	return strings.Join(names, ", ")
}
