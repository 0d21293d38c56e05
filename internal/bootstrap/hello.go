package bootstrap

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/deepep-go/deepep/internal/status"
)

// MaxExtra bounds HelloOptions.Extra.
const MaxExtra = 1 << 20

// helloPrefix tells a hello from anything else that a caller's exchange may deliver. What follows is JSON, so that
// libraries of different versions understand each other well enough to say that they differ.
const helloPrefix = "deepep-hello\n"

// HelloOptions is what a rank says of itself at the start.
type HelloOptions struct {
	Version string // of the library; must be equal on all ranks
	Build   string // of the kernels; must be equal on all ranks
	Extra   []byte // the caller's own, at most MaxExtra bytes; every rank sees it in Peers
	// Interface is the network interface, or its address, for ranks on other hosts. Empty: none can be reached.
	Interface string

	noPidfd bool // for tests: a kernel without pidfds
}

// hello is a rank's part of the first and only gather on the caller's exchanger.
type hello struct {
	Rank, Size     int
	Version, Build string
	identity
	Nonce  string // 16 random bytes in hex; all of them together make the channel's nonce
	Socket string // abstract Unix socket, without the leading "@"
	TCP    string // "address:port", or empty
	Extra  []byte
	// Failure is why this rank cannot go on. It still gathers, so that nobody waits for it in vain.
	Failure string
}

func randomNonce() [16]byte {
	var n [16]byte
	rand.Read(n[:]) // never fails: the runtime ends the process instead
	return n
}

func (h *hello) encode() ([]byte, error) {
	text, err := json.Marshal(h)
	return append([]byte(helloPrefix), text...), err
}

// decodeHello checks a rank's blob. The limits keep a foreign blob from being taken for more than it is.
func decodeHello(b []byte) (hello, error) {
	text, ok := bytes.CutPrefix(b, []byte(helloPrefix))
	if !ok {
		return hello{}, fmt.Errorf("%d bytes that are no hello of this library", len(b))
	}
	if len(text) > 2*MaxExtra {
		return hello{}, fmt.Errorf("a hello of %d bytes", len(text))
	}
	var h hello
	if err := json.Unmarshal(text, &h); err != nil {
		return hello{}, fmt.Errorf("a damaged hello: %w", err)
	}
	nonce, err := hex.DecodeString(h.Nonce)
	if err != nil || len(nonce) != 16 {
		return hello{}, fmt.Errorf("a hello with the nonce %.40q", h.Nonce)
	}
	if len(h.Extra) > MaxExtra {
		return hello{}, fmt.Errorf("a hello with %d extra bytes", len(h.Extra))
	}
	return h, nil
}

// groupNonce is the same on every rank and new for every start, since each rank adds to it.
func groupNonce(hellos []hello) [16]byte {
	sum := sha256.New()
	for _, h := range hellos {
		sum.Write([]byte(h.Nonce))
	}
	return [16]byte(sum.Sum(nil))
}

// decodeHellos reads what the gather brought; blobs stand in rank order.
func decodeHellos(blobs [][]byte) ([]hello, error) {
	hellos := make([]hello, len(blobs))
	for i, b := range blobs {
		h, err := decodeHello(b)
		if err != nil {
			return nil, status.Errorf(status.Mismatch, "rank %d sent %w", i, err)
		}
		hellos[i] = h
	}
	return hellos, nil
}

// compareHellos finds what keeps these ranks from being one group. It looks at all of them alike, so that every rank
// comes to the same answer.
func compareHellos(hellos []hello) error {
	for i, h := range hellos {
		if h.Rank != i {
			return status.Errorf(status.Mismatch, "ranks disagree on their order: the hello at place %d (host %s, pid %d) says that it is rank %d",
				i, h.Host, h.PID, h.Rank)
		}
	}
	var failures []string
	for i, h := range hellos {
		if h.Failure != "" {
			failures = append(failures, fmt.Sprintf("rank %d (host %s, pid %d) cannot start: %s", i, h.Host, h.PID, h.Failure))
		}
	}
	if len(failures) > 0 {
		return status.Errorf(status.Aborted, "%s", strings.Join(failures, "; "))
	}
	for _, must := range []struct {
		what string
		of   func(hello) string
	}{
		{"number of ranks", func(h hello) string { return fmt.Sprint(h.Size) }},
		{"library version", func(h hello) string { return h.Version }},
		{"kernel build", func(h hello) string { return h.Build }},
	} {
		if text := differences(hellos, must.of); text != "" {
			return status.Errorf(status.Mismatch, "ranks disagree on the %s: %s", must.what, text)
		}
	}
	if got := hellos[0].Size; got != len(hellos) {
		return status.Errorf(status.Mismatch, "the exchange joined %d ranks, each of which expects %d", len(hellos), got)
	}
	if err := compareUsers(hellos); err != nil {
		return err
	}
	return checkReach(hellos)
}

// differences says who has which value, or nothing where all agree.
func differences(hellos []hello, of func(hello) string) string {
	var order []string
	who := make(map[string][]int)
	for i, h := range hellos {
		v := of(h)
		if who[v] == nil {
			order = append(order, v)
		}
		who[v] = append(who[v], i)
	}
	if len(order) < 2 {
		return ""
	}
	parts := make([]string, len(order))
	for i, v := range order {
		verb := "has"
		if len(who[v]) > 1 {
			verb = "have"
		}
		parts[i] = fmt.Sprintf("%s %s %.80q", rankList(who[v]), verb, v)
	}
	return strings.Join(parts, "; ")
}

// compareUsers: Unix sockets between users are refused later anyway; here everybody learns why.
func compareUsers(hellos []hello) error {
	first := make(map[string]int)
	for i, h := range hellos {
		j, seen := first[h.machine()]
		if !seen {
			first[h.machine()] = i
		} else if hellos[j].UID != h.UID {
			return status.Errorf(status.Mismatch, "ranks disagree on the user on host %s: rank %d runs as uid %d, rank %d as uid %d",
				h.Host, j, hellos[j].UID, i, h.UID)
		}
	}
	return nil
}

// checkReach: ranks of different machines need an address of each other.
func checkReach(hellos []hello) error {
	for i, h := range hellos {
		if h.machine() == hellos[0].machine() {
			continue
		}
		var without []int
		for r, other := range hellos {
			if other.TCP == "" {
				without = append(without, r)
			}
		}
		if len(without) > 0 {
			return status.Errorf(status.Unsupported, "rank 0 (host %s) and rank %d (host %s) share no machine or no network namespace, "+
				"and %s named no network interface: set DEEPEP_INTERFACE on every rank", hellos[0].Host, i, h.Host, rankList(without))
		}
		return nil
	}
	return nil
}
