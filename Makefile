# Everything is built, run and tested from here. `make` alone lists the targets.
#
# Settings (make NAME=value): PYTHON (makes .venv; its torch is used if it has one), GO, CC, CXX, NVCC, SM90=0 (no
# sm_90 code), CODES (all: machine code for every GPU, as in the wheel), GLIBC (2.28: libraries for that C library and
# later, as in the wheel), CUDA12=0 (a wheel without the library for drivers of CUDA 12), ENGINE (cpu or cuda, for run
# and bench), ARGS (options for run, bench), PREFIX and DESTDIR (install), DEEPEP_BUILD (install: cpu, cuda or all, in
# place of what the machine can build), ARCH=aarch64 (a cross build into build/aarch64).

GO     ?= go
PYTHON ?= python3
ARCH   ?= $(shell uname -m)
CROSS  := $(filter-out $(shell uname -m),$(ARCH))
ifeq ($(origin CC),default)
CC := $(CROSS:%=%-linux-gnu-)gcc
endif
ifeq ($(origin CXX),default)
CXX := $(CROSS:%=%-linux-gnu-)g++
endif
PREFIX ?= /usr/local
BUILD  ?= build$(CROSS:%=/%)
ifdef CROSS
export GOARCH := $(patsubst aarch64,arm64,$(patsubst x86_64,amd64,$(ARCH)))
endif
SM90   ?= 1
JOBS   ?= $(shell nproc)
export GO CC CXX PYTHON
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV    := .venv/bin/python
version  = $(shell sed -n 's/^\#define DEEPEP_VERSION_$1 //p' include/deepep.h)
MAJOR   := $(call version,MAJOR)
MINOR   := $(call version,MINOR)
VERSION := $(MAJOR).$(MINOR).$(call version,PATCH)
LIB     := $(BUILD)/lib
BIN     := $(BUILD)/bin
OBJ     := $(BUILD)/obj

help: ## list the targets
	@sed -n 's/^\([a-z][a-z0-9-]*\):.*## \(.*\)/\1|\2/p' Makefile | awk -F'|' '{ printf "  make %-16s %s\n", $$1, $$2 }'

# ---- Set-up ---------------------------------------------------------------------------------------------------------
# need-go-cc and the like: fails in one line if a tool is missing or too old. Used order-only: it is never "newer". By
# name of the shell: the files of a Go module's archive are not executable.

need-%:
	@bash tools/check_tools.sh $(subst -, ,$*)

VENV_STAMP := .venv/.stamp-base
CUDA_STAMP := .venv/.stamp-cuda

$(VENV_STAMP): tools/setup_venv.sh tools/requirements.txt tools/requirements-torch.txt | need-python
	@tools/setup_venv.sh base
	@touch $@

$(CUDA_STAMP): tools/requirements-cuda.txt | $(VENV_STAMP)
	@tools/setup_venv.sh cuda
	@touch $@

CUDA12_STAMP := .venv/.stamp-cuda12
$(CUDA12_STAMP): tools/cuda12.py tools/requirements-cuda12.txt | $(VENV_STAMP)
	@tools/setup_venv.sh cuda12
	@touch $@

DOCS_STAMP := .venv/.stamp-docs

$(DOCS_STAMP): tools/requirements-docs.txt | $(VENV_STAMP)
	@tools/setup_venv.sh docs
	@touch $@

venv: $(VENV_STAMP) ## make .venv, with torch, the test tools and deep_ep importable

RELEASE_STAMP := .venv/.stamp-release
$(RELEASE_STAMP): tools/requirements-release.txt | $(VENV_STAMP)
	@tools/setup_venv.sh release
	@touch $@

# ---- Linking ----------------------------------------------------------------------------------------------------------
# With GLIBC set, zig links, which has the symbols of every glibc: what the compiler's own C library has renewed since
# (pthread_*, dl*, in 2.34) is bound to the old names. Compilers stay the same. g++ finds its own libraries, zig does not.

