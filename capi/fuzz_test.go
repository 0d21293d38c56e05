//go:build capitest

package main

import (
	"encoding/binary"
	"testing"

	"github.com/deepep-go/deepep/internal/status"
)

// FuzzStructs passes damaged structs to the public functions, without a buffer: every call must end in an argument
// error with a text (deepep_engine_query may succeed), and none may crash or write past the struct.
func FuzzStructs(f *testing.F) {
	for which := range bridged {
		for _, size := range []uint32{0, 3, 4, 8, 64, 600, 65536, 65537, 0xffffffff} {
			f.Add(uint8(which), binary.LittleEndian.AppendUint32(nil, size))
			f.Add(uint8(which), append(binary.LittleEndian.AppendUint32(nil, size), make([]byte, 700)...))
			f.Add(uint8(which), append(binary.LittleEndian.AppendUint32(nil, size), 1, 2, 3, 4, 5, 6, 7))
		}
	}
	f.Fuzz(func(t *testing.T, which uint8, data []byte) {
		which %= bridged
		if which == 5 && len(data) > 32 {
			data = data[:32] // past the events lies a pointer to a config, which the caller must get right
		}
		code, text := bridge(int(which), data)
		if code == 0 && which == 0 {
			return
		}
		if code != int32(status.InvalidArgument) || text == "" {
			t.Fatalf("function %d: status %d, text %q", which, code, text)
		}
	})
}
