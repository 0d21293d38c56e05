package kern

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/deepep-go/deepep/internal/abi"
	"github.com/deepep-go/deepep/internal/dl"
	"github.com/deepep-go/deepep/internal/status"
)

// fake builds a library that has every function but those whose names' beginning the expression without matches; all
// return code 0 but dk_barrier, and dk_info reports an interface version.
func fake(t *testing.T, version int, without string) dl.Query {
	t.Helper()
	gcc, err := exec.LookPath("gcc")
	if err != nil {
		t.Skip("needs gcc to make a library")
	}
	source := "#include \"kernels.h\"\n#include <string.h>\n"
	for _, name := range symbols {
		body := "return 0;"
		if without != "" && regexp.MustCompile("^"+without).MatchString(name) {
			continue
		}
		switch name {
		case "dk_info":
			body = fmt.Sprintf(`p->abi_version = %d; p->caps = 5; p->num_devices = 2; strcpy(p->kind, "fake"); strcpy(p->build, "b1"); return 0;`, version)
		case "dk_barrier":
			body = "p->device_error = 77; return p->size == sizeof(*p) ? DK_EDEVICE : DK_EVERSION;"
		}
		source += fmt.Sprintf("int32_t %s(%s_params *p) { (void)p; %s }\n", name, name, body)
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "x.c"), []byte(source), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(gcc, "-shared", "-fPIC", "-I", "../../kernels/abi", "-o", filepath.Join(dir, "libfake.so"), filepath.Join(dir, "x.c"))
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return dl.Query{File: "libfake.so", Dir: dir}
}

func TestLoad(t *testing.T) {
	l, err := Load(fake(t, abi.Version, ""))
	if err != nil {
		t.Fatal(err)
	}
	if l.Kind != "fake" || l.Build != "b1" || l.NumDevices != 2 || !l.Has(abi.CapHostStream|abi.CapPeerRows) || l.Has(abi.CapGraph) {
		t.Errorf("%+v", l)
	}
	p := &abi.BarrierParams{}
	code := l.Barrier(p)
	err = Error("dk_barrier", code, p.DeviceError)
	if !errors.Is(err, status.ErrDevice) || !strings.Contains(err.Error(), "dk_barrier") || !strings.Contains(err.Error(), "77") {
		t.Errorf("code %d: %v", code, err)
	}
	if allocs := testing.AllocsPerRun(100, func() { l.Barrier(p) }); allocs != 0 {
		t.Errorf("%v allocations a call", allocs)
	}
}

func TestLoadRefusesAnotherVersionAndNamesBoth(t *testing.T) {
	_, err := Load(fake(t, abi.Version+1, ""))
	if !errors.Is(err, status.ErrVersion) || !strings.Contains(err.Error(), fmt.Sprintf("version %d, this library needs %d", abi.Version+1, abi.Version)) {
		t.Error(err)
	}
}

func TestLoadNamesTheMissingFunction(t *testing.T) {
	_, err := Load(fake(t, abi.Version, "dk_combine"))
	if !errors.Is(err, status.ErrNotFound) || !strings.Contains(err.Error(), "no function dk_combine") {
		t.Error(err)
	}
}

// A library may do without a transport, or without memory of the transport's own, but not with a part of them.
func TestTransportIsOptional(t *testing.T) {
	for without, want := range map[string][2]bool{"": {true, true}, "dk_transport": {}, "dk_transport_(unique|attach|detach|alloc|free)": {true, false}} {
		l, err := Load(fake(t, abi.Version, without))
		if err != nil {
			t.Fatal(err)
		}
		if have := [2]bool{l.HasTransport(), l.HasTransportHeap()}; have != want {
			t.Errorf("without %q: transport and its memory %v, want %v", without, have, want)
		}
	}
	for _, without := range []string{"dk_transport_quiet", "dk_transport_attach", "dk_transport_free"} {
		_, err := Load(fake(t, abi.Version, without))
		if !errors.Is(err, status.ErrNotFound) || !strings.Contains(err.Error(), "no function "+without) {
			t.Error(err)
		}
	}
}

func TestErrorsOfTheHostHaveItsWords(t *testing.T) {
	for want, err := range map[string]error{
		"dk_mem_alloc: operating system error 13: permission denied": Error("dk_mem_alloc", int32(status.System), 13),
		"dk_mem_alloc: operating system error":                       Error("dk_mem_alloc", int32(status.System), 0),
		"dk_mem_alloc: device error (device error 700)":              Error("dk_mem_alloc", int32(status.Device), 700),
	} {
		if err.Error() != want {
			t.Errorf("%v, want %s", err, want)
		}
	}
}

// A process that has no descriptor left hears which it has: the cause is elsewhere.
func TestDescriptorsAreCounted(t *testing.T) {
	var before unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &before); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Setrlimit(unix.RLIMIT_NOFILE, &before) }()
	few := before
	few.Cur = min(before.Max, 100)
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &few); err != nil {
		t.Fatal(err)
	}
	var open []int
	var err error
	for err == nil {
		var fd int
		if fd, err = unix.MemfdCreate("many", unix.MFD_CLOEXEC); err == nil {
			open = append(open, fd)
		}
	}
	text := Error("dk_mem_alloc", int32(status.System), int32(syscall.EMFILE)).Error()
	for _, fd := range open {
		unix.Close(fd)
	}
	begin := "dk_mem_alloc: operating system error 24: too many open files; 100 are open of at most 100 (RLIMIT_NOFILE): "
	if !errors.Is(err, unix.EMFILE) || !strings.HasPrefix(text, begin) || !strings.Contains(text, fmt.Sprintf("%d memfd:many", len(open))) {
		t.Errorf("%s\n%v, %d memfds", text, err, len(open))
	}
}
