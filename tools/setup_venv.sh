#!/usr/bin/env bash
# setup_venv.sh base|cuda|cuda12|nvshmem|release|docs|cross ARCH - makes or completes .venv in the repository's root. Run through make.
#   base: torch (unless the Python named by PYTHON has it), the pinned tools, deep_ep importable from python/, and
#         the program deepep of build/
#   cuda: nvcc and the libraries it needs, from PyPI's wheels
#   cuda12: nvcc 12.4 in .venv/cuda12, from Debian's package and PyPI's wheels
#   nvshmem: NVSHMEM, likewise
#   release: the linker and the checks of `make wheel`
#   cross ARCH: what CUDA code for another machine is linked with, into .venv/ARCH, of the same releases
#   docs: Sphinx and what else makes the site of the documents
# Running it again is safe: pip leaves alone what is already as wanted.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
borrowed=.venv/.torch-of-outer-python # there: torch is the one of PYTHON

install() { .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-input "$@"; }

# add_path FOLDER NAME: makes FOLDER importable in .venv, after its own packages.
add_path() { echo "$1" >"$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/$2.pth"; }

create() {
	local outer
	if ! "$PYTHON" -c 'import torch' 2>/dev/null; then
		echo "venv: making .venv; torch and the test tools come from PyPI (once, some minutes, about 5 GB)"
		"$PYTHON" -m venv .venv
		return
	fi
	echo "venv: making .venv on top of the torch of $PYTHON"
	outer=$("$PYTHON" -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))')
	"$PYTHON" -m venv --system-site-packages .venv
	# Where PYTHON is itself a virtual environment, "system" means the Python below it: name the folder as well.
	.venv/bin/python -c 'import torch' 2>/dev/null || add_path "$outer" outer_python
	touch "$borrowed"
}

base() {
	[ -x .venv/bin/python ] || create
	if [ -e "$borrowed" ]; then
		install -r tools/requirements.txt
	else
		install -r tools/requirements.txt -r tools/requirements-torch.txt
	fi
	add_path "$PWD/python" deepep_source_tree
	ln -sf ../../build/bin/deepep .venv/bin/deepep # what a wheel puts there; make builds it
}

fetch() { # name, what it brings
	echo "$1: getting $2 from PyPI into .venv (once)"
	install -r "tools/requirements-$1.txt"
}

cross() {
	local pins
	pins=$(grep -hE '^nvidia-(cuda-runtime|nvshmem)' tools/requirements-cuda.txt tools/requirements-nvshmem.txt)
	echo "cross: getting CUDA's and NVSHMEM's libraries for $1 from PyPI into .venv/$1 (once)"
	# shellcheck disable=SC2086 # one word a pin
	install --upgrade --no-deps --only-binary :all: --platform "manylinux2014_$1" --target ".venv/$1" $pins
}

case ${1:-} in
base) base ;;
cuda) fetch cuda nvcc ;;
cuda12)
	fetch cuda12 "headers and libraries of CUDA 12"
	.venv/bin/python tools/cuda12.py .venv/cuda12
	;;
nvshmem) fetch nvshmem NVSHMEM ;;
release) fetch release "zig (to link) and auditwheel, 100 MB," ;;
docs) fetch docs Sphinx ;;
cross) cross "${2:?ARCH}" ;;
*) echo "usage: tools/setup_venv.sh base|cuda|cuda12|nvshmem|release|docs|cross ARCH" >&2; exit 2 ;;
esac
