#!/bin/sh
# Builds every example with warnings as errors and runs it as 4 processes, on one node and on two; the last line counts.
# `run.sh cuda` runs them on GPUs instead, where one node is all there is.
cd "$(dirname "$0")/.." || exit 2
engine=${1:-cpu}
export DEEPEP_ENGINE="$engine"
out=build/examples
mkdir -p "$out" || exit 2
passed=0
failed=0

attempt() { # name, command...
  label=$1
  shift
  if "$@"; then
    passed=$((passed + 1))
    echo "ok   $label"
  else
    failed=$((failed + 1))
    echo "FAIL $label"
  fi
}

flags="-O2 -Wall -Wextra -Werror -Iinclude -o"
libs="-Lbuild/lib -ldeepep -ldl -Wl,-rpath,$PWD/build/lib"
for source in cpp_examples/*.cpp cpp_examples/*.c; do
  name=$(basename "$source")
  program=$out/${name%.*}
  case $source in
    *.cpp) attempt "build $name" ${CXX:-g++} -std=c++17 $flags "$program" "$source" $libs ;;
    *) attempt "build $name" ${CC:-gcc} -std=c11 -D_GNU_SOURCE $flags "$program" "$source" $libs ;;
  esac
  attempt "run $name, 4 ranks" timeout 60 "$program"
  [ "$engine" = cuda ] || attempt "run $name, 2 nodes of 2 ranks" timeout 60 env DEEPEP_NUM_MAX_NVL_PEERS=2 "$program"
  attempt "run $name, 1 rank" timeout 60 "$program" --ranks 1
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
