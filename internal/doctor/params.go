package doctor

import (
	"path"
	"strings"
)

// The driver parameters with which a GPU can write a NIC's doorbells.
const (
	streamMemOPs = "EnableStreamMemOPs"
	registry     = "RegistryDwords"
	peerMapping  = "PeerMappingOverride=1"
	optionsLine  = `options nvidia NVreg_EnableStreamMemOPs=1 NVreg_RegistryDwords="PeerMappingOverride=1;"`
	reload       = "then `update-initramfs -u` (Debian, Ubuntu) or `dracut -f` (Red Hat) and reboot"
)

// liveParams reads the parameters of the loaded driver.
func (e *exam) liveParams() (mem, dwords string, known bool) {
	text := e.root.text("proc/driver/nvidia/params")
	mem, ok1 := keyed(text, streamMemOPs)
	dwords, ok2 := keyed(text, registry)
	return mem, strings.Trim(dwords, `"`), ok1 || ok2
}

// needsPeerMapping is false if the CPU writes the doorbells.
func (e *exam) needsPeerMapping() bool {
	handler, _ := e.root.env("NVSHMEM_IBGDA_NIC_HANDLER")
	return !strings.HasPrefix(handler, "cpu")
}

// checkDriverParams checks the parameters of the loaded driver, which are in effect.
func checkDriverParams(e *exam) {
	const file = "proc/driver/nvidia/params"
	mem, dwords, known := e.liveParams()
	if !known {
		e.na(Line{Read: "no NVIDIA driver, no parameters", File: "/" + file})
		return
	}
	if len(e.nicList()) == 0 && e.opt.For == ForAny {
		e.na(Line{Read: "only nodes joined by RDMA need them; no RDMA device here", File: "/" + file})
		return
	}
	l := Line{
		Read:  streamMemOPs + ": " + orDash(mem) + ", " + registry + `: "` + dwords + `"`,
		File:  "/" + file,
		Facts: map[string]string{streamMemOPs: mem, registry: dwords},
	}
	hasMem, hasPeer := mem == "1", hasDword(dwords)
	if hasMem && hasPeer {
		e.ok(l)
		return
	}
	var lacking []string
	if !hasMem {
		lacking = append(lacking, streamMemOPs+" is not 1")
	}
	if !hasPeer {
		lacking = append(lacking, registry+" lacks "+peerMapping)
	}
	l.Cause = strings.Join(lacking, " and ") + ": the GPU may not map the NIC's doorbells, and GPU-initiated RDMA (IBGDA) fails to start"
	l.Fix = e.onHost() + "put `" + optionsLine + "` into /etc/modprobe.d/nvidia.conf, " + reload
	if set, file := e.paramsOnDisk(); set {
		l.Fix = e.onHost() + "/" + file + " already has them, but the driver that runs was loaded before, or from an initramfs that lacks them: " + strings.TrimPrefix(reload, "then ")
	}
	if !e.needsPeerMapping() {
		l.Cause += "; NVSHMEM_IBGDA_NIC_HANDLER chooses the CPU for that, which is slower"
		e.warn(l)
		return
	}
	e.fail(l)
}

func hasDword(dwords string) bool {
	for d := range strings.FieldsFuncSeq(dwords, func(r rune) bool { return r == ';' || r == ' ' }) {
		if d == peerMapping {
			return true
		}
	}
	return false
}

// modprobeLine is a line of a modprobe.d file that names one of the keys.
type modprobeLine struct {
	file, text string
	effective  bool // it begins with `options nvidia`, so that modprobe applies it
	mem, peer  bool
}

