#!/bin/sh
# Makes the golden numbers in tests/data again, with PyTorch and transformers from PyPI in
# an environment of their own. The files are committed; review the difference.
set -eu
cd "$(dirname "$0")/.."
venv=build/golden-venv

if ! "$venv/bin/python" -c 'import torch, transformers, numpy' 2>/dev/null; then
    python3 -m venv "$venv"
    # The default wheel of torch computes on the CPU too; it brings about 3 GB of CUDA libraries.
    "$venv/bin/pip" install --quiet torch==2.15.0 transformers==4.57.6 numpy==2.4.6
fi
for generator in scripts/golden_*.py; do
    echo "== $generator"
    HF_HUB_OFFLINE=1 "$venv/bin/python" "$generator"
done
git status --short tests/data
