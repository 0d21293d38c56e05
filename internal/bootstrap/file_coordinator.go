package bootstrap

import (
	"context"
	"encoding/json"
	"fmt"
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
	d := decision{Nonces: make([]string, f.size)}
	d.Nonces[0] = f.nonce
	for r := 1; r < f.size && d.Refusal == ""; r++ {
		b, err := f.await(ctx, "join-"+strconv.Itoa(r), r, stampBytes, nil)
		if err != nil {
			return err
		}
		s, err := parseStamp(b)
		if err != nil {
			return status.Errorf(status.Mismatch, "rank %d joined with %w", r, err)
		}
		d.Nonces[r] = s.nonce
		if s.size != f.size {
			d.Refusal = fmt.Sprintf("ranks disagree on the number of ranks: rank 0 has %d, rank %d has %d", f.size, r, s.size)
		}
	}
	text, err := json.Marshal(d)
	if err != nil {
		return status.Errorf(status.Internal, "exchange: %w", err)
	}
	if err := f.create(f.path("go"), text); err != nil {
		return err
	}
	if d.Refusal != "" {
		return status.Errorf(status.Mismatch, "%s", d.Refusal)
	}
	f.removeOldRuns()
	return nil
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
