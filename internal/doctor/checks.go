package doctor

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// check is one row of the table: a name, the uses that need it, and its function.
type check struct {
	name string
	uses []For
	run  func(*exam)
}

var (
	everywhere = []For{ForCPU, ForIntranode, ForInternode}
	onGPUs     = []For{ForIntranode, ForInternode}
	acrossRDMA = []For{ForInternode}
)

// checks lists causes before their effects, so that the first FAIL is the first to fix. docs/doctor.md describes each
// check by its name.
var checks = []check{
	{"settings", everywhere, checkSettings},
	{"python", everywhere, checkPython},
	{"cpus", everywhere, checkCPUs},
	{"address-space", everywhere, checkAddressSpace},
	{"memory", everywhere, checkHostMemory},
	{"shm", everywhere, checkShm},
	{"ipc", everywhere, checkIPC},
	{"gpu", onGPUs, checkGPUs},
	{"library", onGPUs, checkLibrary},
	{"driver", onGPUs, checkDriver},
	{"compute", onGPUs, checkCompute},
	{"mig", onGPUs, checkMIG},
	{"gpu-memory", onGPUs, checkGPUMemory},
	{"fabric-manager", onGPUs, checkFabricManager},
	{"imex", onGPUs, checkIMEX},
	{"peer-access", onGPUs, checkPeerAccess},
	{"rdma-team", acrossRDMA, checkRDMATeam},
	{"driver-params", acrossRDMA, checkDriverParams},
	{"modprobe", acrossRDMA, checkModprobe},
	{"gpu-rdma", acrossRDMA, checkGPURDMA},
	{"gdrdrv", acrossRDMA, checkGdrdrv},
	{"verbs", acrossRDMA, checkVerbs},
	{"memlock", acrossRDMA, checkMemlock},
	{"port", acrossRDMA, checkPorts},
	{"nics", acrossRDMA, checkNICs},
	{"gid", acrossRDMA, checkGIDs},
	{"variables", acrossRDMA, checkVariables},
	{"nvshmem", acrossRDMA, checkNVSHMEM},
	{"nccl", onGPUs, checkNCCL},
	{"qp-budget", acrossRDMA, checkQPBudget},
	{"affinity", acrossRDMA, checkAffinity},
	{"iommu", onGPUs, checkIOMMU},
	{"acs", onGPUs, checkACS},
}

// Names lists the checks in order.
func Names() []string {
	names := make([]string, len(checks))
	for i, c := range checks {
		names[i] = c.name
	}
	return names
}

// Run examines the host. Its error is that of ctx alone; problems of the host are in the report.
func Run(ctx context.Context, root Root, opt Options) (*Report, error) {
	e := newExam(ctx, root, opt)
	for _, c := range checks {
		if err := ctx.Err(); err != nil {
			return nil, fmt.Errorf("doctor: stopped before %s: %w", c.name, err)
		}
		e.perform(c)
	}
	r := &Report{
		Format:  Format,
		Version: opt.Version,
		Host:    root.text("proc/sys/kernel/hostname"),
		Kernel:  root.text("proc/sys/kernel/osrelease"),
		For:     opt.For,
		Lines:   e.lines,
	}
	r.Status = r.Worst()
	return r, nil
}

// FirstFail runs the checks of a use up to the first FAIL and returns its line. found is false if there is none before
// ctx ends.
func FirstFail(ctx context.Context, root Root, opt Options) (line Line, found bool) {
	e := newExam(ctx, root, opt)
	for _, c := range checks {
		if ctx.Err() != nil {
			return Line{}, false
		}
		from := len(e.lines)
		e.perform(c)
		for _, l := range e.lines[from:] {
			if l.Status == Fail {
				return l, true
			}
		}
	}
	return Line{}, false
}

func newExam(ctx context.Context, root Root, opt Options) *exam {
	e := &exam{ctx: ctx, root: root, opt: opt}
	if opt.PID > 0 {
		environ := root.text("proc/" + strconv.Itoa(opt.PID) + "/environ")
		e.root.Environ = strings.Split(environ, "\x00")
	}
	return e
}

// perform runs one check if it applies to the use. It recovers from a check's panic, so that an unforeseen host costs
// one line and not the report, or the constructor of a buffer.
func (e *exam) perform(c check) {
	if e.opt.For != ForAny && !slices.Contains(c.uses, e.opt.For) {
		return
	}
	e.check = c.name
	defer func() {
		if p := recover(); p != nil {
			e.na(Line{Read: fmt.Sprintf("the check itself failed: %v", p)})
		}
	}()
	c.run(e)
}
