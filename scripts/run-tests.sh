#!/bin/sh
# Run test programs, a summary line each, and end with one line: N passed, N failed, N skipped.
#
# usage: run-tests.sh BUILD_FOLDER PROGRAM...
# A program's output is kept in BUILD_FOLDER/test-logs and shown when it fails.
set -u
build=$1
shift
logs=$build/test-logs
mkdir -p "$logs"
passed=0 failed=0 skipped=0
for program in "$@"; do
    name=$(basename "$program")
    log=$logs/$name.log
    start=$(date +%s%N)
    CMOCKA_MESSAGE_OUTPUT=stdout timeout "${TEST_TIMEOUT:-300}" "$program" >"$log" 2>&1
    code=$?
    ms=$((($(date +%s%N) - start) / 1000000))
    # Between "Running" and "run" only: the summary below names failed and skipped tests again.
    counts=$(awk '/^\[==========\] Running/ { on = 1 } /^\[==========\] .* run\.$/ { on = 0 }
                  on && /^\[       OK \]/ { p++ } on && /^\[  SKIPPED \]/ { s++ }
                  on && /^\[  FAILED  \]/ { f++ } END { print p + 0, s + 0, f + 0 }' "$log")
    p=${counts%% *} f=${counts##* } s=${counts#* } s=${s% *}
    # A program that died, hung or ran nothing has failed, whatever it counted.
    if [ "$code" -ne 0 ] && [ "$f" -eq 0 ] || [ $((p + s + f)) -eq 0 ]; then
        f=$((f + 1))
    fi
    printf '%-28s %4d passed %3d failed %3d skipped %7d ms\n' "$name" "$p" "$f" "$s" "$ms"
    if [ "$f" -gt 0 ]; then
        echo "--- $name: exit code $code"
        grep -v '^\[ RUN      \]\|^\[       OK \]' "$log" | tail -60
        echo "---"
    fi
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
done
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
