package doctor

import (
	"fmt"
	"strconv"
	"strings"
)

// checkGPUs checks the GPUs, their driver and their device files.
func checkGPUs(e *exam) {
	all, usable := e.gpuList(), e.usableGPUs()
	l := Line{Read: plural(len(usable), "GPU"), File: "/dev/nvidia*", Facts: map[string]string{"count": strconv.Itoa(len(usable))}}
	switch {
	case len(usable) > 0:
		e.gpuFiles(usable, l)
	case len(all) == 0:
		l.Read, l.File = "no NVIDIA GPU", "/"+pciDevices
		l.Cause = "the PCI tree shows none"
		l.Fix = "use the CPU engine (DEEPEP_ENGINE=cpu), or a host with GPUs"
		e.missing(l)
	case !e.root.exists("proc/driver/nvidia"):
		l.Read = fmt.Sprintf("%s on the PCI bus, none usable", plural(len(all), "GPU"))
		l.File = "/proc/driver/nvidia"
		l.Cause = "the NVIDIA kernel driver is not loaded"
		l.Fix = e.onHost() + "install driver 580 or later and `modprobe nvidia`; dmesg | grep NVRM says why it did not load"
		e.fail(l)
	default:
		l.Read = fmt.Sprintf("%s on the PCI bus, no device file", plural(len(all), "GPU"))
		l.Cause = "the driver runs but /dev/nvidia0 … are not here"
		l.Fix = "container: docker run --gpus all, or the nvidia runtime class; host: nvidia-modprobe -c 0 -u"
		if e.opt.For == ForAny && e.inContainer() {
			e.warn(l) // a container may have no GPUs on purpose
			return
		}
		e.fail(l)
	}
}

func (e *exam) gpuFiles(usable []gpu, l Line) {
	files := []string{"dev/nvidiactl", "dev/nvidia-uvm"}
	for _, g := range usable {
		files = append(files, "dev/nvidia"+g.minor)
	}
	for _, f := range files {
		l.File = "/" + f
		if !e.root.exists(f) {
			l.Read += ", " + l.File + " missing"
			l.Cause = "CUDA does not start without it"
			l.Fix = "nvidia-modprobe -c 0 -u on the host, then start the container again"
			e.fail(l)
			return
		}
		if err := e.root.access(f); err != nil {
			l.Read += ", " + l.File + ": " + err.Error()
			l.Cause = "the device file may not be opened"
			l.Fix = "chmod 0666 " + l.File + " (NVreg_DeviceFileMode), or add the user to its group; container: --gpus or --device"
			e.fail(l)
			return
		}
	}
	l.File = "/dev/nvidia*"
	e.ok(l)
}

// Driver versions that the prebuilt CUDA library needs (CUDA 13), and the minimum of builds from source, by the
// toolkit's major version.
var minDriver = map[int]version{13: {580}, 12: {525, 60, 13}, 11: {450, 80, 2}}

// checkDriver checks the version and the kind of the loaded kernel driver.
func checkDriver(e *exam) {
	const file = "proc/driver/nvidia/version"
	text := e.root.text(file)
	if text == "" {
		if len(e.gpuList()) == 0 {
			e.na(Line{Read: "no NVIDIA driver", File: "/" + file})
			return
		}
		e.fail(Line{Read: "not loaded", File: "/" + file, Cause: "the PCI bus shows a GPU but no driver reports itself",
			Fix: e.onHost() + "install driver 580 or later and `modprobe nvidia`"})
		return
	}
	v, open := driverVersion(text)
	flavour := "proprietary kernel module"
	if open {
		flavour = "open kernel module"
	}
	l := Line{Read: v + ", " + flavour, File: "/" + file, Facts: map[string]string{"version": v, "flavour": flavour}}
	nvml, err := e.askNVML()
	got, _ := parseVersion(v)
	need, toolkit, known := e.driverNeeded()
	switch {
	case err != nil && strings.Contains(err.Error(), "version mismatch"), err == nil && nvml.Driver != "" && nvml.Driver != v:
		user := "another version"
		if err == nil {
			user = nvml.Driver
		}
		l.Cause = "the loaded kernel module is " + v + ", the user-space libraries are " + user + ": the package was updated without a reboot"
		l.Fix = e.onHost() + "reboot, or stop every process that uses a GPU, then `rmmod nvidia_uvm nvidia_modeset nvidia && modprobe nvidia`"
		e.fail(l)
	case got.less(need):
		l.Cause = fmt.Sprintf("a library built with CUDA %d, as the prebuilt one, needs driver %d.%d or later", toolkit, need[0], need[1])
		l.Fix = fmt.Sprintf("%supdate the driver to %d or later, or build the library with an older toolkit: make cuda NVCC=/usr/local/cuda-12/bin/nvcc", e.onHost(), need[0])
		// A library of an unknown toolkit may be built with an older one. The check compute decides then.
		e.when(known, l)
	default:
		e.ok(l)
	}
}

