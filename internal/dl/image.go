package dl

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/deepep-go/deepep/internal/status"
)

// OpenImage loads a library that the program holds as bytes: from anonymous memory, and where the system refuses that
// from a file that the loader alone ever sees.
func OpenImage(name string, image []byte) (*Library, error) {
	l, memory := openMemory(name, image)
	if memory == nil {
		return l, nil
	}
	l, file := openPrivate(name, image)
	if file == nil {
		return l, nil
	}
	return nil, status.Errorf(status.NotFound, "cannot load %s: from memory: %w; from a private file: %w", imagePath(name), memory, file)
}

func imagePath(name string) string { return name + " (embedded in the program)" }

// memfd makes anonymous memory with a descriptor. The program never executes it, it maps it: the flag by which a
// hardened kernel (vm.memfd_noexec = 2) forbids the former is welcome. Kernels before 6.3 do not know the flag.
var memfd = func(name string) (int, error) {
	const flags = unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	fd, err := unix.MemfdCreate(name, flags|unix.MFD_NOEXEC_SEAL)
	if errors.Is(err, unix.EINVAL) {
		fd, err = unix.MemfdCreate(name, flags)
	}
	return fd, os.NewSyscallError("memfd_create", err)
}

// openMemory loads an image from a memfd, which stays open as long as the library: the loader takes a second library of
// the same path for the first one, and the number of a closed descriptor comes again.
func openMemory(name string, image []byte) (*Library, error) {
	fd, err := memfd(name)
	if err != nil {
		return nil, err
	}
	l, err := loadMemory(fd, image)
	if err != nil {
		unix.Close(fd)
		return nil, err
	}
	l.Path, l.memory = imagePath(name), fd
	return l, nil
}

func loadMemory(fd int, image []byte) (*Library, error) {
	for rest := image; len(rest) > 0; {
		n, err := unix.Write(fd, rest)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return nil, os.NewSyscallError("write", err)
		}
		rest = rest[max(n, 0):]
	}
	// Nobody can cut the mapped file short any more, which would end the process.
	seals := unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_WRITE | unix.F_SEAL_SEAL
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
		return nil, os.NewSyscallError("fcntl", err)
	}
	// Spelled as nobody else does: what was once loaded as /proc/self/fd/N must not be taken for this one.
	return Open(fmt.Sprintf("/proc/self/./fd/%d", fd))
}

// openPrivate loads an image from a file in a new folder of this user, and removes both once the file is mapped.
func openPrivate(name string, image []byte) (*Library, error) {
	parents := []string{os.TempDir()}
	if cache, err := os.UserCacheDir(); err == nil {
		parents = append(parents, cache)
	}
	var tried []error
	for _, parent := range parents {
		l, err := loadPrivate(parent, name, image)
		if err == nil {
			l.Path = imagePath(name)
			return l, nil
		}
		tried = append(tried, err)
	}
	return nil, errors.Join(tried...)
}

func loadPrivate(parent, name string, image []byte) (*Library, error) {
	folder, err := os.MkdirTemp(parent, "deepep-") // of mode 0700
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(folder)
	path := filepath.Join(folder, name)
	if err := os.WriteFile(path, image, 0o500); err != nil {
		return nil, err
	}
	return Open(path)
}
