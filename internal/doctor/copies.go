package doctor

import (
	"bytes"
	"fmt"
	"io"
	"path"
	"slices"
	"strings"
)

// copyOf is one installed copy of a library.
type copyOf struct {
	path    string // of the shared object
	host    string // version in the shared object, "" if unknown
	header  string // version in the header beside it
	loaded  bool   // mapped by the examined process
	example string // where the header is
}

// product describes how to find a library and its version.
type product struct {
	soname  string   // libnvshmem_host.so
	homes   []string // variables for its folder
	wheel   string   // nvidia/nvshmem below site-packages
	roots   []string // folders of packages outside the system's paths
	headers []string // relative to the folder above lib
	macros  [3]string
	mark    string // the text before the version in the shared object
}

var nvshmemProduct = product{
	soname:  "libnvshmem_host.so",
	homes:   []string{"NVSHMEM_HOME", "NVSHMEM_DIR", "NVSHMEM_PREFIX"},
	wheel:   "nvidia/nvshmem",
	roots:   []string{"opt/nvshmem*", "usr/local/nvshmem*", "opt/nvidia/nvshmem*"},
	headers: []string{"include/non_abi/nvshmem_version.h", "include/nvshmem/non_abi/nvshmem_version.h"},
	macros:  [3]string{"NVSHMEM_VENDOR_MAJOR_VERSION", "NVSHMEM_VENDOR_MINOR_VERSION", "NVSHMEM_VENDOR_PATCH_VERSION"},
	mark:    "NVSHMEM v",
}

var ncclProduct = product{
	soname:  "libnccl.so",
	homes:   []string{"NCCL_HOME", "NCCL_ROOT"},
	wheel:   "nvidia/nccl",
	roots:   []string{"opt/nccl*", "usr/local/nccl*"},
	headers: []string{"include/nccl.h"},
	macros:  [3]string{"NCCL_MAJOR", "NCCL_MINOR", "NCCL_PATCH"},
	mark:    "NCCL version ",
}

// copies finds all copies: first the mapped ones, then those that the loader would find.
func (e *exam) copies(p product) []copyOf {
	var list []copyOf
	seen := map[string]bool{}
	add := func(file string, loaded bool) {
		real := e.root.resolve(file)
		if seen[real] || !e.root.exists(real) {
			return
		}
		seen[real] = true
		c := copyOf{path: real, loaded: loaded}
		c.host = e.markedVersion(real, p.mark)
		c.header, c.example = e.headerVersion(p, path.Dir(file))
		list = append(list, c)
	}
	for line := range strings.Lines(e.root.text(e.proc("maps"))) {
		if at := strings.IndexByte(line, '/'); at >= 0 {
			file := strings.TrimSpace(line[at+1:])
			if strings.HasPrefix(path.Base(file), p.soname) {
				add(file, true)
			}
		}
	}
	for _, dir := range e.libraryDirs(p) {
		for _, f := range e.root.glob(dir + "/" + p.soname + "*") {
			add(f, false)
		}
	}
	return list
}

// libraryDirs lists the folders to search, as patterns.
func (e *exam) libraryDirs(p product) []string {
	var dirs []string
	for _, name := range p.homes {
		if v, _ := e.root.env(name); v != "" {
			dirs = append(dirs, path.Join(v, "lib"), path.Join(v, "lib64"))
		}
	}
	if v, _ := e.root.env("LD_LIBRARY_PATH"); v != "" {
		dirs = append(dirs, strings.Split(v, ":")...)
	}
	for _, name := range []string{"VIRTUAL_ENV", "CONDA_PREFIX"} {
		if v, _ := e.root.env(name); v != "" {
			dirs = append(dirs, path.Join(v, "lib/python3*/site-packages", p.wheel, "lib"), path.Join(v, "lib"))
		}
	}
	for _, site := range []string{"usr/local/lib/python3*/dist-packages", "usr/local/lib/python3*/site-packages", "usr/lib/python3/dist-packages", "usr/lib/python3*/site-packages"} {
		dirs = append(dirs, path.Join(site, p.wheel, "lib"))
	}
	dirs = append(dirs, "usr/lib/*-linux-gnu", "usr/lib/*-linux-gnu/nvshmem/*", "usr/lib64", "usr/lib", "usr/local/lib", "usr/local/cuda/lib64")
	for _, r := range p.roots {
		dirs = append(dirs, r+"/lib", r+"/lib64")
	}
	var clean []string
	for _, d := range dirs {
		if d = strings.TrimPrefix(path.Clean("/"+d), "/"); d != "" && !slices.Contains(clean, d) {
			clean = append(clean, d)
		}
	}
	return clean
}

// headerVersion reads the version macros of the header that came with a copy.
func (e *exam) headerVersion(p product, libDir string) (v, file string) {
	for _, h := range p.headers {
		file := path.Join(path.Dir(libDir), h)
		text := e.root.text(file)
		if text == "" {
			continue
		}
		var parts []string
		for _, m := range p.macros {
			value, ok := keyed(text, "#define "+m)
			if ok {
				parts = append(parts, value)
			}
		}
		if len(parts) == 3 {
			return strings.Join(parts, "."), file
		}
	}
	return "", ""
}

