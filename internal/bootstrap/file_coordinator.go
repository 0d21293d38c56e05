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

// lead is rank 0: it opens a new run, waits until all have joined, and lets them go.
func (f *file) lead(ctx context.Context) error {
	f.nonce = freshNonce()
	f.run = f.runDir(f.nonce)
	if err := os.Mkdir(f.run, 0o700); err != nil {
		return status.Errorf(status.System, "rank 0: %w", err)
	}
	if err := f.put(f.openFile(), stamp{f.nonce, f.size}.encode()); err != nil {
		return err
	}
	word := goWord{Nonces: make([]string, f.size)}
	word.Nonces[0] = f.nonce
	for r := 1; r < f.size && word.Refusal == ""; r++ {
		b, err := f.await(ctx, "join-"+strconv.Itoa(r), r, stampBytes, nil)
		if err != nil {
			return err
		}
		s, err := parseStamp(b)
		if err != nil {
			return status.Errorf(status.Mismatch, "rank %d joined with %w", r, err)
		}
		word.Nonces[r] = s.nonce
		if s.size != f.size {
			word.Refusal = fmt.Sprintf("ranks disagree on the number of ranks: rank 0 has %d, rank %d has %d", f.size, r, s.size)
		}
	}
	text, err := json.Marshal(word)
	if err != nil {
		return status.Errorf(status.Internal, "exchange: %w", err)
	}
	if err := f.put(f.path("go"), text); err != nil {
		return err
	}
	if word.Refusal != "" {
		return status.Errorf(status.Mismatch, "%s", word.Refusal)
	}
	f.removeOldRuns()
	return nil
}

// removeOldRuns clears what runs of this name left that did not end in order. All ranks are in the new run by now.
func (f *file) removeOldRuns() {
	entries, _ := os.ReadDir(f.dir)
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), f.name+".run-") && e.Name() != filepath.Base(f.run) {
			os.RemoveAll(filepath.Join(f.dir, e.Name()))
		}
	}
}
