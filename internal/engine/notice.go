package engine

import (
	"fmt"
	"sync"

	"go.uber.org/zap"

	"github.com/deepep-go/deepep/internal/abi"
	"github.com/deepep-go/deepep/internal/plan"
)

// Warned holds the texts that WarnOnce has logged in this process. Tests clear it.
var Warned sync.Map

// WarnOnce logs a warning unless this process has logged the same one before: for options that have no effect, which
// programs may set in every layer.
func WarnOnce(log *zap.Logger, text string) {
	if _, again := Warned.LoadOrStore(text, true); !again {
		log.Warn(text)
	}
}

// noticeConfig warns of settings of a call's config that a user chose and that have no effect with this library.
// docs/migrating.md lists them.
func (b *Buffer) noticeConfig(c *plan.Config) {
	lib := b.opt.Library
	if !lib.Has(abi.CapChunks) && c.NamesChunks() {
		b.noticed.Store(true)
		WarnOnce(b.log, fmt.Sprintf("config: the chunk sizes %d, %d, %d, %d have no effect with engine %s, which chooses its own; num_sms has",
			c.NVLSendChunk, c.NVLRecvChunk, c.RDMASendChunk, c.RDMARecvChunk, lib.Kind))
	}
	if lib.Has(abi.CapHostStream) && b.top.Nodes() == 1 && c.NamesSMs() {
		b.noticed.Store(true)
		WarnOnce(b.log, fmt.Sprintf("config: num_sms = %d has no effect inside a node with engine %s, which has no SMs; between nodes it is twice the number of channels", c.NumSMs, lib.Kind))
	}
}
