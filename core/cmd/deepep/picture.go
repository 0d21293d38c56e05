package main

import (
	"errors"
	"fmt"
	"image/color"
	"slices"
	"strconv"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
)

// picture draws latency against tokens, both logarithmic: p50 as a line with points, p99 as a dashed line of the same
// colour.
func (r *benchReport) picture(file string) error {
	p := plot.New()
	p.Title.Text = fmt.Sprintf("%s, %d ranks, hidden %d, top-%d of %d, %s", r.Engine, r.Spec.Ranks, r.Spec.Hidden, r.Spec.TopK, r.Spec.Experts, r.Spec.Routing)
	p.X.Label.Text, p.Y.Label.Text = "tokens a rank", "microseconds (line p50, dashes p99)"
	p.X.Scale, p.Y.Scale = plot.LogScale{}, plot.LogScale{}
	p.X.Tick.Marker, p.Y.Tick.Marker = r.tokenTicks(), plot.LogTicks{Prec: -1}
	p.Legend.Top, p.Legend.Left = true, true
	p.Add(plotter.NewGrid())
	drawn := 0
	for _, operation := range r.operations() {
		p50, p99 := r.points(operation)
		if len(p50) == 0 {
			continue
		}
		if err := addSeries(p, operation, p50, p99, palette[drawn%len(palette)]); err != nil {
			return err
		}
		drawn++
	}
	if drawn == 0 {
		return errors.New("picture: nothing to draw")
	}
	widen(&p.X)
	widen(&p.Y)
	return writePicture(file, []string{".png"}, 8*vg.Inch, 5*vg.Inch, func(area draw.Canvas) {
		margin := vg.Points(8)
		p.Draw(draw.Crop(area, margin, -margin, margin, -margin))
	})
}

func addSeries(p *plot.Plot, name string, p50, p99 plotter.XYs, c color.Color) error {
	line, points, err := plotter.NewLinePoints(p50)
	if err != nil {
		return fmt.Errorf("picture: %w", err)
	}
	dashes, err := plotter.NewLine(p99)
	if err != nil {
		return fmt.Errorf("picture: %w", err)
	}
	line.Color, points.Color, dashes.Color = c, c, c
	line.Width = vg.Points(1.5)
	points.Shape = draw.CircleGlyph{}
	dashes.Dashes = []vg.Length{vg.Points(4), vg.Points(3)}
	p.Add(line, points, dashes)
	p.Legend.Add(name, line, points)
	return nil
}

func (r *benchReport) operations() []string {
	var names []string
	for _, l := range r.Results {
		if !slices.Contains(names, l.Operation) {
			names = append(names, l.Operation)
		}
	}
	return names
}

func (r *benchReport) points(operation string) (p50, p99 plotter.XYs) {
	for _, l := range r.Results {
		if l.Operation == operation && l.Tokens > 0 && l.P50US > 0 {
			p50 = append(p50, plotter.XY{X: float64(l.Tokens), Y: l.P50US})
			p99 = append(p99, plotter.XY{X: float64(l.Tokens), Y: l.P99US})
		}
	}
	byX := func(a, b plotter.XY) int { return int(a.X - b.X) }
	slices.SortFunc(p50, byX)
	slices.SortFunc(p99, byX)
	return p50, p99
}

// tokenTicks marks the measured numbers of tokens.
func (r *benchReport) tokenTicks() plot.ConstantTicks {
	var ticks plot.ConstantTicks
	for _, n := range r.Spec.Tokens {
		ticks = append(ticks, plot.Tick{Value: float64(n), Label: strconv.Itoa(n)})
	}
	return ticks
}
