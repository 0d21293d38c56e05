package plan

// Transfer says what moves the rows of low-latency halves inside a node.
type Transfer int

// Transfers. The zero value is the default.
const (
	AutoTransfer Transfer = iota // SMTransfer: which is faster beside other work is not measured for enough shapes yet
	SMTransfer                   // the sending half's kernel stores them at their receivers
	CopyTransfer                 // of dispatch: its kernel packs them, and copy engines bring them; of combine: as SMTransfer
)

// TransferNames are the transfers' names, in the order of the constants.
func TransferNames() []string { return []string{"auto", "sm", "copy"} }

// ByCopies reports whether copy engines move rows, where the kernel library has them.
func (t Transfer) ByCopies() bool { return t == CopyTransfer }