// driverVersion reads "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  …".
func driverVersion(text string) (v string, open bool) {
	line, _, _ := strings.Cut(text, "\n")
	for field := range strings.FieldsSeq(line) {
		if field[0] >= '0' && field[0] <= '9' && strings.Contains(field, ".") {
			return field, strings.Contains(line, "Open Kernel Module")
		}
	}
	return "version unknown", strings.Contains(line, "Open Kernel Module")
}

// driverNeeded is the minimum driver of the library that was found, of several the lowest. If known is false, no
// toolkit is known and the minimum is that of the prebuilt one.
func (e *exam) driverNeeded() (v version, toolkit int, known bool) {
	for _, k := range e.opt.Kernels {
		if need, ok := minDriver[k.Toolkit/1000]; ok && (!known || need.less(v)) {
			v, toolkit, known = need, k.Toolkit/1000, true
		}
	}
	if !known {
		return minDriver[13], 13, false
	}
	return v, toolkit, true
}

// checkCompute compares each GPU's compute capability with the architectures in the library.
func checkCompute(e *exam) {
	for _, k := range e.opt.Kernels {
		if k.Reason != "" && len(e.usableGPUs()) > 0 {
			e.fail(Line{Subject: "library", Read: k.Path + ": " + k.Reason, File: k.Path,
				Cause: "GPUs and driver are here, but the CUDA library cannot use them",
				Fix:   "an insufficient driver: update it (line driver), or build the library with an older toolkit; else reinstall the library"})
		}
	}
	type device struct{ name, cc string }
	seen := map[device]bool{}
	nvml, err := e.askNVML()
	if err != nil {
		e.na(Line{Read: "compute capability not known: " + err.Error(), File: "libnvidia-ml.so.1"})
		return
	}
	for _, g := range nvml.GPUs {
		d := device{g.Name, fmt.Sprintf("%d.%d", g.Major, g.Minor)}
		if seen[d] {
			continue
		}
		seen[d] = true
		e.compute(g, d.cc)
	}
}

func (e *exam) compute(g NVMLGPU, cc string) {
	l := Line{Subject: g.Name, Read: "compute capability " + cc, File: "libnvidia-ml.so.1", Facts: map[string]string{"capability": cc}}
	if g.Major < 8 {
		l.Cause = "the kernels need 8.0 or later (BF16 and asynchronous copies)"
		l.Fix = "an A100, H100 or later; or the CPU engine (DEEPEP_ENGINE=cpu)"
		e.fail(l)
		return
	}
	for _, k := range e.opt.Kernels {
		l.Read += ", " + k.Path + " has " + archList(k)
		if !k.has(g.Major, g.Minor) {
			l.File = k.Path
			l.Cause = "the library holds no machine code for this GPU and no PTX that the driver could compile for it"
			l.Fix = fmt.Sprintf("build it with -gencode arch=compute_%[1]d%[2]d,code=sm_%[1]d%[2]d among the Makefile's NVCC_FLAGS (make cuda), or install a wheel that has it", g.Major, g.Minor)
			e.fail(l)
			return
		}
	}
	e.ok(l)
}

