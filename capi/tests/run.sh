#!/bin/sh
# Builds and runs the C programs of this folder against build/lib; the closing line counts. fuzz takes 15 s, with
# DEEPEP_TEST_FULL=1 ten minutes, half of that with AddressSanitizer and UBSan in program and kernels.
cd "$(dirname "$0")/../.." || exit 2
mkdir -p build/capi || exit 2
compile() { # NAME OUTPUT FLAG...
  name=$1 output=$2
  shift 2
  ${CC:-gcc} -std=c11 -D_GNU_SOURCE -O1 -Wall -Wextra -Werror "$@" -Iinclude -o "build/capi/$output" \
    "capi/tests/$name.c" -Lbuild/lib -ldeepep -Wl,-rpath,"$PWD/build/lib" -pthread ||
    { echo "0 passed, 1 failed"; exit 1; }
}
compile api api
compile fuzz fuzz
programs=2 seconds=15
if [ "${DEEPEP_TEST_FULL:-0}" = 1 ]; then
  programs=3 seconds=300
  make BUILD=build/asan SAN=address,undefined kernels >build/capi/make.log 2>&1 || { echo "0 passed, 1 failed"; exit 1; }
  compile fuzz fuzz_asan -fsanitize=address,undefined -fno-sanitize-recover=all -g
fi
{
  timeout 120 build/capi/api || echo "0 passed, 1 failed"
  build/capi/fuzz $seconds
  [ $programs = 3 ] && ASAN_OPTIONS=detect_leaks=0 DEEPEP_KERNELS="$PWD/build/asan/lib" build/capi/fuzz_asan $seconds
} >build/capi/run.log 2>&1
cat build/capi/run.log
awk -v programs=$programs '/^[0-9]+ passed, [0-9]+ failed$/ {passed += $1; failed += $3; seen++}
  END {if (seen < programs) failed++; print passed " passed, " failed + 0 " failed"; exit failed > 0}' build/capi/run.log
