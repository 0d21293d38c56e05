package main

import (
	"fmt"
	"image/color"
	"strconv"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
)

// panels draws plots side by side under a caption.
func panels(file, caption string, width vg.Length, plots ...*plot.Plot) error {
	const height = 4 * vg.Inch
	return writePicture(file, []string{".svg", ".png"}, width, height, func(area draw.Canvas) {
		tiles := draw.Tiles{
			Rows: 1, Cols: len(plots), PadX: vg.Points(14),
			PadTop: vg.Points(26), PadBottom: vg.Points(6), PadLeft: vg.Points(6), PadRight: vg.Points(10),
		}
		style := plots[0].Title.TextStyle
		style.XAlign, style.YAlign = draw.XCenter, draw.YTop
		area.FillText(style, vg.Point{X: width / 2, Y: height - vg.Points(6)}, caption)
		for i, p := range plots {
			p.Draw(tiles.At(area, i, 0))
		}
	})
}

// picture draws time, throughput and the largest queue as bars, for the first number of queue pairs: a group for each
// NIC, a colour for each order.
func (r *qpReport) picture(file string) error {
	queues := r.Results[0].Queues
	draws := []struct {
		title string
		value func(*qpResult) float64
	}{
		{"slowest rank, us", func(q *qpResult) float64 { return q.SlowestUS }},
		{"GB/s a NIC", func(q *qpResult) float64 { return q.GBs }},
		{"largest queue, KiB", func(q *qpResult) float64 { return float64(q.LargestQueue) / 1024 }},
	}
	var plots []*plot.Plot
	for i, d := range draws {
		p := plot.New()
		p.Title.Text = d.title
		if err := r.bars(p, queues, d.value, i == 0); err != nil {
			return err
		}
		plots = append(plots, p)
	}
	caption := fmt.Sprintf("Low-latency %s, %d ranks, %s a peer, %s routing, buffers %s", r.Operation, r.Ranks, count(queues, "queue pair"), r.Routing, r.Buffer)
	return panels(file, caption, 11*vg.Inch, plots...)
}

func (r *qpReport) bars(p *plot.Plot, queues int, value func(*qpResult) float64, legend bool) error {
	const width = 8 // points
	var names []string
	for k, order := range r.orders {
		var values plotter.Values
		names = nil
		for _, one := range r.Results {
			if one.Order == order && one.Queues == queues {
				values = append(values, value(one))
				names = append(names, one.NIC)
			}
		}
		bars, err := plotter.NewBarChart(values, vg.Points(width))
		if err != nil {
			return fmt.Errorf("picture: %w", err)
		}
		bars.Color, bars.LineStyle.Width = palette[k%len(palette)], 0
		bars.Offset = vg.Points(width * (float64(k) - float64(len(r.orders)-1)/2))
		p.Add(bars)
		if legend {
			p.Legend.Add(order, bars)
		}
	}
	p.Legend.Top = true
	p.Y.Min, p.Y.Max = 0, p.Y.Max*1.35
	p.NominalX(names...)
	return nil
}

// picture draws the model as lines over the number of ranks, and published figures as points: rings if they are in the
// fit.
func (r *epReport) picture(file string) error {
	var plots []*plot.Plot
	for _, unit := range []string{"us", "GB/s"} {
		p := plot.New()
		p.Title.Text = map[string]string{"us": "low latency, us", "GB/s": "normal mode, logical GB/s"}[unit]
		p.X.Label.Text = "ranks"
		p.X.Scale = plot.LogScale{}
		p.Add(plotter.NewGrid())
		drawn := 0
		for _, operation := range []string{"low-latency dispatch", "low-latency combine", "dispatch", "combine"} {
			added, err := r.series(p, operation, unit, palette[drawn%len(palette)])
			if err != nil {
				return err
			}
			if added {
				drawn++
			}
		}
		if drawn == 0 {
			continue
		}
		p.X.Tick.Marker = r.rankTicks(unit)
		p.Y.Min, p.Y.Max = 0, p.Y.Max*1.25
		p.Legend.Top, p.Legend.Left = true, true
		widen(&p.X)
		plots = append(plots, p)
	}
	return panels(file, "Lines: model. Points: published; rings: published and used for the fit.", 9*vg.Inch, plots...)
}

func (r *epReport) series(p *plot.Plot, operation, unit string, c color.Color) (bool, error) {
	var model, fit, check plotter.XYs
	for _, one := range r.Results {
		if one.Operation != operation || one.Unit != unit {
			continue
		}
		model = append(model, plotter.XY{X: float64(one.Ranks), Y: one.Model})
		switch at := (plotter.XY{X: float64(one.Ranks), Y: one.Published}); one.Role {
		case "fit":
			fit = append(fit, at)
		case "check":
			check = append(check, at)
		}
	}
	if len(model) == 0 {
		return false, nil
	}
	line, err := plotter.NewLine(model)
	if err != nil {
		return false, fmt.Errorf("picture: %w", err)
	}
	line.Color, line.Width = c, vg.Points(1.5)
	p.Add(line)
	p.Legend.Add(operation, line)
	for _, points := range []struct {
		at    plotter.XYs
		shape draw.GlyphDrawer
	}{{fit, draw.RingGlyph{}}, {check, draw.CircleGlyph{}}} {
		if len(points.at) == 0 {
			continue
		}
		scatter, err := plotter.NewScatter(points.at)
		if err != nil {
			return false, fmt.Errorf("picture: %w", err)
		}
		scatter.Color, scatter.Shape, scatter.Radius = c, points.shape, vg.Points(3.5)
		p.Add(scatter)
	}
	return true, nil
}

// rankTicks marks the simulated numbers of ranks.
func (r *epReport) rankTicks(unit string) plot.ConstantTicks {
	var ticks plot.ConstantTicks
	seen := map[int]bool{}
	for _, one := range r.Results {
		if one.Unit == unit && !seen[one.Ranks] {
			seen[one.Ranks] = true
			ticks = append(ticks, plot.Tick{Value: float64(one.Ranks), Label: strconv.Itoa(one.Ranks)})
		}
	}
	return ticks
}
