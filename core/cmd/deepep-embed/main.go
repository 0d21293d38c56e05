// Command deepep-embed writes a package that holds the CPU engine's kernel library, so that a program which imports it
// runs with nothing beside it.
//
//	go run github.com/deepep-go/deepep/core/cmd/deepep-embed ./kernels                  in the folder of the program's module
//	go run github.com/deepep-go/deepep/core/cmd/deepep-embed -library FILE ./kernels    with a library that is there
//
// Without -library it builds the library from the sources of the deepep module that the program's module requires, which
// takes make and a C++ compiler (CXX). The program then imports the package for its effect:
//
//	import _ "example.org/program/kernels"
//
// The package is empty on systems other than the library's. Run the command once for each architecture.
package main

import (
	"flag"
	"fmt"
	"os"
)

func main() {
	library := flag.String("library", "", "libdeepep_cpu.so; built if it is not given")
	flag.Usage = func() {
		fmt.Fprintln(flag.CommandLine.Output(), "usage: deepep-embed [-library FILE] FOLDER")
		flag.PrintDefaults()
	}
	flag.Parse()
	if flag.NArg() != 1 {
		flag.Usage()
		os.Exit(2)
	}
	written, err := embed(*library, flag.Arg(0))
	if err != nil {
		fmt.Fprintf(os.Stderr, "deepep-embed: %v\n", err)
		os.Exit(1)
	}
	fmt.Printf("%s: import it for its effect\n", written)
}

// embed writes the package with the library at path, or with one that it builds.
func embed(path, folder string) (written string, err error) {
	if path == "" {
		temporary, err := os.MkdirTemp("", "deepep-embed-")
		if err != nil {
			return "", err
		}
		defer os.RemoveAll(temporary)
		if path, err = build(temporary); err != nil {
			return "", err
		}
	}
	image, err := os.ReadFile(path)
	if err != nil {
		return "", err
	}
	arch, err := architecture(image)
	if err != nil {
		return "", fmt.Errorf("%s: %w", path, err)
	}
	return folder, write(folder, arch, image)
}
