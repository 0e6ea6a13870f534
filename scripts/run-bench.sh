#!/bin/sh
# Run benches one after the other, then the steps beside PyTorch's. Those named cuda_* skip themselves
# without a GPU; ops runs with one thread and with all cores.
#
# usage: TESSERA=./tessera PYTHON=python3 run-bench.sh PROGRAM...
# PYTHON may have torch and transformers; without them Tessera is measured alone.
set -u
code=0
for program in "$@"; do
    name=$(basename "$program")
    echo "== $name"
    "$program" || code=1
    if [ "$name" = ops ] && [ "$(nproc)" -gt 1 ]; then
        "$program" "$(nproc)" || code=1
    fi
done
echo "== steps on the CPU"
if command -v "$PYTHON" >/dev/null; then
    "$PYTHON" bench/cpu/steps.py || code=1
else
    echo "SKIP: no $PYTHON (PYTHON= names one)"
fi
exit $code
