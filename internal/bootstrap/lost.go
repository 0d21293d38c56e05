package bootstrap

import (
	"encoding/binary"
	"errors"

	"github.com/deepep-go/deepep/internal/status"
)

// lost is a connection that has ended without a word.
type lost struct {
	rank int
	err  error
}

// failLost fails a rank whose connection was lost, after those that were lost before: they may be its reason.
func (c *Channel) failLost(rank int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, l := range c.lost {
		c.failAndTell(l.rank, l.rank, l.err)
		if l.rank == rank {
			return
		}
	}
}

// failAndTell fails a rank for a connection that broke, and tells the others of it: they have theirs, and may wait for
// ranks that have given up because of the broken one. culprit is the rank to blame, of the two at its ends. Needs c.mu.
func (c *Channel) failAndTell(rank, culprit int, err error) {
	if c.failed[rank] != nil {
		return
	}
	c.fail(rank, err)
	if c.closed {
		return
	}
	blob := append(binary.LittleEndian.AppendUint32(nil, uint32(culprit)), encodeRefusal(err)...)
	for other, l := range c.links {
		if l != nil && other != rank && l.hasRoom() {
			l.queue(&outgoing{frame: frame{kind: kindLost, rank: c.rank, nonce: c.nonce, blob: blob}})
		}
	}
}

// heardLost handles a frame of kind kindLost: it fails the rank to blame, unless that is this one, which sees it itself.
func (c *Channel) heardLost(f *frame) error {
	if len(f.blob) < 4 || int64(binary.LittleEndian.Uint32(f.blob)) >= int64(len(c.peers)) {
		return errors.New("a damaged word of a lost connection")
	}
	culprit, why := int(binary.LittleEndian.Uint32(f.blob)), decodeRefusal(f.blob[4:])
	if culprit != c.rank {
		c.Fail(culprit, status.Errorf(status.CodeOf(why), "%s has lost a connection: %w", c.peers[f.rank], why))
	}
	return nil
}
