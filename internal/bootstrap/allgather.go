package bootstrap

import (
	"context"
	"encoding/binary"

	"github.com/deepep-go/deepep/internal/status"
)

// blockBytes is what each rank gives to an all-gather of equal blocks: the blob's length (u32, little endian), the
// blob, zeros.
const (
	blockBytes = 4096
	blockHead  = 4
)

// NewAllGather makes an Exchanger of an all-gather of equally long blocks of bytes, as MPI and torch.distributed have
// one. f sends this rank's block and fills recv with the blocks of all ranks, in rank order. recv is len(send) * size
// bytes.
func NewAllGather(rank, size int, f func(ctx context.Context, send, recv []byte) error) Exchanger {
	return NewCallback(rank, size, func(ctx context.Context, blob []byte) ([][]byte, error) {
		if f == nil {
			return nil, status.InvalidArg("allgather", "none", "a function that gathers one block from each rank")
		}
		if len(blob) > blockBytes-blockHead {
			return nil, status.Errorf(status.Internal, "%d bytes do not fit a block of the all-gather", len(blob))
		}
		send, recv := make([]byte, blockBytes), make([]byte, size*blockBytes)
		binary.LittleEndian.PutUint32(send, uint32(len(blob)))
		copy(send[blockHead:], blob)
		if err := f(ctx, send, recv); err != nil {
			return nil, err
		}
		return cutBlocks(recv, size)
	})
}

// cutBlocks takes each rank's blob out of its block.
func cutBlocks(recv []byte, size int) ([][]byte, error) {
	blobs := make([][]byte, size)
	for rank := range blobs {
		block := recv[rank*blockBytes : (rank+1)*blockBytes]
		n := binary.LittleEndian.Uint32(block)
		if n > blockBytes-blockHead {
			return nil, status.Errorf(status.Mismatch, "the caller's all-gather did not return the block that rank %d sent", rank)
		}
		blobs[rank] = block[blockHead : blockHead+n]
	}
	return blobs, nil
}
