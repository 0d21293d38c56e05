# build.mk - libdeepep_nvshmem.so: the CUDA library's objects, kernels across nodes, the transport over NVSHMEM; their tests. Included by
# the Makefile. NVSHMEM_HOME (include/ and lib/ of a release) is PyPI's wheel in .venv, installed when first needed, unless it is set.

NVSHMEM_STAMP := .venv/.stamp-nvshmem
ifndef NVSHMEM_HOME
NVSHMEM_READY := $(NVSHMEM_STAMP)
NVSHMEM_HOME   = $(shell $(VENV) -c 'import nvidia.nvshmem as it; print(it.__path__[0])')
endif

NVSHMEM_LIB = $(if $(CROSS),.venv/$(CROSS)/nvidia/nvshmem,$(NVSHMEM_HOME))

NVSHMEM_OUT  := $(BUILD)/nvshmem
NVSHMEM_SRC  := $(sort $(wildcard nvshmem/*.cu nvshmem/internode/*.cu))
NVSHMEM_OBJ  := $(NVSHMEM_SRC:%.cu=$(OBJ)/%.o)
HOST_PART_OBJ := $(OBJ)/nvshmem/host_part.o
PLUGIN       := $(NVSHMEM_OUT)/nvshmem_transport_ibdevx.so.3
PLUGIN_SRC   := $(sort $(wildcard nvshmem/testtransport/*.cpp nvshmem/testtransport/*.cu))
PLUGIN_OBJ   := $(addprefix $(OBJ)/,$(addsuffix .o,$(basename $(PLUGIN_SRC))))
GPU_TEST_OBJ := $(addprefix $(OBJ)/nvshmem/tests/,cases.o ranks.o transport_test.o)
PARTS_TEST_OBJ := $(addprefix $(OBJ)/nvshmem/tests/,wire_test.o memory_test.o)
INTERNODE_TEST_OBJ := $(addprefix $(OBJ)/nvshmem/tests/,internode_test.o internode_shrink_test.o internode_routed_test.o internode_routed_shrink_test.o internode_low_latency_test.o worker_test.o network.o)
NVSHMEM_ALL  := $(LIB)/libdeepep_nvshmem.so $(PLUGIN) $(addprefix $(NVSHMEM_OUT)/,transport_test wire_test memory_test internode_test internode_shrink_test internode_routed_test internode_routed_shrink_test internode_low_latency_test worker_test probe)

# The device link takes the codes that NVSHMEM's device part has, and can make no PTX. sm_100 runs on 10.3, too.
RDC_CODE := $(SM80_CODE) $(if $(filter 0,$(SM90)),,$(call gencode,90)) $(if $(NEWER_CODES),$(call gencode,100 120))
NVSHMEM_INCLUDE = -Ikernels -Invshmem -I$(OBJ) -isystem $(NVSHMEM_HOME)/include -isystem $(CUDA_HOME)/include/cccl -isystem $(CUDA_HOME)/include
# Sources with kernels become relocatable device code, for the device link with NVSHMEM's device part; the others are host code.
NVSHMEM_FLAGS   = $(NVCC_HOST) -std=c++17 -O3 $(COMPRESS) -DDEEPEP_SM90=$(SM90) -Werror all-warnings -Xcompiler -fPIC,-fvisibility=hidden,-Wall,-Wextra $(NVSHMEM_INCLUDE)
HOST_CODE       = $(SM80_CODE)
DEVICE_SRC      = nvshmem/transport.cu $(wildcard nvshmem/internode/*.cu)
DEVICE_OBJ      = $(DEVICE_SRC:%.cu=$(OBJ)/%.o)
code_of         = $(if $(filter $1.cu,$(DEVICE_SRC)),$(RDC_CODE) -rdc=true,$(HOST_CODE))
TEST_CXX        = $(CXX) -std=c++17 -O2 -fPIC -fvisibility=hidden -pthread $(WARN) $(NVSHMEM_INCLUDE)

$(NVSHMEM_STAMP): tools/requirements-nvshmem.txt | $(VENV_STAMP)
	@tools/setup_venv.sh nvshmem
	@touch $@

$(OBJ)/nvshmem.flags: FORCE | $(CUDA_READY) $(NVSHMEM_READY)
	$(call keep,$(NVCC) $(NVSHMEM_FLAGS) $(RDC_CODE) $(TEST_CXX))
$(OBJ)/nvshmem_build_id.h: FORCE
	$(call keep,#define DK_NVSHMEM_BUILD_ID "$(call build_id,kernels/abi kernels/cuda $(NVSHMEM_SRC) $(wildcard nvshmem/*.h nvshmem/*.cuh nvshmem/*.cpp) nvshmem/internode)")

# Combine's kernel has 640 threads, hence 96 registers a thread; those of 768 get 80 by their launch bounds. What a kernel calls may not
# take more than it has, which ptxas checks: without a limit nvcc would choose by itself for each code.
$(OBJ)/nvshmem/internode/normal.o: NVSHMEM_FLAGS += -maxrregcount=96
# Likewise, of 512 threads.
$(OBJ)/nvshmem/internode/low_latency.o: NVSHMEM_FLAGS += -maxrregcount=128

$(NVSHMEM_OBJ): $(OBJ)/%.o: %.cu $(OBJ)/nvshmem.flags | $(CUDA_READY) $(NVSHMEM_READY) $(OBJ)/nvshmem_build_id.h need-cxx
	@mkdir -p $(@D)
	$(NVCC) $(NVSHMEM_FLAGS) $(call code_of,$*) $(call nvcc_names,$<) -MMD -MP -MF $(@:.o=.d) -c -o $@ $<

# The device link writes its -L into the code: through links in build/obj they are the same in every folder.
$(OBJ)/nvshmem/device_link.o: $(DEVICE_OBJ)
	@ln -sfn $(abspath $(CUDA_HOME)) $(OBJ)/cuda_home && ln -sfn $(abspath $(NVSHMEM_LIB)) $(OBJ)/nvshmem_home
	$(OBJ)/cuda_home/bin/nvcc $(NVCC_HOST) -dlink -Xcompiler -fPIC $(RDC_CODE) $(COMPRESS) -o $@ $(DEVICE_OBJ) -L$(OBJ)/nvshmem_home/lib \
	  $(subst -L$(CUDA_HOME),-L$(OBJ)/cuda_home,$(CUDA_LINK)) -lnvshmem_device -lcudadevrt

# Of the CUDA library's objects all but two: this library has a dk_info of its own, and internode/*.cu where internode_none.cu refuses.
CUDA_ALONE_OBJ := $(addprefix $(OBJ)/kernels/cuda/launch/,info.o internode_none.o)
NVSHMEM_PARTS = $(filter-out $(CUDA_ALONE_OBJ),$(CUDA_OBJ)) $(NVSHMEM_OBJ) $(HOST_PART_OBJ) $(OBJ)/nvshmem/device_link.o
$(LIB)/libdeepep_nvshmem.so: $(NVSHMEM_PARTS) tools/kernels.map | $(LINK_READY)
	@mkdir -p $(@D)
	$(LINK_CXX) $(GPU_LINKFLAGS) -Wl,-rpath,'$$ORIGIN/../../nvidia/nvshmem/lib' -o $@ $(NVSHMEM_PARTS) \
	  $(CUDA_LINK) $(NVSHMEM_LIB)/lib/libnvshmem_device.a -lcudadevrt -lcudart_static -ldl -lrt $(CXX_LIBS)

# For benchmarks: the same library, whose kernels post to the test transport's worker themselves (nvshmem/internode/wire.cuh).
WIRE_LIB := $(NVSHMEM_OUT)/libdeepep_nvshmem_wire.so
WIRE_SRC := nvshmem/transport.cu nvshmem/internode/normal.cu
WIRE_OBJ := $(WIRE_SRC:%.cu=$(OBJ)/wire/%.o)
WIRE_DEVICE_OBJ := $(filter-out $(WIRE_SRC:%.cu=$(OBJ)/%.o),$(DEVICE_OBJ)) $(WIRE_OBJ)
$(OBJ)/wire/nvshmem/internode/normal.o: NVSHMEM_FLAGS += -maxrregcount=96
$(WIRE_OBJ): $(OBJ)/wire/%.o: %.cu $(OBJ)/nvshmem.flags | $(CUDA_READY) $(NVSHMEM_READY) $(OBJ)/nvshmem_build_id.h need-cxx
	@mkdir -p $(@D)
	$(NVCC) $(NVSHMEM_FLAGS) -DDEEPEP_TEST_WIRE $(call code_of,$*) -MMD -MP -MF $(@:.o=.d) -c -o $@ $<
$(OBJ)/wire/device_link.o: $(WIRE_DEVICE_OBJ)
	$(NVCC) $(NVCC_HOST) -dlink -Xcompiler -fPIC $(RDC_CODE) $(COMPRESS) -o $@ $(WIRE_DEVICE_OBJ) -L$(NVSHMEM_LIB)/lib $(CUDA_LINK) -lnvshmem_device -lcudadevrt
WIRE_PARTS = $(filter-out $(WIRE_SRC:%.cu=$(OBJ)/%.o) $(OBJ)/nvshmem/device_link.o,$(NVSHMEM_PARTS)) $(WIRE_OBJ) $(OBJ)/wire/device_link.o
$(WIRE_LIB): $(WIRE_PARTS) tools/kernels.map
	@mkdir -p $(@D)
	$(CXX) $(GPU_LINKFLAGS) -o $@ $(WIRE_PARTS) $(CUDA_LINK) $(NVSHMEM_LIB)/lib/libnvshmem_device.a -lcudadevrt -lcudart_static -ldl -lrt

nvshmem-wire: $(WIRE_LIB) $(PLUGIN) ## build the library whose kernels post to the test transport's NIC, for bench_ops

# ---- C++ objects. For tests: the plugin, a program for GPUs, programs that need none

$(filter $(OBJ)/nvshmem/testtransport/kernels.o,$(PLUGIN_OBJ)): $(OBJ)/%.o: %.cu $(OBJ)/nvshmem.flags | need-cxx
	@mkdir -p $(@D)
	$(NVCC) $(NVSHMEM_FLAGS) $(SM80_CODE) $(if $(filter 0,$(SM90)),,$(call gencode,90)) -gencode arch=compute_80,code=compute_80 -MMD -MP -MF $(@:.o=.d) -c -o $@ $<

$(filter-out %/kernels.o,$(PLUGIN_OBJ)) $(HOST_PART_OBJ) $(GPU_TEST_OBJ) $(PARTS_TEST_OBJ): $(OBJ)/%.o: %.cpp $(OBJ)/nvshmem.flags | need-cxx
	@mkdir -p $(@D)
	$(TEST_CXX) -MMD -MP -c -o $@ $<

$(PLUGIN): $(PLUGIN_OBJ) nvshmem/testtransport/testtransport.map
	@mkdir -p $(@D)
	$(CXX) -shared -pthread -static-libstdc++ -Wl,-z,defs -Wl,--version-script=nvshmem/testtransport/testtransport.map \
	  -Wl,-soname,$(@F) -o $@ $(PLUGIN_OBJ) $(CUDA_LINK) -lcudart_static -ldl -lrt

$(NVSHMEM_OUT)/transport_test: $(GPU_TEST_OBJ)
	@mkdir -p $(@D)
	$(CXX) -pthread -static-libstdc++ -o $@ $(GPU_TEST_OBJ) $(CUDA_LINK) -lcudart_static -ldl -lrt

# Parts of the plugin over the test's stand-ins for CUDA.
$(NVSHMEM_OUT)/wire_test: $(OBJ)/nvshmem/testtransport/rings.o
$(NVSHMEM_OUT)/wire_test $(NVSHMEM_OUT)/memory_test: $(NVSHMEM_OUT)/%_test: $(OBJ)/nvshmem/tests/%_test.o $(OBJ)/nvshmem/testtransport/%.o
	@mkdir -p $(@D)
	$(CXX) -pthread -o $@ $^

# Kernels on the host: kernels/tests/emulate stands in for nvcc's built-ins, nvshmem/tests/emulate for NVSHMEM.
$(INTERNODE_TEST_OBJ): $(OBJ)/%.o: %.cpp $(OBJ)/nvshmem.flags | need-cxx
	@mkdir -p $(@D)
	$(EMULATE_CXX) -Invshmem/tests/emulate -Invshmem/tests $(NVSHMEM_INCLUDE) $(INTERNODE_TEST_FLAGS) -MMD -MP -c -o $@ $<
$(addprefix $(NVSHMEM_OUT)/,internode_test internode_shrink_test internode_routed_test internode_routed_shrink_test internode_low_latency_test): $(NVSHMEM_OUT)/%: $(OBJ)/nvshmem/tests/%.o $(OBJ)/nvshmem/tests/network.o $(EMULATE_OBJ)
	@mkdir -p $(@D)
	$(CXX) -pthread -o $@ $^

$(NVSHMEM_OUT)/probe: nvshmem/tests/probe.c $(wildcard kernels/abi/*.h) | need-cc
	@mkdir -p $(@D)
	$(C_COMMAND) -o $@ $< -ldl

# The worker's kernel, and its host side, likewise.
$(NVSHMEM_OUT)/worker_test: $(OBJ)/nvshmem/tests/worker_test.o $(OBJ)/nvshmem/testtransport/rings.o $(OBJ)/nvshmem/tests/network.o $(EMULATE_OBJ)
	@mkdir -p $(@D)
	$(CXX) -pthread -o $@ $^

-include $(NVSHMEM_OBJ:.o=.d) $(WIRE_OBJ:.o=.d) $(HOST_PART_OBJ:.o=.d) $(PLUGIN_OBJ:.o=.d) $(GPU_TEST_OBJ:.o=.d) $(PARTS_TEST_OBJ:.o=.d) $(INTERNODE_TEST_OBJ:.o=.d)
