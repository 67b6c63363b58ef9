#!/usr/bin/env bash
# Runs a command with every kernel that it compiles instrumented, bindings included, as torch calls them:
#
#   kernels/sanitize.sh thread sdk conformance cpu --level ops
#   kernels/sanitize.sh address,undefined pytest tests/ops/test_lamb.py
#
# The first error ends the process and is printed. Kernels so compiled are kept apart, in build/sanitize-<kind>/cache.
set -euo pipefail

kind=$1
shift
case $kind in
  thread) runtime=libtsan.so ;;
  address,undefined) runtime=libasan.so ;;
  *) echo "usage: $0 thread|address,undefined COMMAND..." >&2; exit 2 ;;
esac

export DS_PLUGIN_CACHE_DIR=$PWD/build/sanitize-$kind/cache CXX=${CXX:-g++}
export CXXFLAGS="-fsanitize=$kind -fno-sanitize-recover=all -fno-omit-frame-pointer -g1"
export LDFLAGS="-fsanitize=$kind"
# A thread sanitizer does not see how the threads of torch's pool wait for each other: kernels start threads of their
# own instead, and torch has none.
if [ "$kind" = thread ]; then export CXXFLAGS="$CXXFLAGS -DDS_KERNELS_OWN_THREADS=4" OMP_NUM_THREADS=1; fi
# Of libraries that are not instrumented, torch's and Python's, nothing is reported.
export TSAN_OPTIONS="halt_on_error=1 ignore_noninstrumented_modules=1"
export ASAN_OPTIONS="detect_leaks=0"
# Python is not linked against the sanitizer, which must come before everything else.
export LD_PRELOAD="$("$CXX" -print-file-name=$runtime):$("$CXX" -print-file-name=libstdc++.so.6)"
exec "$@"
