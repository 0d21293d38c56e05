package health

import "fmt"

// LastCall is what a rank did last: numbers as in the kernel interface (DK_OP_*, DK_PHASE_*).
type LastCall struct {
	Op     uint32
	Number uint64 // counts the calls of a buffer
	Phase  uint32
	Buffer uint32
}

// OpName gives the text for an operation's number.
func OpName(op uint32) string {
	names := [...]string{"none", "layout", "notify", "dispatch", "combine", "ll_dispatch", "ll_combine", "clean", "barrier", "mask"}
	if int(op) < len(names) {
		return names[op]
	}
	return fmt.Sprintf("operation %d", op)
}

// String says it for people: "dispatch #17 (receive)".
func (c LastCall) String() string { return c.text(OpName) }

func (c LastCall) text(name func(uint32) string) string {
	if c.Op == 0 {
		return "none"
	}
	text := fmt.Sprintf("%s #%d", name(c.Op), c.Number)
	switch c.Phase {
	case 0, 3: // not told, or both halves in one
	case 1:
		text += " (send)"
	case 2:
		text += " (receive)"
	default:
		text += fmt.Sprintf(" (phase %d)", c.Phase)
	}
	return text
}
