#!/bin/sh
# Builds and runs the C programs of this folder against build/lib; the closing line counts. fuzz takes 15 s, with
# DEEPEP_TEST_FULL=1 ten minutes.
cd "$(dirname "$0")/../.." || exit 2
mkdir -p build/capi || exit 2
for name in api fuzz; do
  ${CC:-gcc} -std=c11 -D_GNU_SOURCE -O1 -Wall -Wextra -Werror -Iinclude -o build/capi/$name capi/tests/$name.c \
    -Lbuild/lib -ldeepep -Wl,-rpath,"$PWD/build/lib" -pthread || { echo "0 passed, 1 failed"; exit 1; }
done
seconds=15
[ "${DEEPEP_TEST_FULL:-0}" = 1 ] && seconds=600
{ timeout 120 build/capi/api || echo "0 passed, 1 failed"; build/capi/fuzz $seconds; } >build/capi/run.log 2>&1
cat build/capi/run.log
awk '/^[0-9]+ passed, [0-9]+ failed$/ {passed += $1; failed += $3; programs++}
  END {if (programs < 2) failed++; print passed " passed, " failed + 0 " failed"; exit failed > 0}' build/capi/run.log
