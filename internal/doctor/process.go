package doctor

import (
	"fmt"
	"path"
	"strconv"
	"strings"
)

// minPython is the minimum of python/deep_ep.
var minPython = version{3, 10}

// checkPython checks the interpreter of the examined process, of the active virtual environment, or of the system, in
// that order.
func checkPython(e *exam) {
	v, where := e.pythonVersion()
	method := e.startMethod()
	if v == "" {
		e.na(Line{Read: "no Python found; C, C++ and Go programs need none"})
		return
	}
	l := Line{
		Read:  "Python " + v + method.text(),
		File:  "/" + where,
		Facts: map[string]string{"version": v},
	}
	got, valid := parseVersion(v)
	switch {
	case valid && got.less(minPython):
		l.Cause = fmt.Sprintf("the package needs Python %d.%d or later", minPython[0], minPython[1])
		l.Fix = "make the virtual environment with a newer python3"
		e.fail(l)
	case method.name == "fork":
		l.Cause = "a child that was forked after the library or CUDA started has neither its threads nor a usable device, and hangs"
		l.Fix = `multiprocessing.set_start_method("spawn") before the first process; torch: mp.spawn, or DataLoader(multiprocessing_context="spawn")`
		e.when(method.loaded, l)
	default:
		e.ok(l)
	}
}

func (e *exam) pythonVersion() (v, where string) {
	exe := e.root.link(e.proc("exe"))
	if base := path.Base(exe); strings.HasPrefix(base, "python") {
		if v := strings.TrimPrefix(base, "python"); v != "" && v != "3" {
			return v, strings.TrimPrefix(exe, "/")
		}
	}
	for _, name := range []string{"VIRTUAL_ENV", "CONDA_PREFIX"} {
		prefix, _ := e.root.env(name)
		if prefix == "" {
			continue
		}
		prefix = strings.TrimPrefix(prefix, "/")
		cfg := path.Join(prefix, "pyvenv.cfg")
		for line := range strings.Lines(e.root.text(cfg)) {
			key, value, _ := strings.Cut(line, "=")
			if k := strings.TrimSpace(key); k == "version" || k == "version_info" {
				return strings.TrimSpace(value), cfg
			}
		}
		if v, where := e.pythonLink(path.Join(prefix, "bin/python3")); v != "" {
			return v, where
		}
	}
	for _, p := range []string{"usr/local/bin/python3", "usr/bin/python3"} {
		if v, where := e.pythonLink(p); v != "" {
			return v, where
		}
	}
	return "", ""
}

// pythonLink reads the version from the name of the file that bin/python3 links to.
func (e *exam) pythonLink(name string) (v, where string) {
	if !e.root.exists(name) {
		return "", ""
	}
	base := path.Base(e.root.resolve(name))
	if v := strings.TrimPrefix(base, "python"); v != base && v != "3" && v != "" {
		return v, name
	}
	return "", ""
}

// startMethod is the method by which multiprocessing made the examined process.
type startMethod struct {
	name   string // "" if it is unknown, or the process is not a child of multiprocessing
	loaded bool   // fork: the parent had loaded this library or CUDA
}

func (m startMethod) text() string {
	if m.name == "" {
		return ""
	}
	return ", start method " + m.name
}

// startMethod uses Options.StartMethod, else the command line: children of spawn and forkserver name their method, a
// forked one has its parent's command line.
func (e *exam) startMethod() startMethod {
	if e.opt.StartMethod != "" {
		return startMethod{name: e.opt.StartMethod}
	}
	if e.opt.PID == 0 {
		return startMethod{}
	}
	cmd := e.root.text(e.proc("cmdline"))
	for _, name := range []string{"spawn", "forkserver"} {
		if strings.Contains(cmd, "multiprocessing."+name) {
			return startMethod{name: name}
		}
	}
	parent, _ := keyed(e.root.text(e.proc("status")), "PPid")
	dir := path.Join("proc", parent)
	if cmd == "" || parent == "" || e.root.text(path.Join(dir, "cmdline")) != cmd || !strings.Contains(cmd, "python") {
		return startMethod{}
	}
	maps := e.root.text(path.Join(dir, "maps"))
	return startMethod{
		name:   "fork",
		loaded: strings.Contains(maps, "libdeepep") || strings.Contains(maps, "libcuda.so"),
	}
}

// checkAddressSpace checks the limit of the address space, of which CUDA and NVSHMEM reserve much more than they use.
func checkAddressSpace(e *exam) {
	file := "/" + e.proc("limits")
	limit, unlimited, known := e.limit("Max address space")
	switch {
	case !known:
		e.na(Line{Read: "limits of the process not readable", File: file})
	case unlimited:
		e.ok(Line{Read: "unlimited", File: file, Facts: map[string]string{"limit": "unlimited"}})
	default:
		need := e.opt.Plan.HostBytes * uint64(max(e.ranks(), 1))
		l := Line{
			Read:  "limited to " + bytesText(limit),
			File:  file,
			Cause: "CUDA reserves address space for all memory of all GPUs, and every rank maps the buffers of all ranks; the reservation fails as out of memory",
			Fix:   "ulimit -v unlimited in the shell that starts the job (Slurm: VSizeFactor=0; /etc/security/limits.conf: remove the `as` line)",
			Facts: map[string]string{"limit": bytesText(limit)},
		}
		onlyCPU := e.opt.For == ForCPU || (e.opt.For == ForAny && len(e.gpuList()) == 0)
		if onlyCPU && limit > need+1<<30 { // 1 GiB for the interpreter and torch
			l.Cause = "enough for the CPU engine, not for CUDA, which reserves address space for all memory of all GPUs"
			e.warn(l)
			return
		}
		e.fail(l)
	}
}

