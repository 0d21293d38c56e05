package core

import (
	"context"
	"fmt"
	"time"

	"github.com/deepep-go/deepep/internal/doctor"
	"github.com/deepep-go/deepep/internal/doctor/libs"
	"github.com/deepep-go/deepep/internal/env"
	"github.com/deepep-go/deepep/internal/status"
)

// doctorLimit bounds the examination of the host, which delays the error. It usually takes 50 ms.
const doctorLimit = 2 * time.Second

// diagnosed adds the doctor's first FAIL to an error whose cause may lie in the host, unlike invalid arguments,
// disagreement among ranks and dead peers.
func (g *Group) diagnosed(err error, o *BufferOptions) error {
	switch status.CodeOf(err) {
	case status.System, status.Device, status.OutOfMemory, status.NotFound:
	default:
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), doctorLimit)
	defer cancel()
	if found := libs.FirstFail(ctx, g.examination(o)); found != "" {
		return fmt.Errorf("%w\n%s", err, found)
	}
	return err
}

// examination is what the doctor examines the host for: the wanted use and the memory that it takes.
func (g *Group) examination(o *BufferOptions) doctor.Options {
	e := doctor.Options{For: doctor.ForCPU, Version: versionText(), Ranks: g.topology.NodeSize()}
	bytes := o.NumNVLBytes + o.NumRDMABytes
	name := o.Engine
	if s, err := env.Current(); err == nil && (name == "" || name == EngineAuto) {
		name = s.Engine
	}
	if name != EngineCUDA {
		e.Plan.HostBytes = bytes
		return e
	}
	e.Plan.DeviceBytes = bytes
	e.For = doctor.ForIntranode
	if g.topology.Nodes() > 1 {
		e.For = doctor.ForInternode
	}
	if s, err := env.Current(); err == nil {
		_, err = loadEngine(EngineCUDA, s.Kernels)
		e.Searched = status.CodeOf(err) == status.NotFound // then there is no library; else nobody has looked into it
	}
	return e
}
