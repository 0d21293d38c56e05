package engine

import (
	"cmp"
	"fmt"
	"slices"
	"time"
	"unsafe"

	"github.com/deepep-go/deepep/internal/abi"
	"github.com/deepep-go/deepep/internal/kern"
	"github.com/deepep-go/deepep/internal/plan"
	"github.com/deepep-go/deepep/internal/status"
)

// RDMAOptions configure the queue pairs to ranks that loads and stores do not reach.
type RDMAOptions struct {
	Queues      plan.Queues // toward each of them
	Everywhere  bool        // low-latency calls use them to all other ranks, also to those of this rank's node
	MaxTokens   int         // the largest B of low-latency calls over queue pairs; 0: no limit
	MNNVL       bool        // NVLink between hosts may be used, where the transport knows of one
	Workspace   uint64      // the most bytes that flags and counts may take; 0: no limit
	RankNICs    int         // NICs of a rank; 0: its share of the host's
	HostNICs    int         // NICs of this host
	RanksOfHost int         // of a draft: ranks that share them; 0: as many as a node has
	Settings    string      // lines "NAME=VALUE", which a transport with a start of its own gets
	Seed        uint64      // of the software RDMA's delays and orders
	Late        bool        // for tests: every operation takes effect as late as it may
}

// usesTransport reports whether any rank is reached through queue pairs.
func (b *Buffer) usesTransport() bool {
	return b.top.ByQueues(b.opt.LowLatency && b.opt.RDMA.Everywhere)
}

// remotePeers are the ranks that this one has queue pairs to, in the order of creation.
func (b *Buffer) remotePeers() []int32 {
	if !b.usesTransport() {
		return nil
	}
	queues := b.opt.RDMA.Queues
	queues.Order = b.queueOrder()
	order := queues.RemotePeers(b.rank)
	if b.opt.LowLatency && b.opt.RDMA.Everywhere {
		order = queues.PeerOrder(b.rank)
	}
	peers := make([]int32, len(order))
	for i, rank := range order {
		peers[i] = int32(rank)
	}
	return peers
}

// perNIC returns how many NICs this rank has and how many queue pairs toward a peer each of them gets. A transport
// without a start of its own (the software RDMA) is one NIC.
func (b *Buffer) perNIC() (nics, queuePairs int) {
	switch {
	case !b.usesTransport():
		return 0, 0
	case !b.onNICs():
		nics = 1
	case b.opt.RDMA.RankNICs > 0:
		nics = b.opt.RDMA.RankNICs
	default:
		nics = plan.DevicesOfRank(b.opt.RDMA.HostNICs, b.ranksOfHost())
	}
	return nics, b.opt.RDMA.Queues.PerDevice(nics)
}

// onNICs reports whether the transport drives NICs, which connect all ranks of a group (NVSHMEM); that of a draft
// without a library is taken for one that does.
func (b *Buffer) onNICs() bool {
	return b.opt.Library == nil || b.opt.Library.HasTransportHeap()
}

// ranksOfHost counts the ranks that share this host's NICs. A draft has no members to ask.
func (b *Buffer) ranksOfHost() int {
	if b.members == nil {
		return cmp.Or(b.opt.RDMA.RanksOfHost, b.top.NodeSize())
	}
	count := 0
	for rank := range b.size {
		if b.members.Peer(rank).SameHost {
			count++
		}
	}
	return count
}

// whyQueues is the reason why the buffer needs a transport, for errors.
func (b *Buffer) whyQueues() string {
	if b.top.Nodes() == 1 {
		return "allow_nvlink_for_low_latency_mode = 0 asks for RDMA among all ranks"
	}
	return fmt.Sprintf("%d ranks with num_nvl_peers = %d are %d nodes", b.size, b.top.Peers, b.top.Nodes())
}

// unsupported adds the reason where a library refuses to go beyond loads and stores.
func (b *Buffer) unsupported(err error) error {
	if status.CodeOf(err) != status.Unsupported || !b.usesTransport() {
		return err
	}
	return status.Errorf(status.Unsupported, "%s, and the kernels of engine %s (%s) reach ranks by loads and stores alone: %w",
		b.whyQueues(), b.opt.Library.Kind, b.opt.Library.Path, err)
}

// checkTransport refuses a library without a transport where one is needed.
func (b *Buffer) checkTransport() error {
	if b.usesTransport() && !b.opt.Library.HasTransport() {
		return status.Errorf(status.Unsupported, "%s, and the kernel library of engine %s (%s) has no transport", b.whyQueues(), b.opt.Library.Kind, b.opt.Library.Path)
	}
	return nil
}

// checkReach refuses ranks that the library cannot reach. A transport whose blocks are mapped here joins nodes of one
// host only.
func (b *Buffer) checkReach() error {
	if err := b.checkTransport(); err != nil {
		return err
	}
	if err := b.checkOrder(); err != nil {
		return err
	}
	for rank := range b.size {
		remote := b.top.Remote(b.rank, rank)
		if b.members.Peer(rank).SameHost || remote && b.opt.Library.HasTransportHeap() {
			continue
		}
		if remote {
			return status.Errorf(status.Unsupported, "%s is on another host: the transport of engine %s joins nodes of one host only",
				b.members.Describe(rank), b.opt.Library.Kind)
		}
		return status.Errorf(status.Unsupported, "%s is on another host, and num_nvl_peers = %d puts it into this rank's node: engine %s reaches only ranks of this host",
			b.members.Describe(rank), b.top.Peers, b.opt.Library.Kind)
	}
	return nil
}

