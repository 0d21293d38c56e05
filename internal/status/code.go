package status

import "strconv"

// Code is a kind of error: the same number in C (DEEPEP_*), in the kernel interface (DK_*) and in Python.
type Code int32

// String is the kind's text in include/deepep.h.
func (c Code) String() string {
	if c >= 0 && int(c) < len(texts) {
		return texts[c]
	}
	return "code " + strconv.Itoa(int(c))
}
