package bootstrap

import "github.com/deepep-go/deepep/internal/status"

// MaxNote bounds a note.
const MaxNote = 4096

// OnNote makes the channel's readers call f with the notes of other ranks. f must not block; nil drops the notes.
func (c *Channel) OnNote(f func(rank int, note []byte)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.onNote = f
}

// Note sends a few bytes to one rank and does not wait. If the peer does not keep up, the note is dropped: send only
// what a later note repeats.
func (c *Channel) Note(rank int, note []byte) error {
	if len(note) > MaxNote {
		return status.InvalidArg("note", len(note), "at most 4096 bytes")
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return status.Errorf(status.InvalidState, "note: this rank's channel is closed")
	}
	if l := c.links[rank]; l != nil && l.hasRoom() {
		l.queue(&outgoing{frame: frame{kind: kindNote, rank: c.rank, nonce: c.nonce, blob: note}})
	}
	return nil
}
