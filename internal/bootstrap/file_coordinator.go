package bootstrap

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/deepep-go/deepep/internal/status"
)

// coordinate is rank 0's part of the start: it opens a new run, waits until all ranks have joined, and writes its
// decision.
func (f *file) coordinate(ctx context.Context) error {
	f.nonce = freshNonce()
	f.run = f.runDir(f.nonce)
	if err := os.Mkdir(f.run, 0o700); err != nil {
		return status.Errorf(status.System, "rank 0: %w", err)
	}
	if err := f.create(f.openFile(), stamp{f.nonce, f.size}.encode()); err != nil {
		return err
	}
	d, failure := f.awaitJoiners(ctx)
	text, err := json.Marshal(d)
	if err != nil {
		return status.Errorf(status.Internal, "exchange: %w", err)
	}
	if err := f.create(f.path("go"), text); err != nil {
		return err
	}
	if failure == nil {
		f.removeOldRuns()
	}
	return failure
}

// awaitJoiners waits for all ranks. The decision tells those that have joined of a failure, so that they name the
// missing rank, not rank 0.
func (f *file) awaitJoiners(ctx context.Context) (d decision, failure error) {
	d = decision{Nonces: make([]string, f.size)}
	d.Nonces[0] = f.nonce
	for r := 1; r < f.size && failure == nil; r++ {
		var s stamp
		if s, failure = f.joiner(ctx, r); failure == nil {
			d.Nonces[r] = s.nonce
		}
		if failure == nil && s.size != f.size {
			failure = status.Errorf(status.Mismatch, "ranks disagree on the number of ranks: rank 0 has %d, rank %d has %d", f.size, r, s.size)
		}
	}
	if failure == nil {
		return d, nil
	}
	for r := 1; r < f.size; r++ {
		if b, err := readBounded(f.path("join-"+strconv.Itoa(r)), stampBytes); err == nil {
			if s, err := parseStamp(b); err == nil {
				d.Nonces[r] = s.nonce
			}
		}
	}
	text := failure.Error()
	d.Refusal, d.Code = text[:min(len(text), maxReason)], status.CodeOf(failure)
	if d.Code == status.Interrupted {
		d.Code = status.Aborted // of rank 0's caller, not of theirs
	}
	return d, failure
}

// joiner waits for a rank's stamp.
func (f *file) joiner(ctx context.Context, r int) (stamp, error) {
	b, err := f.awaitPath(ctx, f.path("join-"+strconv.Itoa(r)), f.notJoined, stampBytes, nil)
	if err != nil {
		return stamp{}, err
	}
	s, err := parseStamp(b)
	if err != nil {
		return stamp{}, status.Errorf(status.Mismatch, "rank %d joined with %w", r, err)
	}
	return s, nil
}

// removeOldRuns removes the files of earlier runs of this name that were killed. All ranks are in the new run by now.
func (f *file) removeOldRuns() {
	entries, _ := os.ReadDir(f.dir)
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), f.name+".run-") && e.Name() != filepath.Base(f.run) {
			os.RemoveAll(filepath.Join(f.dir, e.Name()))
		}
	}
}
