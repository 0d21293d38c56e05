package bootstrap

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"strconv"

	"github.com/deepep-go/deepep/internal/status"
)

// errOtherRun: rank 0 has opened another run since this one was found.
var errOtherRun = errors.New("another run is open")

// follow is every other rank: it joins the run that is open, and the next one if rank 0 opened another meanwhile.
func (f *file) follow(ctx context.Context) error {
	own := stamp{freshNonce(), f.size}
	for {
		open, err := f.findRun(ctx)
		if err != nil {
			return err
		}
		err = f.put(f.path("join-"+strconv.Itoa(f.rank)), own.encode())
		if err == nil {
			err = f.awaitGo(ctx, own.nonce)
		}
		if errors.Is(err, status.ErrTimeout) && open.size != f.size {
			return status.Errorf(status.Mismatch, "ranks disagree on the number of ranks: rank 0 has %d, rank %d has %d: %w", open.size, f.rank, f.size, err)
		}
		if !errors.Is(err, errOtherRun) && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		// It was an old run: replaced, or its folder is gone. Look again.
		if err := sleep(ctx, pollMost, f.lateText(0)); err != nil {
			return err
		}
	}
}

// findRun reads which run is open.
func (f *file) findRun(ctx context.Context) (stamp, error) {
	b, err := f.awaitPath(ctx, f.openFile(), 0, stampBytes, nil)
	if err != nil {
		return stamp{}, err
	}
	s, err := parseStamp(b)
	if err != nil {
		return stamp{}, status.Errorf(status.Mismatch, "file %s: %w: remove it or choose another name", f.openFile(), err)
	}
	f.nonce, f.run = s.nonce, f.runDir(s.nonce)
	return s, nil
}

// replaced is errOtherRun as soon as another run is open.
func (f *file) replaced() error {
	b, err := readBounded(f.openFile(), stampBytes)
	if err != nil {
		return nil
	}
	if s, err := parseStamp(b); err == nil && s.nonce != f.nonce {
		return errOtherRun
	}
	return nil
}

// awaitGo waits for rank 0's word to this process.
func (f *file) awaitGo(ctx context.Context, own string) error {
	for pause := pollFirst; ; pause = min(2*pause, pollMost) {
		b, err := f.awaitPath(ctx, f.path("go"), 0, goBytes, f.replaced)
		if err != nil {
			return err
		}
		var word goWord
		if err := json.Unmarshal(b, &word); err != nil {
			return status.Errorf(status.Mismatch, "file %s: %w", f.path("go"), err)
		}
		verdict := word.judge(f.rank, f.size, own)
		if !errors.Is(verdict, errNotForUs) {
			return verdict
		}
		if err := f.replaced(); err != nil {
			return err
		}
		if err := sleep(ctx, pause, f.lateText(0)); err != nil {
			return fmt.Errorf("%w; %w", err, verdict)
		}
	}
}
