package engine

import (
	"fmt"
	"strconv"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/deepep-go/deepep/core/op"
	"github.com/deepep-go/deepep/internal/abi"
	"github.com/deepep-go/deepep/internal/kern"
	"github.com/deepep-go/deepep/internal/plan"
	"github.com/deepep-go/deepep/internal/status"
)

// given is an address argument: whether it must be there, and what it must be a multiple of, a power of two.
type given struct {
	name    string
	address uintptr
	needed  bool
	align   uintptr
}

// need checks that addresses are there and aligned.
func need(all ...given) error {
	for i := range all {
		g := &all[i]
		if g.needed && g.address == 0 {
			return status.InvalidArg(g.name, "NULL", "the address of a tensor: the shape is not empty")
		}
		if g.address&(g.align-1) != 0 {
			return status.InvalidArg(g.name, fmt.Sprintf("address %#x", g.address), fmt.Sprintf("a multiple of %d bytes", g.align))
		}
	}
	return nil
}

// tensor is memory that a call reads.
type tensor struct {
	name    string
	address uintptr
	bytes   uint64
}

// apart checks that what a call writes lies in none of the tensors that it reads. Empty ones and address 0 lie nowhere.
func apart(written tensor, read ...tensor) error {
	for i := range read {
		r := &read[i]
		if written.address == 0 || r.address == 0 || written.bytes == 0 || r.bytes == 0 {
			continue
		}
		if uint64(r.address)+r.bytes > uint64(written.address) && uint64(written.address)+written.bytes > uint64(r.address) {
			return status.InvalidArg(written.name, fmt.Sprintf("%d bytes at %#x, which overlap %s", written.bytes, written.address, r.name),
				"memory that no argument of the call has")
		}
	}
	return nil
}

// config returns the caller's configuration, checked, or the default, which leaves the SMs to chooseSMs.
func (b *Buffer) config(c *Call, kind int) (plan.Config, error) {
	if c.Config == nil {
		config, err := plan.ConfigFor(kind, b.size)
		config.NumSMs = 0
		return config, err
	}
	config := plan.Config(*c.Config)
	err := config.Check()
	if err == nil && !b.noticed.Load() {
		b.noticeConfig(&config)
	}
	return config, err
}

// maxLoggedSMs is the largest choice that a log line is written for.
const maxLoggedSMs = 511

// chooseSMs returns the configuration's SMs, or for 0 the plan's choice for this call. The first call that leads to a
// choice logs it. b.mu is held.
func (b *Buffer) chooseSMs(config *plan.Config, q plan.SMQuery) int32 {
	if config.NumSMs != 0 {
		return config.NumSMs
	}
	q.Topology, q.ComputeCapability = b.top, 10*b.dev.CC[0]+b.dev.CC[1]
	n := plan.NumSMs(q)
	if seen := &b.chosenSMs[q.Kind][min(n, maxLoggedSMs)]; !*seen && q.ComputeCapability != 0 {
		*seen = true
		b.log.Info(fmt.Sprintf("%d SMs for %s of %d tokens, top-%d, rows of %d bytes%s: neither set_num_sms nor a config gives a number", n,
			kindName(q.Kind), q.Tokens, q.TopK, q.RowBytes, stagedText(q.Staged)))
	}
	return int32(n)
}

func kindName(kind int) string {
	if kind == plan.KindCombine {
		return op.OpCombine.String()
	}
	return op.OpDispatch.String()
}

func stagedText(staged bool) string {
	if staged {
		return " through staging memory"
	}
	return ""
}

// fitsRow refuses rows that num_nvl_bytes, or between nodes num_rdma_bytes, cannot stage. b.mu is held.
func (b *Buffer) fitsRow(rowBytes uint64) error {
	if rowBytes <= b.minRow {
		return nil
	}
	p := b.blockSizes(rowBytes)
	if code := b.opt.Library.BlockSizes(p); code != 0 {
		return kern.Error("dk_block_sizes", code, p.DeviceError)
	}
	if b.opt.NVLBytes < p.MinNVLBytes {
		return status.Errorf(status.InvalidArgument, "num_nvl_bytes = %d of the buffer cannot stage rows of %d bytes: at least %d is needed",
			b.opt.NVLBytes, rowBytes, p.MinNVLBytes)
	}
	if b.opt.RDMABytes < p.MinRDMABytes {
		return status.Errorf(status.InvalidArgument, "num_rdma_bytes = %d of the buffer cannot stage rows of %d bytes between %d nodes: at least %d is needed",
			b.opt.RDMABytes, rowBytes, b.top.Nodes(), p.MinRDMABytes)
	}
	b.minRow = rowBytes
	return nil
}

const countsHead = int(unsafe.Sizeof(abi.Counts{}))

// countsRoom makes sure that a pending exchange has enough host memory. Slots of the usual size share one page from the
// start.
func (b *Buffer) countsRoom(slot *pending, perExpert int) error {
	want := countsHead + 4*perExpert
	if want <= len(slot.page) {
		return nil
	}
	page, err := b.dev.NewHostPage(want)
	if err != nil {
		return err
	}
	b.extra = append(b.extra, page) // the old memory stays: a kernel may still write to it
	slot.page, slot.address = page.Host, page.Address
	return nil
}

// recordGrace is how long an aborted kernel may take to write its failure record.
const recordGrace = 50 * time.Millisecond

// awaitWord waits on the host until page's first word is >= atLeast, slice ends (errNotYet), or the status page shows
// that the kernel gave up.
func (b *Buffer) awaitWord(page []byte, atLeast uint64, slice time.Duration) error {
	p := &abi.HostWaitParams{Device: b.dev.Handle(), HostWord: hostAddress(page), AtLeast: atLeast, HostStatus: hostAddress(b.page.Host)}
	deadline := time.Now().Add(slice)
	for {
		step := waitSlice
		if slice >= 0 {
			step = max(0, min(step, time.Until(deadline)))
		}
		p.TimeoutNS = uint64(step)
		switch code := b.opt.Library.HostWait(p); status.Code(code) {
		case status.OK:
			return nil
		case status.Timeout:
			if slice >= 0 && time.Until(deadline) <= 0 {
				return errNotYet
			}
			if b.closed.Load() {
				return errDestroyed
			}
		case status.Aborted:
			// The kernel leaves as well and records in which call.
			within(recordGrace, func() bool { return atomic.LoadUint32(&b.words.Sticky) != 0 })
			if err := b.failure(); err != nil {
				return err
			}
			return status.Errorf(status.Internal, "dk_host_wait: aborted without a reason")
		default:
			return kern.Error("dk_host_wait", code, p.DeviceError)
		}
	}
}

func hostAddress(page []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(page)))) }

func itoa(n int32) string { return strconv.Itoa(int(n)) }

func rowsText(r plan.Rows) string { return fmt.Sprintf("%+v", r) }
