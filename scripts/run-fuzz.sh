#!/bin/sh
# Run libFuzzer on one target after the other; findings are kept.
#
# usage: run-fuzz.sh FOLDER_OF_PROGRAMS SECONDS NAME...
# A target starts from tests/data/fuzz/NAME and from what earlier runs found beside its program. An
# input that fails is left there as crash-*, leak-*, timeout-*: once it is understood, put it into
# tests/data/fuzz/NAME, where every `make test` replays it.
set -u
programs=$1 seconds=$2
shift 2
failed=0
export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_leaks=1:allocator_may_return_null=1}
for name in "$@"; do
    found=$programs/found/$name
    mkdir -p "$found"
    if "$programs/$name" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 \
        -max_len=65536 -artifact_prefix="$found/../$name-" -print_final_stats=1 \
        "$found" "tests/data/fuzz/$name" >"$programs/$name.log" 2>&1; then
        sed -n "s/^stat::number_of_executed_units: */$name: $seconds s, inputs: /p" "$programs/$name.log"
    else
        failed=$((failed + 1))
        echo "$name: FAILED"
        tail -40 "$programs/$name.log"
    fi
done
[ "$failed" -eq 0 ]