// queueOrder is the order in which queue pairs are made.
func (b *Buffer) queueOrder() plan.Order {
	if lib := b.opt.Library; lib != nil && lib.HasTransportHeap() {
		return plan.Rotated
	}
	return b.opt.RDMA.Queues.Order
}

// checkOrder refuses an order of queue pairs that the transport does not take: one with memory of its own (NVSHMEM)
// makes its queue pairs itself, toward all ranks, in rotated order.
func (b *Buffer) checkOrder() error {
	order := b.opt.RDMA.Queues.Order
	if !b.usesTransport() || !b.opt.Library.HasTransportHeap() || order == plan.DefaultOrder || order == plan.Rotated {
		return nil
	}
	return status.Errorf(status.Unsupported, "DEEPEP_QP_ORDER: got %q, allowed auto or rotated: the transport of %s (%s) makes its queue pairs itself, in that order",
		order, b.opt.Library.Path, b.opt.Library.Build)
}

// reach is where the ranks' blocks are mapped in this process. The kernel library reads the slices during the calls
// that take them.
type reach struct {
	peers []int32  // ranks with queue pairs, in the order of creation
	nic   []uint64 // by rank: for the transport; 0: no queue pairs
	local []uint64 // by rank: for loads and stores; 0: on another node, even where it is mapped for the transport
}

func (b *Buffer) findReach() {
	b.reach = reach{peers: b.remotePeers(), nic: make([]uint64, b.size), local: make([]uint64, b.size)}
	b.reach.nic[b.rank] = b.block.Addresses[b.rank]
	for _, rank := range b.reach.peers {
		b.reach.nic[rank] = b.block.Addresses[rank]
	}
	for rank, address := range b.block.Addresses {
		if !b.top.Remote(b.rank, rank) {
			b.reach.local[rank] = address
		}
	}
}

// openTransport connects the queue pairs, once the blocks of all ranks are mapped.
func (b *Buffer) openTransport() error {
	if len(b.reach.peers) == 0 {
		return nil
	}
	o := &b.opt.RDMA
	p := &abi.TransportOpenParams{
		Device: b.dev.Handle(), Rank: int32(b.rank), NumRanks: int32(b.size), NumQPs: int32(o.Queues.PerPeer), QPDepth: int32(o.Queues.Depth),
		NumPeers: int32(len(b.reach.peers)), HostPeers: uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b.reach.peers)))),
		HostBlocks: uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b.reach.nic)))), BlockBytes: b.regions.Total, Seed: o.Seed,
	}
	if o.Late {
		p.Flags |= abi.TransportLate
	}
	if code := b.opt.Library.TransportOpen(p); status.Code(code) == status.Unsupported && o.Late {
		return status.Errorf(status.Unsupported, "DEEPEP_SOFTWARE_RDMA asks for late RDMA, and that of engine %s is not software", b.opt.Library.Kind)
	} else if code != 0 {
		return fmt.Errorf("%d queue pairs of depth %d toward each of %d ranks: %w", p.NumQPs, p.QPDepth, p.NumPeers,
			kern.Error("dk_transport_open", code, p.DeviceError))
	}
	b.transport = p.Transport
	b.log.Info(fmt.Sprintf("%d queue pairs of depth %d toward each of %d ranks, made in the order %s", p.NumQPs, p.QPDepth, p.NumPeers, b.queueOrder()))
	return nil
}

// teamFlags are the library's flags for this buffer (abi.Team*).
func (b *Buffer) teamFlags() (flags uint32) {
	if b.opt.Shrink {
		flags |= abi.TeamShrink
	}
	if b.opt.LowLatency {
		flags |= abi.TeamLowLatency
		if b.opt.RDMA.Everywhere && b.size > 1 {
			flags |= abi.TeamLLTransport
		}
	}
	if b.copiesRows() {
		flags |= abi.TeamLLCopy
	}
	if b.copiesNormal() {
		flags |= abi.TeamNormalCopy
	}
	return flags
}

// transferOfHalves says how low-latency calls in halves run: DEEPEP_LL_TRANSFER, where that changes anything.
func (b *Buffer) transferOfHalves() plan.Transfer {
	if b.opt.LLTransfer == plan.AutoTransfer || !b.opt.LowLatency || b.whyNoTransfer() != "" {
		return plan.SMTransfer
	}
	return b.opt.LLTransfer
}

