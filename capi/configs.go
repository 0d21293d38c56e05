package main

/*
#include "shim.h"
*/
import "C"

import (
	"github.com/deepep-go/deepep/core"
	"github.com/deepep-go/deepep/core/op"
)

//export dpgo_config_check
func dpgo_config_check(c *C.deepep_config) C.int32_t {
	return guard(func() error { return core.CheckConfig(args[op.Config](c)) })
}

//export dpgo_config_default
func dpgo_config_default(kind, ranks C.int32_t, c *C.deepep_config) C.int32_t {
	return guard(func() error {
		config, err := core.DefaultConfigFor(int(kind), int(ranks))
		if err == nil {
			*args[op.Config](c) = config
		}
		return err
	})
}

//export dpgo_config_size_hint
func dpgo_config_size_hint(c *C.deepep_config, hiddenBytes C.int64_t, ranks, rdma C.int32_t, bytes *C.uint64_t) C.int32_t {
	return guard(func() error {
		config := args[op.Config](c)
		if err := core.CheckConfig(config); err != nil {
			return err
		}
		n, err := core.SizeHint(*config, int64(hiddenBytes), int(ranks), rdma != 0)
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
