module github.com/deepep-go/deepep

go 1.25.0

require (
	github.com/ebitengine/purego v0.11.3
	go.uber.org/goleak v1.3.0
	go.uber.org/zap v1.28.0
	golang.org/x/sync v0.22.0
	golang.org/x/sys v0.47.0
)

require go.uber.org/multierr v1.10.0 // indirect
