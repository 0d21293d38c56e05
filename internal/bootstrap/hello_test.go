package bootstrap

import (
	"bytes"
	"strings"
	"testing"

	"github.com/deepep-go/deepep/internal/status"
)

func someHellos(n int) []hello {
	hs := make([]hello, n)
	for i := range hs {
		hs[i] = hello{
			Rank: i, Size: n, Version: "1.0", Build: "b", Nonce: freshNonce(), Socket: "s",
			identity: identity{Host: "h", Boot: "boot", NetNS: "net", PID: 100 + i, UID: 7},
		}
	}
	return hs
}

func TestCompareHellos(t *testing.T) {
	if err := compareHellos(someHellos(4)); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		change func(hs []hello)
		code   status.Code
		words  []string
	}{
		"version": {func(hs []hello) { hs[1].Version, hs[3].Version = "2.0", "2.0" }, status.Mismatch,
			[]string{"library version", `ranks 0, 2 have "1.0"`, `ranks 1, 3 have "2.0"`}},
		"build": {func(hs []hello) { hs[2].Build = "c" }, status.Mismatch, []string{"kernel build", `rank 2 has "c"`, `ranks 0-1, 3 have "b"`}},
		"size":  {func(hs []hello) { hs[0].Size = 5 }, status.Mismatch, []string{"number of ranks", `rank 0 has "5"`}},
		"all expect more": {func(hs []hello) {
			for i := range hs {
				hs[i].Size = 9
			}
		}, status.Mismatch, []string{"joined 4 ranks", "expects 9"}},
		"twice the same rank": {func(hs []hello) { hs[2].Rank = 1 }, status.Mismatch, []string{"place 2", "pid 102", "it is rank 1"}},
		"rank out of range":   {func(hs []hello) { hs[3].Rank = 7 }, status.Mismatch, []string{"place 3", "it is rank 7"}},
		"user":                {func(hs []hello) { hs[3].UID = 8 }, status.Mismatch, []string{"rank 0 runs as uid 7", "rank 3 as uid 8"}},
		"failure":             {func(hs []hello) { hs[1].Failure = "no memory" }, status.Aborted, []string{"rank 1 (host h, pid 101)", "no memory"}},
		"no way":              {func(hs []hello) { hs[2].Boot, hs[2].Host = "x", "far" }, status.Unsupported, []string{"rank 2 (host far)", "ranks 0-3", "DEEPEP_INTERFACE"}},
		"no way from one": {func(hs []hello) {
			hs[2].NetNS = "other"
			hs[0].TCP, hs[1].TCP, hs[2].TCP = "a:1", "a:2", "b:1"
		}, status.Unsupported, []string{"and rank 3 named no"}},
	} {
		t.Run(name, func(t *testing.T) {
			hs := someHellos(4)
			c.change(hs)
			wantError(t, compareHellos(hs), c.code, c.words...)
		})
	}
	hs := someHellos(2)
	hs[1].Boot, hs[1].UID, hs[0].TCP, hs[1].TCP = "x", 9, "a:1", "b:1"
	if err := compareHellos(hs); err != nil {
		t.Errorf("two hosts with addresses and different users: %v", err)
	}
}

func TestHelloRoundTripAndDamage(t *testing.T) {
	h := someHellos(1)[0]
	h.Extra, h.Start = []byte{0, 255, 10}, 1<<63+1
	b, err := h.encode()
	if err != nil {
		t.Fatal(err)
	}
	got, err := decodeHello(b)
	if err != nil || got.Start != h.Start || !bytes.Equal(got.Extra, h.Extra) || got.Host != "h" || got.PID != 100 {
		t.Errorf("got %+v, %v", got, err)
	}
	for _, bad := range []string{
		"", "hello", helloPrefix, helloPrefix + "{}", helloPrefix + `{"Nonce":"00"}`, string(b[:len(b)-1]), helloPrefix + strings.Repeat(" ", 3*MaxExtra),
	} {
		if _, err := decodeHello([]byte(bad)); err == nil {
			t.Errorf("accepted %.60q", bad)
		}
	}
	_, err = decodeHellos([][]byte{b, []byte("pickle")})
	wantError(t, err, status.Mismatch, "rank 1 sent 6 bytes that are not a hello")
}

func TestGroupNonceNeedsEveryRank(t *testing.T) {
	hs := someHellos(3)
	a := groupNonce(hs)
	if b := groupNonce(hs); a != b {
		t.Error("not the same twice")
	}
	hs[2].Nonce = freshNonce()
	if b := groupNonce(hs); a == b {
		t.Error("rank 2 adds nothing")
	}
}

func FuzzDecodeHello(f *testing.F) {
	h := someHellos(1)[0]
	b, _ := h.encode()
	f.Add(b)
	f.Add([]byte(helloPrefix + `{"Rank":-1,"Size":1e9,"Nonce":"00112233445566778899aabbccddeeff"}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := decodeHello(b)
		if err != nil {
			return
		}
		if len(h.Nonce) != 32 || len(h.Extra) > MaxExtra {
			t.Errorf("accepted %+v", h)
		}
		compareHellos([]hello{h}) // must not panic
		compareHellos([]hello{h, h})
	})
}
