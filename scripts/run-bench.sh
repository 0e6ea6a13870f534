#!/bin/sh
# Run benches one after the other. Those named cuda_* skip themselves without a GPU.
set -u
code=0
for program in "$@"; do
    echo "== $(basename "$program")"
    "$program" || code=1
done
exit $code
