// Package env reads the DEEPEP_* settings into one struct.
//
// Load is pure: it reads variables through the function that it is given. Current loads through the function of this
// process, which SetSource sets: Go's os.Getenv does not see what a program sets after it has loaded the library, so the
// C API passes the C library's getenv. An unset or empty variable means the default. A value that Load cannot parse is an
// error that names it.
package env