// markedVersion searches a shared object for the version text that it prints. It reads in pieces, because libnccl.so
// has more than 200 MB.
func (e *exam) markedVersion(file, mark string) string {
	f, err := e.root.FS.Open(file)
	if err != nil {
		return ""
	}
	defer f.Close()
	const piece, keep = 1 << 20, 64
	buf := make([]byte, 0, piece+keep)
	for e.ctx.Err() == nil {
		n, err := io.ReadFull(f, buf[len(buf):piece+keep])
		buf = buf[:len(buf)+n]
		for rest := buf; ; {
			at := bytes.Index(rest, []byte(mark))
			if at < 0 || at+len(mark)+keep > len(rest) && err == nil {
				break // absent, or cut off at the end of the piece: the next piece has it whole
			}
			rest = rest[at+len(mark):]
			if v := versionAt(rest); v != "" {
				return v
			}
		}
		if err != nil {
			return ""
		}
		buf = buf[:copy(buf, buf[len(buf)-keep-len(mark):])]
	}
	return ""
}

// versionAt parses "3.4.5" at the start of b.
func versionAt(b []byte) string {
	n := 0
	for n < len(b) && n < 16 && (b[n] == '.' || b[n] >= '0' && b[n] <= '9') {
		n++
	}
	v := strings.TrimRight(string(b[:n]), ".")
	if strings.Count(v, ".") < 1 || v[0] == '.' {
		return ""
	}
	return v
}

// minNVSHMEM is the first release whose IBGDA the kernels can use.
var minNVSHMEM = version{3, 3, 9}

// checkNVSHMEM compares the versions of the header, the shared object and the device code in libdeepep_nvshmem.so: if
// they differ, calls hang without an error.
func checkNVSHMEM(e *exam) {
	list := e.copies(nvshmemProduct)
	if len(list) == 0 {
		e.missing(Line{
			Read:  "no copy found",
			File:  "libnvshmem_host.so.3",
			Cause: "nodes are joined through NVSHMEM, which is not installed where the loader looks",
			Fix:   "pip install nvidia-nvshmem-cu13, or name its folder in NVSHMEM_HOME",
		})
		return
	}
	used := list[0] // a mapped copy, else the first that the loader finds
	for i, c := range list {
		e.nvshmemCopy(c, used, i == 0)
	}
}

func (e *exam) nvshmemCopy(c, used copyOf, first bool) {
	l := Line{Subject: copyName(c), Read: describeCopy(c), File: "/" + c.path}
	if first {
		l.Subject = "used"
		l.Facts = map[string]string{"version": c.host, "header": c.header}
	}
	host, hostKnown := parseVersion(c.host)
	header, headerKnown := parseVersion(c.header)
	built, builtKnown := parseVersion(e.opt.NVSHMEM)
	switch {
	case first && hostKnown && host.less(minNVSHMEM):
		l.Cause = "at least " + minNVSHMEM.String() + " is needed"
		l.Fix = "pip install -U nvidia-nvshmem-cu13 (or -cu12), and unset NVSHMEM_HOME or LD_LIBRARY_PATH if they lead to the old copy"
		e.fail(l)
	case first && hostKnown && builtKnown && host != built:
		l.Read += ", libdeepep_nvshmem.so built with " + e.opt.NVSHMEM
		l.Cause = "the device half is linked into libdeepep_nvshmem.so, the host half is this copy; unequal versions hang without a word"
		l.Fix = "install nvshmem " + built.String() + ", or rebuild libdeepep_nvshmem.so against this copy"
		e.fail(l)
	case hostKnown && headerKnown && host != header:
		l.Cause = "header and shared object of one folder differ: what is built there gets the device half of the one and the host half of the other"
		l.Fix = "reinstall this copy (/" + c.example + " says " + c.header + ")"
		e.when(first, l)
	case !first && c.loaded && c.host != used.host:
		l.Cause = "two versions are mapped by one process"
		l.Fix = "keep one: pip uninstall the other, or clean LD_LIBRARY_PATH; `import torch` maps the copy of torch's own packages"
		e.fail(l)
	case !first && c.host != used.host:
		l.Cause = "another version than the one in use (" + used.host + "): which one a program gets depends on search order"
		l.Fix = "remove one, or pin NVSHMEM_HOME"
		e.warn(l)
	default:
		e.ok(l)
	}
}

func copyName(c copyOf) string {
	if c.loaded {
		return "loaded"
	}
	return "installed"
}

func describeCopy(c copyOf) string {
	s := orUnknown(c.host)
	if c.header != "" {
		s += ", header " + c.header
	}
	if c.loaded {
		s += ", loaded"
	}
	return s + ", /" + c.path
}

func orUnknown(v string) string {
	if v == "" {
		return "version unknown"
	}
	return v
}

// checkNCCL finds several copies of NCCL, with which torch fails. This library does not use NCCL, but its calls often
// come last before the failure.
func checkNCCL(e *exam) {
	list := e.copies(ncclProduct)
	if len(list) == 0 {
		e.na(Line{Read: "no copy found (not needed by this library)", File: "libnccl.so.2"})
		return
	}
	used := list[0]
	for i, c := range list {
		l := Line{Subject: copyName(c), Read: describeCopy(c), File: "/" + c.path}
		if i == 0 {
			l.Subject, l.Facts = "used", map[string]string{"version": c.host}
		}
		if c.host == used.host {
			e.ok(l)
			continue
		}
		l.Cause = fmt.Sprintf("another version than the one in use (%s)", orUnknown(used.host))
		l.Fix = "keep one; torch brings its own (pip package nvidia-nccl-cu13)"
		if !c.loaded {
			l.Cause += "; harmless unless LD_LIBRARY_PATH or LD_PRELOAD brings it in"
		}
		e.when(c.loaded, l)
	}
}
