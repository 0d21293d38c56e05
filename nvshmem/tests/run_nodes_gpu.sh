#!/usr/bin/env bash
# run_nodes_gpu.sh FOLDER [SECONDS] - the CUDA engine across nodes, on 4 GPUs of this machine, from build/ (make lib kernels cuda
# nvshmem), within SECONDS (600). First nodes are a setting and puts go by NVLink; then nodes are hosts that only NVSHMEM's test
# transport connects, without delays, with delays, and as a NIC of 50 GB/s (nic-*, and wire-* with kernels that post to it themselves, if
# there is that library: make nvshmem-wire). With fewer than 4 GPUs: 2 nodes of one rank; with MPS=1, 4 ranks that share one GPU at the
# same time (nothing is killed then: under MPS a killed process may take others along). Writes a log for each run and summary.txt to FOLDER,
# and prints summary.txt. PYTHON (python3) has torch, pytest and NVSHMEM's wheel. ONLY="NAME ...": only these runs.
set -u
cd "$(dirname "$0")/../.."
out=${1:?usage: nvshmem/tests/run_nodes_gpu.sh FOLDER [SECONDS]}
end=$((SECONDS + ${2:-600}))
mkdir -p "$out"
out=$(realpath "$out")
python=${PYTHON:-python3}
built=$PWD/${BUILD:-build}
plugin=$built/nvshmem/nvshmem_transport_ibdevx.so.3
nvshmem=$("$python" -c 'import nvidia.nvshmem as it; print(list(it.__path__)[0])') || exit 2
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
shared=${MPS:+1}
[ "$gpus" -ge $((shared ? 1 : 2)) ] || { echo "run_nodes_gpu.sh: 2 GPUs are needed (1 with MPS=1), $gpus are here" >&2; exit 2; }
export LD_LIBRARY_PATH=$nvshmem/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export PYTHONPATH=$PWD/python:$PWD/python/tests:$PWD/nvshmem/tests DEEPEP_LIBRARY=$built/lib/libdeepep.so DEEPEP_KERNELS=$built/lib
ranks=$((gpus < 4 && !shared ? 2 : 4))
export DEEPEP_TIMEOUT_MS=8000 DEEPEP_FIRST_TIMEOUT_MS=12000 PYTHONUNBUFFERED=1
export DEEPEP_TEST_DEVICE=cuda DEEPEP_TEST_NODES=$ranks PYTHONDONTWRITEBYTECODE=1
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((shared ? 0 : ranks - 1)))}
if ((shared)); then # the library gives each rank its part of the SMs, so that ranks which wait for each other run together
	export CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d) CUDA_MPS_LOG_DIRECTORY=$out DEEPEP_TEST_RANKS=$ranks
	nvidia-cuda-mps-control -d || exit 2
	trap 'echo quit | nvidia-cuda-mps-control' EXIT
fi

counted=1
source tools/timed_runs.sh

# Through the plugin all kernels are loaded at the start, which takes torch long: one that torch loads while another kernel waits for a copy
# of the proxy waits for that kernel, and the copy for the load. And no copy may be queued behind a kernel that waits for it.
apart=(DEEPEP_TEST_PLUGIN="$plugin" NVSHMEM_REMOTE_TRANSPORT=ibdevx CUDA_MODULE_LOADING=EAGER CUDA_DEVICE_MAX_CONNECTIONS=32)
late=("${apart[@]}" DEEPEP_TESTTRANSPORT=11:200:4)
nic=("${apart[@]}" DEEPEP_TESTTRANSPORT=nic:2:50:100)
wire=$built/nvshmem/libdeepep_nvshmem_wire.so
if [ -e "$wire" ]; then # in a folder of the kernel libraries, in place of the other
	mkdir -p "$out/kernels"
	ln -sf "$built"/lib/*.so* "$out/kernels"
	ln -sf "$wire" "$out/kernels/libdeepep_nvshmem.so"
	posting=("${nic[@]}" DEEPEP_KERNELS="$out/kernels")
fi
tests() { echo "$python" -m pytest -v --no-header --maxfail=4 --durations=6 -p no:cacheprovider "$@"; }
selftest=("$python" nvshmem/tests/selftest_nodes.py internode --num-processes "$ranks" --timeout 20)
normal=python/tests/test_internode.py low_latency=python/tests/test_internode_low_latency.py
read -ra first <<<"$(tests $normal::test_everything)"
read -ra all <<<"$(tests $normal --deselect $normal::test_both_modes_on_one_buffer)"
read -ra some <<<"$(tests $normal::test_everything $normal::test_chosen $normal::test_a_token_crosses_once_for_each_node)"
read -ra fast <<<"$(tests $low_latency)"
read -ra dead <<<"$(tests python/tests/test_internode_failures.py)"
read -ra graphs <<<"$(tests python/tests/test_internode_graphs.py)"
read -ra routed <<<"$(tests python/tests/test_elastic_nodes.py python/tests/test_elastic_shrink.py)"
routed+=(-k "test_cases or masked_between_nodes")
read -ra masks <<<"$(tests python/tests/test_internode_failures.py)"
masks+=(-k "normal_calls") # with enable_shrink
dead+=(-k "(killed and dispatch) or late or shrink")
((shared)) && masks+=(-k "normal_calls and (late or masked)") dead+=(-k "(late_is or late_for or shrink) and not killed") graphs+=(-k "not lost")

{
	date -u
	nvidia-smi -L
	ls -l "$built"/lib/*.so* "$plugin" "$nvshmem/lib/libnvshmem_host.so.3"
} >"$out/summary.txt"
run nvlink-selftest 120 -- "${selftest[@]}"
run nvlink-low-latency 40 -- "${fast[@]}"
run nvlink-normal 40 -- "${all[@]}"
run nvlink-routed 60 -- "${routed[@]}"
run nvlink-failures 70 -- "${dead[@]}"
run nvlink-masks 90 DEEPEP_TEST_FULL=1 -- "${masks[@]}"
run apart-selftest 120 "${apart[@]}" -- "${selftest[@]}" --timeout 90 --num-tokens 256 --iterations 3
run apart-first 100 "${apart[@]}" -- "${first[@]}"
run apart-routed 120 "${apart[@]}" -- "${routed[@]}"
run apart-low-latency 100 "${late[@]}" -- "${fast[@]}" -k "2x2 or 4x1 or 2x1"
run apart-failures 150 "${apart[@]}" -- "${dead[@]}"
run apart-masks 150 DEEPEP_TEST_FULL=1 "${apart[@]}" -- "${masks[@]}"
run apart-graphs 90 "${apart[@]}" -- "${graphs[@]}"
run apart-late 100 "${late[@]}" -- "${some[@]}"
run nic-normal 100 "${nic[@]}" -- "${first[@]}"
run nic-low-latency 100 "${nic[@]}" -- "${fast[@]}" -k "2x2 or 4x1 or 2x1"
if [ -e "$wire" ]; then
	run wire-normal 100 "${posting[@]}" -- "${first[@]}"
	run wire-low-latency 100 "${posting[@]}" -- "${fast[@]}" -k "2x2 or 4x1 or 2x1"
fi
for log in "$out"/*.log; do
	echo "==== $(basename "$log")"
	tail -n 40 "$log" | cut -c 1-400
done
cat "$out/summary.txt"
all_passed
