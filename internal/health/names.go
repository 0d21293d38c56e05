package health

import "fmt"

// LastCall is a rank's last call, numbered as in the kernel interface (DK_OP_*, DK_PHASE_*).
type LastCall struct {
	Op     uint32
	Number uint64 // counts the calls of a buffer
	Phase  uint32
	Buffer uint32
}

// OpName is the name of an operation.
func OpName(op uint32) string {
	names := [...]string{"none", "layout", "notify", "dispatch", "combine", "ll_dispatch", "ll_combine", "clean", "barrier", "mask"}
	if int(op) < len(names) {
		return names[op]
	}
	return fmt.Sprintf("operation %d", op)
}

// String is the call as text: "dispatch #17 (receive)".
func (c LastCall) String() string { return c.text(OpName) }

func (c LastCall) text(name func(uint32) string) string {
	if c.Op == 0 {
		return "none"
	}
	text := fmt.Sprintf("%s #%d", name(c.Op), c.Number)
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
