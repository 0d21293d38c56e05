package bootstrap

import "github.com/deepep-go/deepep/internal/status"

// OnWord makes the channel's readers call f with the words of other ranks. f must not block.
func (c *Channel) OnWord(f func(rank int, tag string, word []byte)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.onWord = f
}

// Tell sends a few bytes to every other rank and does not wait. Unlike a note a word is not dropped, and it arrives
// before what this rank sends later. A rank that does not read fails, as in an Exchange.
func (c *Channel) Tell(tag string, word []byte) error {
	if err := checkMessage(tag, word, nil); err != nil {
		return err
	}
	if len(word) > MaxNote {
		return status.InvalidArg("word", len(word), "at most 4096 bytes")
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return closedError(tag)
	}
	for rank, l := range c.links {
		if l != nil && !l.queue(&outgoing{frame: frame{kind: kindWord, rank: c.rank, nonce: c.nonce, tag: tag, blob: word}}) {
			c.fail(rank, status.Errorf(status.Timeout, "%s has not read for %d messages", c.peers[rank], queueFrames))
		}
	}
	return nil
}
