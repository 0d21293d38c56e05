package bootstrap

import (
	"bytes"
	"context"
	"fmt"
	"sync"

	"github.com/deepep-go/deepep/internal/status"
)

// localRound is one all-gather. It ends when every rank has given its blob, or when one leaves.
type localRound struct {
	blobs [][]byte
	given []bool
	count int
	done  chan struct{}
	err   error
}

type localGroup struct {
	mu    sync.Mutex
	round *localRound
	size  int
	err   error // names the first rank that left; the others leave because of it
}

type local struct {
	rank int
	g    *localGroup
}

// NewLocal makes the Exchangers for ranks that are goroutines of this process.
func NewLocal(size int) []Exchanger {
	g := &localGroup{size: size}
	g.round = g.newRound()
	all := make([]Exchanger, size)
	for r := range all {
		all[r] = &local{r, g}
	}
	return all
}

func (g *localGroup) newRound() *localRound {
	return &localRound{blobs: make([][]byte, g.size), given: make([]bool, g.size), done: make(chan struct{})}
}

func (l *local) Rank() int { return l.rank }
func (l *local) Size() int { return l.g.size }

func (l *local) AllGather(ctx context.Context, blob []byte) ([][]byte, error) {
	if err := checkBlob(blob); err != nil {
		return nil, err
	}
	r, err := l.g.give(l.rank, bytes.Clone(blob))
	if err != nil {
		return nil, err
	}
	select {
	case <-r.done:
	case <-ctx.Done():
		// The other ranks cannot complete this round.
		l.g.leave(l.rank)
		return nil, ctxError(ctx, l.g.missing(r))
	}
	if r.err != nil {
		return nil, r.err
	}
	out := make([][]byte, len(r.blobs))
	for i, b := range r.blobs {
		out[i] = bytes.Clone(b)
	}
	return out, nil
}

// give adds a rank's blob to the current round. The last rank opens the next round.
func (g *localGroup) give(rank int, blob []byte) (*localRound, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	r := g.round
	if g.err != nil {
		return nil, g.err
	}
	if r.given[rank] {
		return nil, status.Errorf(status.InvalidState, "rank %d gathers twice at once", rank)
	}
	r.blobs[rank], r.given[rank] = blob, true
	if r.count++; r.count == len(r.given) {
		g.round = g.newRound()
		close(r.done)
	}
	return r, nil
}

func leftError(rank int) error {
	return status.Errorf(status.Aborted, "rank %d has left the exchange", rank)
}

func (g *localGroup) leave(rank int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.err != nil {
		return
	}
	g.err = leftError(rank)
	g.round.err = g.err
	close(g.round.done)
}

func (g *localGroup) missing(r *localRound) string {
	g.mu.Lock()
	defer g.mu.Unlock()
	var ranks []int
	for rank, ok := range r.given {
		if !ok {
			ranks = append(ranks, rank)
		}
	}
	return fmt.Sprintf("exchange: nothing from %s", rankList(ranks))
}

func (l *local) Close() error {
	l.g.leave(l.rank)
	return nil
}
