package health

import (
	"fmt"

	"github.com/deepep-go/deepep/core/op"
)

// LastCall is a rank's last call, numbered as in the kernel interface (DK_OP_*, DK_PHASE_*).
type LastCall struct {
	Op     uint32
	Number uint64 // counts the calls of a buffer
	Phase  uint32
	Buffer uint32
}

// String is the call as text: "dispatch #17 (receive)".
func (c LastCall) String() string {
	if c.Op == 0 {
		return "none"
	}
	text := fmt.Sprintf("%s #%d", op.Operation(c.Op), c.Number)
	switch c.Phase {
	case 0, 3: // without phases, or both in one call
	case 1:
		text += " (send)"
	case 2:
		text += " (receive)"
	default:
		text += fmt.Sprintf(" (phase %d)", c.Phase)
	}
	return text
}
