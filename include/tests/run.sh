#!/bin/sh
# The headers compile alone, as C and as C++, under every standard they promise; the last line counts.
cd "$(dirname "$0")/../.." || exit 2
out=build/header
mkdir -p "$out" || exit 2
passed=0
failed=0

attempt() { # name, command...
  label=$1
  shift
  if "$@" >"$out/log" 2>&1; then
    passed=$((passed + 1))
    echo "ok   $label"
  else
    failed=$((failed + 1))
    echo "FAIL $label"
    cat "$out/log"
  fi
}

warn="-Wall -Wextra -Werror -Iinclude"
for std in c99 c11 c17; do
  attempt "deepep.h as $std" ${CC:-gcc} -std=$std -pedantic $warn -x c -fsyntax-only include/deepep.h
done
for std in c++17 c++20; do
  attempt "deepep.h as $std" ${CXX:-g++} -std=$std -pedantic $warn -x c++ -fsyntax-only include/deepep.h
  attempt "deepep.hpp as $std" ${CXX:-g++} -std=$std -pedantic $warn -x c++ -fsyntax-only include/deepep.hpp
done
attempt "build header.c as C" ${CC:-gcc} -std=gnu99 $warn -o "$out/header_c" include/tests/header.c
attempt "run it" "$out/header_c"
attempt "build header.c as C++" ${CXX:-g++} -std=gnu++17 $warn -x c++ -o "$out/header_cpp" include/tests/header.c
attempt "run it" "$out/header_cpp"
functions() { grep -oE '\bdeepep_[a-z_]+\(' "$1" | tr -d '(' | grep -v '^deepep_pool_' | sort -u; }
functions include/deepep.h >"$out/c"
functions include/deepep.hpp >"$out/cpp"
grep -oE '\bdeepep_[a-z_]+>' include/deepep.hpp | tr -d '>' >>"$out/cpp" # what an Owner calls
attempt "deepep.hpp calls every function of deepep.h" sh -c "! grep -vxFf $out/cpp $out/c"
printf '#include "deepep.h"\nint main(void) { deepep_call c = DEEPEP_CALL_INIT; return c.no_such_field; }\n' >"$out/wrong.c"
attempt "a wrong field does not compile" sh -c "! ${CC:-gcc} -Iinclude -fsyntax-only $out/wrong.c"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
