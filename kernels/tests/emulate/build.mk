# build.mk - the CUDA library compiled for the host, its kernels run lane by lane: what tests need where there is no GPU. Included by
# the Makefile.

EMULATE_OUT  := $(OBJ)/emulated
EMULATE_CXX   = $(CXX) -std=c++20 -O2 -fPIC -fvisibility=hidden -pthread -ffp-contract=off -fno-strict-aliasing -Wall -Werror -Wno-unknown-pragmas \
  -fno-extern-tls-init -Wno-volatile -Wno-sign-compare -Ikernels/tests/emulate
EMULATE_INCLUDE = -I$(EMULATE_OUT)/include -Ikernels -I$(OBJ) -isystem $(CUDA_HOME)/include/cccl -isystem $(CUDA_HOME)/include
# Every user links blocks and copies; the library links a device and a runtime, too.
EMULATE_OBJ  := $(addprefix $(OBJ)/kernels/tests/emulate/,blocks.o copies.o)
EMULATE_GPU_OBJ := $(addprefix $(OBJ)/kernels/tests/emulate/,gpu.o runtime.o memory.o)
EMULATED_SRC := $(CUDA_SRC:kernels/cuda/launch/%.cu=$(EMULATE_OUT)/%.cpp)
EMULATED_OBJ := $(EMULATED_SRC:.cpp=.o)
EMULATED     := $(BUILD)/test/libdeepep_emulated.so

$(OBJ)/emulate.flags: FORCE | $(CUDA_READY)
	$(call keep,$(EMULATE_CXX) $(EMULATE_INCLUDE))

$(EMULATE_OBJ) $(EMULATE_GPU_OBJ): $(OBJ)/%.o: %.cpp $(OBJ)/emulate.flags | need-cxx
	@mkdir -p $(@D)
	$(EMULATE_CXX) -isystem $(CUDA_HOME)/include -MMD -MP -c -o $@ $<

# Launches are not C++ and become calls. All lanes share the parameters, as on a GPU. Waiting kernels look for reasons to leave, and read
# the host's status block, once in many polls; here, where each poll takes longer and looks are to meet other ranks' steps, once in 8.
EMULATED_CUH := $(patsubst kernels/%,$(EMULATE_OUT)/include/%,$(filter-out %/ptx.cuh,$(shell find kernels/cuda -name '*.cuh')))
$(EMULATED_SRC): $(EMULATE_OUT)/%.cpp: kernels/cuda/launch/%.cu kernels/tests/emulate/build.mk
	@mkdir -p $(@D)
	@{ echo '#line 1 "$<"'; sed -E 's/([a-z_:]+(<kBulk>)?)<<<(.*)>>>\(/emulate::launch(\1, \3, /' $<; } >$@
	@! grep -n '<<<' $@
$(EMULATED_CUH): $(EMULATE_OUT)/include/%: kernels/% kernels/tests/emulate/build.mk
	@mkdir -p $(@D)
	@{ echo '#line 1 "$<"'; sed -E 's/const __grid_constant__ ([A-Za-z]+) /const \1 \&/; s/(kPollsPerLook = )64;/\18;/; s/(kPollsPerHostLook = )2048;/\18;/' $<; } >$@
	@case $@ in */wait.cuh) grep -q 'kPollsPerLook = 8;' $@ && grep -q 'kPollsPerHostLook = 8;' $@;; esac

$(EMULATED_OBJ): %.o: %.cpp $(OBJ)/emulate.flags | $(EMULATED_CUH) $(CUDA_READY) $(OBJ)/cuda_build_id.h need-cxx
	$(EMULATE_CXX) -include kernels/tests/emulate/launch.h $(EMULATE_INCLUDE) -MMD -MP -c -o $@ $<

$(EMULATED): $(EMULATED_OBJ) $(EMULATE_OBJ) $(EMULATE_GPU_OBJ) tools/kernels.map
	@mkdir -p $(@D)
	$(CXX) -shared -pthread -Wl,-z,defs -Wl,--version-script=tools/kernels.map -o $@ $(filter %.o,$^)

emulated: $(EMULATED) kernel-tests ## build the CUDA library for the host, its kernels emulated

-include $(EMULATED_OBJ:.o=.d) $(EMULATE_OBJ:.o=.d) $(EMULATE_GPU_OBJ:.o=.d)
