#!/bin/sh
# An environment with PyTorch and transformers from PyPI, in build/golden-venv; prints its python.
set -eu
cd "$(dirname "$0")/.."
venv=build/golden-venv
if ! "$venv/bin/python" -c 'import torch, transformers, numpy' 2>/dev/null; then
    python3 -m venv "$venv" >&2
    # The default wheel of torch computes on the CPU too; it brings about 3 GB of CUDA libraries.
    "$venv/bin/pip" install --quiet torch==2.15.0 transformers==4.57.6 numpy==2.4.6 >&2
fi
echo "$venv/bin/python"
