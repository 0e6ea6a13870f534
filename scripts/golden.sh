#!/bin/sh
# Makes the golden numbers in tests/data again, with PyTorch and transformers from PyPI in
# an environment of their own. The files are committed; review the difference.
set -eu
cd "$(dirname "$0")/.."
python=$(scripts/torch-env.sh)
for generator in scripts/golden_*.py; do
    echo "== $generator"
    HF_HUB_OFFLINE=1 "$python" "$generator"
done
git status --short tests/data
