package bootstrap

import (
	"bytes"
	"encoding/binary"
	"io"
	"strings"
	"testing"
)

func TestFrameRoundTrip(t *testing.T) {
	var wire bytes.Buffer
	sent := []frame{
		{kind: kindData, rank: 1023, nonce: randomNonce(), tag: "memory", blob: bytes.Repeat([]byte{7}, 70_000)},
		{kind: kindBye, nonce: randomNonce(), blob: []byte{}},
		{kind: kindNote, rank: 5, tag: strings.Repeat("t", maxTag), blob: []byte{1}},
	}
	for i := range sent {
		if err := writeFrame(&wire, &sent[i]); err != nil {
			t.Fatal(err)
		}
	}
	for _, want := range sent {
		got, err := readFrame(&wire, MaxBlob)
		if err != nil {
			t.Fatal(err)
		}
		if got.kind != want.kind || got.rank != want.rank || got.nonce != want.nonce || got.tag != want.tag || !bytes.Equal(got.blob, want.blob) {
			t.Errorf("frame of kind %d changed on the way", want.kind)
		}
	}
	if _, err := readFrame(&wire, MaxBlob); err != io.EOF {
		t.Errorf("after the last frame: %v, want a plain EOF", err)
	}
}

func TestFrameLimits(t *testing.T) {
	for _, f := range []frame{
		{kind: kindData, blob: make([]byte, MaxBlob+1)}, {kind: kindData, tag: strings.Repeat("t", maxTag+1)}, {kind: kindData, fds: make([]int, MaxFDs+1)},
	} {
		if err := writeFrame(io.Discard, &f); err == nil {
			t.Error("a frame over the limits was written")
		}
	}
	good, err := (&frame{kind: kindData, tag: "t", blob: []byte("blob")}).encodeHead()
	if err != nil {
		t.Fatal(err)
	}
	good = good[:headerBytes]
	for what, damage := range map[string]func(b []byte){
		"magic": func(b []byte) { b[0]++ }, "kind 0": func(b []byte) { b[4] = 0 }, "last kind": func(b []byte) { b[4] = byte(kindEnd) },
		"descriptors": func(b []byte) { b[5] = MaxFDs + 1 }, "tag": func(b []byte) { binary.LittleEndian.PutUint16(b[6:], maxTag+1) },
		"blob": func(b []byte) { binary.LittleEndian.PutUint32(b[8:], MaxBlob+1) },
		"rank": func(b []byte) { binary.LittleEndian.PutUint32(b[12:], maxRanks) },
	} {
		b := bytes.Clone(good)
		damage(b)
		if _, err := decodeHeader(b); err == nil {
			t.Errorf("a damaged %s was accepted", what)
		}
	}
	if _, err := readFrame(bytes.NewReader(good), MaxBlob); err == nil || !strings.Contains(err.Error(), "0 of 5 bytes") {
		t.Errorf("a frame cut short: %v", err)
	}
	if _, err := readFrame(bytes.NewReader(good), 3); err == nil || !strings.Contains(err.Error(), "at most 3") {
		t.Errorf("a frame over the reader's limit: %v", err)
	}
	good[5] = 1
	if _, err := readFrame(bytes.NewReader(good), MaxBlob); err == nil || !strings.Contains(err.Error(), "carries none") {
		t.Errorf("descriptors on a plain stream: %v", err)
	}
}

func FuzzReadFrame(f *testing.F) {
	var wire bytes.Buffer
	writeFrame(&wire, &frame{kind: kindData, rank: 3, tag: "tag", blob: []byte("blob")})
	f.Add(wire.Bytes())
	f.Add(wire.Bytes()[:headerBytes])
	f.Fuzz(func(t *testing.T, b []byte) {
		got, err := readFrame(bytes.NewReader(b), 1<<16)
		if err != nil {
			return
		}
		var again bytes.Buffer
		if err := writeFrame(&again, &got); err != nil || !bytes.HasPrefix(b, again.Bytes()) {
			t.Errorf("%+v does not encode to what it came from (%v)", got, err)
		}
	})
}

func FuzzParseFDs(f *testing.F) {
	f.Add([]byte{})
	f.Add(binary.LittleEndian.AppendUint64(nil, 1<<40))
	f.Add([]byte("\x10\x00\x00\x00\x00\x00\x00\x00\x02\x00\x00\x00\x05\x00\x00\x00")) // another type: no descriptors
	f.Fuzz(func(t *testing.T, b []byte) {
		parseFDs(b) // must not panic; the numbers are not real and must not be closed
	})
}
