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

// PageFaults counts this process's page faults so far.
func PageFaults() uint64 {
	var usage unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &usage) != nil {
		return 0
	}
	return uint64(usage.Minflt + usage.Majflt)
}
