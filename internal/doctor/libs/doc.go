// Package libs asks the NVIDIA and verbs libraries of a real host what package
// doctor wants to know of them.
//
// Each function opens its library at run time, by the name that the driver
// installs, asks, and leaves it open: NVML and CUDA start threads that must not
// lose their code. A library or function that is not there is an error that
// names it. No memory is allocated on a device and no context is made. Any
// goroutine may call.
package libs
