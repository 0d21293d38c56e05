package bootstrap

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// queueFrames bounds the frames that wait for one peer. Exchanges keep ranks within a call or two of each other, so
// that a longer queue means that the peer does not read.
const queueFrames = 256

// link is a connection to one peer. One goroutine reads it, one writes it.
type link struct {
	rank int
	conn net.Conn
	unix *net.UnixConn // conn if it can carry descriptors, else nil
	id   fileID        // of conn
	out  chan *outgoing

	unusable atomic.Pointer[error] // why nothing can be written, where the reader would not learn it

	near *inbox // of a rank of the crowd, which has no connection; nil: conn counts
	home int    // with near: the rank that sends
}

// outgoing is a queued frame. All links of one Exchange share the duplicated descriptors.
type outgoing struct {
	frame
	shared *sharedFDs
}

// sharedFDs closes descriptors when the last frame that carries them has been sent or dropped.
type sharedFDs struct {
	fds  []int
	refs atomic.Int32
}

func (s *sharedFDs) release() {
	if s != nil && s.refs.Add(-1) == 0 {
		closeFDs(s.fds)
	}
}

func newLink(rank int, conn net.Conn) *link {
	l := &link{rank: rank, conn: conn, out: make(chan *outgoing, queueFrames)}
	l.unix, _ = conn.(*net.UnixConn)
	var err error
	if l.id, err = idOf(conn); err != nil {
		l.id = noFile
	}
	return l
}

// read returns the next frame. Its descriptors are close-on-exec and belong to the caller.
func (l *link) read(maxBlob int) (frame, error) {
	if l.unix == nil {
		return readFrame(l.conn, maxBlob)
	}
	b := make([]byte, headerBytes)
	fds, err := readHeadWithFDs(l.unix, b)
	if err != nil {
		return frame{}, err
	}
	h, err := decodeHeader(b)
	if err == nil && h.nfds != len(fds) {
		err = fmt.Errorf("frame announces %d descriptors, %d came: this process may have too many open files", h.nfds, len(fds))
	}
	if err == nil && h.blob > maxBlob {
		err = fmt.Errorf("frame announces %d bytes where at most %d are expected", h.blob, maxBlob)
	}
	var f frame
	if err == nil {
		f, err = h.readBody(l.unix)
	}
	if err != nil {
		closeFDs(fds)
		return frame{}, err
	}
	f.fds = fds
	return f, nil
}

// readHeadWithFDs fills b with a frame's header. The kernel delivers descriptors with the first byte of the write that
// sent them, which is the header's. ReadMsgUnix sets close-on-exec.
func readHeadWithFDs(c *net.UnixConn, b []byte) ([]int, error) {
	oob := make([]byte, unix.CmsgSpace(MaxFDs*4))
	var fds []int
	for have := 0; have < len(b); {
		n, oobn, _, _, err := c.ReadMsgUnix(b[have:], oob)
		if oobn > 0 {
			more, perr := parseFDs(oob[:oobn])
			for _, fd := range more {
				fds = append(fds, Above(fd))
			}
			if err == nil {
				err = perr
			}
		}
		if err == nil && n == 0 {
			err = io.EOF
		}
		if errors.Is(err, io.EOF) && have > 0 {
			err = io.ErrUnexpectedEOF
		}
		if err == nil && len(fds) > MaxFDs {
			err = fmt.Errorf("%d descriptors in one frame", len(fds))
		}
		if err != nil {
			closeFDs(fds)
			return nil, err
		}
		have += n
	}
	return fds, nil
}

// parseFDs returns the descriptors in control messages.
func parseFDs(oob []byte) ([]int, error) {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, fmt.Errorf("control message: %w", err)
	}
	var fds []int
	for i := range msgs {
		if msgs[i].Header.Level != unix.SOL_SOCKET || msgs[i].Header.Type != unix.SCM_RIGHTS {
			continue
		}
		more, err := unix.ParseUnixRights(&msgs[i])
		if err != nil {
			return fds, fmt.Errorf("descriptors: %w", err)
		}
		fds = append(fds, more...)
	}
	return fds, nil
}

// write sends one frame whole.
func (l *link) write(f *frame) error {
	if l.unix == nil || len(f.fds) == 0 {
		return writeFrame(l.conn, f)
	}
	head, err := f.encodeHead()
	if err != nil {
		return err
	}
	n, _, err := l.unix.WriteMsgUnix(head, unix.UnixRights(f.fds...), nil)
	if err != nil {
		return err
	}
	if _, err := io.Copy(l.unix, bytes.NewReader(head[n:])); err != nil { // a stream may take the header in parts
		return err
	}
	if len(f.blob) == 0 { // to write nothing fails where the peer has read the frame, and left
		return nil
	}
	_, err = l.unix.Write(f.blob)
	return err
}

// writeLoop sends queued frames until the queue is closed. After an error it releases the rest without sending; the
// reader reports the loss of the peer, because it may have read the reason. A read that waits never hears that
// something else in this process has closed the descriptor: such an error ends the reader.
func (l *link) writeLoop() {
	var failed error
	for o := range l.out {
		if failed == nil {
			failed = l.write(&o.frame)
			if failed != nil && !writingIsOver(failed) {
				l.unusable.Store(&failed)
				l.shut()
			}
		}
		o.shared.release()
	}
	if c, ok := l.conn.(interface{ CloseWrite() error }); ok && failed == nil {
		c.CloseWrite()
	}
}

// queue passes a frame to the writer without waiting. It returns false if the queue is full: the peer does not read.
func (l *link) queue(o *outgoing) bool {
	if l.near != nil {
		return l.near.put(letter{frame: o.frame})
	}
	select {
	case l.out <- o:
		return true
	default:
		return false
	}
}

// hasRoom reports whether a note may be queued. Half of the queue is for messages alone.
func (l *link) hasRoom() bool {
	if l.near != nil {
		return l.near.has(l.home) < queueFrames/2
	}
	return len(l.out) < queueFrames/2
}

// endWriting lets the peer have what is queued, then the end.
func (l *link) endWriting() {
	if l.near != nil {
		l.near.put(letter{frame: frame{rank: l.home}, end: true})
		return
	}
	l.conn.SetWriteDeadline(time.Now().Add(flushAtClose))
	close(l.out)
}

// endReadingIn ends the reader after d, in which it takes what has arrived.
func (l *link) endReadingIn(d time.Duration) { l.conn.SetReadDeadline(time.Now().Add(d)) }

func closeFDs(fds []int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}

// dupFDs duplicates descriptors, close-on-exec.
func dupFDs(fds []int) ([]int, error) {
	out := make([]int, 0, len(fds))
	for i, fd := range fds {
		d, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 3)
		if err != nil {
			closeFDs(out)
			return nil, fmt.Errorf("descriptor %d (index %d): %w", fd, i, err)
		}
		out = append(out, Above(d))
	}
	return out, nil
}

// writingIsOver reports whether a write failed for a reason that others account for: the peer has closed, which the reader
// reports, this side has, or the time of flushAtClose is over.
func writingIsOver(err error) bool {
	return connectionGone(err) || errors.Is(err, net.ErrClosed) || errors.Is(err, os.ErrDeadlineExceeded)
}

// connectionGone reports whether an error means that the other end has closed.
func connectionGone(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET) ||
		errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNREFUSED)
}
