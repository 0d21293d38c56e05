package bootstrap

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/deepep-go/deepep/internal/status"
)

// MaxExtra bounds HelloOptions.Extra.
const MaxExtra = 1 << 20

// helloPrefix begins every hello, since a caller's exchange may deliver other data. JSON follows, so that libraries of
// different versions can decode each other's version.
const helloPrefix = "deepep-hello\n"

// HelloOptions is what a rank's hello contains.
type HelloOptions struct {
	Version string // of the library; must be equal on all ranks
	Build   string // of the kernels; must be equal on all ranks
	Extra   []byte // the caller's data, at most MaxExtra bytes; every rank sees it in Peers
	// Interface is the network interface, or its address, for ranks on other hosts. Empty: other hosts cannot be
	// reached.
	Interface string

	noPidfd bool // for tests: a kernel without pidfds
}

// hello is a rank's part of the first and only gather on the caller's exchanger.
type hello struct {
	Rank, Size     int
	Version, Build string
	identity
	Nonce  string // 16 random bytes in hex; the channel's nonce is a hash of all ranks' nonces
	Socket string // abstract Unix socket, without the leading "@"
	TCP    string // "address:port", or empty
	Extra  []byte
	// Failure is why this rank cannot start. It still gathers, so that the other ranks do not wait for it.
	Failure string

	absent bool // a place without a process: see Candidate.Enter
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

// decodeHello decodes and checks a rank's blob, which may come from another program.
func decodeHello(b []byte) (hello, error) {
	text, ok := bytes.CutPrefix(b, []byte(helloPrefix))
	if !ok {
		return hello{}, fmt.Errorf("%d bytes that are not a hello of this library", len(b))
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

// groupNonce is equal on every rank and different for every start, because each rank contributes a random nonce.
func groupNonce(hellos []hello) [16]byte {
	sum := sha256.New()
	for _, h := range hellos {
		sum.Write([]byte(h.Nonce))
	}
	return [16]byte(sum.Sum(nil))
}

// decodeHellos decodes the gathered blobs, which are in rank order.
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

// compareHellos returns why these ranks cannot form a group. Its result depends on the hellos alone, so that every rank
// returns the same error.
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

// differences lists which ranks have which value; "" if all agree.
func differences(hellos []hello, of func(hello) string) string {
	var order []string
	ranks := make(map[string][]int)
	for i, h := range hellos {
		if h.absent {
			continue
		}
		v := of(h)
		if ranks[v] == nil {
			order = append(order, v)
		}
		ranks[v] = append(ranks[v], i)
	}
	if len(order) < 2 {
		return ""
	}
	parts := make([]string, len(order))
	for i, v := range order {
		verb := "has"
		if len(ranks[v]) > 1 {
			verb = "have"
		}
		parts[i] = fmt.Sprintf("%s %s %.80q", rankList(ranks[v]), verb, v)
	}
	return strings.Join(parts, "; ")
}

// compareUsers compares the users of each machine. The handshake refuses another user too, but there only one rank
// would return the reason.
func compareUsers(hellos []hello) error {
	first := make(map[string]int)
	for i, h := range hellos {
		if h.absent {
			continue
		}
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

// checkReach checks that ranks of different machines have TCP addresses.
func checkReach(hellos []hello) error {
	first := max(0, slices.IndexFunc(hellos, func(h hello) bool { return !h.absent }))
	for i, h := range hellos {
		if h.absent || h.machine() == hellos[first].machine() {
			continue
		}
		var without []int
		for r, other := range hellos {
			if other.TCP == "" && !other.absent {
				without = append(without, r)
			}
		}
		if len(without) > 0 {
			return status.Errorf(status.Unsupported, "rank %d (host %s) and rank %d (host %s) share no machine or no network namespace, "+
				"and %s named no network interface: set DEEPEP_INTERFACE on every rank", first, hellos[first].Host, i, h.Host, rankList(without))
		}
		return nil
	}
	return nil
}