func (b *Buffer) whyNoTransfer() string {
	switch lib, asked := b.opt.Library, b.opt.LLTransfer; {
	case lib == nil:
		return "there is no kernel library"
	case b.usesTransport():
		return "rows of this buffer go through queue pairs"
	case asked == plan.CopyTransfer && !lib.Has(abi.CapLLCopy):
		return "the engine " + lib.Kind + " has no copy engines"
	case asked == plan.StreamTransfer && lib.Has(abi.CapHostStream):
		return "the engine " + lib.Kind + " has no streams"
	}
	return ""
}

// copiesRows reports whether copy engines move rows of low-latency halves.
func (b *Buffer) copiesRows() bool { return b.transferOfHalves() == plan.CopyTransfer }

// halvesOnStream reports whether low-latency calls in halves run whole on the communication stream.
func (b *Buffer) halvesOnStream() bool { return b.transferOfHalves() == plan.StreamTransfer }

// copiesNormal reports whether copy engines move rows of normal mode.
func (b *Buffer) copiesNormal() bool {
	return b.opt.NormalCopies && b.opt.NVLBytes > 0 && b.whyNoNormalCopies() == ""
}

// mayCopy reports whether copy engines may move the rows of a call whose handle is from an exchange: one of this buffer.
func (b *Buffer) mayCopy(exchange uint64) bool {
	return b.copiesNormal() && exchange>>exchangeBits == b.exchangeOf(0)>>exchangeBits
}

// A smaller region may be what a size hint gave: half of it would stage no rows that the whole stages.
const leastWithOutboxes = 512 << 10

func (b *Buffer) whyNoNormalCopies() string {
	switch lib := b.opt.Library; {
	case lib == nil:
		return "there is no kernel library"
	case !lib.Has(abi.CapNormalCopy):
		return "the engine " + lib.Kind + " has no copy engines"
	case b.usesTransport() || b.top.Nodes() > 1:
		return "rows of this buffer go through queue pairs"
	case b.opt.NVLBytes < leastWithOutboxes:
		return "num_nvl_bytes has no room for packed rows"
	case b.opt.Shrink:
		return "a rank that enable_shrink leaves out could still be reading rows"
	}
	return ""
}

// mentionUseless says that a setting changes nothing, where somebody has made it.
func (b *Buffer) mentionUseless() {
	if why := b.whyNoNormalCopies(); b.opt.NormalCopies && b.opt.NVLBytes > 0 && why != "" {
		WarnOnce(b.log, "DEEPEP_NORMAL_TRANSFER=copy changes nothing: "+why)
	}
	if b.opt.LowLatency && b.opt.LLSMs != 0 && b.opt.Library.Has(abi.CapHostStream) {
		WarnOnce(b.log, "DEEPEP_LL_SMS changes nothing: the engine "+b.opt.Library.Kind+" has no SMs")
	}
	if asked := b.opt.LLTransfer; b.opt.LowLatency && asked != plan.AutoTransfer && asked != b.transferOfHalves() {
		WarnOnce(b.log, "DEEPEP_LL_TRANSFER="+asked.String()+" changes nothing: "+b.whyNoTransfer())
	}
}

// losePeer discards what is queued for a rank that has died or left, so that no call waits for its queue pairs.
func (b *Buffer) losePeer(rank int) {
	if b.transport == 0 || !slices.Contains(b.reach.peers, int32(rank)) {
		return
	}
	p := &abi.TransportLoseParams{Transport: b.transport, Peer: int32(rank)}
	if code := b.opt.Library.TransportLose(p); code != 0 {
		b.log.Warn(kern.Error("dk_transport_lose", code, p.DeviceError).Error())
	}
}

// deliver waits until the queue pairs have completed what this rank's last calls posted: peers may wait for it. At the
// limit the host drops what late or lost peers have not taken; false: the device is still waiting.
func (b *Buffer) deliver(limit time.Duration) bool {
	if b.transport == 0 {
		return true
	}
	p := &abi.TransportQuietParams{Transport: b.transport, Peer: -1, QP: -1, TimeoutNS: uint64(limit)}
	if !b.dev.HostStream() {
		p.Stream = uint64(b.comm)
	}
	if b.opt.Library.TransportQuiet(p) != 0 || b.dev.HostStream() || b.order.end.Record(b.comm) != nil {
		return true
	}
	done, err := b.order.end.Wait(limit)
	return done || err != nil
}

// closeTransport ends the queue pairs. The team is gone, the peers' memory is still mapped.
func (b *Buffer) closeTransport() error {
	if b.transport == 0 {
		return nil
	}
	p := &abi.TransportCloseParams{Transport: b.transport}
	code := b.opt.Library.TransportClose(p)
	b.transport = 0
	return kern.Error("dk_transport_close", code, p.DeviceError)
}

// checkRDMATokens refuses low-latency calls above the user's limit for calls between nodes.
func (b *Buffer) checkRDMATokens(numMaxTokens int32) error {
	if limit := b.opt.RDMA.MaxTokens; limit > 0 && int(numMaxTokens) > limit && b.usesTransport() {
		return status.InvalidArg("num_max_dispatch_tokens_per_rank", numMaxTokens, "at most DEEPEP_NUM_MAX_RDMA_TOKENS = "+itoa(int32(limit))+" between nodes")
	}
	return nil
}
