package plan

// Transfer says how low-latency calls in halves run, and what moves their rows inside a node.
type Transfer int

// Transfers. The zero value is the default.
const (
	AutoTransfer   Transfer = iota // SMTransfer: with it alone x is free once the sending half is done
	SMTransfer                     // the sending half's kernel stores rows at their receivers
	CopyTransfer                   // the sending half's kernel packs rows, and copy engines bring them
	StreamTransfer                 // the whole call runs on the communication stream; the receiving half waits for it
)

// TransferNames are the transfers' names, in the order of the constants.
func TransferNames() []string { return []string{"auto", "sm", "copy", "stream"} }

// String returns the name.
func (t Transfer) String() string { return TransferNames()[t] }
