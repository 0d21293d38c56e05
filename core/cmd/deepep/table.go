package main

import (
	"fmt"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"
)

// newTable is a table in the program's style.
func newTable() table.Writer {
	t := table.NewWriter()
	style := table.StyleRounded
	style.Format.Header = text.FormatDefault
	style.Format.Footer = text.FormatDefault
	style.Options.DrawBorder = true
	style.Options.SeparateRows = false
	t.SetStyle(style)
	return t
}

// rightAlign aligns all columns but the first n, which hold numbers, to the right.
func rightAlign(t table.Writer, first, columns int) {
	var configs []table.ColumnConfig
	for i := first; i < columns; i++ {
		configs = append(configs, table.ColumnConfig{Number: i + 1, Align: text.AlignRight, AlignHeader: text.AlignRight, AlignFooter: text.AlignRight})
	}
	t.SetColumnConfigs(configs)
}

// count prints "1 rank" and "2 ranks".
func count(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

// sizeText prints bytes with a binary unit.
func sizeText(n uint64) string {
	units := []string{"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"}
	f, i := float64(n), 0
	for f >= 1024 && i < len(units)-1 {
		f, i = f/1024, i+1
	}
	if i == 0 {
		return fmt.Sprintf("%d B", n)
	}
	return fmt.Sprintf("%.1f %s", f, units[i])
}

// timeText prints a duration with three figures: 950 ns, 20.3 us, 1.24 ms.
func timeText(d time.Duration) string {
	switch {
	case d == 0:
		return "-"
	case d < time.Microsecond:
		return fmt.Sprintf("%d ns", d)
	case d < time.Millisecond:
		return figures(float64(d)/1e3) + " us"
	case d < time.Second:
		return figures(float64(d)/1e6) + " ms"
	}
	return figures(d.Seconds()) + " s"
}

func figures(f float64) string {
	switch {
	case f < 10:
		return fmt.Sprintf("%.2f", f)
	case f < 100:
		return fmt.Sprintf("%.1f", f)
	}
	return fmt.Sprintf("%.0f", f)
}

// rateText prints a rate: 0, 3.2, 48, 12.3k.
func rateText(f float64) string {
	switch {
	case f == 0:
		return "0"
	case f < 1000:
		return figures(f)
	case f < 1e6:
		return figures(f/1e3) + "k"
	}
	return figures(f/1e6) + "M"
}

// flowText prints bytes a second in decimal units, like link rates.
func flowText(f float64) string {
	units := []string{"B", "kB", "MB", "GB", "TB"}
	i := 0
	for f >= 1000 && i < len(units)-1 {
		f, i = f/1000, i+1
	}
	if f == 0 {
		return "-"
	}
	return figures(f) + " " + units[i]
}
