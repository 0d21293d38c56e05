#!/bin/sh
# A test of the test: builds variants of the CPU library with one planted error each (#if DK_MUTANT == n in kernels/cpu) and
# shows that kernel_tests fails for every one of them. `mutants.sh race` plants races instead, in the build for TSan, which has to
# report each (and ends there: reports are slow). The last line is "N passed, N failed".
set -u
cd "$(dirname "$0")/../.." || exit 1
unset MAKEFLAGS MAKELEVEL MFLAGS DEEPEP_TEST_SANITIZER
passed=0 failed=0

# numbers of mutants, and the cases that are enough to notice each
kinds='1 a lost flag|ll order/halves
2 a stale epoch|ll order/
3 a row off by one|dispatch/BF16
4 a corrupted byte|dispatch/BF16
5 a wrong column of scales|dispatch/FP8
6 a skipped weight|ll combine/
7 a wrong row of scales|ll FP8/
8 another order of the sum|combine/
9 a barrier that does not wait|team/barrier
10 a failed call that leaves its output|abort/
11 a signal before its data|transport/order
12 another order in a queue pair|transport/order
13 a lost completion|transport/quiet
21 the flag of one queue pair is lost|ll internode/pairs: ll dispatch
22 a flag before its rows|ll internode/pairs_late: ll dispatch
23 a mirror of the last use|ll internode/pairs_late: ll dispatch
24 a mirror overwritten while it is read|ll internode edges/overwritten
25 a credit before the rows were read|ll internode edges/a slot
26 a send of before a clean|ll internode edges/sent
27 a slot that is used again too early|ll internode edges/on its way
28 rows that are given back too early|ll internode edges/callers
31 a head before its row|normal internode seeds/3 nodes of 2
32 a credit before the reading|normal internode seeds/3 nodes of 2
33 a forgotten reader|normal internode seeds/2 nodes of 2
34 a node that is added twice|normal internode/pairs: combine/4 ranks
35 a source that is used again while it crosses|normal internode seeds/4 nodes of 1'
races='100 a flag without order|ll order/
101 a signal without order|transport/order in a queue'

verdict() { # title, 0 if noticed
  if [ "$2" -eq 0 ]; then passed=$((passed + 1)); echo "ok     $1"; else failed=$((failed + 1)); echo "FAILED $1: not noticed"; fi
}

# Compiles the one file that has mutant $1 again, and links it with the objects of the build in folder $2 to $2/mutants/$1.so.
build() {
  number=$1 folder=$2
  source=$(grep -lE "DK_MUTANT == $number( |\$)" kernels/cpu/*.cpp) || return 1
  object=$folder/obj/${source%.cpp}.o
  mkdir -p "$folder/mutants"
  commands=$(make -n -B BUILD="$folder" ${SAN:+SAN=$SAN} "$folder/lib/libdeepep_cpu.so") || return 1
  compile=$(echo "$commands" | grep -F -- "-c -o $object ")
  link=$(echo "$commands" | grep -F -- "-o $folder/lib/libdeepep_cpu.so")
  [ -n "$compile" ] && [ -n "$link" ] || return 1
  variant=$folder/mutants/$number
  sh -c "$(echo "$compile" | sed "s|-MMD -MP -c -o $object|-DDK_MUTANT=$number -c -o $variant.o|")" &&
    sh -c "$(echo "$link" | sed "s|$folder/lib/libdeepep_cpu.so|$variant.so|; s| $object| $variant.o|")"
}

if [ "${1:-}" = race ]; then
  SAN=thread
  while IFS='|' read -r kind cases; do
    number=${kind%% *}
    build "$number" build/tsan || { verdict "race $kind (cannot be built)" 1; continue; }
    TSAN_OPTIONS=halt_on_error=1 DEEPEP_TEST_SANITIZER=thread build/tsan/bin/kernel_tests "build/tsan/mutants/$number.so" --filter "$cases" --stop \
      >"build/tsan/mutants/$number.log" 2>&1
    grep -q 'WARNING: ThreadSanitizer: data race' "build/tsan/mutants/$number.log"
    verdict "race $kind" $?
  done <<LIST
$races
LIST
else
  # The suite passes without a mutant, else its failures say nothing.
  build/bin/kernel_tests build/lib/libdeepep_cpu.so --filter "dispatch/BF16" >/dev/null
  verdict "no mutant, no failure" $?
  while IFS='|' read -r kind cases; do
    build "${kind%% *}" build || { verdict "mutant $kind (cannot be built)" 1; continue; }
    build/bin/kernel_tests "build/mutants/${kind%% *}.so" --filter "$cases" --patience 0.1 --stop >"build/mutants/${kind%% *}.log" 2>&1
    grep '^FAILED .*/' "build/mutants/${kind%% *}.log" | grep -qv '^FAILED opening'
    verdict "mutant $kind" $?
  done <<LIST
$kinds
LIST
fi
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