// modprobeLines reads the folders in modprobe's order of precedence: a file hides one of the same name in a later
// folder.
func (e *exam) modprobeLines() []modprobeLine {
	var lines []modprobeLine
	seen := map[string]bool{}
	for _, dir := range []string{"etc/modprobe.d", "run/modprobe.d", "usr/local/lib/modprobe.d", "usr/lib/modprobe.d", "lib/modprobe.d"} {
		for _, file := range e.root.glob(dir + "/*.conf") {
			if seen[path.Base(file)] {
				continue
			}
			seen[path.Base(file)] = true
			joined := strings.ReplaceAll(e.root.text(file), "\\\n", " ")
			for line := range strings.Lines(joined) {
				line = strings.TrimSpace(line)
				if strings.HasPrefix(line, "#") || !(strings.Contains(line, streamMemOPs) || strings.Contains(line, "PeerMappingOverride")) {
					continue
				}
				lines = append(lines, parseModprobe(file, line))
			}
		}
	}
	return lines
}

func parseModprobe(file, line string) modprobeLine {
	fields := strings.Fields(line)
	m := modprobeLine{file: file, text: line}
	m.effective = len(fields) > 2 && fields[0] == "options" && fields[1] == "nvidia"
	for _, f := range fields {
		value, found := strings.CutPrefix(f, "NVreg_"+streamMemOPs+"=")
		m.mem = m.mem || (found && strings.Trim(value, `"`) == "1")
		value, found = strings.CutPrefix(f, "NVreg_"+registry+"=")
		m.peer = m.peer || (found && hasDword(strings.Trim(value, `"`)))
	}
	return m
}

// paramsOnDisk reports whether the driver will have both keys when it is loaded again.
func (e *exam) paramsOnDisk() (both bool, file string) {
	mem, peer := false, false
	for _, m := range e.modprobeLines() {
		if m.effective {
			mem, peer = mem || m.mem, peer || m.peer
			file = m.file
		}
	}
	return mem && peer, file
}

// checkModprobe compares the files with the parameters of the loaded driver.
func checkModprobe(e *exam) {
	mem, dwords, known := e.liveParams()
	live := mem == "1" && hasDword(dwords)
	lines := e.modprobeLines()
	if len(lines) == 0 {
		l := Line{Read: "keys in no file", File: "/etc/modprobe.d"}
		switch {
		case live && !e.inContainer():
			l.Cause = "the keys are live but in no file: the next boot loses them (unless the kernel command line sets them)"
			l.Fix = "put `" + optionsLine + "` into /etc/modprobe.d/nvidia.conf"
			if strings.Contains(e.root.text("proc/cmdline"), "nvidia.NVreg_") {
				l.Cause, l.Fix, l.Read = "", "", "keys on the kernel command line"
				e.ok(l)
				return
			}
			e.warn(l)
		default:
			e.na(l)
		}
		return
	}
	for _, m := range lines {
		l := Line{Subject: path.Base(m.file), Read: m.text, File: "/" + m.file}
		switch {
		case !m.effective:
			l.Cause = "modprobe ignores the line: it does not begin with `options nvidia`"
			l.Fix = e.onHost() + "write it as `" + fixedOptions(m.text) + "`, " + reload
			e.when(!live, l)
		case !m.mem && !m.peer:
			l.Cause = "the value is not the one that is needed"
			l.Fix = e.onHost() + "write it as `" + optionsLine + "`, " + reload
			e.when(!live, l)
		case known && ((m.mem && mem != "1") || (m.peer && !hasDword(dwords))):
			l.Cause = "set on disk, not live: /proc/driver/nvidia/params does not show it; the driver was loaded before the edit, or from an initramfs without this file"
			l.Fix = e.onHost() + strings.TrimPrefix(reload, "then ")
			e.warn(l) // the FAIL is in driver-params
		default:
			e.ok(l)
		}
	}
}

// fixedOptions writes `options nvidia` before the NVreg_ words of a line.
func fixedOptions(line string) string {
	var words []string
	for _, f := range strings.Fields(line) {
		if strings.HasPrefix(f, "NVreg_") {
			words = append(words, f)
		}
	}
	if len(words) == 0 {
		return optionsLine
	}
	return "options nvidia " + strings.Join(words, " ")
}
