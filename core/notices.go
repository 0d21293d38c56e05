package core

import (
	"fmt"
	"strings"

	"github.com/deepep-go/deepep/internal/doctor"
	"github.com/deepep-go/deepep/internal/engine"
	"github.com/deepep-go/deepep/internal/env"
	"github.com/deepep-go/deepep/internal/kern"
)

// thisHost is the host whose GPUs noticeGPU looks for; tests put another in its place.
var thisHost = doctor.Host

// noticeGPU warns, once a process, where the machine has a GPU and "auto" has taken the CPU engine all the same: the
// CUDA library was not built, or finds no device.
func (g *Group) noticeGPU(o *BufferOptions, chosen string, s env.Settings) {
	asked := o.Engine
	if asked == "" || asked == EngineAuto {
		asked = s.Engine
	}
	if asked != EngineAuto || chosen != EngineCPU || !doctor.SeesGPU(thisHost()) {
		return
	}
	text := "this machine has a GPU, and the buffer is on the CPU engine, which takes no tensor of a GPU: "
	switch l, err := loadEngine(EngineCUDA, s.Kernels); {
	case err == nil:
		text += fmt.Sprintf("%s finds no device: %s; `deepep doctor` says more", l.Path, l.Reason)
	case g.topology.Nodes() > 1:
		text += "libdeepep_cuda.so cannot be loaded. " + doctor.BuildNodes + ". " + firstLine(err)
	default:
		text += "libdeepep_cuda.so cannot be loaded. " + doctor.BuildGPU + ". " + firstLine(err)
	}
	engine.WarnOnce(g.log, text+". DEEPEP_ENGINE=cpu takes the CPU engine without this warning")
}

// firstLine is an error without the list of what was tried.
func firstLine(err error) string {
	line, _, _ := strings.Cut(err.Error(), "\n")
	return line
}

// noticeLinks warns of links that were asked for and that the buffer's library does not have. On one node of GPUs
// allow_mnnvl allows nothing that is not done anyway.
func (g *Group) noticeLinks(o *BufferOptions, l *kern.Library, chosen string) {
	if o.AllowMNNVL && !l.HasTransportHeap() && (chosen == EngineCPU || g.topology.Nodes() > 1) {
		engine.WarnOnce(g.log, "allow_mnnvl has no effect with engine "+chosen+": it lets NVSHMEM use NVLink between hosts")
	}
}
