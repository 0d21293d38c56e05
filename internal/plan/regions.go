package plan

// PageBytes is the alignment of every region of a symmetric block.
const PageBytes = 4096

// defaultRowSegment is two batches of 4096 tokens of 7168 BF16 over 4 ranks.
const defaultRowSegment = 512 << 20

// RowSegmentBytes is the size of the segment that a program makes for the rows that it receives in normal mode: what the
// setting says, or for -1 the default, where there is normal mode.
func RowSegmentBytes(setting int64, nvlBytes uint64) uint64 {
	switch {
	case setting >= 0:
		return uint64(setting)
	case nvlBytes == 0:
		return 0
	}
	return defaultRowSegment
}

// Region is a part of a block.
type Region struct {
	Offset, Bytes uint64
}

// Regions are the parts of a rank's symmetric block: control | wire | nvl | rdma, the same on all ranks.
type Regions struct {
	Control, Wire, NVL, RDMA Region
	Total                    uint64
}

// NewRegions lays a block out. nvl and rdma keep the size that was asked for; the next region begins on a new page, so
// that what callers overwrite never shares a page with flags.
func NewRegions(control, wire, nvl, rdma uint64) Regions {
	var r Regions
	place := func(bytes uint64) Region {
		at := Region{r.Total, bytes}
		r.Total = align(r.Total+bytes, PageBytes)
		return at
	}
	r.Control, r.Wire, r.NVL, r.RDMA = place(control), place(wire), place(nvl), place(rdma)
	return r
}