GLIBC ?=
ifdef GLIBC
export ZIG_GLOBAL_CACHE_DIR := $(CURDIR)/build/zig
LINK_READY := $(RELEASE_STAMP)
LINK_C     := $(CURDIR)/$(VENV) -m ziglang cc -target $(or $(ARCH),$(shell uname -m))-linux-gnu.$(GLIBC) -s
LINK_CXX   := $(LINK_C)
# Go's linker writes an empty table of needed versions into a program, which auditwheel takes for one of another kind.
PROGRAM_DONE = && $(CROSS:%=%-linux-gnu-)objcopy --remove-section=.gnu.version_r $@
CXX_LIBS    = tools/old_glibc.c $(shell $(CXX) -print-file-name=libstdc++.a) $(shell $(CXX) -print-file-name=libgcc_s.so.1) -lpthread -ldl -lrt -lm
else
LINK_C     := $(CC)
LINK_CXX   := $(CXX)
endif

# ---- The engine: libdeepep.so and the program ------------------------------------------------------------------------
# A folder counts as a source: its time changes when a file comes or goes.

go_sources = go.mod go.sum $(shell find $1 \( -name testdata -o -path capi/tests \) -prune -o \
               \( -type d -o -type f -not -name '*_test.go' \) -print 2>/dev/null)
# A program that was linked against another major version does not load this one. Before 1.0 that number is 0.
SONAME   := libdeepep.so.$(MAJOR)
MAP      := $(CURDIR)/capi/deepep.map
PROGRAM  := $(BIN)/deepep
# The same bytes in every folder, with git and without: no path, no commit, and no id that is made of the command line.
GO_BUILD := $(GO) build -trimpath -buildvcs=false

