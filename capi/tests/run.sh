#!/bin/sh
# Builds and runs the C programs of this folder against build/lib; their closing line counts.
cd "$(dirname "$0")/../.." || exit 2
mkdir -p build/capi || exit 2
${CC:-gcc} -std=c11 -D_GNU_SOURCE -O1 -Wall -Wextra -Werror -Iinclude -o build/capi/api capi/tests/api.c \
  -Lbuild/lib -ldeepep -Wl,-rpath,"$PWD/build/lib" -pthread || { echo "0 passed, 1 failed"; exit 1; }
exec timeout 120 build/capi/api
