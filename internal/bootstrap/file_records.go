package bootstrap

import (
	"encoding/hex"
	"errors"
	"fmt"
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
