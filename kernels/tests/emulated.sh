#!/bin/bash
# emulated.sh [LIBRARY]: the kernel suite over the CUDA library on emulated devices (kernels/tests/emulate), in the shapes below,
# two at a time. DEEPEP_TEST_FULL=1: the whole suite for both architectures, also with turns at random.
# Prints what failed and, at last, "N passed, N failed".
set -u
cd "$(dirname "$0")/../.." || exit 1
unset DEEPEP_TEST_SANITIZER
export library=${1:-build/test/libdeepep_emulated.so} logs=build/test/emulated
rm -rf "$logs" && mkdir -p "$logs"

# name ~ devices (DEEPEP_EMULATE) ~ cases ~ options. What takes longest comes first. Ranks have a device each but where it says so.
usual='normal90~cc=90,sms=3~^dispatch/|^worst/|^peer rows/|^expand/|^copy/~--threads
low latency~cc=90,sms=3~^ll dispatch/|^ll combine/|^ll FP8/|^ll FP4/|^ll order/|^ll copy/~--threads
normal80~cc=80,sms=3~^dispatch/BF16|^dispatch/FP8|^dispatch/hidden|^dispatch/smallest region, 4|^combine/4|^combine/5|^combine/16|^combine/one|^worst/spare|^expand/rows straight|^expand/FP8|^expand/least memory, s|^expand/unred|^peer rows/BF16|^peer rows/worst|^copy/|^normal mask/expanded|^normal mask/plain, a death before c~--threads
normal120~cc=120,sms=3~^combine/16|^expand/unred|^dispatch/hidden|^normal mask/expanded, a~--threads
combine90~cc=90,sms=3~^combine/|^layout/|^notify/|^isa/~--threads
failures~cc=90,sms=3,seed=1~^mask/|^normal mask/|^shrink/|^failure/|^abort/|^timeout/|^mismatch/|^refused/~--threads
rest~cc=90,sms=4,seed=1~^info/|^memory/|^release/|^stream/|^team/|^statistics/|^leaving/notify|^leaving/low-latency|^random/~--threads --rounds 3
many SMs~devices=2,sms=26~^dispatch/|^combine/|^peer rows/~--threads --ranks 2
more SMs than tokens~devices=2,sms=40~^ll ~--threads --ranks 2
one device~devices=1,sms=16~^team/barrier|^notify/pattern|^combine/8|^ll order/two~--threads
processes~cc=90,sms=3~^process/a rank dies~--ranks 4'
full='all90~cc=90~~
all80~cc=80~~
all89~cc=89~~
all120~cc=120~~
at random90~cc=90,seed=2~~--threads --rounds 30
at random80~cc=80,seed=3~~--threads --rounds 30
many SMs~devices=2,sms=26~~--threads --ranks 2
more SMs than tokens~devices=2,sms=40~^ll ~--threads --ranks 2
one device~devices=1,sms=16~~--threads --rounds 10'

run() { # a line of the lists
  IFS='~' read -r name devices cases options <<<"$1"
  # shellcheck disable=SC2086
  DEEPEP_EMULATE=$devices timeout -k 2 1500 build/bin/kernel_tests "$library" --filter "$cases" $options >"$logs/$name.log" 2>&1
  echo "$?" >"$logs/$name.status"
}
export -f run
if [ "${DEEPEP_TEST_FULL:-0}" = 1 ]; then chosen=$full; else chosen=$usual; fi
echo "$chosen" | xargs -P 2 -d '\n' -I '{}' bash -c 'run "$1"' _ '{}'

passed=0 failed=0
while IFS='~' read -r name devices _; do
  log=$logs/$name.log
  read -r good _ bad _ < <(grep -E '^[0-9]+ passed, ' "$log" | tail -n 1)
  if [ -z "${good:-}" ]; then # it came to no end
    good=$(grep -c '^ok ' "$log") bad=1
    echo "FAILED $name ($devices): it ended with status $(cat "$logs/$name.status"): $(tail -n 1 "$log")"
  fi
  grep '^FAILED' "$log" | sed "s/^/$name ($devices): /"
  echo "ok     $name ($devices): $good cases passed"
  passed=$((passed + good)) failed=$((failed + bad))
done <<<"$chosen"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
