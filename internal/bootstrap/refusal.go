package bootstrap

import (
	"encoding/binary"

	"github.com/deepep-go/deepep/internal/status"
)

// maxReason bounds the text of an error that is sent to another rank.
const maxReason = 1000

// encodeRefusal encodes an error for another rank: its kind, then its text.
func encodeRefusal(err error) []byte {
	text := err.Error()
	b := binary.LittleEndian.AppendUint32(nil, uint32(status.CodeOf(err)))
	return append(b, text[:min(len(text), maxReason)]...)
}

// decodeRefusal never returns nil.
func decodeRefusal(b []byte) error {
	if len(b) < 4 || len(b) > 4+maxReason {
		return status.Errorf(status.System, "a damaged refusal of %d bytes", len(b))
	}
	code := status.Code(binary.LittleEndian.Uint32(b))
	if code <= status.OK || code > status.Internal {
		code = status.System
	}
	return status.Errorf(code, "%s", b[4:])
}
