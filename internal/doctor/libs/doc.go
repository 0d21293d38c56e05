// Package libs queries the NVIDIA and verbs libraries of a real host for package doctor.
//
// Each function opens its library at run time, by the name that the driver installs, and leaves it open: NVML and CUDA
// start threads that need its code. The error names a missing library or function. The package allocates no device
// memory and makes no context. Any goroutine may call it.
package libs
