package nicsim

import (
	"fmt"

	"github.com/deepep-go/deepep/internal/status"
)

// Routing is how a leaf switch chooses the spine for a packet.
type Routing int

// Routings.
const (
	Adaptive Routing = iota // the uplink with the shortest queue, for every packet
	ECMP                    // by a hash of source, destination and queue pair
	Static                  // by the destination: one path toward each, spines in turn
)

// Fabric determines which ranks share a leaf switch.
type Fabric int

// Fabrics.
const (
	Rail Fabric = iota // ranks of the same index on different nodes
	Pod                // all ranks of a node and its neighbours
)

// Hardware describes the network. Rates are in 10^6 bytes a second.
type Hardware struct {
	LinkRate   int64 // wire rate of a link, each way
	NICRate    int64 // at which a NIC reads payload over PCIe and sends it
	PCIeRate   int64
	NVLinkRate int64 // out of a GPU, and into it
	CopyRate   int64 // at which the SMs of normal mode copy rows or sum them; fitted

	Call    Time // of a low-latency call without the transfer: launch, cast, posting, polling, copying out; fitted
	PostGap Time // between two messages that a GPU posts
	Post    Time // from posting to the first byte in the NIC: doorbell, request and payload read over PCIe
	Land    Time // from the last byte at the NIC until it is visible in GPU memory
	Grant   Time // minimum time of a packet of another queue pair than the last one: arbitration and context
	Wire    Time // of a link: cable and switch
	NVWire  Time // latency of NVLink

	Turn        int64 // bytes that a queue pair sends before the turn of the next one; 0: until it is empty
	LowestFirst bool  // the next turn is that of the lowest number, not of the next number

	Segment int64 // maximum bytes of a packet
	MTU     int64
	Header  int64 // bytes added to each MTU
	Buffer  int64 // bytes that the remote end of a link can hold, between switches and from NICs; 0: no limit

	Routing  Routing
	Fabric   Fabric
	LeafSize int // NICs on a leaf switch
	Spines   int // of which each has a link to every leaf
}

// H800 is the machine of the published figures: ConnectX-7 at 400 Gb/s beside each GPU. docs/simulation.md has the
// source of each number.
var H800 = Hardware{
	LinkRate: 50000, NICRate: 47000, PCIeRate: 63000, NVLinkRate: 160000, CopyRate: 158000,
	Call: 25 * Microsecond, PostGap: 10 * Nanosecond, Post: 2 * Microsecond, Land: 500 * Nanosecond, Grant: 10 * Nanosecond,
	Wire: 250 * Nanosecond, NVWire: 800 * Nanosecond,
	Turn: 16 << 10, Segment: 16 << 10, MTU: 4096, Header: 30, Buffer: 128 << 10, LeafSize: 32, Spines: 32,
}

// Check refuses values out of range.
func (h *Hardware) Check() error {
	for _, n := range []struct {
		name         string
		value, least int64
	}{
		{"link rate", h.LinkRate, 1}, {"nic rate", h.NICRate, 1}, {"pcie rate", h.PCIeRate, 1}, {"nvlink rate", h.NVLinkRate, 1}, {"copy rate", h.CopyRate, 1},
		{"call", int64(h.Call), 0}, {"post gap", int64(h.PostGap), 0}, {"post", int64(h.Post), 0}, {"land", int64(h.Land), 0}, {"grant", int64(h.Grant), 0},
		{"wire", int64(h.Wire), 0}, {"nvlink wire", int64(h.NVWire), 0},
		{"turn", h.Turn, 0}, {"mtu", h.MTU, 1}, {"segment", h.Segment, 1}, {"header", h.Header, 0}, {"buffer", h.Buffer, 0}, {"leaf size", int64(h.LeafSize), 1}, {"spines", int64(h.Spines), 1},
	} {
		if n.value < n.least {
			return status.InvalidArg(n.name, n.value, fmt.Sprintf("%d or more", n.least))
		}
	}
	if most := int64(1 << 22); h.Segment > most {
		return status.InvalidArg("segment", h.Segment, fmt.Sprintf("at most %d", most))
	}
	if least := h.wireBytes(h.Segment); h.Buffer > 0 && h.Buffer < least {
		return status.InvalidArg("buffer", h.Buffer, fmt.Sprintf("0, or at least one segment with its headers, %d bytes", least))
	}
	if h.Routing < Adaptive || h.Routing > Static {
		return status.InvalidArg("routing", int(h.Routing), "0 (adaptive), 1 (ecmp) or 2 (static)")
	}
	if h.Fabric < Rail || h.Fabric > Pod {
		return status.InvalidArg("fabric", int(h.Fabric), "0 (rail) or 1 (pod)")
	}
	return nil
}

// WithBuffer sets the buffers at the remote ends of links, 0 for no limit. Eight packets fit into a buffer, so that the
// size of packets does not determine the buffer's effect.
func (h *Hardware) WithBuffer(bytes int64) {
	h.Buffer = bytes
	if bytes > 0 {
		h.Segment = min(h.Segment, max(h.MTU, bytes/8/h.MTU*h.MTU))
	}
}

// wireBytes adds the headers.
func (h *Hardware) wireBytes(payload int64) int64 {
	return payload + max(1, (payload+h.MTU-1)/h.MTU)*h.Header
}
