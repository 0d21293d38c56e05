package bootstrap

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/deepep-go/deepep/internal/status"
)

// Pauses between polls of the shared folder: short at first, then doubled to spare a network file system.
const (
	pollFirst = time.Millisecond
	pollMax   = 20 * time.Millisecond
)

// FileOptions describes a group that starts through a folder that all ranks see.
type FileOptions struct {
	Rank, Size int
	Dir        string // exists, and only this user or trusted ones can write to it
	Name       string // of the group: equal on all ranks, and not in use by another running group in this folder
}

// file is one rank's view of a run. Dir holds
//
//	Name                    the stamp of the current run, written by rank 0
//	Name.run-<nonce>/       the folder of this run:
//	  join-<rank>           the joiner's stamp
//	  go                    rank 0's decision: the nonces of all joiners, or why the run does not begin
//	  <gather>-<rank>       a blob
//	  bye-<rank>            this rank has closed its exchanger
//
// A rename creates each file, so that a reader never sees half of one. A joiner does not mistake an earlier run's files
// for this run's: it accepts a run only when `go` holds the nonce that it has just made.
type file struct {
	rank, size int
	dir, name  string
	run        string // folder of this run
	nonce      string // of the run
	seq        int
	broken     error
	closed     bool
}

var groupName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$`)

// OpenFile joins the ranks through a folder and returns when all have joined. It is collective.
func OpenFile(ctx context.Context, o FileOptions) (Exchanger, error) {
	if err := CheckGroup(o.Rank, o.Size); err != nil {
		return nil, err
	}
	if !groupName.MatchString(o.Name) || strings.Contains(o.Name, ".run-") {
		return nil, status.InvalidArg("name", strconv.Quote(o.Name), "1 to 100 letters, digits, '.', '_', '-', the first a letter or digit, without \".run-\"")
	}
	if info, err := os.Stat(o.Dir); err != nil || !info.IsDir() {
		return nil, status.InvalidArg("directory", strconv.Quote(o.Dir), "an existing folder that all ranks can write")
	}
	f := &file{rank: o.Rank, size: o.Size, dir: o.Dir, name: o.Name}
	var err error
	if o.Rank == 0 {
		err = f.coordinate(ctx)
	} else {
		err = f.join(ctx)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

func (f *file) Rank() int { return f.rank }
func (f *file) Size() int { return f.size }

func (f *file) path(name string) string { return filepath.Join(f.run, name) }
func (f *file) openFile() string        { return filepath.Join(f.dir, f.name) }
func (f *file) runDir(nonce string) string {
	return filepath.Join(f.dir, f.name+".run-"+nonce)
}

// AllGather writes this rank's blob and reads all ranks' blobs. Once it has them all, every rank has read the gather
// before, and this rank removes its file of that gather.
func (f *file) AllGather(ctx context.Context, blob []byte) ([][]byte, error) {
	if err := checkBlob(blob); err != nil {
		return nil, err
	}
	if f.closed {
		return nil, status.Errorf(status.InvalidState, "exchange: this rank's exchanger is closed")
	}
	if f.broken != nil {
		return nil, f.broken
	}
	all, err := f.gather(ctx, blob)
	f.broken = err
	return all, err
}

func (f *file) gather(ctx context.Context, blob []byte) ([][]byte, error) {
	f.seq++
	file := func(seq, rank int) string { return fmt.Sprintf("%d-%d", seq, rank) }
	if err := f.create(f.path(file(f.seq, f.rank)), blob); err != nil {
		return nil, err
	}
	all := make([][]byte, f.size)
	for r := range all {
		if r == f.rank {
			all[r] = bytes.Clone(blob)
			continue
		}
		left := func() error {
			if f.has("bye-" + strconv.Itoa(r)) {
				return leftError(r)
			}
			return nil
		}
		late := func() []int { // all that have not come, not just the one whose turn it is
			return f.without(func(rank int) string { return file(f.seq, rank) }, r)
		}
		var err error
		if all[r], err = f.awaitPath(ctx, f.path(file(f.seq, r)), late, MaxBlob, left); err != nil {
			return nil, err
		}
	}
	os.Remove(f.path(file(f.seq-1, f.rank)))
	return all, nil
}

// without lists the ranks that have not written their file; awaited alone where its file has come just now.
func (f *file) without(name func(rank int) string, awaited int) (ranks []int) {
	for rank := range f.size {
		if !f.has(name(rank)) {
			ranks = append(ranks, rank)
		}
	}
	if ranks == nil {
		return []int{awaited}
	}
	return ranks
}

// awaitPath polls for a file and reads it. over, if not nil, is called before each poll and returns why the file will
// not come. late lists the ranks to blame when ctx ends.
func (f *file) awaitPath(ctx context.Context, path string, late func() []int, limit int, over func() error) ([]byte, error) {
	for pause := pollFirst; ; pause = min(2*pause, pollMax) {
		var stop error
		if over != nil {
			stop = over() // before the read: a rank that leaves has written its file before
		}
		b, err := readBounded(path, limit)
		if err == nil {
			return b, nil
		}
		if !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ESTALE) && !errors.Is(err, syscall.EBADF) {
			return nil, status.Errorf(status.System, "exchange: file of %s: %w", rankList(late()), err)
		}
		if stop != nil {
			return nil, stop
		}
		if !sleepUntil(ctx, pause) {
			return nil, ctxError(ctx, f.lateText(late()...))
		}
	}
}

func (f *file) lateText(from ...int) string {
	return fmt.Sprintf("exchange: nothing from %s in folder %s under the name %s", rankList(from), f.dir, f.name)
}

func sleep(ctx context.Context, d time.Duration, what string) error {
	if !sleepUntil(ctx, d) {
		return ctxError(ctx, what)
	}
	return nil
}

// sleepUntil is false if ctx ended first.
func sleepUntil(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// notJoined lists the ranks, but for rank 0 and this one, that have not joined the open run.
func (f *file) notJoined() (ranks []int) {
	for r := 1; r < f.size; r++ {
		if r != f.rank && !f.has("join-"+strconv.Itoa(r)) {
			ranks = append(ranks, r)
		}
	}
	return ranks
}

func (f *file) has(name string) bool {
	_, err := os.Lstat(f.path(name))
	return err == nil
}

// readBounded does not follow links: in a shared folder a link could point anywhere.
func readBounded(path string, limit int) ([]byte, error) {
	in, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer in.Close()
	b, err := io.ReadAll(io.LimitReader(in, int64(limit)+1))
	if err == nil && len(b) > limit {
		err = fmt.Errorf("%s: more than %d bytes", path, limit)
	}
	return b, err
}

// create writes a file under a temporary name and renames it; twice if something else in this process closes it.
func (f *file) create(path string, b []byte) error {
	err := f.createOnce(path, b)
	if errors.Is(err, syscall.EBADF) {
		err = f.createOnce(path, b)
	}
	return err
}

func (f *file) createOnce(path string, b []byte) error {
	tmp, err := os.CreateTemp(f.run, ".new-*")
	if err != nil {
		return status.Errorf(status.System, "exchange: %w", err)
	}
	_, err = tmp.Write(b)
	status.Keep(&err, tmp.Close())
	if err == nil {
		err = os.Rename(tmp.Name(), path)
	}
	if err != nil {
		os.Remove(tmp.Name())
		return status.Errorf(status.System, "exchange: %w", err)
	}
	return nil
}

// Close writes this rank's bye file; the last of the ranks that have joined removes the run's files. If a rank was
// killed, the next run of that name removes them.
func (f *file) Close() error {
	if f.closed || f.run == "" {
		f.closed = true
		return nil
	}
	f.closed = true
	if err := f.create(f.path("bye-"+strconv.Itoa(f.rank)), nil); err != nil {
		if errors.Is(err, fs.ErrNotExist) { // removed by a rank that gave up, or by a newer run
			return nil
		}
		return err
	}
	for r := range f.size {
		if joined := r == 0 || f.has("join-"+strconv.Itoa(r)); joined && !f.has("bye-"+strconv.Itoa(r)) {
			return nil
		}
	}
	if b, err := os.ReadFile(f.openFile()); err == nil && strings.HasPrefix(string(b), f.nonce+" ") {
		os.Remove(f.openFile())
	}
	os.RemoveAll(f.run)
	return nil
}
