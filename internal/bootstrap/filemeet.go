package bootstrap

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/deepep-go/deepep/internal/status"
)

// stamp is what the open file and the join files hold: a fresh nonce and the writer's idea of the group's size.
type stamp struct {
	nonce string
	size  int
}

const stampBytes = 64

func (s stamp) encode() []byte { return fmt.Appendf(nil, "%s %d", s.nonce, s.size) }

func parseStamp(b []byte) (stamp, error) {
	nonce, rest, found := strings.Cut(string(b), " ")
	size, err := strconv.Atoi(rest)
	raw, herr := hex.DecodeString(nonce)
	if !found || err != nil || herr != nil || len(raw) != 16 || size < 1 || size > maxRanks {
		return stamp{}, fmt.Errorf("%.40q is no stamp of this library", b)
	}
	return stamp{nonce, size}, nil
}

func freshNonce() string {
	n := randomNonce()
	return hex.EncodeToString(n[:])
}

// goWord is rank 0's word. Nonces stand by rank; where there is a refusal, those of ranks that had not come are empty.
type goWord struct {
	Nonces  []string
	Refusal string `json:",omitempty"`
}

const goBytes = maxRanks*40 + 2*maxReason

// errNotForUs: the word is of an earlier run, or of a group that another process joined as this rank.
var errNotForUs = errors.New("the run that is open knows nothing of this process: it is an old one, or another process has this rank")

// judge says what rank 0's word means for a rank that joined with the nonce own.
func (w goWord) judge(rank, size int, own string) error {
	switch {
	case w.Refusal != "" && slices.Contains(w.Nonces, own):
		return status.Errorf(status.Mismatch, "%s", w.Refusal)
	case w.Refusal == "" && len(w.Nonces) == size && w.Nonces[rank] == own:
		return nil
	}
	return errNotForUs
}

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
