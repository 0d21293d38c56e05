package status

import "strconv"

// Code is a kind of error: the same number in C (DEEPEP_*), in the kernel interface (DK_*) and in Python.
type Code int32

// The kinds. The numbers are part of the C interface: new ones are appended, none is ever reused.
const (
	OK              Code = 0
	InvalidArgument Code = 1  // an argument is outside what the function allows
	InvalidState    Code = 2  // the call does not fit what was done before (destroyed, not ready, hook missing)
	Unsupported     Code = 3  // well formed, but this build, engine or machine cannot do it
	OutOfMemory     Code = 4  // host or device memory
	System          Code = 5  // the operating system refused
	Timeout         Code = 6  // a wait's deadline passed: a peer is late
	PeerDead        Code = 7  // a peer's process has ended
	Mismatch        Code = 8  // ranks disagree on something that must be equal
	Aborted         Code = 9  // the buffer failed before
	NotFound        Code = 10 // a library or a symbol
	Version         Code = 11 // parts of different versions
	Fork            Code = 12 // used in a forked child
	Interrupted     Code = 13 // a sliced wait returned early; callers go on waiting, users never see it
	Device          Code = 14 // the device reported an error of its own
	Internal        Code = 15 // a bug in this library
)

var texts = [...]string{
	OK: "ok", InvalidArgument: "invalid argument", InvalidState: "invalid state", Unsupported: "unsupported",
	OutOfMemory: "out of memory", System: "system error", Timeout: "timeout", PeerDead: "peer dead",
	Mismatch: "ranks disagree", Aborted: "aborted", NotFound: "not found", Version: "version conflict",
	Fork: "used after fork", Interrupted: "interrupted", Device: "device error", Internal: "internal error",
}

// String names the kind in a few words.
func (c Code) String() string {
	if c >= 0 && int(c) < len(texts) {
		return texts[c]
	}
	return "code " + strconv.Itoa(int(c))
}
