package plan

import (
	"fmt"

	"github.com/deepep-go/deepep/core/op"
	"github.com/deepep-go/deepep/internal/status"
)

// Config is op.Config with what can be decided about it.
type Config op.Config

// DefaultConfig is what V1's Config() without arguments gives.
var DefaultConfig = Config{NumSMs: 20, NVLSendChunk: 6, NVLRecvChunk: 256, RDMASendChunk: 6, RDMARecvChunk: 256}

// Kinds of configuration.
const (
	KindDispatch = 0
	KindCombine  = 1
)

// bands are the defaults by number of ranks: the last band that begins at or below the group's size counts. The numbers
// are those of V1 for the sizes that it knows, so that programs which size their buffers by them get the same sizes.
var bands = []struct {
	ranks             int
	dispatch, combine Config
}{
	{1, Config{20, 24, 256, 6, 128}, Config{20, 10, 256, 6, 128}},
	{3, Config{20, 6, 256, 6, 128}, Config{20, 9, 256, 6, 128}},
	{5, Config{20, 6, 256, 6, 128}, Config{20, 4, 256, 6, 128}},
	{9, Config{20, 36, 288, 20, 128}, Config{20, 4, 288, 12, 128}},
	{24, Config{20, 32, 288, 8, 128}, Config{20, 1, 288, 8, 128}},
	{72, Config{20, 20, 480, 12, 128}, Config{20, 1, 480, 8, 128}},
	{112, Config{20, 20, 560, 12, 128}, Config{20, 1, 560, 8, 128}},
	{136, Config{20, 32, 720, 12, 128}, Config{20, 2, 720, 8, 128}},
}

// ConfigFor is the default for a kind of call and any number of ranks.
func ConfigFor(kind, ranks int) (Config, error) {
	if kind != KindDispatch && kind != KindCombine {
		return Config{}, status.InvalidArg("kind", kind, "0 (dispatch) or 1 (combine)")
	}
	if ranks < 1 {
		return Config{}, status.InvalidArg("num_ranks", ranks, "1 or more")
	}
	var c Config
	for _, b := range bands {
		if b.ranks > ranks {
			break
		}
		c = b.dispatch
		if kind == KindCombine {
			c = b.combine
		}
	}
	err := c.Check() // which rounds
	return c, err
}

// NamesChunks reports whether the chunk sizes were chosen: they are none of the library's own defaults, for any number of
// ranks and either kind of call.
func (c *Config) NamesChunks() bool {
	own := func(d *Config) bool {
		recv := (d.RDMARecvChunk + d.RDMASendChunk - 1) / d.RDMASendChunk * d.RDMASendChunk // as Check rounds it
		return c.NVLSendChunk == d.NVLSendChunk && c.NVLRecvChunk == d.NVLRecvChunk && c.RDMASendChunk == d.RDMASendChunk && c.RDMARecvChunk == recv
	}
	if own(&DefaultConfig) {
		return false
	}
	for i := range bands {
		if own(&bands[i].dispatch) || own(&bands[i].combine) {
			return false
		}
	}
	return true
}

// NamesSMs reports whether the number of SMs was chosen: it is neither left to the library nor V1's default.
func (c *Config) NamesSMs() bool { return c.NumSMs != 0 && c.NumSMs != DefaultConfig.NumSMs }

// Check refuses what V1 refuses and rounds RDMARecvChunk up to a multiple of RDMASendChunk as V1 does.
func (c *Config) Check() error {
	if c.NumSMs < 0 || c.NumSMs%2 != 0 {
		return status.InvalidArg("num_sms", c.NumSMs, "an even number, 0 or more")
	}
	if err := checkChunks("nvl", c.NVLSendChunk, c.NVLRecvChunk); err != nil {
		return err
	}
	if c.RDMASendChunk <= 0 || c.RDMARecvChunk <= 0 {
		return checkChunks("rdma", c.RDMASendChunk, c.RDMARecvChunk)
	}
	rounded := (int64(c.RDMARecvChunk) + int64(c.RDMASendChunk) - 1) / int64(c.RDMASendChunk) * int64(c.RDMASendChunk)
	if rounded < 2*int64(c.RDMASendChunk) || rounded > maxInt32 {
		return status.InvalidArg("num_max_rdma_chunked_recv_tokens", c.RDMARecvChunk,
			fmt.Sprintf("at least twice num_max_rdma_chunked_send_tokens = %d", c.RDMASendChunk))
	}
	c.RDMARecvChunk = int32(rounded)
	return nil
}

func checkChunks(link string, send, recv int32) error {
	switch {
	case send <= 0:
		return status.InvalidArg("num_max_"+link+"_chunked_send_tokens", send, "1 or more")
	case recv <= 0:
		return status.InvalidArg("num_max_"+link+"_chunked_recv_tokens", recv, "1 or more")
	case send >= recv:
		return status.InvalidArg("num_max_"+link+"_chunked_send_tokens", send,
			fmt.Sprintf("less than num_max_%s_chunked_recv_tokens = %d", link, recv))
	}
	return nil
}