func archList(k KernelLibrary) string {
	var names []string
	for _, a := range k.Cubins {
		names = append(names, "sm_"+strconv.Itoa(a))
	}
	for _, a := range k.PTX {
		names = append(names, "compute_"+strconv.Itoa(a))
	}
	if len(names) == 0 {
		return "no device code"
	}
	return strings.Join(names, " ")
}

// checkMIG finds GPUs in MIG mode: their slices have fewer SMs, no NVLink and no peer access.
func checkMIG(e *exam) {
	nvml, err := e.askNVML()
	if err != nil {
		e.na(Line{Read: "MIG mode not known: " + err.Error(), File: "libnvidia-ml.so.1"})
		return
	}
	var on []string
	for i, g := range nvml.GPUs {
		if g.MIG {
			on = append(on, strconv.Itoa(i))
		}
	}
	l := Line{Read: "off on " + plural(len(nvml.GPUs), "GPU"), File: "libnvidia-ml.so.1", Facts: map[string]string{"mig": "off"}}
	if len(on) > 0 {
		l.Read = "on for GPU " + strings.Join(on, ", ")
		l.Facts["mig"] = "on"
		l.Cause = "a MIG slice reaches no other GPU: ranks on different slices or GPUs cannot map each other's memory"
		l.Fix = e.onHost() + "nvidia-smi -mig 0 (as root, GPUs idle); one rank alone works on a slice"
		e.when(e.opt.For != ForAny, l)
	} else {
		e.ok(l)
	}
	e.planSMs()
}

// planSMs compares the planned multiprocessors with those of each visible device.
func (e *exam) planSMs() {
	cuda, err := e.askCUDA()
	if err != nil {
		e.na(Line{Subject: "SMs", Read: "number of SMs not known: " + err.Error(), File: "libcuda.so.1"})
		return
	}
	for i, g := range cuda.GPUs {
		l := Line{Subject: "SMs", Read: fmt.Sprintf("%d on GPU %d", g.SMs, i), File: "libcuda.so.1", Facts: map[string]string{"sms": strconv.Itoa(g.SMs)}}
		if e.opt.Plan.SMs > 0 {
			l.Read += fmt.Sprintf(", %d planned", e.opt.Plan.SMs)
		}
		if e.opt.Plan.SMs > g.SMs {
			l.Cause = "the communication asks for more multiprocessors than the device, or its MIG slice, has"
			l.Fix = fmt.Sprintf("Buffer.set_num_sms(%d) or less; half of the device leaves room for the model", g.SMs&^1)
			e.fail(l)
			return
		}
		if i == len(cuda.GPUs)-1 {
			e.ok(l)
		}
	}
}

// checkGPUMemory compares the planned device memory with the free memory of each GPU.
func checkGPUMemory(e *exam) {
	nvml, err := e.askNVML()
	if err != nil {
		e.na(Line{Read: "free memory not known: " + err.Error(), File: "libnvidia-ml.so.1"})
		return
	}
	if len(nvml.GPUs) == 0 {
		e.na(Line{Read: "no GPU", File: "libnvidia-ml.so.1"})
		return
	}
	worst, at := nvml.GPUs[0], 0
	for i, g := range nvml.GPUs {
		if g.MemoryFree < worst.MemoryFree {
			worst, at = g, i
		}
	}
	l := Line{
		Read:  fmt.Sprintf("%s free of %s on GPU %d, the fullest", bytesText(worst.MemoryFree), bytesText(worst.MemoryTotal), at),
		File:  "libnvidia-ml.so.1",
		Facts: map[string]string{"total": bytesText(worst.MemoryTotal)},
	}
	need := e.opt.Plan.DeviceBytes
	if need > 0 {
		l.Read += ", " + bytesText(need) + " planned"
	}
	if need > worst.MemoryFree {
		l.Cause = "the buffers do not fit beside what already lies there; CUDA would report it as out of memory or invalid argument"
		l.Fix = "smaller buffers (`deepep plan --memory` gives the largest B), or make the buffer before the KV cache is taken; nvidia-smi shows whose memory it is"
		e.fail(l)
		return
	}
	e.ok(l)
}
