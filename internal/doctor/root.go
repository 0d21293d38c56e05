package doctor

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path"
	"strconv"
	"strings"
	"syscall"
)

// Root is a host as the checks see it.
type Root struct {
	FS      fs.FS    // the files, rooted at /: proc, sys, etc, dev, usr …
	Environ []string // NAME=value of the examined process

	// Access reports whether a file may be opened for reading and writing.
	Access func(path string) error
	// Space is the size of a path's file system and its free part, in bytes.
	Space func(path string) (total, free uint64, err error)

	// Queries of libraries. A nil function or an error becomes a line of the report.
	NVML  func(context.Context) (*NVML, error)
	CUDA  func(context.Context) (*CUDA, error)
	Verbs func(context.Context) (*Verbs, error)
}

// ErrNotAsked is the error for a library without a function in the root.
var ErrNotAsked = errors.New("not asked in this report")

// Host is the root of this machine, without the library functions.
func Host() Root {
	return Root{
		FS:      os.DirFS("/"),
		Environ: os.Environ(),
		Access: func(p string) error {
			const readWrite = 6 // R_OK | W_OK
			return syscall.Access("/"+p, readWrite)
		},
		Space: func(p string) (uint64, uint64, error) {
			var s syscall.Statfs_t
			if err := syscall.Statfs("/"+p, &s); err != nil {
				return 0, 0, err
			}
			size := uint64(s.Bsize)
			return s.Blocks * size, s.Bavail * size, nil
		},
	}
}

// text reads a small file and trims it; "" if it cannot be read.
func (r Root) text(name string) string {
	b, err := fs.ReadFile(r.FS, name)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

func (r Root) exists(name string) bool {
	_, err := fs.Stat(r.FS, name)
	return err == nil
}

// glob lists the names that match, sorted so that numbers count (mlx5_2 before mlx5_10).
func (r Root) glob(pattern string) []string {
	names, err := fs.Glob(r.FS, pattern)
	if err != nil {
		return nil // the only error is a malformed pattern, and patterns are constants
	}
	sortNatural(names)
	return names
}

// link reads a symbolic link; "" if there is none.
func (r Root) link(name string) string {
	target, err := fs.ReadLink(r.FS, name)
	if err != nil {
		return ""
	}
	return target
}

// resolve follows the links of a path inside the root, at most 16 of them.
func (r Root) resolve(name string) string {
	for range 16 {
		target := r.link(name)
		switch {
		case target == "":
			return name
		case path.IsAbs(target):
			name = strings.TrimPrefix(path.Clean(target), "/")
		default:
			name = path.Join(path.Dir(name), target)
		}
	}
	return name
}

// number reads a file that holds one integer.
func (r Root) number(name string) (int64, bool) {
	n, err := strconv.ParseInt(r.text(name), 0, 64)
	return n, err == nil
}

// env looks up a variable; the last one counts, as in a shell.
func (r Root) env(name string) (string, bool) {
	for i := len(r.Environ) - 1; i >= 0; i-- {
		if k, v, ok := strings.Cut(r.Environ[i], "="); ok && k == name {
			return v, true
		}
	}
	return "", false
}

// envInt looks up a whole number. set is true if the variable exists.
func (r Root) envInt(name string) (n int, set, valid bool) {
	v, set := r.env(name)
	if !set {
		return 0, false, false
	}
	n, err := strconv.Atoi(strings.TrimSpace(v))
	return n, true, err == nil
}

func (r Root) access(name string) error {
	if r.Access == nil {
		return nil
	}
	return r.Access(name)
}

// keyed finds "key: value" or "key value" in a file of such lines.
func keyed(text, key string) (string, bool) {
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		rest, ok := strings.CutPrefix(line, key)
		if !ok {
			continue
		}
		trimmed := strings.TrimLeft(rest, ": \t")
		if rest == "" || trimmed != rest {
			return strings.TrimSpace(trimmed), true
		}
	}
	return "", false
}
