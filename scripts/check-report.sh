#!/bin/sh
# Compare two stages of a small BERT briefly, and open the page in headless Chromium
# (scripts/check-report.py): charts and tables are there, nothing on the console.
#
# usage: TESSERA=./tessera scripts/check-report.sh [--shots FOLDER]
set -eu
cd "$(dirname "$0")/.."
found=no
for browser in chromium chromium-browser google-chrome; do
    if command -v "$browser" >/dev/null; then
        found=yes
    fi
done
if [ "$found" = no ]; then
    echo "check-report: skipped, no Chromium (Debian and Ubuntu: the package chromium)"
    exit 0
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if ! "${TESSERA:-./tessera}" compare --config configs/demo.yaml --ranks 1,2 --stages 0,3 --steps 4 \
    --repeat 1 --set data.max_train_samples=20 --output-dir "$folder/compare" \
    >"$folder/log" 2>&1; then
    cat "$folder/log"
    echo "check-report: tessera compare failed"
    exit 1
fi
scripts/check-report.py "$folder/compare/report.html" "$@"
