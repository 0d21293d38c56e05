#!/usr/bin/env bash
# run_gpu.sh FOLDER - runs transport_test on the GPUs of this machine, from build/ (make nvshmem), in under a minute. Writes a log for
# each run and summary.txt to FOLDER. PYTHON (python3) has NVSHMEM's wheel.
set -u
cd "$(dirname "$0")/../.."
out=${1:?usage: nvshmem/tests/run_gpu.sh FOLDER}
mkdir -p "$out"
built=${BUILD:-build}
program=$built/nvshmem/transport_test library=$built/lib/libdeepep_nvshmem.so plugin=$built/nvshmem/nvshmem_transport_ibdevx.so.3
nvshmem=$("${PYTHON:-python3}" -c 'import nvidia.nvshmem as it; print(list(it.__path__)[0])') || exit 2
export LD_LIBRARY_PATH=$nvshmem/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
[ "$gpus" -ge 1 ] || { echo "run_gpu.sh: no GPU here" >&2; exit 2; }
failed=0

# run NAME SECONDS [VARIABLE=VALUE ...] -- ARGUMENTS OF transport_test
run() {
	local name=$1 seconds=$2 settings=()
	shift 2
	while [ "$1" != -- ]; do settings+=("$1"); shift; done
	shift
	local start=$SECONDS verdict=passed
	env "${settings[@]}" timeout -k 2 "$seconds" "$program" "$library" --gpus "$gpus" --seconds $((seconds - 1)) "$@" >"$out/$name.log" 2>&1 || {
		verdict=FAILED
		failed=$((failed + 1))
	}
	echo "$verdict $name ($((SECONDS - start)) s): $*" | tee -a "$out/summary.txt"
}

{
	date -u
	nvidia-smi -L
	ls -l "$library" "$plugin" "$nvshmem/lib/libnvshmem_host.so.3"
} >"$out/summary.txt"
# All GPUs by NVLink, no plugin.
run one-host 13 -- --ranks $((gpus < 2 ? 2 : gpus > 4 ? 4 : gpus))
# Two hosts that only the plugin joins: at once and in order; late and in a random order.
run two-hosts 10 -- --ranks 2 --hosts 2 --plugin "$plugin"
run two-hosts-late 10 DEEPEP_TESTTRANSPORT=7:300:4 -- --ranks 2 --hosts 2 --plugin "$plugin"
if [ "$gpus" -ge 4 ]; then
	run two-by-two-late 10 DEEPEP_TESTTRANSPORT=11:300:4 -- --ranks 4 --hosts 2 --plugin "$plugin"
fi
run lost-peer 8 -- --ranks 2 --hosts 2 --plugin "$plugin" --lose
# NVSHMEM ended and started once more in the same processes.
run restart 8 -- --ranks 2 --restart
tail -n 30 "$out"/*.log
cat "$out/summary.txt"
exit $((failed > 0))
