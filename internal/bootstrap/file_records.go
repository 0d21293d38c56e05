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

// stamp is the content of the open file and of the join files: the writer's nonce and its size of the group.
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
		return stamp{}, fmt.Errorf("%.40q is not a stamp of this library", b)
	}
	return stamp{nonce, size}, nil
}

func freshNonce() string {
	n := randomNonce()
	return hex.EncodeToString(n[:])
}

// decision is the content of the go file: rank 0 starts the run, or refuses it and says why. Nonces are by rank; with a
// refusal those of ranks that had not joined are empty.
type decision struct {
	Nonces  []string
	Refusal string      `json:",omitempty"`
	Code    status.Code `json:",omitempty"` // of the refusal
}

const decisionBytes = maxRanks*40 + 2*maxReason

// errNotForUs means that the decision belongs to an earlier run, or that another process joined as this rank.
var errNotForUs = errors.New("the open run does not list this process: it is an old run, or another process has this rank")

// verdict is nil if the run begins for the rank that joined with nonce.
func (d decision) verdict(rank, size int, nonce string) error {
	switch {
	case d.Refusal != "" && slices.Contains(d.Nonces, nonce):
		code := d.Code
		if code <= status.OK || code > status.Internal {
			code = status.Mismatch
		}
		return status.Errorf(code, "%s", d.Refusal)
	case d.Refusal == "" && len(d.Nonces) == size && d.Nonces[rank] == nonce:
		return nil
	}
	return errNotForUs
}
