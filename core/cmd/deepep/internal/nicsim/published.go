package nicsim

// Published is one figure of upstream's tables, which docs/simulation.md quotes. The figures for the fit were chosen
// before the model was written.
type Published struct {
	Operation Operation
	Ranks     int
	Value     float64 // microseconds in low latency, GB/s (logical) in normal mode
	Fitted    bool    // the model's constants come from it; all others check
}

// PublishedTable has every figure.
var PublishedTable = []Published{
	{LowLatencyDispatch, 8, 77, false}, {LowLatencyDispatch, 16, 118, true}, {LowLatencyDispatch, 32, 155, false},
	{LowLatencyDispatch, 64, 173, false}, {LowLatencyDispatch, 128, 192, false}, {LowLatencyDispatch, 256, 194, false},
	{LowLatencyCombine, 8, 114, false}, {LowLatencyCombine, 16, 195, true}, {LowLatencyCombine, 32, 273, false},
	{LowLatencyCombine, 64, 314, false}, {LowLatencyCombine, 128, 369, false}, {LowLatencyCombine, 256, 360, false},
	{Dispatch, 8, 153, true}, {Dispatch, 16, 43, false}, {Dispatch, 32, 58, false}, {Dispatch, 64, 51, false},
	{Combine, 8, 158, true}, {Combine, 16, 43, false}, {Combine, 32, 57, false}, {Combine, 64, 50, false},
}

// Run simulates the figure's call.
func (p *Published) Run(hw Hardware, seed uint64) (Result, error) {
	j, err := PublishedJob(p.Operation, p.Ranks)
	if err != nil {
		return Result{}, err
	}
	j.Seed = seed
	return Run(hw, j)
}

// Of is the result's value for this kind of figure.
func (p *Published) Of(r Result) float64 {
	if p.Operation.lowLatency() {
		return r.Mean.Microseconds()
	}
	return r.Bandwidth
}

// fitSeeds is the number of random routings over which the fit averages.
const fitSeeds = 3

// Fit finds the two fitted constants, each by least squares of the relative errors of its two figures. A call's
// constant part adds to its time, so that a formula gives it.
func Fit(hw Hardware) (call Time, copyRate int64, err error) {
	var above, below float64
	for _, p := range fitted(true) {
		var transfer float64
		for seed := range uint64(fitSeeds) {
			r, err := p.Run(hw, seed+1)
			if err != nil {
				return 0, 0, err
			}
			transfer += r.Transfer.Microseconds() / fitSeeds
		}
		above += (p.Value - transfer) / (p.Value * p.Value)
		below += 1 / (p.Value * p.Value)
	}
	call = max(0, Time(above/below*float64(Microsecond)))
	copyRate, err = fitCopyRate(hw)
	return call, copyRate, err
}

func fitted(lowLatency bool) []Published {
	var list []Published
	for _, p := range PublishedTable {
		if p.Fitted && p.Operation.lowLatency() == lowLatency {
			list = append(list, p)
		}
	}
	return list
}

// fitCopyRate starts from the hardware's rate. Bandwidth is nearly proportional to it, which gives a formula for the
// best rate; a few iterations correct the rest.
func fitCopyRate(hw Hardware) (int64, error) {
	const rounds = 3
	for range rounds {
		var above, below float64
		for _, p := range fitted(false) {
			r, err := p.Run(hw, 1) // with 4096 tokens a rank the seed hardly matters
			if err != nil {
				return 0, err
			}
			share := p.Of(r) / p.Value
			above += share
			below += share * share
		}
		hw.CopyRate = int64(float64(hw.CopyRate) * above / below)
	}
	return hw.CopyRate, nil
}
