package doctor

import (
	"fmt"
	"path"
	"strconv"
	"strings"
)

// checkCPUs compares the CPUs that the process may use with the ranks of the host.
func checkCPUs(e *exam) {
	list, _ := keyed(e.root.text(e.proc("status")), "Cpus_allowed_list")
	allowed := countCPUs(list)
	if allowed == 0 {
		e.na(Line{Read: "CPUs of the process not readable", File: "/" + e.proc("status")})
		return
	}
	l := Line{
		Read:  plural(allowed, "CPU"),
		File:  "/" + e.proc("status"),
		Facts: map[string]string{"cpus": strconv.Itoa(allowed)},
	}
	usable := float64(allowed)
	if quota, file := e.cpuQuota(); quota > 0 && quota < usable {
		usable = quota
		l.Read += fmt.Sprintf(", cgroup quota %g", quota)
		l.File = "/" + file
		l.Facts["quota"] = fmt.Sprintf("%g", quota)
	}
	ranks := e.ranks()
	if ranks > 0 {
		l.Read += " for " + plural(ranks, "rank")
	}
	if ranks > 0 && usable < float64(ranks) {
		l.Cause = "each rank has a thread that launches and waits; with fewer CPUs than ranks they take turns, which shows as slow ranks and late heartbeats"
		l.Fix = "give the job at least one CPU a rank (docker --cpus, Kubernetes resources.limits.cpu, Slurm --cpus-per-task), or start fewer ranks"
		e.warn(l)
		return
	}
	e.ok(l)
}

// ranks on this host: the planned number, else one for each GPU; 0: unknown.
func (e *exam) ranks() int {
	if e.opt.Ranks > 0 || e.opt.For == ForCPU {
		return e.opt.Ranks
	}
	return len(e.usableGPUs())
}

// cpuQuota is the smallest CPU limit of the cgroup and its parents; 0 if there is none.
func (e *exam) cpuQuota() (cpus float64, file string) {
	for _, dir := range e.cgroupDirs("") {
		fields := strings.Fields(e.root.text(path.Join(dir, "cpu.max")))
		if len(fields) == 2 {
			cpus, file = tighter(cpus, file, fields[0], fields[1], path.Join(dir, "cpu.max"))
		}
	}
	for _, dir := range e.cgroupDirs("cpu") {
		quota, period := path.Join(dir, "cpu.cfs_quota_us"), path.Join(dir, "cpu.cfs_period_us")
		cpus, file = tighter(cpus, file, e.root.text(quota), e.root.text(period), quota)
	}
	return cpus, file
}

func tighter(cpus float64, file, quota, period, from string) (float64, string) {
	q, err1 := strconv.ParseFloat(quota, 64)
	p, err2 := strconv.ParseFloat(period, 64)
	if err1 != nil || err2 != nil || q <= 0 || p <= 0 { // "max" and -1 mean none
		return cpus, file
	}
	if n := q / p; cpus == 0 || n < cpus {
		return n, from
	}
	return cpus, file
}

// cgroupDirs lists the folders of the process's cgroup, innermost first: of the unified tree for controller "", else of
// that version 1 controller. In a container the path may be the host's, so that the list always ends with the mount's
// root.
func (e *exam) cgroupDirs(controller string) []string {
	mount := path.Join("sys/fs/cgroup", controller)
	if !e.root.exists(mount) {
		return nil
	}
	var dirs []string
	for line := range strings.Lines(e.root.text(e.proc("cgroup"))) {
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(parts) != 3 || !controls(parts[1], controller) {
			continue
		}
		for p := path.Clean("/" + parts[2]); p != "/"; p = path.Dir(p) {
			if dir := path.Join(mount, p); e.root.exists(dir) {
				dirs = append(dirs, dir)
			}
		}
	}
	return append(dirs, mount)
}

func controls(list, controller string) bool {
	if controller == "" {
		return list == ""
	}
	for c := range strings.SplitSeq(list, ",") {
		if c == controller {
			return true
		}
	}
	return false
}

// checkHostMemory compares the planned host memory of all ranks with the free memory.
func checkHostMemory(e *exam) {
	free, file := e.freeMemory()
	if file == "" {
		e.na(Line{Read: "free memory not readable", File: "/proc/meminfo"})
		return
	}
	total, _ := keyed(e.root.text("proc/meminfo"), "MemTotal")
	l := Line{Read: bytesText(free) + " free", File: "/" + file}
	if kib, err := strconv.ParseUint(strings.TrimSuffix(total, " kB"), 10, 64); err == nil {
		l.Facts = map[string]string{"total": fmt.Sprintf("%d GiB", (kib+1<<19)>>20)}
	}
	ranks := uint64(max(e.ranks(), 1))
	need := e.opt.Plan.HostBytes * ranks
	if need > 0 {
		l.Read += fmt.Sprintf(", %s planned (%s × %s)", bytesText(need), bytesText(e.opt.Plan.HostBytes), plural(int(ranks), "rank"))
	}
	if need > free {
		l.Cause = "the buffers do not fit; pages are touched as used, so the failure would come in the middle of the run"
		l.Fix = "smaller num_nvl_bytes or num_rdma_bytes, fewer tokens a rank, or a higher memory limit; `deepep plan` shows what each part takes"
		e.fail(l)
		return
	}
	e.ok(l)
}

// freeMemory is MemAvailable, or the rest of the cgroup's limit if that is less.
func (e *exam) freeMemory() (free uint64, file string) {
	text, _ := keyed(e.root.text("proc/meminfo"), "MemAvailable")
	kib, err := strconv.ParseUint(strings.TrimSuffix(text, " kB"), 10, 64)
	if err != nil {
		return 0, ""
	}
	free, file = kib*1024, "proc/meminfo"
	type pair struct{ dir, limit, used string }
	var pairs []pair
	for _, d := range e.cgroupDirs("") {
		pairs = append(pairs, pair{d, "memory.max", "memory.current"})
	}
	for _, d := range e.cgroupDirs("memory") {
		pairs = append(pairs, pair{d, "memory.limit_in_bytes", "memory.usage_in_bytes"})
	}
	for _, p := range pairs {
		limit, err1 := strconv.ParseUint(e.root.text(path.Join(p.dir, p.limit)), 10, 64)
		used, err2 := strconv.ParseUint(e.root.text(path.Join(p.dir, p.used)), 10, 64)
		if err1 != nil || err2 != nil {
			continue
		}
		if left := limit - min(used, limit); left < free {
			free, file = left, path.Join(p.dir, p.limit)
		}
	}
	return free, file
}