// checkShm checks /dev/shm, which holds NCCL's buffers and the statistics pages, not this library's buffers.
func checkShm(e *exam) {
	const file, enough = "/dev/shm", 1 << 30
	if e.root.Space == nil {
		e.na(Line{Read: ErrNotAsked.Error(), File: file})
		return
	}
	total, free, err := e.root.Space("dev/shm")
	if err != nil {
		e.warn(Line{
			Read:  "not there: " + err.Error(),
			File:  file,
			Cause: "statistics pages then go to the temporary folder, and NCCL cannot start",
			Fix:   "mount -t tmpfs -o size=16g tmpfs /dev/shm",
		})
		return
	}
	l := Line{
		Read:  fmt.Sprintf("%s, %s free", bytesText(total), bytesText(free)),
		File:  file,
		Facts: map[string]string{"size": bytesText(total)},
		Fix:   "docker run --shm-size=16g (or --ipc=host); Kubernetes: an emptyDir with medium Memory mounted on /dev/shm",
	}
	switch {
	case free < 16<<20:
		l.Cause = "nearly full: torch's data loaders and NCCL fail there; files that dead processes left are the usual reason"
		l.Fix = "ls -la /dev/shm and remove what no process uses; or " + l.Fix
		e.warn(l)
	case total < enough:
		l.Cause = "the default of a container; this library's buffers do not need it, NCCL's and torch's data loaders do"
		e.warn(l)
	default:
		l.Fix = ""
		e.ok(l)
	}
}

// initialIPC is the kernel's number of the first IPC namespace.
const initialIPC = "ipc:[4026531839]"

// checkIPC checks the namespaces and permissions with which ranks share memory and see each other's end.
func checkIPC(e *exam) {
	ns := e.root.link(e.proc("ns/ipc"))
	where := "the host's IPC namespace"
	switch {
	case ns == "":
		where = "IPC namespace not readable"
	case ns != initialIPC:
		where = "an IPC namespace of its own (a container: all ranks of this host must be in it, or in --ipc=host)"
	}
	l := Line{Subject: "namespace", Read: where, File: "/" + e.proc("ns/ipc")}
	other := e.otherNamespace(ns)
	if other == "" {
		e.ok(l)
	} else {
		l.Cause = "CUDA IPC handles do not cross IPC namespaces; process " + other + " uses a GPU from another one"
		l.Fix = "start all ranks of a host in one container, or each with --ipc=host --pid=host"
		e.warn(l)
	}
	const yama = "proc/sys/kernel/yama/ptrace_scope"
	scope, ok := e.root.number(yama)
	p := Line{Subject: "ptrace", File: "/" + yama, Read: "ptrace_scope " + strconv.FormatInt(scope, 10),
		Facts: map[string]string{"scope": strconv.FormatInt(scope, 10)}}
	switch {
	case !ok:
		e.na(Line{Subject: "ptrace", Read: "kernel without Yama: ptrace is not restricted", File: "/" + yama})
	case scope >= 2 && !e.capability(capSysPtrace):
		p.Cause = "descriptors of another rank cannot be fetched (pidfd_getfd), nor a hung rank be looked at with py-spy or gdb"
		p.Fix = e.onHost() + "sysctl kernel.yama.ptrace_scope=1, or --cap-add=SYS_PTRACE for the container"
		e.warn(p)
	default:
		e.ok(p)
	}
}

const (
	capIPCLock   = 14
	capSysPtrace = 19
)

// otherNamespace finds a process of the same user that holds a GPU open from another IPC namespace.
func (e *exam) otherNamespace(mine string) string {
	if mine == "" {
		return ""
	}
	for _, link := range e.root.glob("proc/[0-9]*/ns/ipc") {
		ns := e.root.link(link)
		if ns == "" || ns == mine {
			continue
		}
		dir := strings.TrimSuffix(link, "/ns/ipc")
		for _, fd := range e.root.glob(dir + "/fd/*") {
			if strings.HasPrefix(e.root.link(fd), "/dev/nvidia-uvm") {
				return strings.TrimPrefix(dir, "proc/")
			}
		}
	}
	return ""
}

// checkMemlock checks the limit of locked memory: registering memory with a NIC locks it.
func checkMemlock(e *exam) {
	file := "/" + e.proc("limits")
	limit, unlimited, known := e.limit("Max locked memory")
	switch {
	case !known:
		e.na(Line{Read: "limits of the process not readable", File: file})
		return
	case unlimited:
		e.ok(Line{Read: "unlimited", File: file, Facts: map[string]string{"limit": "unlimited"}})
		return
	}
	l := Line{Read: bytesText(limit), File: file, Facts: map[string]string{"limit": bytesText(limit)}}
	if e.capability(capIPCLock) {
		l.Read += ", lifted by CAP_IPC_LOCK"
		e.ok(l)
		return
	}
	if len(e.nicList()) == 0 && e.opt.For == ForAny {
		l.Read += " (no RDMA device needs it)"
		e.na(l)
		return
	}
	l.Read += ", no CAP_IPC_LOCK"
	l.Cause = "memory that a NIC reads and writes must be locked; registration fails with ENOMEM, which looks like lack of memory"
	l.Fix = "container: --ulimit memlock=-1 --cap-add=IPC_LOCK (Kubernetes: capabilities.add IPC_LOCK); " +
		"host: `* - memlock unlimited` in /etc/security/limits.d/rdma.conf and log in again; service: LimitMEMLOCK=infinity"
	// Queue pairs, doorbells and a small heap need less; a plan gives the exact number.
	e.when(limit < max(e.opt.Plan.HostBytes, 1<<30), l)
}
