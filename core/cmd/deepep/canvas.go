package main

import (
	"errors"
	"fmt"
	"image/color"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgimg"
	"gonum.org/v1/plot/vg/vgsvg"
)

// palette has colours that people with colour blindness can distinguish (Okabe and Ito).
var palette = []color.Color{
	color.RGBA{R: 0x00, G: 0x72, B: 0xb2, A: 0xff}, color.RGBA{R: 0xd5, G: 0x5e, B: 0x00, A: 0xff},
	color.RGBA{R: 0x00, G: 0x9e, B: 0x73, A: 0xff}, color.RGBA{R: 0xcc, G: 0x79, B: 0xa7, A: 0xff},
	color.RGBA{R: 0xe6, G: 0x9f, B: 0x00, A: 0xff}, color.RGBA{R: 0x56, G: 0xb4, B: 0xe9, A: 0xff},
}

// writePicture draws on a white canvas and writes it to file. The file's extension, one of forms, chooses the format.
func writePicture(file string, forms []string, width, height vg.Length, drawOn func(draw.Canvas)) (err error) {
	ext := filepath.Ext(file)
	if !slices.Contains(forms, ext) {
		return fmt.Errorf("picture: %q; allowed is a name that ends in %s", file, strings.Join(forms, " or "))
	}
	var canvas vg.CanvasWriterTo
	if ext == ".svg" {
		canvas = vgsvg.NewWith(vgsvg.UseWH(width, height))
	} else {
		canvas = vgimg.PngCanvas{Canvas: vgimg.NewWith(vgimg.UseWH(width, height), vgimg.UseDPI(120), vgimg.UseBackgroundColor(color.White))}
	}
	area := draw.NewCanvas(canvas, width, height)
	area.SetColor(color.White)
	area.Fill(area.Rectangle.Path())
	drawOn(area)
	f, err := os.Create(file)
	if err != nil {
		return fmt.Errorf("picture: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	_, err = canvas.(io.WriterTo).WriteTo(f)
	return err
}

// widen gives a logarithmic axis some room on both sides; a single value would have no extent.
func widen(a *plot.Axis) {
	a.Min, a.Max = a.Min*0.8, a.Max*1.25
}
