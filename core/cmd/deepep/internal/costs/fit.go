package costs

import (
	"math"
	"slices"
)

// knob is a cost that Fit may change.
type knob struct {
	name string
	of   func(*Kernel) *float64
}

var knobs = []knob{
	{"call_us", func(k *Kernel) *float64 { return &k.CallUS }},
	{"notify_us", func(k *Kernel) *float64 { return &k.NotifyUS }},
	{"row_us", func(k *Kernel) *float64 { return &k.RowUS }},
	{"row_least_us", func(k *Kernel) *float64 { return &k.RowLeastUS }},
	{"sm_gb_s", func(k *Kernel) *float64 { return &k.SMGBs }},
	{"stream_row_us", func(k *Kernel) *float64 { return &k.StreamRowUS }},
	{"stream_gb_s", func(k *Kernel) *float64 { return &k.StreamGBs }},
	{"put_gb_s", func(k *Kernel) *float64 { return &k.PutGBs }},
	{"senders", func(k *Kernel) *float64 { return &k.Senders }},
	{"signal_us", func(k *Kernel) *float64 { return &k.SignalUS }},
	{"metadata_bytes", func(k *Kernel) *float64 { return &k.MetadataByte }},
}

// Fit sets the fitted costs of some kernels, or with no name of all, to those with the least squares of the relative errors of its measurements marked
// fit. A limit that binds hides the others, so the sum has kinks: Fit searches by steps that shrink, along one cost at a
// time and then once more in the direction that a round has gone (Hooke and Jeeves), from the costs that are there.
func (f *File) Fit(kernels ...string) error {
	for name, k := range f.Kernels {
		if len(kernels) > 0 && !slices.Contains(kernels, name) {
			continue
		}
		var own []*Measurement
		for i := range f.Measured {
			if m := &f.Measured[i]; m.Fit && kernelOf(m.Operation, m.Ranks/m.RanksPerNode) == name {
				own = append(own, m)
			}
		}
		if len(own) == 0 || len(k.Fitted) == 0 {
			continue
		}
		if err := f.fit(k, own); err != nil {
			return err
		}
	}
	return nil
}

func (f *File) fit(k *Kernel, own []*Measurement) error {
	var values []*float64
	for _, n := range knobs {
		for _, name := range k.Fitted {
			if n.name == name {
				v := n.of(k)
				if *v == 0 {
					*v = 1 // steps are shares of it
				}
				values = append(values, v)
			}
		}
	}
	search := descent{f: f, own: own, values: values, scale: current(values)}
	best, err := f.squares(own)
	for step := 0.5; step > 1e-4 && err == nil; {
		before := best
		if best, err = search.round(best, step); before-best < 1e-3*before+1e-7 {
			step /= 2
		}
	}
	if err != nil {
		return err
	}
	for _, v := range values {
		*v = rounded(*v)
	}
	return nil
}

func current(values []*float64) []float64 {
	list := make([]float64, len(values))
	for i, v := range values {
		list[i] = *v
	}
	return list
}

// descent is a search for the costs of one kernel. A step is a share of the value that the search began with.
type descent struct {
	f      *File
	own    []*Measurement
	values []*float64
	scale  []float64
}

// round tries a step along each cost, and then the whole round's way once more. It returns the least squares.
func (d *descent) round(best, step float64) (float64, error) {
	base := current(d.values)
	for i, v := range d.values {
		for _, by := range []float64{step, -step} {
			before := *v
			*v = max(0, before+by*d.scale[i])
			now, err := d.squares()
			if err != nil {
				return 0, err
			}
			if now < best {
				best = now
				break
			}
			*v = before
		}
	}
	reached := current(d.values)
	for i, v := range d.values {
		*v = max(0, 2*reached[i]-base[i])
	}
	now, err := d.squares()
	if err == nil && now < best {
		return now, nil
	}
	for i, v := range d.values {
		*v = reached[i]
	}
	return best, err
}

// squares is infinite where a rate is zero.
func (d *descent) squares() (float64, error) {
	sum, err := d.f.squares(d.own)
	if math.IsNaN(sum) {
		sum = math.Inf(1)
	}
	return sum, err
}

func (f *File) squares(own []*Measurement) (sum float64, err error) {
	for _, m := range own {
		_, miss, err := f.Compare(m)
		if err != nil {
			return 0, err
		}
		sum += miss * miss
	}
	return sum, nil
}

// rounded keeps three figures.
func rounded(v float64) float64 {
	if v == 0 {
		return 0
	}
	scale := math.Pow(10, 2-math.Floor(math.Log10(math.Abs(v))))
	return math.Round(v*scale) / scale
}
