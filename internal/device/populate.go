package device

import (
	"errors"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/deepep-go/deepep/internal/status"
)

// Populate brings in the pages of a part of host memory, so that no later access waits for one. What is there stays.
func (m *Memory) Populate(offset, bytes uint64) error {
	if bytes == 0 {
		return nil
	}
	address := m.Address + offset
	memory := unsafe.Slice((*byte)(*(*unsafe.Pointer)(unsafe.Pointer(&address))), bytes)
	err := unix.Madvise(memory, unix.MADV_POPULATE_WRITE)
	if errors.Is(err, unix.EINVAL) { // before Linux 5.14
		for at := uint64(0); at < bytes; at += uint64(unix.Getpagesize()) {
			atomic.AddUint32((*uint32)(unsafe.Pointer(&memory[at])), 0)
		}
		return nil
	}
	if err != nil {
		return status.Errorf(status.OutOfMemory, "bringing in %d bytes of memory: %w", bytes, err)
	}
	return nil
}

// mincoreStep is how much memory one look at the pages covers.
const mincoreStep = 64 << 20

// Zero fills a part of host memory with zeros. Pages that nobody has touched stay so.
func (m *Memory) Zero(offset, bytes uint64) {
	page := uint64(unix.Getpagesize())
	seen := make([]byte, mincoreStep/page)
	for at, end := offset, offset+bytes; at < end; {
		n := min(end, (at/page*page)+mincoreStep) - at
		address := m.Address + at
		memory := unsafe.Slice((*byte)(*(*unsafe.Pointer)(unsafe.Pointer(&address))), n)
		first := address / page * page
		_, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(first), uintptr(address+n-first), uintptr(unsafe.Pointer(unsafe.SliceData(seen))))
		for i := uint64(0); i < n; {
			part := min(n, page-(address+i)%page)
			if errno != 0 || seen[(address+i)/page-first/page]&1 != 0 {
				clear(memory[i : i+part])
			}
			i += part
		}
		at += n
	}
}

// PageFaults counts this process's page faults so far.
func PageFaults() uint64 { return pageFaults(unix.RUSAGE_SELF) }

// ThreadPageFaults counts those of the thread that calls.
func ThreadPageFaults() uint64 { return pageFaults(unix.RUSAGE_THREAD) }

func pageFaults(who int) uint64 {
	var usage unix.Rusage
	if unix.Getrusage(who, &usage) != nil {
		return 0
	}
	return uint64(usage.Minflt + usage.Majflt)
}
