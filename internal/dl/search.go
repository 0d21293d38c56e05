package dl

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"strings"
	"unsafe"

	"github.com/ebitengine/purego"
	"golang.org/x/sys/unix"

	"github.com/deepep-go/deepep/internal/status"
)

// Query names a file and the folders in which to look for it.
type Query struct {
	File string // base name, e.g. libdeepep_cpu.so
	// Dir is a folder named by the user (DEEPEP_KERNELS). If it is set, Find looks nowhere else.
	Dir string
	// Image is the library as bytes of the program. Find tries it first.
	Image []byte
	// Beside lists folders that Find tries before the usual ones.
	Beside []string
}

// Find opens the first library for which accept returns nil. The error lists every path with its reason. Its kind is
// that of the first library that was found and refused, for example Version, else NotFound.
func Find(q Query, accept func(*Library) error) error {
	var tried []string
	code := status.NotFound
	attempt := func(path string, open func() (*Library, error)) bool {
		err := try(open, accept)
		if err == nil {
			return true
		}
		tried = append(tried, "  "+path+": "+reason(err))
		if c := status.CodeOf(err); c != status.NotFound && code == status.NotFound {
			code = c
		}
		return false
	}
	if q.Image != nil && q.Dir == "" {
		if attempt(imagePath(q.File), func() (*Library, error) { return OpenImage(q.File, q.Image) }) {
			return nil
		}
	}
	for _, path := range candidates(q) {
		if attempt(path, func() (*Library, error) { return openExisting(path) }) {
			return nil
		}
	}
	hint := "set DEEPEP_KERNELS to the folder that holds it"
	if q.Dir != "" {
		hint = "DEEPEP_KERNELS names the only folder searched"
	}
	return status.Errorf(code, "no usable %s (%s); tried:\n%s", q.File, hint, strings.Join(tried, "\n"))
}

// openExisting is Open with a short error for a file that is not there.
func openExisting(path string) (*Library, error) {
	if strings.Contains(path, "/") {
		if _, err := os.Stat(path); err != nil {
			return nil, status.Errorf(status.NotFound, "%w", errors.Unwrap(err))
		}
	}
	return Open(path)
}

func try(open func() (*Library, error), accept func(*Library) error) error {
	l, err := open()
	if err != nil {
		return err
	}
	if err := accept(l); err != nil {
		l.Close()
		return err
	}
	return nil
}

// reason drops the path from an error, since the line begins with it.
func reason(err error) string {
	text := err.Error()
	if _, after, ok := strings.Cut(text, ": "); ok && strings.HasPrefix(text, "cannot load ") {
		return after
	}
	return text
}

// candidates lists the paths in the order in which they are tried.
func candidates(q Query) []string {
	if q.Dir != "" {
		return []string{filepath.Join(q.Dir, q.File)}
	}
	dirs := append([]string{}, q.Beside...)
	if dir := codeFolder(); dir != "" {
		// The folder of libdeepep.so (an installation, the wheel, build/lib), or of a Go program.
		dirs = append(dirs, dir)
		if root, name := filepath.Split(dir); name == "bin" {
			dirs = append(dirs, filepath.Join(root, "lib"), filepath.Join(root, "lib64"))
		}
	}
	if tree := sourceTree(); tree != "" {
		dirs = append(dirs, filepath.Join(tree, "build", "lib"))
	}
	var paths []string
	seen := map[string]bool{}
	for _, dir := range dirs {
		if path := filepath.Join(dir, q.File); !seen[path] {
			seen[path] = true
			paths = append(paths, path)
		}
	}
	// The loader's own folders, and that of `make install`, which a loader's cache may not know yet.
	return append(paths, q.File, filepath.Join("/usr/local/lib", q.File))
}

// codeFolder is the folder of the file that holds this code: libdeepep.so in a C or Python process, the program in a Go
// process. The kernel lists the mapped files in /proc/self/maps; without /proc the loader knows the path that it opened.
func codeFolder() string {
	address := reflect.ValueOf(codeFolder).Pointer()
	path := ""
	if maps, err := os.ReadFile("/proc/self/maps"); err == nil {
		path = mappedFile(string(maps), uint64(address))
	}
	if path == "" {
		path = loadedFile(address)
	}
	if path == "" {
		return ""
	}
	return filepath.Dir(path)
}

// dlInfo is Dl_info of dlfcn.h.
type dlInfo struct {
	file   *byte // path of the object
	base   uintptr
	name   *byte
	symbol uintptr
}

// loadedFile asks the loader (dladdr) for the file of the object that holds an address; "" if it has none with a path.
func loadedFile(address uintptr) string {
	dladdr, err := purego.Dlsym(purego.RTLD_DEFAULT, "dladdr")
	if err != nil || dladdr == 0 {
		return ""
	}
	info := new(dlInfo)
	if found, _, _ := purego.SyscallN(dladdr, address, uintptr(unsafe.Pointer(info))); int32(found) == 0 || info.file == nil {
		return ""
	}
	path := unix.BytePtrToString(info.file)
	if !strings.Contains(path, "/") {
		return "" // found through PATH
	}
	path, err = filepath.Abs(path)
	if err != nil {
		return ""
	}
	return path
}

// mappedFile finds the file mapped at an address in the text of /proc/PID/maps; "" if there is none.
func mappedFile(maps string, address uint64) string {
	for line := range strings.Lines(maps) {
		var from, to uint64
		if _, err := fmt.Sscanf(line, "%x-%x", &from, &to); err != nil || address < from || address >= to {
			continue
		}
		if slash := strings.IndexByte(line, '/'); slash >= 0 {
			return strings.TrimSuffix(strings.TrimSpace(line[slash:]), " (deleted)")
		}
		return ""
	}
	return ""
}

// sourceTree is the root of the checkout that this file was compiled from; "" if it is not there, or if the build
// trimmed paths.
func sourceTree() string {
	_, file, _, ok := runtime.Caller(0)
	if !ok || !filepath.IsAbs(file) {
		return ""
	}
	root := filepath.Join(filepath.Dir(file), "..", "..")
	if _, err := os.Stat(filepath.Join(root, "kernels", "abi", "kernels.h")); err != nil {
		return ""
	}
	return root
}
