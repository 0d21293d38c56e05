package doctor

import (
	"context"
	"fmt"
	"path"
	"strconv"
	"strings"
	"time"
)

// exam is one run over one host: the root, the plan, and values that several checks need.
type exam struct {
	ctx   context.Context
	root  Root
	opt   Options
	check string // name of the running check
	lines []Line

	nvml  memo[*NVML]
	cuda  memo[*CUDA]
	verbs memo[*Verbs]
	gpus  memo[[]gpu]
	nics  memo[[]nic]
}

// memo caches a result.
type memo[T any] struct {
	asked bool
	value T
	err   error
}

func (m *memo[T]) get(ask func() (T, error)) (T, error) {
	if !m.asked {
		m.asked = true
		m.value, m.err = ask()
	}
	return m.value, m.err
}

// libraryWait bounds a call of a library: cuInit can hang for minutes if the fabric manager is not running.
const libraryWait = 20 * time.Second

// askLibrary calls a library function in a goroutine, so that the report goes on if the function hangs.
func askLibrary[T any](ctx context.Context, name string, ask func(context.Context) (T, error)) (T, error) {
	var none T
	if ask == nil {
		return none, ErrNotAsked
	}
	ctx, cancel := context.WithTimeout(ctx, libraryWait)
	defer cancel()
	type answer struct {
		value T
		err   error
	}
	done := make(chan answer, 1)
	go func() {
		defer func() {
			if p := recover(); p != nil {
				done <- answer{err: fmt.Errorf("%s: %v", name, p)}
			}
		}()
		v, err := ask(ctx)
		done <- answer{v, err}
	}()
	select {
	case a := <-done:
		return a.value, a.err
	case <-ctx.Done():
		return none, fmt.Errorf("%s did not answer: %w", name, context.Cause(ctx))
	}
}

func (e *exam) askNVML() (*NVML, error) {
	return e.nvml.get(func() (*NVML, error) { return askLibrary(e.ctx, "libnvidia-ml", e.root.NVML) })
}

func (e *exam) askCUDA() (*CUDA, error) {
	return e.cuda.get(func() (*CUDA, error) { return askLibrary(e.ctx, "libcuda", e.root.CUDA) })
}

func (e *exam) askVerbs() (*Verbs, error) {
	return e.verbs.get(func() (*Verbs, error) { return askLibrary(e.ctx, "libibverbs", e.root.Verbs) })
}

func (e *exam) add(s Status, l Line) {
	l.Check, l.Status = e.check, s
	l.Read = strings.ReplaceAll(l.Read, "\n", "; ") // joined errors contain line ends
	e.lines = append(e.lines, l)
}

func (e *exam) ok(l Line)   { e.add(OK, l) }
func (e *exam) warn(l Line) { e.add(Warn, l) }
func (e *exam) fail(l Line) { e.add(Fail, l) }
func (e *exam) na(l Line)   { e.add(NA, l) }

// when adds a FAIL if the condition holds, else a WARN.
func (e *exam) when(grave bool, l Line) {
	if grave {
		e.fail(l)
		return
	}
	e.warn(l)
}

// missing adds a FAIL if the caller named a use, which then needs what is missing, else N/A.
func (e *exam) missing(l Line) {
	if e.opt.For == ForAny {
		l.Cause, l.Fix = "", ""
		e.na(l)
		return
	}
	e.fail(l)
}

// proc is the path of a file of the examined process.
func (e *exam) proc(name string) string {
	pid := "self"
	if e.opt.PID > 0 {
		pid = strconv.Itoa(e.opt.PID)
	}
	return path.Join("proc", pid, name)
}

// limit reads a soft limit of the examined process, in the limit's unit.
func (e *exam) limit(title string) (value uint64, unlimited, known bool) {
	rest, ok := keyed(e.root.text(e.proc("limits")), title)
	if !ok {
		return 0, false, false
	}
	soft, _, _ := strings.Cut(rest, " ")
	if soft == "unlimited" {
		return 0, true, true
	}
	n, err := strconv.ParseUint(soft, 10, 64)
	return n, false, err == nil
}

// capability reports whether the examined process has the capability of this number.
func (e *exam) capability(bit uint) bool {
	text, _ := keyed(e.root.text(e.proc("status")), "CapEff")
	mask, err := strconv.ParseUint(text, 16, 64)
	return err == nil && mask>>bit&1 == 1
}

// inContainer guesses from files and variables of container runtimes.
func (e *exam) inContainer() bool {
	if e.root.exists(".dockerenv") || e.root.exists("run/.containerenv") {
		return true
	}
	first := e.root.text("proc/1/cgroup")
	for _, mark := range []string{"docker", "kubepods", "containerd", "lxc", "libpod"} {
		if strings.Contains(first, mark) {
			return true
		}
	}
	_, kube := e.root.env("KUBERNETES_SERVICE_HOST")
	return kube
}

// onHost is the beginning of a fix that has to be made on the host.
func (e *exam) onHost() string {
	if e.inContainer() {
		return "on the host, not in this container: "
	}
	return ""
}
