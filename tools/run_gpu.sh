#!/usr/bin/env bash
# run_gpu.sh FOLDER [SECONDS] - what has to have run on GPUs, within SECONDS (550), from build/ (make lib kernels program cuda), where
# nothing can be built: first the suites, four lanes side by side, then figures, one after another. Writes a log for each run and
# summary.txt to FOLDER, and prints summary.txt. PYTHON (python3) has torch and pytest. ONLY="NAME ...": only these runs. V1=FOLDER: a
# wheel of DeepEP 1.2, unpacked, to be measured beside. Ranks share GPUs where there are fewer than four. Nodes have a script of
# their own, nvshmem/tests/run_nodes_gpu.sh.
set -u
cd "$(dirname "$0")/.."
out=${1:?usage: tools/run_gpu.sh FOLDER [SECONDS]}
end=$((SECONDS + ${2:-550}))
mkdir -p "$out"
out=$(realpath "$out")
python=${PYTHON:-python3}
built=$PWD/${BUILD:-build}
cuda=$built/lib/libdeepep_cuda.so
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
[ "$gpus" -ge 1 ] || { echo "run_gpu.sh: no GPU here" >&2; exit 2; }
export PYTHONPATH=$PWD/python:$PWD/bench PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
export DEEPEP_LIBRARY=$built/lib/libdeepep.so DEEPEP_KERNELS=$built/lib
ranks=$((gpus < 2 ? 2 : gpus > 4 ? 4 : gpus))

counted=1
source tools/timed_runs.sh

# suite NAME SECONDS FILES OPTIONS: files of python/tests, in pools of four ranks.
suite() {
	local name=$1 seconds=$2 files=()
	for file in $3; do files+=("python/tests/test_$file.py"); done
	shift 3
	run "$name" "$seconds" DEEPEP_TEST_DEVICE=cuda DEEPEP_TEST_RANKS=4 -- \
		"$python" -m pytest -v --no-header --maxfail=6 --durations=6 -p no:cacheprovider "${files[@]}" "$@"
}
sanitizer() { # TOOL SECONDS FILTER
	run "$1" "$2" DEEPEP_TEST_SANITIZER="$1" -- "$sanitizer" --tool "$1" --print-limit 20 --error-exitcode 9 \
		"$built/bin/kernel_tests" "$cuda" --threads --patience 8 --filter "$3"
}

{
	date -u
	nvidia-smi -L
	ls -l "$built"/lib/*.so*
} >"$out/summary.txt"
(
	suite threads 60 lifecycle -k threads
	run kernels 240 -- "$built/bin/kernel_tests" "$cuda"
	run sm80 60 -- "$built/bin/kernel_tests" "$cuda" --isa 80 --filter '^ll |^expand/|^combine/|^dispatch/'
) &
(
	suite low-latency 200 "low_latency shrink release lifecycle regroup" --deselect python/tests/test_lifecycle.py::test_threads
	suite graphs 300 graphs
) &
(
	suite normal 300 "dispatch combine layout refused mismatch failures shrink_normal"
	suite face 100 "face face_ordering face_rows streams_events arguments memory_of_arguments"
) &
(
	suite elastic 200 "elastic elastic_balance elastic_clients elastic_failures elastic_ops elastic_refused elastic_regroup elastic_shrink" \
		-k "not between_nodes"
	suite clients 150 "clients clients_inference clients_training ops autograd nn"
	sanitizer memcheck 120 '^expand/|^combine/|^ll dispatch|^ll combine'
	sanitizer racecheck 100 '^expand/at once|^combine/sums'
	sanitizer synccheck 60 '^expand/|^ll dispatch'
) &
wait
run faults 120 -- "$built/bin/deepep" faults --engine cuda --ranks "$ranks" --faults kill,stop,exception --rounds 200
counted=0 # figures from here on
if [ -x "$built/bin/bench_ops" ] && [ "$gpus" -ge 2 ]; then
	shape=(ranks="$ranks" devices="$ranks" experts=$((64 * ranks)))
	run ops-normal 60 -- "$built/bin/bench_ops" "$cuda" "${shape[@]}" mode=normal sms=16,20,24
	run ops-routed 60 -- "$built/bin/bench_ops" "$cuda" "${shape[@]}" mode=routed sms=20,24
	run ops-low-latency 60 -- "$built/bin/bench_ops" "$cuda" "${shape[@]}" mode=ll
	run ops-overlap 60 -- "$built/bin/bench_ops" "$cuda" "${shape[@]}" mode=overlap copies=1
fi
if [ "$gpus" -ge 2 ]; then
	[ -z "${V1:-}" ] || run beside-v1 90 -- "$python" bench/beside_v1.py --v1 "$V1" --ranks "$ranks"
	run overlap 120 -- "$python" bench/gpu.py --only overlap --ranks "$ranks" --rounds 12 --json "$out/overlap.json"
	run figures 200 -- "$python" bench/gpu.py --only startup calls dense normal lowlatency --ranks "$ranks" --json "$out/figures.json"
fi
cat "$out/summary.txt"
all_passed
