package main

/*
#include "shim.h"
*/
import "C"

import "github.com/deepep-go/deepep/core"

func fromConfig(c *C.deepep_config) core.Config {
	return core.Config{
		NumSMs: int32(c.num_sms), NVLSendChunk: int32(c.nvl_send_chunk), NVLRecvChunk: int32(c.nvl_recv_chunk),
		RDMASendChunk: int32(c.rdma_send_chunk), RDMARecvChunk: int32(c.rdma_recv_chunk),
	}
}

func toConfig(c core.Config, out *C.deepep_config) {
	out.num_sms = C.int32_t(c.NumSMs)
	out.nvl_send_chunk, out.nvl_recv_chunk = C.int32_t(c.NVLSendChunk), C.int32_t(c.NVLRecvChunk)
	out.rdma_send_chunk, out.rdma_recv_chunk = C.int32_t(c.RDMASendChunk), C.int32_t(c.RDMARecvChunk)
}

//export dpgo_config_check
func dpgo_config_check(c *C.deepep_config) C.int32_t {
	return guard(func() error {
		config := fromConfig(c)
		err := config.Check()
		if err == nil {
			toConfig(config, c)
		}
		return err
	})
}

//export dpgo_config_default
func dpgo_config_default(kind, ranks C.int32_t, c *C.deepep_config) C.int32_t {
	return guard(func() error {
		config, err := core.DefaultConfigFor(int(kind), int(ranks))
		if err == nil {
			toConfig(config, c)
		}
		return err
	})
}

//export dpgo_config_size_hint
func dpgo_config_size_hint(c *C.deepep_config, hiddenBytes C.int64_t, ranks, rdma C.int32_t, bytes *C.uint64_t) C.int32_t {
	return guard(func() error {
		config := fromConfig(c)
		if err := config.Check(); err != nil {
			return err
		}
		n, err := core.SizeHint(config, int64(hiddenBytes), int(ranks), rdma != 0)
		*bytes = C.uint64_t(n)
		return err
	})
}

//export dpgo_low_latency_size_hint
func dpgo_low_latency_size_hint(tokens, hidden, ranks, experts C.int32_t, bytes *C.uint64_t) C.int32_t {
	return guard(func() error {
		n, err := core.LowLatencySizeHint(int64(tokens), int64(hidden), int64(ranks), int64(experts))
		*bytes = C.uint64_t(n)
		return err
	})
}
