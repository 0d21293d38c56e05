package bootstrap

import (
	"errors"
	"net"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// fileID tells an open file from any other. Something else in this process may close a descriptor that is not its own;
// its number is then free for another file, and a read that waits hears of neither.
type fileID struct {
	dev, ino uint64
}

// noFile is that of a connection that had lost its descriptor before its file was known.
var noFile = fileID{^uint64(0), ^uint64(0)}

// idOf is the file behind a connection's descriptor; zero where there is no descriptor, or this process has closed it
// in good order.
func idOf(conn net.Conn) (id fileID, err error) {
	c, ok := conn.(syscall.Conn)
	if !ok {
		return fileID{}, nil
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return fileID{}, nil
	}
	var inner error
	if err := raw.Control(func(fd uintptr) {
		var s unix.Stat_t
		if inner = unix.Fstat(int(fd), &s); inner == nil {
			id = fileID{uint64(s.Dev), s.Ino} //nolint:unconvert // of 32 bits on some machines
		}
	}); err != nil {
		return fileID{}, nil
	}
	return id, inner
}

// stolen reports whether something else has closed the connection's descriptor.
func (l *link) stolen() bool {
	if l.conn == nil || l.id == (fileID{}) {
		return false
	}
	now, err := idOf(l.conn)
	return errors.Is(err, unix.EBADF) || now != (fileID{}) && now != l.id
}

// LowestFD is the lowest number of descriptors of memory and of epoll sets. The Go runtime has an epoll set and an
// eventfd with low numbers. If something else in the process closes one of them, and memory of ours gets the number, the
// runtime writes to that memory whenever it wakes its poller; with an epoll set its timers stand still. Any other file
// of that number makes the runtime end the process, which the other ranks see.
const LowestFD = 64

// Above gives a descriptor a number from LowestFD on, unless the process's limit forbids it.
func Above(fd int) int {
	if fd < 0 || fd >= LowestFD {
		return fd
	}
	high, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, LowestFD)
	if err != nil {
		return fd
	}
	unix.Close(fd)
	return high
}

// abandoned keeps connections whose descriptor's number may be another file's by now: the garbage collector would close
// that one.
var abandoned sync.Map

// shut closes the connection, if there is one. Where its descriptor is not ours any more, it only ends reads and writes.
func (l *link) shut() {
	switch {
	case l.conn == nil:
	case l.stolen():
		abandoned.Store(l.conn, nil)
		l.conn.SetDeadline(time.Unix(1, 0))
	default:
		l.conn.Close()
	}
}
