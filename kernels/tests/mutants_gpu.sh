#!/bin/bash
# mutants_gpu.sh build [FOLDER] | run [FOLDER]: a test of the test on GPUs. `build` (no GPU needed) makes variants of the CUDA library
# with one planted error each in FOLDER (build/mutants_gpu): a line of a copy of the sources is changed, and the one file that has it
# compiled again. `run` shows that the kernel suite, or bench_ops where there are several GPUs, fails for each of them; PROGRAMS is
# the folder of kernel_tests and bench_ops (build/bin). The last line is "N passed, N failed".
set -u
cd "$(dirname "$0")/../.." || exit 1
unset MAKEFLAGS MAKELEVEL MFLAGS DEEPEP_TEST_SANITIZER
folder=$(realpath -m "${2:-build/mutants_gpu}")
programs=${PROGRAMS:-build/bin}
passed=0 failed=0

mutants=$(grep -v '^#' kernels/tests/mutants_cuda.list | grep -v '~-~[^~]*$')

verdict() { # title, 0 if noticed, more
  if [ "$2" -eq 0 ]; then passed=$((passed + 1)); echo "ok     $1${3:-}"; else failed=$((failed + 1)); echo "FAILED $1${3:-: not noticed}"; fi
}

# The commands with which make builds the library, for sm_90a alone and into $folder; then each variant's own.
commands() { make -n -B BUILD="$folder" SM80_CODE= SM90_CODE='-gencode arch=compute_90a,code=sm_90a' "$folder/lib/libdeepep_cuda.so"; }
build_one() { # number file expression
  local tree=$folder/tree$1 changed unit object
  rm -rf "$tree" && mkdir -p "$tree" && cp -r kernels "$tree/" || return 1
  sed -i "$3" "$tree/kernels/cuda/$2" || return 1
  changed=$(diff "kernels/cuda/$2" "$tree/kernels/cuda/$2" | grep -c '^<')
  [ "$changed" -eq 1 ] || { echo "mutant $1 changes $changed lines of $2"; return 1; }
  local objects=()
  for object in $(cd "$folder/obj" && grep -l "/${2##*/}" kernels/cuda/launch/*.d); do
    unit=${object%.d}
    (cd "$tree" && sh -c "$(grep -F -- "-c -o $folder/obj/$unit.o " "$folder/commands" | sed "s|-MMD -MP -MF [^ ]*||; s|-Xptxas --warn-on-spills,--warning-as-error||; s|-c -o $folder/obj/$unit.o|-c -o $tree/${unit##*/}.o|")") || return 1
    objects+=("$unit")
  done
  [ ${#objects[@]} -gt 0 ] || return 1
  local link
  link=$(grep -F -- "-o $folder/lib/libdeepep_cuda.so" "$folder/commands" | sed "s|-o $folder/lib/libdeepep_cuda.so|-o $folder/$1.so|")
  for unit in "${objects[@]}"; do link=${link/ $folder\/obj\/$unit.o/ $tree\/${unit##*/}.o}; done
  sh -c "$link" && rm -rf "$tree"
}
left_out() { [ -n "${ONLY:-}" ] && [[ " $ONLY " != *" ${1%% *} "* ]]; } # ONLY: some of the numbers
build_all() {
  mkdir -p "$folder"
  make --no-print-directory --jobs=2 BUILD="$folder" SM80_CODE= SM90_CODE='-gencode arch=compute_90a,code=sm_90a' "$folder/lib/libdeepep_cuda.so" >"$folder/build.log" 2>&1 ||
    { tail -n 20 "$folder/build.log"; exit 1; }
  commands >"$folder/commands" && cp "$folder/lib/libdeepep_cuda.so" "$folder/0.so"
  while IFS='~' read -r title file expression _; do
    left_out "$title" && continue
    build_one "${title%% *}" "$file" "$expression" >"$folder/${title%% *}.log" 2>&1
    verdict "mutant $title" $? " $(tail -n 1 "$folder/${title%% *}.log")"
  done <<<"$mutants"
}

# 0 if a program fails for the library, 1 if none does, 2 if it cannot be tried. By kernel_tests, whose ranks take all GPUs there are,
# then by bench_ops, whose batches are larger.
noticed() { # library cases mode log
  [ -e "$1" ] || return 2
  timeout -k 2 40 "$programs/kernel_tests" "$1" --threads --filter "$2" --patience 0.5 --stop >"$4" 2>&1 || {
    grep -q '^FAILED opening' "$4" && return 2
    return 0
  }
  [ -x "$programs/bench_ops" ] && [ "$gpus" -gt 1 ] || return 1
  local shape='tokens=1024 hidden=7168'
  [ "$3" = llcheck ] && shape='hidden=2048 experts=64 max_tokens=64'
  for round in 1 2; do
    # shellcheck disable=SC2086
    timeout -k 2 40 "$programs/bench_ops" "$1" mode="$3" ranks="$gpus" devices="$gpus" $shape nvl_mb=16 >>"$4" 2>&1 || return 0
  done
  return 1
}
attempt() { # number cases mode
  noticed "$folder/$1.so" "$2" "$3" "$folder/$1.$3.txt"
  echo $? >"$folder/$1.$3.status"
}
run_all() {
  gpus=$(nvidia-smi -L | grep -c '^GPU')
  rm -f "$folder"/*.status
  # Without a mutant nothing fails, else the failures below say nothing.
  attempt 0 combine/ normalcheck &
  attempt 0 'll ' llcheck &
  while IFS='~' read -r title _ _ cases mode _; do
    left_out "$title" && continue
    while [ "$(jobs -r | wc -l)" -ge 4 ]; do wait -n; done
    attempt "${title%% *}" "$cases" "$mode" &
  done <<<"$mutants"
  wait
  for mode in normalcheck llcheck; do
    [ "$(cat "$folder/0.$mode.status")" = 1 ]
    verdict "no mutant, no failure ($mode)" $? ": $(grep -v '^skip' "$folder/0.$mode.txt" | tail -n 1 | cut -c1-140)"
  done
  while IFS='~' read -r title _ _ _ mode _; do
    left_out "$title" && continue
    local log=$folder/${title%% *}.$mode
    case $(cat "$log.status") in
      0) verdict "mutant $title" 0 ": $(grep -m 1 '^FAILED\|wrong\|differ\|DK_E' "$log.txt" | cut -c1-140)" ;;
      1) verdict "mutant $title" 1 ;;
      *) verdict "mutant $title" 1 ": there is no $folder/${title%% *}.so that opens" ;;
    esac
  done <<<"$mutants"
}
case ${1:-} in
  build) build_all ;;
  run) run_all ;;
  *) echo "usage: mutants_gpu.sh build|run [FOLDER]"; exit 2 ;;
esac
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
