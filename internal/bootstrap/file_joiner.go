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

// errOtherRun means that rank 0 has opened another run since this rank read the stamp.
var errOtherRun = errors.New("another run is open")

// join is the other ranks' part of the start: it joins the open run, and the next one if rank 0 has opened another.
func (f *file) join(ctx context.Context) error {
	mine := stamp{freshNonce(), f.size}
	for {
		open, err := f.findRun(ctx)
		if err != nil {
			return err
		}
		err = f.create(f.path("join-"+strconv.Itoa(f.rank)), mine.encode())
		if err == nil {
			err = f.awaitGo(ctx, mine.nonce)
		}
		if errors.Is(err, status.ErrTimeout) && open.size != f.size {
			return status.Errorf(status.Mismatch, "ranks disagree on the number of ranks: rank 0 has %d, rank %d has %d: %w", open.size, f.rank, f.size, err)
		}
		if !errors.Is(err, errOtherRun) && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		// It was an old run, which rank 0 has replaced or removed.
		if err := sleep(ctx, pollMax, f.lateText(0)); err != nil {
			return err
		}
	}
}

// findRun reads the stamp of the open run.
func (f *file) findRun(ctx context.Context) (stamp, error) {
	b, err := f.awaitPath(ctx, f.openFile(), func() []int { return []int{0} }, stampBytes, nil)
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

// replaced returns errOtherRun if another run is open.
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

// undecided lists the ranks to blame while rank 0 has not decided: those that it still waits for, else rank 0.
func (f *file) undecided() []int {
	if missing := f.notJoined(); len(missing) > 0 && f.has("join-"+strconv.Itoa(f.rank)) {
		return missing
	}
	return []int{0}
}

// awaitGo waits for rank 0's decision on this process, which joined with nonce.
func (f *file) awaitGo(ctx context.Context, nonce string) error {
	for pause := pollFirst; ; pause = min(2*pause, pollMax) {
		b, err := f.awaitPath(ctx, f.path("go"), f.undecided, decisionBytes, f.replaced)
		if err != nil {
			return err
		}
		var d decision
		if err := json.Unmarshal(b, &d); err != nil {
			return status.Errorf(status.Mismatch, "file %s: %w", f.path("go"), err)
		}
		verdict := d.verdict(f.rank, f.size, nonce)
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
