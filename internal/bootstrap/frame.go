package bootstrap

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// MaxBlob bounds one blob of an Exchange or AllGather.
const MaxBlob = 64 << 20

// MaxFDs bounds the descriptors of one message. The kernel's own limit is 253 (SCM_MAX_FD).
const MaxFDs = 64

// maxTag bounds the tag of an Exchange, a text that names what is exchanged.
const maxTag = 255

// frameMagic opens every frame: "DEP1" on the wire.
const frameMagic = 0x31504544

const headerBytes = 32

type frameKind uint8

const (
	kindChallenge frameKind = iota + 1 // TCP bootstrap: rank 0's first frame on a new connection
	kindJoin                           // TCP bootstrap: the joiner's answer
	kindAccept                         // TCP bootstrap: all ranks have joined
	kindRefuse                         // both: a refusal with code and reason
	kindGather                         // TCP bootstrap: a blob
	kindHello                          // channel: the dialer's first frame
	kindWelcome                        // channel: the listener's first frame
	kindData                           // channel: an Exchange's message
	kindNote                           // channel: a one-way note
	kindBye                            // channel: the sender closes it, with the reason if there is one
	kindWord                           // channel: a one-way word that is not dropped
	kindPost                           // channel: what the sender posts now under a tag
	kindKnock                          // door: a process asks to be let into a group
	kindAdmit                          // door: it is let in
	kindWait                           // channel: whether the sender waits for others
	kindLost                           // channel: a connection of the sender broke, and which rank is to blame
	kindEnd
)

// frame is one unit on a link. Only Unix links carry fds.
type frame struct {
	kind  frameKind
	rank  int // the sender, or on a TCP gather the rank whose blob this is
	nonce [16]byte
	tag   string
	blob  []byte
	fds   []int
}

// header is the fixed part of a frame.
//
//	0 magic u32 · 4 kind u8 · 5 number of descriptors u8 · 6 tag bytes u16 · 8 blob bytes u32 · 12 rank u32 · 16 nonce
type header struct {
	kind  frameKind
	nfds  int
	tag   int
	blob  int
	rank  int
	nonce [16]byte
}

func (f *frame) encodeHead() ([]byte, error) {
	if len(f.blob) > MaxBlob || len(f.tag) > maxTag || len(f.fds) > MaxFDs {
		return nil, fmt.Errorf("frame of %d bytes, tag of %d, %d descriptors is over the limits", len(f.blob), len(f.tag), len(f.fds))
	}
	b := make([]byte, headerBytes, headerBytes+len(f.tag))
	binary.LittleEndian.PutUint32(b[0:], frameMagic)
	b[4], b[5] = byte(f.kind), byte(len(f.fds))
	binary.LittleEndian.PutUint16(b[6:], uint16(len(f.tag)))
	binary.LittleEndian.PutUint32(b[8:], uint32(len(f.blob)))
	binary.LittleEndian.PutUint32(b[12:], uint32(f.rank))
	copy(b[16:], f.nonce[:])
	return append(b, f.tag...), nil
}

// decodeHeader checks every field, before the reader allocates memory for it.
func decodeHeader(b []byte) (header, error) {
	if len(b) != headerBytes {
		return header{}, fmt.Errorf("frame header of %d bytes, want %d", len(b), headerBytes)
	}
	if m := binary.LittleEndian.Uint32(b[0:]); m != frameMagic {
		return header{}, fmt.Errorf("frame magic %#08x, want %#08x", m, uint32(frameMagic))
	}
	h := header{
		kind: frameKind(b[4]), nfds: int(b[5]), tag: int(binary.LittleEndian.Uint16(b[6:])),
		blob: int(binary.LittleEndian.Uint32(b[8:])), rank: int(binary.LittleEndian.Uint32(b[12:])),
	}
	copy(h.nonce[:], b[16:])
	switch {
	case h.kind < kindChallenge || h.kind >= kindEnd:
		return header{}, fmt.Errorf("frame kind %d is unknown", h.kind)
	case h.nfds > MaxFDs:
		return header{}, fmt.Errorf("frame announces %d descriptors, limit %d", h.nfds, MaxFDs)
	case h.tag > maxTag:
		return header{}, fmt.Errorf("frame announces a tag of %d bytes, limit %d", h.tag, maxTag)
	case h.blob > MaxBlob:
		return header{}, fmt.Errorf("frame announces %d bytes, limit %d", h.blob, MaxBlob)
	case h.rank >= maxRanks:
		return header{}, fmt.Errorf("frame from rank %d, limit %d", h.rank, maxRanks)
	}
	return h, nil
}

// eagerBytes bounds what the reader allocates for a header alone. It allocates the rest when these bytes have arrived.
const eagerBytes = 1 << 20

// readBody reads tag and blob.
func (h header) readBody(r io.Reader) (frame, error) {
	f := frame{kind: h.kind, rank: h.rank, nonce: h.nonce}
	want := h.tag + h.blob
	body := make([]byte, min(want, eagerBytes))
	n, err := io.ReadFull(r, body)
	if err == nil && n < want {
		body = append(make([]byte, 0, want), body...)[:want]
		var rest int
		rest, err = io.ReadFull(r, body[n:])
		n += rest
	}
	if err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return frame{}, fmt.Errorf("frame body, %d of %d bytes: %w", n, want, err)
	}
	f.tag, f.blob = string(body[:h.tag]), body[h.tag:]
	return f, nil
}

// readFrame reads a frame of at most maxBlob bytes from a plain byte stream. It refuses frames with descriptors.
func readFrame(r io.Reader, maxBlob int) (frame, error) {
	var b [headerBytes]byte
	if _, err := io.ReadFull(r, b[:]); err != nil {
		return frame{}, err // io.EOF between frames: the other side has closed
	}
	h, err := decodeHeader(b[:])
	if err != nil {
		return frame{}, err
	}
	if h.nfds != 0 {
		return frame{}, errors.New("frame announces descriptors on a link that carries none")
	}
	if h.blob > maxBlob {
		return frame{}, fmt.Errorf("frame announces %d bytes where at most %d are expected", h.blob, maxBlob)
	}
	return h.readBody(r)
}

func writeFrame(w io.Writer, f *frame) error {
	head, err := f.encodeHead()
	if err != nil {
		return err
	}
	if _, err := w.Write(head); err != nil {
		return err
	}
	if len(f.blob) == 0 {
		return nil
	}
	_, err = w.Write(f.blob)
	return err
}
