package main

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/deepep-go/deepep/core/cmd/deepep/internal/costs"
)

func simCostsCommand() *cobra.Command {
	var base, machine, source string
	cmd := &cobra.Command{
		Use:   "costs [BENCH_OUTPUT...]",
		Short: "What the kernels cost, from what bench_ops measured",
		Long: `Reads what bench_ops printed (mode=normal, nodes, sweep, ll, llsweep; top-8 of 256
experts), finds the costs with which deepep sim ep --ours predicts it best, and prints them as
a file for --costs. Measurements replace those of the same kernels in --base; costs of kernels
that were not measured stay. Of a kernel's measurements those with the most tokens and the
largest rows are fitted to, the others check. Without arguments the costs of --base are fitted
again to its own measurements.`,
		Example: `  bench_ops build/lib/libdeepep_cuda.so mode=sweep ranks=4 devices=4 > sweep.txt
  deepep sim costs sweep.txt > mine.json
  deepep sim ep --ours --costs mine.json`,
		RunE: func(cmd *cobra.Command, args []string) error {
			file, err := readCosts(base)
			if err != nil {
				return err
			}
			var measured []string
			for _, path := range args {
				kernels, err := addBench(file, path, machine, source)
				if err != nil {
					return err
				}
				measured = append(measured, kernels...)
			}
			if err := file.Fit(measured...); err != nil {
				return err
			}
			return file.Write(cmd.OutOrStdout())
		},
	}
	f := cmd.Flags()
	f.StringVar(&base, "base", "", "file of costs to begin with; none: docs/performance.md's")
	f.StringVar(&machine, "machine", "h200", "machine of the costs that was measured on")
	f.StringVar(&source, "source", "", "what was measured, in words; none: the file's name")
	return cmd
}

// readCosts reads a file of costs; "": those of the documents.
func readCosts(path string) (*costs.File, error) {
	if path == "" {
		return costs.Builtin(), nil
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	file, err := costs.Read(f)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return file, nil
}

// addBench reads an output of bench_ops and returns the kernels that it measured.
func addBench(file *costs.File, path, machine, source string) (kernels []string, err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if source == "" {
		source = filepath.Base(path)
	}
	measured, err := costs.ReadBench(f, machine, source)
	if err != nil {
		return nil, err
	}
	file.Source = source + "; other kernels: " + file.Source
	return file.Replace(measured)
}
