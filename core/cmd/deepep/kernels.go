package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"

	"github.com/deepep-go/deepep/internal/dl"
	"github.com/deepep-go/deepep/internal/doctor"
	"github.com/deepep-go/deepep/internal/env"
	"github.com/deepep-go/deepep/internal/kern"
)

// libraryFolders lists the folders of an installation's libraries relative to this program: bin/ beside lib/, as in the
// wheel, a prefix and a build folder.
func libraryFolders() []string {
	exe, err := os.Executable()
	if err != nil {
		return nil
	}
	bin := filepath.Dir(exe)
	return []string{filepath.Join(bin, "..", "lib"), filepath.Join(bin, "..", "lib64"), bin}
}

// loadKernels opens a kernel library by its kind: cpu or cuda.
func loadKernels(kind string) (*kern.Library, error) {
	q := dl.Query{File: env.LibraryFile(kind), Dir: os.Getenv("DEEPEP_KERNELS"), Beside: libraryFolders()}
	return kern.LoadOrOlder(q, env.OlderLibraryFile(kind))
}

// builtMark is the text in libdeepep_nvshmem.so before the version of its device half.
const builtMark = "built with NVSHMEM "

// installedKernels inspects the CUDA library of this installation that a process would load, and finds the NVSHMEM
// version that the internode library was linked with. With another root it looks in that root's usual folders, and
// inspects the CUDA libraries of both toolkits.
func installedKernels(root string) (libraries []doctor.KernelLibrary, nvshmem string) {
	folders := libraryFolders()
	if dir := os.Getenv("DEEPEP_KERNELS"); dir != "" {
		folders = []string{dir}
	}
	if root != "" {
		folders = []string{filepath.Join(root, "usr/lib"), filepath.Join(root, "usr/local/lib")}
	}
	for i, dir := range folders {
		if absolute, err := filepath.Abs(dir); err == nil {
			folders[i] = absolute
		}
	}
	older := env.OlderLibraryFile("cuda")
	for _, file := range loadedCUDA(root) {
		for _, dir := range folders {
			name := strings.TrimPrefix(filepath.Join(dir, file), "/")
			k, err := doctor.InspectKernels(os.DirFS("/"), name)
			if err != nil {
				continue
			}
			if file == older {
				k.Toolkit = 12000
			}
			if root == "" {
				k.Reason = reason("cuda")
			}
			libraries = append(libraries, k)
			break
		}
	}
	for _, dir := range folders {
		if nvshmem == "" {
			nvshmem = markedText(filepath.Join(dir, env.LibraryFile("nvshmem")), builtMark)
		}
	}
	return libraries, nvshmem
}

// loadedCUDA lists the files of the CUDA library that a process may load: with another root both.
func loadedCUDA(root string) []string {
	file, older := env.LibraryFile("cuda"), env.OlderLibraryFile("cuda")
	if root != "" {
		return []string{file, older}
	}
	if l, err := loadKernels("cuda"); err == nil && filepath.Base(l.Path) == older {
		return []string{older}
	}
	return []string{file}
}

// reason is why a kernel library cannot be used, "" if it can.
func reason(kind string) string {
	l, err := loadKernels(kind)
	switch {
	case err != nil:
		return err.Error()
	case l.NumDevices == 0:
		return l.Reason
	}
	return ""
}

// markedText reads the string after a mark in a file.
func markedText(file, mark string) string {
	b, err := os.ReadFile(file)
	if err != nil {
		return ""
	}
	_, after, found := bytes.Cut(b, []byte(mark))
	if !found {
		return ""
	}
	word, _, _ := bytes.Cut(after[:min(len(after), 32)], []byte{0})
	return string(word)
}
