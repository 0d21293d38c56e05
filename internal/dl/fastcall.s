//go:build deepep_fastcall

// Go allows a function without a body, such as cgocall, only in a package that has an assembly file.
