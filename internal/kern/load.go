package kern

import (
	"bytes"
	"slices"
	"syscall"

	"github.com/deepep-go/deepep/internal/abi"
	"github.com/deepep-go/deepep/internal/dl"
	"github.com/deepep-go/deepep/internal/status"
)

// Library is a loaded kernel library of the right version.
type Library struct {
	Path       string
	Kind       string // "cpu", "cuda"
	Build      string // ranks of a buffer must have the same
	Caps       uint32 // abi.Cap*
	NumDevices int
	Reason     string // why no device can be used, where NumDevices is 0
	Limits     Limits
	oldDriver  bool // no device can be used, for want of a newer driver

	functions functions
}

// functions are the addresses of the library's functions; 0 for those of a group that it does not have.
type functions [numFunctions]uintptr

// Limits are the library's own for low-latency calls: top-k, num_max_dispatch_tokens_per_rank, local experts.
type Limits struct{ TopK, Tokens, LocalExperts int32 }

// insufficientDriver is CUDA's error number for a driver that is too old for the library's toolkit.
const insufficientDriver = 35

// LoadOrOlder loads a kernel library. Where the driver is too old for it, it is the one in the file `older`, of an older
// toolkit, if that lies in the same place and finds a device. "" for older: there is none.
func LoadOrOlder(q dl.Query, older string) (*Library, error) {
	l, err := Load(q)
	if err != nil || older == "" || !l.oldDriver {
		return l, err
	}
	q.File = older
	if other, err := Load(q); err == nil && other.NumDevices > 0 {
		return other, nil
	}
	return l, nil
}

// Load finds a kernel library, resolves all its functions and compares versions.
func Load(q dl.Query) (*Library, error) {
	l := &Library{}
	if err := dl.Find(q, l.bind); err != nil {
		return nil, err
	}
	return l, nil
}

// bind fills l from an open file, or says what does not fit.
func (l *Library) bind(file *dl.Library) error {
	found, err := resolve(file)
	if err != nil {
		return err
	}
	*l = Library{Path: file.Path, functions: found}
	p := &abi.InfoParams{}
	code := l.Info(p)
	if p.ABIVersion != 0 && p.ABIVersion != abi.Version {
		return status.Errorf(status.Version, "%s has kernel interface version %d, this library needs %d", file.Path, p.ABIVersion, abi.Version)
	}
	if code != 0 {
		return Error("dk_info", code, p.DeviceError)
	}
	l.Kind, l.Build, l.Reason = Text(p.Kind[:]), Text(p.Build[:]), Text(p.Reason[:])
	l.Caps, l.NumDevices = p.Caps, int(p.NumDevices)
	l.oldDriver = l.NumDevices == 0 && p.DeviceError == insufficientDriver
	l.Limits = Limits{TopK: p.MaxLLTopK, Tokens: p.MaxLLTokens, LocalExperts: p.MaxLLLocalExperts}
	return nil
}

// resolve finds every function. The error names the first missing one in the order of kernels.h; only groups of which no
// function is there may be missing.
func resolve(file *dl.Library) (found functions, err error) {
	var missing [numFunctions]error
	for i, symbol := range symbols {
		found[i], missing[i] = file.Symbol(symbol)
	}
	for _, group := range optional {
		if !slices.ContainsFunc(group, func(i int) bool { return found[i] != 0 }) {
			for _, i := range group {
				missing[i] = nil
			}
		}
	}
	for _, err := range missing {
		if err != nil {
			return functions{}, err
		}
	}
	return found, nil
}

// HasTransport says whether the library reaches ranks beyond loads and stores. Without it the Transport functions must not
// be called.
func (l *Library) HasTransport() bool { return l.functions[fnTransportOpen] != 0 }

// HasTransportHeap says whether blocks come from the transport's own memory. Without it TransportUniqueID, -Attach,
// -Detach, -Alloc and -Free must not be called.
func (l *Library) HasTransportHeap() bool { return l.functions[fnTransportAttach] != 0 }

// Has says whether the library has all of the capabilities (abi.Cap*).
func (l *Library) Has(caps uint32) bool { return l.Caps&caps == caps }

// Error makes an error of a code that a function returned; nil for DK_OK.
func Error(function string, code, deviceError int32) error {
	switch {
	case code == 0:
		return nil
	case deviceError != 0 && status.Code(code) == status.System: // the host's own number
		err := status.Errorf(status.System, "%s: %v %d: %w", function, status.System, deviceError, syscall.Errno(deviceError))
		if errno := syscall.Errno(deviceError); errno == syscall.EMFILE {
			err = status.Errorf(status.System, "%w; %s", err, descriptors())
		}
		return err
	case deviceError != 0:
		return status.Errorf(status.Code(code), "%s: %v (device error %d)", function, status.Code(code), deviceError)
	}
	return status.Errorf(status.Code(code), "%s: %v", function, status.Code(code))
}

// Text reads a NUL-terminated field.
func Text(field []byte) string {
	if i := bytes.IndexByte(field, 0); i >= 0 {
		field = field[:i]
	}
	return string(field)
}
