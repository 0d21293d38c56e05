package doctor

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"fmt"
	"io/fs"
	"slices"
)

// A container of device code, as CUDA compilers write it: a header, then entries of machine code or PTX with their
// architectures.
const (
	fatbinSection  = ".nv_fatbin"
	fatbinMagic    = 0xba55ed50
	fatbinHeader   = 16 // magic u32, version u16, header size u16, payload size u64
	entryMinHeader = 32 // kind u16, version u16, header size u32, payload size u64, …, architecture u32 at 28
	entryArchAt    = 28
	kindPTX        = 1
	kindCubin      = 2
)

// InspectKernels reads for which architectures a CUDA library has code. The file does not contain the toolkit's
// version; the caller sets it.
func InspectKernels(fsys fs.FS, name string) (KernelLibrary, error) {
	k := KernelLibrary{Path: "/" + name}
	b, err := fs.ReadFile(fsys, name)
	if err != nil {
		return k, fmt.Errorf("doctor: %w", err)
	}
	f, err := elf.NewFile(bytes.NewReader(b))
	if err != nil {
		return k, fmt.Errorf("doctor: %s is no shared object: %w", name, err)
	}
	defer f.Close()
	section := f.Section(fatbinSection)
	if section == nil {
		return k, fmt.Errorf("doctor: %s holds no device code", name)
	}
	data, err := section.Data()
	if err != nil {
		return k, fmt.Errorf("doctor: %s: %s: %w", name, fatbinSection, err)
	}
	k.Cubins, k.PTX = fatbinArchs(data)
	return k, nil
}

// fatbinArchs reads a section and skips damaged parts.
func fatbinArchs(data []byte) (cubins, ptx []int) {
	for len(data) >= fatbinHeader {
		if binary.LittleEndian.Uint32(data) != fatbinMagic {
			data = data[8:] // containers are 8-byte aligned, with padding between
			continue
		}
		header := int(binary.LittleEndian.Uint16(data[6:]))
		size := binary.LittleEndian.Uint64(data[8:])
		data = data[min(max(header, fatbinHeader), len(data)):]
		n := min(size, uint64(len(data)))
		cubins, ptx = entries(data[:n], cubins, ptx)
		data = data[n:]
	}
	slices.Sort(cubins)
	slices.Sort(ptx)
	return slices.Compact(cubins), slices.Compact(ptx)
}

func entries(data []byte, cubins, ptx []int) ([]int, []int) {
	for len(data) >= entryMinHeader {
		kind := binary.LittleEndian.Uint16(data)
		header := uint64(binary.LittleEndian.Uint32(data[4:]))
		size := binary.LittleEndian.Uint64(data[8:])
		arch := int(binary.LittleEndian.Uint32(data[entryArchAt:]))
		switch kind {
		case kindPTX:
			ptx = append(ptx, arch)
		case kindCubin:
			cubins = append(cubins, arch)
		}
		step := header + size
		if header < entryMinHeader || step < header || step > uint64(len(data)) {
			break
		}
		data = data[step:]
	}
	return cubins, ptx
}
