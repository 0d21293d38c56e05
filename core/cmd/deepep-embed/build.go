package main

import (
	"bytes"
	"debug/elf"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

const module = "github.com/deepep-go/deepep"

// build makes the library in a folder, from the sources of the module that the program in the working folder requires:
// they fit the package core that the program is linked with.
func build(folder string) (path string, err error) {
	list := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", module)
	list.Stderr = os.Stderr
	out, err := list.Output()
	sources := strings.TrimSpace(string(out))
	if err != nil || sources == "" {
		return "", fmt.Errorf("the module of the working folder does not require %s: import %s/core in the program, then go mod tidy", module, module)
	}
	path = filepath.Join(folder, "lib", "libdeepep_cpu.so")
	command := exec.Command("make", "--no-print-directory", "-C", sources, "BUILD="+folder, path)
	command.Env = slices.DeleteFunc(os.Environ(), func(setting string) bool { // of a make that runs this command
		return strings.HasPrefix(setting, "MAKEFLAGS=") || strings.HasPrefix(setting, "MFLAGS=")
	})
	command.Stdout, command.Stderr = os.Stderr, os.Stderr
	if err := command.Run(); err != nil {
		return "", fmt.Errorf("building libdeepep_cpu.so in %s: make: %w (it takes make and a C++ compiler; or give a library by -library)", sources, err)
	}
	return path, nil
}

// architectures are Go's names of those that the CPU library is built for.
var architectures = map[elf.Machine]string{elf.EM_X86_64: "amd64", elf.EM_AARCH64: "arm64"}

// architecture is the one of a kernel library; an error if the image is something else.
func architecture(image []byte) (string, error) {
	file, err := elf.NewFile(bytes.NewReader(image))
	if err != nil {
		return "", fmt.Errorf("not a shared library: %w", err)
	}
	symbols, err := file.DynamicSymbols()
	if err != nil || file.Type != elf.ET_DYN || !slices.ContainsFunc(symbols, func(s elf.Symbol) bool { return s.Name == "dk_info" && s.Section != elf.SHN_UNDEF }) {
		return "", errors.New("not a kernel library: it has no dk_info")
	}
	arch, known := architectures[file.Machine]
	if !known {
		return "", fmt.Errorf("a library for %v; known are x86-64 and aarch64", file.Machine)
	}
	return arch, nil
}
