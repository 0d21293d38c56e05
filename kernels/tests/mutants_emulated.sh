#!/bin/bash
# mutants_emulated.sh: a test of the test without a GPU. Variants of the CUDA library on emulated devices (make emulated), with one
# planted error each of mutants_cuda.list, in build/mutants_emulated; the kernel suite has to fail for each of them.
# ONLY="1 21": some of the numbers. The last line is "N passed, N failed".
set -u
cd "$(dirname "$0")/../.." || exit 1
unset MAKEFLAGS MAKELEVEL MFLAGS DEEPEP_TEST_SANITIZER
export folder=build/mutants_emulated objects=build/obj/emulated library=build/test/libdeepep_emulated.so
mkdir -p "$folder"
make --no-print-directory --jobs=2 emulated >"$folder/build.log" 2>&1 || { tail -n 20 "$folder/build.log"; exit 1; }
make -n -B "$library" >"$folder/commands" || exit 1

# Includes name files from kernels/ on: a changed copy in a folder that is looked into first is enough.
build() { # number file expression
  local tree=$folder/tree$1 header=$objects/include/cuda/$2 object link
  rm -rf "$tree" && mkdir -p "$tree/$(dirname "cuda/$2")" && sed "$3" "$header" >"$tree/cuda/$2" || return 1
  [ "$(diff "$header" "$tree/cuda/$2" | grep -c '^<')" -eq 1 ] || { echo "mutant $1 does not change one line of $2"; return 1; }
  link=$(grep -F -- "-o $library" "$folder/commands" | sed "s|-o $library|-o $folder/$1.so|")
  for object in $(grep -lF "$header" $objects/*.d | sed 's/d$/o/'); do
    sh -c "$(grep -F -- "-c -o $object " "$folder/commands" | sed "s|-MMD -MP -c -o $object|-O1 -c -o $tree/${object##*/}|; s| -I$objects/include| -I$tree -I$objects/include|")" || return 1
    link=${link/ $object/ $tree\/${object##*/}}
  done
  sh -c "$link" && rm -rf "$tree"
}
attempt() { # a line of the list
  local title file expression cases devices number
  IFS='~' read -r title file expression cases _ devices <<<"$1"
  number=${title%% *}
  rm -f "$folder/$number.so"
  build "$number" "$file" "$expression" >"$folder/$number.log" 2>&1 || { echo "FAILED mutant $title: it cannot be built: $(tail -n 1 "$folder/$number.log")"; return; }
  DEEPEP_EMULATE=$devices timeout -k 2 100 build/bin/kernel_tests "$folder/$number.so" --threads --filter "$cases" --stop >"$folder/$number.log" 2>&1
  local status=$? why
  why=$(grep -m 1 '^FAILED\|^emulate:' "$folder/$number.log" || echo "it ended with status $status")
  case "$status $why" in
    0*) echo "FAILED mutant $title: not noticed" ;;
    *'FAILED opening'* | *'no case has'*) echo "FAILED mutant $title: $why" ;;
    *) echo "ok     mutant $title: ${why:0:150}" ;;
  esac
}
export -f build attempt

# Without a mutant nothing fails, else the failures below say nothing.
if DEEPEP_EMULATE=cc=90,sms=3 build/bin/kernel_tests $library --threads --filter '^combine/BF16|^dispatch/BF16|^ll combine/BF16' >"$folder/0.log" 2>&1; then
  echo "ok     no mutant, no failure"
else
  echo "FAILED no mutant, but: $(grep -m 1 '^FAILED' "$folder/0.log")"
fi >"$folder/verdicts"
grep -v '^#' kernels/tests/mutants_cuda.list | grep -v '~-$' | while IFS= read -r line; do
  [ -z "${ONLY:-}" ] || [[ " $ONLY " == *" ${line%% *} "* ]] || continue
  printf '%s\0' "$line"
done | xargs -0 -P 2 -I '{}' bash -c 'attempt "$1" 2>/dev/null' _ '{}' | tee -a "$folder/verdicts"
passed=$(grep -c '^ok' "$folder/verdicts") failed=$(grep -c '^FAILED' "$folder/verdicts")
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
