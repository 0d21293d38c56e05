package doctor

import (
	"encoding/binary"
	"fmt"
	"io/fs"
	"path"
	"strings"
)

// checkIOMMU finds a translating IOMMU, which routes traffic between devices through the root complex, or blocks it.
func checkIOMMU(e *exam) {
	cmdline := e.root.text("proc/cmdline")
	units := e.root.glob("sys/class/iommu/*")
	l := Line{File: "/proc/cmdline"}
	if len(units) == 0 {
		l.Read = "off"
		l.Facts = map[string]string{"mode": "off"}
		e.ok(l)
		return
	}
	mode, file := e.iommuMode(cmdline)
	l.Read, l.Facts = fmt.Sprintf("on, %s", mode), map[string]string{"mode": mode}
	if file != "" {
		l.File = "/" + file
	}
	if mode == "passthrough" || len(e.gpuList()) == 0 {
		e.ok(l)
		return
	}
	l.Cause = "addresses of devices are translated: transfers between GPUs, and between GPU and NIC, go through the root complex, are slow, or corrupt data"
	l.Fix = e.onHost() + "add iommu=pt to the kernel command line (GRUB_CMDLINE_LINUX in /etc/default/grub, update-grub, reboot), or switch the IOMMU off in the BIOS"
	e.warn(l)
}

// iommuMode reads the domain type of the first GPU's group, else the command line.
func (e *exam) iommuMode(cmdline string) (mode, file string) {
	for _, g := range e.gpuList() {
		file := path.Join(pciDevices, g.bus, "iommu_group/type")
		switch t := e.root.text(file); t {
		case "":
			continue
		case "identity":
			return "passthrough", file
		default:
			return "translating (" + t + ")", file
		}
	}
	for field := range strings.FieldsSeq(cmdline) {
		if field == "iommu=pt" || field == "iommu.passthrough=1" {
			return "passthrough", ""
		}
	}
	return "translating", ""
}

// PCI configuration space, as the specification numbers it.
const (
	extendedStart = 0x100
	acsCapability = 0x000d
	acsControl    = 6                  // offset of the control register in the capability
	acsRedirect   = 1<<2 | 1<<3 | 1<<5 // request redirect, completion redirect, egress control
	plainConfig   = 64                 // bytes that a process without CAP_SYS_ADMIN may read
)

// checkACS checks the bridges above GPUs and NICs: with redirection on, a switch routes traffic between its ports
// through the CPU.
func checkACS(e *exam) {
	bridges := e.bridges()
	if len(bridges) == 0 {
		e.na(Line{Read: "no bridge above a GPU or NIC", File: "/" + pciDevices})
		return
	}
	var redirecting []string
	read := 0
	for _, b := range bridges {
		config, err := fs.ReadFile(e.root.FS, path.Join(pciDevices, b, "config"))
		if err != nil || len(config) <= plainConfig {
			continue
		}
		read++
		if acsRedirects(config) {
			redirecting = append(redirecting, b)
		}
	}
	l := Line{File: "/" + pciDevices + "/*/config", Read: fmt.Sprintf("no redirection on %s", plural(read, "bridge")), Facts: map[string]string{"redirecting": fmt.Sprint(len(redirecting))}}
	switch {
	case read == 0:
		e.na(Line{Read: plural(len(bridges), "bridge") + " not readable: run as root on the host to see ACS", File: l.File})
	case len(redirecting) > 0:
		shown := redirecting[:min(len(redirecting), 4)]
		l.Read = fmt.Sprintf("redirection on %d of %s: %s", len(redirecting), plural(read, "bridge"), strings.Join(shown, " "))
		l.Cause = "traffic between devices of one switch goes up to the CPU and back: GPU to NIC at a fraction of the rate, peer access perhaps wrong"
		l.Fix = e.onHost() + "switch ACS off in the BIOS, or at each boot: setpci -s BRIDGE ECAP_ACS+0x6.w=0000 for " + strings.Join(redirecting, " ")
		e.warn(l)
	default:
		e.ok(l)
	}
}

// bridges are the PCI functions above GPUs and NICs, root ports included, each once.
func (e *exam) bridges() []string {
	var list []string
	seen := map[string]bool{}
	add := func(chain []string) {
		for _, b := range chain[:max(len(chain)-1, 0)] {
			if strings.HasPrefix(b, "pci") || seen[b] {
				continue
			}
			seen[b] = true
			list = append(list, b)
		}
	}
	for _, g := range e.gpuList() {
		add(g.chain)
	}
	for _, n := range e.nicList() {
		add(n.chain)
	}
	sortNatural(list)
	return list
}

// acsRedirects walks the extended capabilities of a configuration space.
func acsRedirects(config []byte) bool {
	at := extendedStart
	for range 64 { // a damaged list may be cyclic
		if at < extendedStart || at+acsControl+2 > len(config) {
			return false
		}
		head := binary.LittleEndian.Uint32(config[at:])
		if head == 0 || head == 0xffffffff {
			return false
		}
		if head&0xffff == acsCapability {
			return binary.LittleEndian.Uint16(config[at+acsControl:])&acsRedirect != 0
		}
		at = int(head >> 20 &^ 3)
	}
	return false
}
