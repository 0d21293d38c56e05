#!/usr/bin/env bash
# run_nic_gpu.sh FOLDER [LATENCY_US:GB_PER_S[:POSTS_PER_US]] - calls across nodes that the test transport joins as a NIC does (2:50:100),
# beside what its rate and latency alone allow, on 2 GPUs or 4, in at most 90 s, from build/ (make nvshmem nvshmem-wire build/bin/bench_ops).
# Then, without a rate and a latency, the limit of the worker, and of NVSHMEM's proxy in front of it. Writes a log for each run
# and table.txt to FOLDER, and prints table.txt. PYTHON (python3) has NVSHMEM's wheel. ONLY="NAME ...": only these runs.
set -u
cd "$(dirname "$0")/../.."
out=${1:?usage: nvshmem/tests/run_nic_gpu.sh FOLDER [LATENCY_US:GB_PER_S[:POSTS_PER_US]]}
nic=nic:${2:-2:50:100}
end=$((SECONDS + 90))
mkdir -p "$out"
built=${BUILD:-build}
plugin=$built/nvshmem/nvshmem_transport_ibdevx.so.3 proxied=$built/lib/libdeepep_nvshmem.so posting=$built/nvshmem/libdeepep_nvshmem_wire.so
nvshmem=$("${PYTHON:-python3}" -c 'import nvidia.nvshmem as it; print(list(it.__path__)[0])') || exit 2
export LD_LIBRARY_PATH=$nvshmem/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} CUDA_MODULE_LOADING=EAGER CUDA_DEVICE_MAX_CONNECTIONS=32
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
[ "$gpus" -ge 2 ] || { echo "run_nic_gpu.sh: 2 GPUs are needed, $gpus are here" >&2; exit 2; }
failed=0

# run NAME SECONDS SETTING LIBRARY RANKS ARGUMENTS...
run() {
	local name=$1 seconds=$2 setting=$3 library=$4 ranks=$5
	shift 5
	[ -z "${ONLY:-}" ] || case " $ONLY " in *" $name "*) ;; *) return ;; esac
	local left=$((end - SECONDS)) start=$SECONDS verdict=passed
	[ -e "$library" ] || { echo "LEFT OUT $name: no $library" >>"$out/table.txt"; return; }
	[ "$left" -ge 8 ] || { echo "LEFT OUT $name: no time" >>"$out/table.txt"; return; }
	[ "$seconds" -le $((left - 3)) ] || seconds=$((left - 3))
	DEEPEP_TESTTRANSPORT=$setting timeout -k 2 "$seconds" "$built/bin/bench_ops" "$library" plugin="$(realpath "$plugin")" ranks="$ranks" nodes=2 \
		devices="$ranks" "$@" >"$out/$name.log" 2>&1 || {
		verdict="FAILED ($?)"
		failed=$((failed + 1))
	}
	{
		echo "==== $name: $verdict ($((SECONDS - start)) s)"
		grep -v '^done' "$out/$name.log" | head -n 24 | cut -c 1-200
	} >>"$out/table.txt"
}

{
	date -u
	nvidia-smi -L
} >"$out/table.txt"
run check 20 "$nic" "$posting" 2 mode=normalcheck tokens=512
run nic 25 "$nic" "$posting" 2 mode=nic iterations=30 sms=16,24
run limit-worker 20 nic:0:0 "$posting" 2 mode=nic iterations=15 sms=24
[ "$gpus" -lt 4 ] || run nic-2x2 25 "$nic" "$posting" 4 mode=nic iterations=30 sms=24
run limit-proxy 20 nic:0:0 "$proxied" 2 mode=nic iterations=15 sms=24
run nic-proxy 20 "$nic" "$proxied" 2 mode=nic iterations=15 sms=24
cat "$out/table.txt"
exit $((failed > 0))
