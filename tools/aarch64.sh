#!/usr/bin/env bash
# aarch64.sh - builds for aarch64 and runs what qemu's user mode runs of it: the kernel suite of the CPU library, Go tests
# that look at no process, the program, the examples with one rank (qemu makes up the start time in /proc/self/stat, so
# that ranks take each other for dead). qemu keeps the host's memory order, too: the fences that aarch64 needs are looked
# for in the code. The last line counts. Options are those of kernel_tests.
set -u
cd "$(dirname "$0")/.." || exit 2
BUILD=build/aarch64 TRIPLET=aarch64-linux-gnu
export QEMU_LD_PREFIX=/usr/$TRIPLET
passed=0 failed=0 skipped=0

missing=()
command -v qemu-aarch64 >/dev/null || missing+=(qemu-user)
for tool in gcc g++; do command -v $TRIPLET-$tool >/dev/null || missing+=("$tool-$TRIPLET"); done
if [ ${#missing[@]} -gt 0 ]; then
	echo "skipped: needs ${missing[*]} (on Debian: apt-get install ${missing[*]})"
	echo "0 passed, 0 failed, 1 skipped"
	exit 0
fi

check() { # name, command...
	local name=$1
	shift
	if "$@" >"$BUILD/check.log" 2>&1; then
		passed=$((passed + 1))
		echo "ok     $name"
	else
		failed=$((failed + 1))
		echo "FAILED $name"
		tail -n 30 "$BUILD/check.log"
	fi
}

# fenced OBJECT FUNCTION...: all of the functions have a fence; sequentially consistent loads and stores have none.
fenced() {
	local code function
	code=$($TRIPLET-objdump -dC --no-show-raw-insn "$BUILD/obj/kernels/cpu/$1") || return 1
	for function in "${@:2}"; do
		awk -v name="<dk::$function(" 'index($0, name) && /:$/ { inside = 1 } /^$/ { inside = 0 } inside && /\tdmb/ { found = 1 }
			END { exit !found }' <<<"$code" || { echo "$function has no fence"; return 1; }
	done
}

example() { # source
	local code folder compiler="$TRIPLET-gcc -std=c11 -D_GNU_SOURCE"
	[[ $1 == *.c ]] || compiler="$TRIPLET-g++ -std=c++17"
	$compiler -O2 -Wall -Wextra -Werror -Iinclude -o "$BUILD/example" "$1" -L$BUILD/lib -ldeepep -ldl \
		-Wl,-rpath,"$PWD/$BUILD/lib" || return 1
	folder=$(mktemp -d)
	timeout 300 qemu-aarch64 "$BUILD/example" --rank 0 1 "$folder" # not --ranks: qemu starts no other program
	code=$?
	rm -rf "$folder"
	return $code
}

mkdir -p $BUILD
make ARCH=aarch64 --no-print-directory lib kernels kernel-tests program || { echo "0 passed, 1 failed"; exit 1; }
check "fences of slots and messages" fenced low_latency/common.o SendHalf::begin SendHalf::post RecvHalf::find RecvHalf::intact
check "fences of notices" fenced team/wait.o mask_peer
check "fences of exchanges" fenced team/exchange.o Exchange::post Exchange::confirmed
check "fences of the software NIC" fenced rdma/thread.o carry_out_signal
check "program" qemu-aarch64 $BUILD/bin/deepep plan
check "go test" env GOARCH=arm64 CGO_ENABLED=0 "${GO:-go}" test -count=1 -vet=off -exec qemu-aarch64 ./core/op ./internal/abi \
	./internal/doctor ./internal/env ./internal/plan ./internal/pool ./internal/status
for source in cpp_examples/*.c cpp_examples/*.cpp; do check "$source, 1 rank" example "$source"; done

qemu-aarch64 $BUILD/bin/kernel_tests $BUILD/lib/libdeepep_cpu.so --patience 5 "$@" | tee $BUILD/kernel_tests.log
read -r kernels_passed _ kernels_failed _ kernels_skipped _ < <(tail -n 1 $BUILD/kernel_tests.log)
if [[ $kernels_passed =~ ^[0-9]+$ ]]; then
	passed=$((passed + kernels_passed)) failed=$((failed + ${kernels_failed:-0})) skipped=$((skipped + ${kernels_skipped:-0}))
else
	failed=$((failed + 1))
fi
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
