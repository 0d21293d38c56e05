package engine

import (
	"github.com/deepep-go/deepep/core/op"
	"github.com/deepep-go/deepep/internal/plan"
)

// Draft is a buffer on paper: what New would make of the same options, as far as that needs neither a device nor peers.
type Draft struct{ b *Buffer }

// NewDraft lays a rank's buffer out and refuses what New refuses of it. Without a library the regions are those of the
// options alone.
func NewDraft(opt Options, rank int) (*Draft, error) {
	opt.Timeout, opt.FirstTimeout = atLeastMillisecond(opt.Timeout), atLeastMillisecond(opt.FirstTimeout)
	b := &Buffer{opt: opt, rank: rank, size: opt.Topology.Ranks, top: opt.Topology}
	if opt.Library == nil {
		b.regions = plan.NewRegions(0, 0, opt.NVLBytes, opt.RDMABytes)
		return &Draft{b}, nil
	}
	b.limits = LimitsOf(opt.Library)
	if err := b.checkTransport(); err != nil {
		return nil, err
	}
	return &Draft{b}, b.measure()
}

// Info is that of the buffer, with zeros for what only a device knows.
func (d *Draft) Info() op.Info {
	i := d.b.describe()
	i.TotalBytes = d.b.regions.Total
	d.b.describeMemory(&i, len(d.b.remotePeers()))
	return i
}

// Peers are the ranks with queue pairs, in the order in which those are made.
func (d *Draft) Peers() []int32 { return d.b.remotePeers() }

// FitsRow refuses normal-mode rows that the regions cannot stage.
func (d *Draft) FitsRow(rowBytes uint64) error {
	if d.b.opt.Library == nil {
		return nil
	}
	return d.b.fitsRow(rowBytes)
}

// FitsLowLatency refuses a shape that low-latency calls of the buffer refuse.
func (d *Draft) FitsLowLatency(shape plan.LowLatency) error {
	if err := shape.CheckDispatch(d.b.top, &d.b.limits); err != nil {
		return err
	}
	if err := d.b.checkRDMATokens(shape.NumMaxTokens); err != nil || d.b.opt.Library == nil {
		return err
	}
	_, err := d.b.slot(shape.NumMaxTokens, shape.Hidden, shape.NumExperts)
	return err
}
