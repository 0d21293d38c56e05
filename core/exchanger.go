package core

import (
	"context"
	"strconv"
	"strings"

	"github.com/deepep-go/deepep/internal/bootstrap"
	"github.com/deepep-go/deepep/internal/env"
	"github.com/deepep-go/deepep/internal/status"
)

// Exchanger is how ranks find each other: it gathers one blob from every rank, in rank order. NewGroup uses it once and
// closes it. NewLocal, NewAllGather, NewCallback, DialTCP and OpenFile make one; a program may bring its own.
type Exchanger interface {
	Rank() int
	Size() int
	// AllGather returns every rank's blob, in rank order. Collective. After an error the Exchanger is of no more use.
	AllGather(ctx context.Context, blob []byte) ([][]byte, error)
	// Close is local and idempotent; ranks that still gather get an error.
	Close() error
}

// NewLocal makes the Exchangers of ranks that are goroutines of this process.
func NewLocal(size int) []Exchanger {
	all := make([]Exchanger, size)
	for rank, e := range bootstrap.NewLocal(size) {
		all[rank] = e
	}
	return all
}

// NewCallback makes an Exchanger of the caller's own gather, which returns one blob of any length from each rank, in
// rank order.
func NewCallback(rank, size int, gather func(ctx context.Context, blob []byte) ([][]byte, error)) Exchanger {
	return bootstrap.NewCallback(rank, size, gather)
}

// NewAllGather makes an Exchanger of an all-gather of equally long blocks, as MPI and torch.distributed have one:
// gather sends this rank's block and fills recv, len(send) * size bytes, with the blocks of all ranks in rank order.
func NewAllGather(rank, size int, gather func(ctx context.Context, send, recv []byte) error) Exchanger {
	return bootstrap.NewAllGather(rank, size, gather)
}

// TCPOptions describe ranks that meet at rank 0's address.
type TCPOptions struct {
	Rank, Size int
	Address    string // "host:port" of rank 0, which listens there; "": MASTER_ADDR and MASTER_PORT of the environment
	Secret     string // equal on all ranks, without NUL; whoever knows it can join. Not sent. "": "default", for loopback alone
	Interface  string // network interface, or its address; "": DEEPEP_INTERFACE, and without it loopback only
}

// DialTCP joins the ranks at rank 0's address and returns when all are there. Collective. ErrMismatch: another size or
// secret, or a rank given twice. ErrTimeout, with the missing ranks, where ctx ends first.
func DialTCP(ctx context.Context, o TCPOptions) (Exchanger, error) {
	if o.Address == "" {
		host, port := env.Get("MASTER_ADDR"), env.Get("MASTER_PORT")
		if host == "" && port == "" {
			return nil, status.InvalidArg("address", "none", "\"host:port\" of rank 0, or MASTER_ADDR and MASTER_PORT set")
		}
		o.Address = host + ":" + port
	}
	if o.Interface == "" {
		s, err := env.Current()
		if err != nil {
			return nil, err
		}
		o.Interface = s.Interface
	}
	switch {
	case strings.ContainsRune(o.Secret, 0): // a C string would end there
		return nil, status.InvalidArg("name", strconv.Quote(o.Secret), "a text without NUL")
	case o.Interface != "" && named(o.Secret) == defaultName:
		return nil, status.InvalidArg("name", strconv.Quote(named(o.Secret)),
			"with a network interface (DEEPEP_INTERFACE) a name that others do not know: it is the secret by which ranks are let in")
	}
	return bootstrap.DialTCP(ctx, bootstrap.TCPOptions{
		Rank: o.Rank, Size: o.Size, Address: o.Address, Secret: named(o.Secret), Interface: o.Interface,
	})
}

// FileOptions describe ranks that meet in a folder that all of them see.
type FileOptions struct {
	Rank, Size int
	Dir        string // exists; writable by this user, or by people who are trusted
	Name       string // of the group: equal on all ranks, and of no other live group in the folder; "": "default"
}

// OpenFile joins the ranks through a folder and returns when all are there. Collective. Errors are those of DialTCP.
func OpenFile(ctx context.Context, o FileOptions) (Exchanger, error) {
	return bootstrap.OpenFile(ctx, bootstrap.FileOptions{Rank: o.Rank, Size: o.Size, Dir: o.Dir, Name: named(o.Name)})
}

// defaultName is the name of groups without one. As a secret everybody knows it.
const defaultName = "default"

// named is the name of a group, or the name of those without one.
func named(name string) string {
	if name == "" {
		return defaultName
	}
	return name
}