$(LIB)/$(SONAME): $(call go_sources,core internal capi) $(wildcard include/*.h kernels/abi/*.h) | $(LINK_READY) need-go-cc
	@mkdir -p $(@D)
	CGO_ENABLED=1 CC='$(LINK_C)' $(GO_BUILD) -buildmode=c-shared -o $@ \
	  -ldflags '-s -w -buildid= -extldflags "-Wl,--version-script=$(MAP) -Wl,-soname,$(SONAME) -Wl,-s"' ./capi
	@rm -f $(LIB)/libdeepep.so.h && touch $@

$(LIB)/libdeepep.so: $(LIB)/$(SONAME)
	@ln -sf $(SONAME) $@

$(PROGRAM): $(call go_sources,core internal) include/deepep.h | need-go
	@mkdir -p $(@D)
	CGO_ENABLED=0 $(GO_BUILD) -ldflags '-s -w -buildid=' -o $@ ./core/cmd/deepep $(PROGRAM_DONE)
	@touch $@

# The compiled face of the Python package: Python's stable ABI alone, so one file for every Python. Where a machine has
# no Python headers the package does without it.
FACE        := $(LIB)/deepep_torch.abi3.so
PYTHON_INCLUDE = $(shell $(or $(wildcard $(VENV)),$(PYTHON)) -c 'import sysconfig; print(sysconfig.get_paths()["include"])' 2>/dev/null)

$(FACE): python/face/face.c include/deepep.h | $(LINK_READY)
	@mkdir -p $(@D)
	@if [ -e "$(PYTHON_INCLUDE)/Python.h" ]; then \
	  $(LINK_C) -std=c11 -O2 -Wall -Wextra -Werror -shared -fPIC -fvisibility=hidden -Iinclude -I"$(PYTHON_INCLUDE)" -o $@ $<; \
	else echo "no Python.h: the Python package goes without its compiled face"; fi

face: $(FACE) ## build the compiled face of the Python package, if there are Python headers

lib: $(LIB)/libdeepep.so $(FACE) ## build libdeepep.so (Go engine behind the C API)

program: $(PROGRAM) ## build the command-line program

# ---- Kernel libraries ------------------------------------------------------------------------------------------------
# Each object depends on a .flags file that is rewritten only when its content changes, so new flags rebuild.

SAN       ?=
# As the sanitizers' manuals advise: it compiles in two thirds of the time of -O2, and runs no slower.
OPTIMIZE  := $(if $(SAN),-O1,-O2)
SANFLAGS  := $(if $(SAN),-fsanitize=$(SAN) -fno-sanitize-recover=all -fno-omit-frame-pointer -g)
# libstdc++ goes in, libgcc_s stays outside: its static form needs glibc 2.35. What is unused goes out: it needs 2.36.
LINKFLAGS := -shared -pthread -Wl,--version-script=tools/kernels.map \
  $(if $(SAN),$(SANFLAGS),$(if $(GLIBC),,-static-libstdc++) -Wl,--gc-sections -Wl,-z,defs)
WARN      := -Wall -Wextra -Werror
AVX2      := -mavx2 -mfma -mf16c
AVX512    := -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c
CPU_SRC   := $(sort $(shell find kernels/cpu -name '*.cpp' 2>/dev/null))
ifneq ($(ARCH),x86_64)
CPU_SRC   := $(filter-out %/avx2.cpp %/avx512.cpp,$(CPU_SRC))
endif
CPU_OBJ   := $(CPU_SRC:%.cpp=$(OBJ)/%.o)
TEST_SRC  := $(sort $(wildcard kernels/tests/*.c kernels/tests/*.cpp))
TEST_OBJ  := $(addsuffix .o,$(addprefix $(OBJ)/,$(TEST_SRC)))
isa        = $(if $(filter %/avx2,$1),$(AVX2))$(if $(filter %/avx512,$1),$(AVX512))
# Ranks compare it: two libraries made of the same sources have the same id.
build_id   = $(VERSION)-$(shell cat $(sort $(shell find $1 -type f 2>/dev/null)) </dev/null | sha256sum | cut -c1-12)

CXX_COMMAND := $(CXX) -std=c++17 $(OPTIMIZE) -ffp-contract=off -fPIC -fvisibility=hidden -pthread $(WARN) $(SANFLAGS) -Ikernels -I$(OBJ)
C_COMMAND   := $(CC) -std=c11 -D_GNU_SOURCE $(OPTIMIZE) -pthread $(WARN) $(SANFLAGS) -Ikernels
NVCC_FLAGS   = $(NVCC_HOST) -std=c++17 -O3 $(CUDA_CODE) $(COMPRESS) -DDEEPEP_SM90=$(SM90) \
  -Werror all-warnings $(SPILL_CHECK) -Xcompiler -fPIC,-fvisibility=hidden,-Wall,-Wextra \
  -Ikernels -I$(OBJ)
# Of the codes that everyone builds; for sm_100 ptxas spills 40 bytes in combine_expanded.
SPILL_CHECK := $(if $(filter all,$(CODES)),,-Xptxas --warn-on-spills,--warning-as-error)
# Which GPUs get machine code. CODES=some: sm_80 (and 86, 89), sm_90. CODES=all adds Blackwell's three, which take
# three times as long to compile; the PTX for sm_90 serves them otherwise, and what comes later. A name with f runs on
# its family, 10.0 and 10.3.
CODES       ?= some
gencode      = $(foreach code,$1,-gencode arch=compute_$(code),code=sm_$(code))
NEWER_CODES := $(if $(filter 0,$(SM90)),,$(if $(filter all,$(CODES)),100f 103 120))
SM80_CODE   := $(call gencode,80)
SM90_CODE   := $(call gencode,90) -gencode arch=compute_90,code=compute_90
CUDA_CODE   := $(SM80_CODE) $(if $(filter 0,$(SM90)),,$(SM90_CODE)) $(call gencode,$(NEWER_CODES))
COMPRESS    := $(if $(filter all,$(CODES)),--compress-mode=size --threads=$(JOBS))

# nvcc: NVCC= if given, else the one of PyPI's wheels in .venv, fetched when first needed.
CUDA_SRC := $(sort $(shell find kernels/cuda -name '*.cu' 2>/dev/null))
CUDA_OBJ := $(CUDA_SRC:%.cu=$(OBJ)/%.o)
ifdef NVCC
CUDA_HOME   = $(patsubst %/bin/nvcc,%,$(realpath $(shell command -v $(NVCC))))
else
CUDA_READY := $(CUDA_STAMP)
CUDA_HOME   = $(shell $(VENV) -c 'import nvidia.cu13 as cuda; print(cuda.__path__[0])')
NVCC        = $(CUDA_HOME)/bin/nvcc
endif

# What nvcc's objects are linked with: of the machine that they are for.
CUDA_LIB = $(if $(CROSS),.venv/$(CROSS)/nvidia/cu13,$(CUDA_HOME))
CUDA_LINK = -L$(CUDA_LIB)/lib -L$(CUDA_LIB)/lib64
ifdef CROSS
CUDA_READY += .venv/.stamp-$(CROSS)
NVCC_HOST  := -ccbin $(CXX)
.venv/.stamp-$(CROSS): tools/requirements-cuda.txt tools/requirements-nvshmem.txt | $(VENV_STAMP)
	@tools/setup_venv.sh cross $(CROSS)
	@touch $@
endif

# nvcc names what is local to a file after the file's full path and a process id: here after the path in the tree, so that
# two builds are the same. Symbols that only a linker reads name nvcc's temporary files, and go out. nvcc 12 takes no seed
# and needs none.
OLD_NVCC = $(if $(findstring release 12.,$(shell $(NVCC) --version 2>&1)),yes)
nvcc_names = $(if $(OLD_NVCC),,-frandom-seed=$1) -Xcudafe --orig_src_path_name=/$1 -Xcicc --orig_src_path_name=/$1 \
  $(foreach home,$(NVSHMEM_HOME) $(CUDA_HOME),$(foreach at,$(home) $(realpath $(home)),-Xcompiler -ffile-prefix-map=$(at)=.)) \
  -Xcompiler -ffile-prefix-map=$(CURDIR)=.
GPU_LINKFLAGS = $(LINKFLAGS) -Wl,-s

# $(call keep,text): a recipe that writes text to the target unless it is there already.
keep = @mkdir -p $(@D); echo '$1' | cmp -s - $@ || echo '$1' >$@

FORCE:
$(OBJ)/cpu.flags: FORCE
	$(call keep,$(CXX_COMMAND) $(C_COMMAND) $(AVX2) $(AVX512))
$(OBJ)/cuda.flags: FORCE | $(CUDA_READY)
	$(call keep,$(NVCC) $(NVCC_FLAGS))
$(OBJ)/cpu_build_id.h: FORCE
	$(call keep,#define DK_BUILD_ID "$(call build_id,kernels/abi kernels/cpu)")
$(OBJ)/cuda_build_id.h: FORCE
	$(call keep,#define DK_BUILD_ID "$(call build_id,kernels/abi kernels/cuda)")

$(CPU_OBJ): $(OBJ)/%.o: %.cpp $(OBJ)/cpu.flags | $(OBJ)/cpu_build_id.h need-cxx
	@mkdir -p $(@D)
	$(CXX_COMMAND) $(call isa,$*) -MMD -MP -c -o $@ $<

$(LIB)/libdeepep_cpu.so: $(CPU_OBJ) tools/kernels.map | $(LINK_READY)
	@mkdir -p $(@D)
	$(LINK_CXX) $(LINKFLAGS) -o $@ $(CPU_OBJ) $(CXX_LIBS)

kernels: $(LIB)/libdeepep_cpu.so ## build libdeepep_cpu.so

$(OBJ)/%.c.o: %.c $(OBJ)/cpu.flags | need-cc
	@mkdir -p $(@D)
	$(C_COMMAND) -MMD -MP -c -o $@ $<

$(OBJ)/%.cpp.o: %.cpp $(OBJ)/cpu.flags | need-cxx
	@mkdir -p $(@D)
	$(CXX_COMMAND) -MMD -MP -c -o $@ $<

$(BIN)/kernel_tests: $(TEST_OBJ)
	@mkdir -p $(@D)
	$(CXX) -pthread $(SANFLAGS) -o $@ $(TEST_OBJ) -ldl -lm

kernel-tests: $(if $(TEST_SRC),$(BIN)/kernel_tests) ## build the suite of the kernel interface

$(CUDA_OBJ): $(OBJ)/%.o: %.cu $(OBJ)/cuda.flags | $(CUDA_READY) $(OBJ)/cuda_build_id.h need-cxx
	@mkdir -p $(@D)
	$(NVCC) $(NVCC_FLAGS) $(call nvcc_names,$<) -MMD -MP -MF $(@:.o=.d) -c -o $@ $<

$(LIB)/libdeepep_cuda.so: $(CUDA_OBJ) tools/kernels.map | $(LINK_READY)
	@mkdir -p $(@D)
	$(LINK_CXX) $(GPU_LINKFLAGS) -o $@ $(CUDA_OBJ) $(CUDA_LINK) -lcudart_static -ldl -lrt $(CXX_LIBS)

cuda: $(if $(CUDA_SRC),$(LIB)/libdeepep_cuda.so) ## build libdeepep_cuda.so (no GPU needed)
	@$(if $(CUDA_SRC),:,echo "cuda: kernels/cuda has no .cu files: nothing to build")

# The same sources by nvcc 12.4, for drivers that CUDA 13 does not take. It knows no Blackwell and no compression.
cuda12: $(CUDA12_STAMP) ## build libdeepep_cuda12.so, for drivers 525 to 579 (x86-64)
	@$(MAKE) --no-print-directory BUILD=$(BUILD)/cuda12 CODES=some NVCC=$(CURDIR)/.venv/cuda12/bin/nvcc cuda
	@mkdir -p $(LIB)
	install -m 755 $(BUILD)/cuda12/lib/libdeepep_cuda.so $(LIB)/libdeepep_cuda12.so

include kernels/tests/emulate/build.mk
include nvshmem/build.mk

nvshmem: $(NVSHMEM_ALL) ## build libdeepep_nvshmem.so and its tests (no GPU needed)

nvshmem-versions: nvshmem ## which releases of NVSHMEM on PyPI fit (fetches them; ARGS=3.8.0)
	$(VENV) tools/nvshmem_versions.py $(ARGS)

# $(call entry,source,command): an object of compile_commands.json.
define entry
{"directory": "$(CURDIR)", "file": "$1", "command": "$(strip $2) -c -o $(OBJ)/$1.o $1"},

endef
written = $(file >>compile_commands.json,$1)

compile-commands: $(CUDA_READY) $(NVSHMEM_READY) $(OBJ)/cpu_build_id.h $(OBJ)/cuda_build_id.h ## write compile_commands.json, for clangd
	$(file >compile_commands.json,[)
	$(call written,$(foreach s,$(CPU_SRC),$(call entry,$s,$(CXX_COMMAND) $(call isa,$(basename $s)))))
	$(call written,$(foreach s,$(filter %.cpp,$(TEST_SRC)),$(call entry,$s,$(CXX_COMMAND))))
	$(call written,$(foreach s,$(filter %.c,$(TEST_SRC)),$(call entry,$s,$(C_COMMAND))))
	$(call written,$(foreach s,$(CUDA_SRC),$(call entry,$s,$(NVCC) $(NVCC_FLAGS))))
	$(call written,$(foreach s,$(NVSHMEM_SRC),$(call entry,$s,$(NVCC) $(NVSHMEM_FLAGS) $(call code_of,$(basename $s)))))
	@sed -i '/^$$/d; $$ s/,$$//' compile_commands.json && echo ']' >>compile_commands.json
	@$(VENV) -m json.tool compile_commands.json >/dev/null

-include $(CPU_OBJ:.o=.d) $(TEST_OBJ:.o=.d) $(CUDA_OBJ:.o=.d)

# ---- Run and test -----------------------------------------------------------------------------------------------------

# all-ready asks for the tools first, so that a missing one stops everything before the downloads.

all-ready: need-go-cc-cxx-python
	@$(MAKE) --no-print-directory --jobs=$(JOBS) ready

ready: venv lib kernels program kernel-tests
	@:

run: all-ready $(if $(filter cuda,$(ENGINE)),cuda) ## train a small mixture-of-experts model over 4 ranks (ENGINE=cuda: on GPUs; ARGS="--steps 50")
	$(VENV) python/examples/train_moe.py $(if $(ENGINE),--engine $(ENGINE)) $(ARGS)

test: all-ready ## run the tests that need no GPU (13 to 25 minutes on 2 cores; README: what is left out)
	$(VENV) tools/run_tests.py

test-full: all-ready ## the same with the long versions: more seeds, cycles and fuzzing
	$(VENV) tools/run_tests.py --full

test-gpu: $(if $(PREBUILT),,all-ready cuda) ## run the kernel suite and the Python tests on a CUDA device (PREBUILT=1: with build/ as it is and PYTHON)
	$(if $(PREBUILT),$(PYTHON),$(VENV)) tools/run_tests.py --gpu $(ARGS)

$(BIN)/bench_ops: $(wildcard bench/cuda/*) kernels/abi/kernels.h | $(CUDA_READY) need-cxx
	@mkdir -p $(@D)
	$(NVCC) -std=c++17 -O2 -arch=sm_90 -Ikernels -Invshmem -o $@ $(filter %.cu,$^) $(CUDA_LINK) -ldl -lpthread

BENCH := $(if $(filter cuda,$(ENGINE)),gpu,cpu)
bench: all-ready $(if $(filter gpu,$(BENCH)),cuda $(BIN)/bench_ops) ## measure, beside gloo in the same run (ENGINE=cuda: on GPUs, beside NCCL)
	$(VENV) bench/$(BENCH).py $(ARGS)

clients: all-ready ## run files of real clients, unchanged, over the package (fetches their wheels; ARGS="sglang -k low")
	$(VENV) tools/clients/run.py $(ARGS)

test-aarch64: ## build for aarch64, run it under qemu-user as far as that goes (skips without cross compilers)
	tools/aarch64.sh $(ARGS)

lint: venv need-go ## check formatting (clang-format, gofmt, ruff), ruff, mypy, go vet, staticcheck
	$(VENV) tools/run_tests.py lint

fmt: venv need-go ## format C, C++, CUDA, Go and Python
	git ls-files '*.c' '*.h' '*.cpp' '*.hpp' '*.cu' '*.cuh' | xargs .venv/bin/clang-format -i
	gofmt -w core internal capi bench tools
	$(VENV) -m ruff check --fix --quiet python bench tools kernels nvshmem setup.py
	$(VENV) -m ruff format --quiet python bench tools kernels nvshmem setup.py

abi-check: venv lib kernels ## compare symbols, structs in C, Go and ctypes, and all that callers see with the goldens of the last release
	$(VENV) tools/run_tests.py abi

sanitize: venv ## run the kernel suite under ASan with UBSan, and under TSan
	@$(MAKE) --no-print-directory --jobs=$(JOBS) BUILD=build/asan SAN=address,undefined kernels kernel-tests
	@$(MAKE) --no-print-directory --jobs=$(JOBS) BUILD=build/tsan SAN=thread kernels kernel-tests
	$(VENV) tools/run_tests.py asan tsan race

sanitize-gpu: venv cuda kernel-tests ## run the kernel suite under compute-sanitizer (memcheck, racecheck, synccheck)
	$(VENV) tools/run_tests.py memcheck racecheck synccheck

generate: venv need-cc ## write the generated files and the goldens of the interfaces anew
	$(VENV) tools/generate_abi.py
	$(VENV) tools/abi_layout.py --write

check: lint test sanitize ## all that needs no GPU, before a commit

# ---- Ship -------------------------------------------------------------------------------------------------------------

# The wheel's libraries have their own folder: machine code for every GPU takes minutes, and zig links them.
WHEEL_GLIBC := 2.28
WHEEL_BUILD := build/release
WHEEL_MAKE  = $(MAKE) --no-print-directory BUILD=$(WHEEL_BUILD) CODES=all GLIBC=$(WHEEL_GLIBC)
WHEEL_TAG   = manylinux_$(subst .,_,$(WHEEL_GLIBC))_$(or $(ARCH),$(shell uname -m))

# nvcc 12.4 can be had for x86-64.
WHEEL_CUDA12 := $(if $(filter 0,$(CUDA12)),,$(if $(filter x86_64,$(ARCH)),cuda12))

# What the wheel tells of itself; setup.py adds it.
RELEASE   := PYTHONPATH=tools $(VENV) -m release
SBOM      := $(CURDIR)/$(WHEEL_BUILD)/sbom.cdx.json

wheel-libraries: venv $(RELEASE_STAMP) ## build what the wheel holds, into build/release
	@$(if $(WHEEL_CUDA12),:,rm -f $(WHEEL_BUILD)/lib/libdeepep_cuda12.so)
	@$(WHEEL_MAKE) --jobs=$(JOBS) lib kernels program cuda $(WHEEL_CUDA12) $(WHEEL_BUILD)/lib/libdeepep_nvshmem.so

wheel: wheel-libraries ## build dist/deepep_go-*.whl: every GPU's code, glibc 2.28 or later, any Python 3
	@rm -rf $(WHEEL_BUILD)/wheel
	@$(RELEASE).sbom --build $(WHEEL_BUILD) --output $(SBOM)
	DEEPEP_SBOM=$(SBOM) DEEPEP_BUILD=release $(VENV) -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir $(WHEEL_BUILD)/wheel .
	PATH="$(CURDIR)/.venv/bin:$$PATH" $(VENV) -m auditwheel repair --plat $(WHEEL_TAG) --only-plat --wheel-dir dist $(WHEEL_BUILD)/wheel/*.whl
	$(if $(filter 0,$(SM90) $(CUDA12)),@echo 'SM90=0 or CUDA12=0: a wheel for trials: code for some GPUs or drivers is not in it',$(VENV) tools/check_wheel.py dist/deepep_go-$(VERSION)-py3-none-$(WHEEL_TAG).whl)

SITE := $(BUILD)/site
docs: $(DOCS_STAMP) | need-go ## build build/site: the documents and the references of Python, C, C++ and Go as one static site
	$(VENV) tools/website/build.py $(SITE)

docs-picture: docs ## take the picture of the site's start page anew (needs Chromium)
	$(VENV) tools/website/picture.py $(SITE) docs/pictures/site.png

CMAKE_DIR = $(DESTDIR)$(PREFIX)/lib/cmake/deepep
fill      = sed -e 's/@VERSION@/$(VERSION)/g; s/@MAJOR@/$(MAJOR)/g; s/@MINOR@/$(MINOR)/g' $1 >$2

# DEEPEP_BUILD=release BUILD=build/release installs what `make wheel-libraries` has built.
installed = $(if $(filter cpu,$(DEEPEP_BUILD)),$(filter %_cpu.so,$1),$(if $(filter cuda,$(DEEPEP_BUILD)),$(filter-out %_nvshmem.so,$1),$1))
native:
	@$(PYTHON) tools/build_native.py --build $(BUILD)

install: native ## build what the machine can build (DEEPEP_BUILD), install it under PREFIX (/usr/local); DESTDIR for packages
	install -d $(addprefix $(DESTDIR)$(PREFIX)/,bin include lib/pkgconfig) $(CMAKE_DIR)
	install -m 755 $(PROGRAM) $(DESTDIR)$(PREFIX)/bin
	install -m 755 $(LIB)/$(SONAME) $(call installed,$(wildcard $(LIB)/libdeepep_*.so)) $(DESTDIR)$(PREFIX)/lib
	ln -sf $(SONAME) $(DESTDIR)$(PREFIX)/lib/libdeepep.so
	install -m 644 include/deepep.h include/deepep.hpp $(DESTDIR)$(PREFIX)/include
	$(call fill,cmake/deepep.pc.in,$(DESTDIR)$(PREFIX)/lib/pkgconfig/deepep.pc)
	$(call fill,cmake/deepep-config.cmake.in,$(CMAKE_DIR)/deepep-config.cmake)
	$(call fill,cmake/deepep-config-version.cmake.in,$(CMAKE_DIR)/deepep-config-version.cmake)

matrix: $(VENV_STAMP) ## try the wheel with other versions of torch, Python and Debian; writes docs/versions.md (WHEEL=; ARGS="--only ROW")
	$(VENV) tools/matrix.py $(if $(WHEEL),--wheel $(WHEEL)) $(ARGS)

# Only the commit counts, not who builds it and when: its time is the time of every file in the release.
STAGE       := build/stage
release: venv | need-go-cc-cxx-python ## make dist/ of the commit: wheel, source and binary archive, Debian packages, SBOM, notes, checksums
	@$(RELEASE) begin --dist dist
	@rm -rf $(STAGE)
	@umask 022; export SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct); $(MAKE) --no-print-directory wheel && \
	  DEEPEP_BUILD=release $(MAKE) --no-print-directory -o lib -o kernels -o program -o native BUILD=$(WHEEL_BUILD) install \
	    DESTDIR=$(CURDIR)/$(STAGE) PREFIX=/usr && \
	  $(RELEASE) finish --build $(WHEEL_BUILD) --stage $(STAGE) --dist dist

clean: ## remove what was built (.venv stays)
	rm -rf build dist

.PHONY: help venv lib program compile-commands all-ready ready kernels kernel-tests cuda cuda12 emulated nvshmem nvshmem-versions run test test-full test-gpu clients test-aarch64 bench lint fmt abi-check \
  sanitize sanitize-gpu generate check docs docs-picture wheel wheel-libraries release native matrix install clean FORCE
