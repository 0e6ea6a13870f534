#!/bin/sh
# Every GPU row of bench/RESULTS.md again, on a machine with GPUs: one part a heading there.
#
# usage: PYTHON=python3 scripts/run-bench-gpu.sh [PART...] [--dry-run]
#
#     check      right on GPUs, memory of the card                 bench/gpu/check.py
#     ops        single ops and their floors                       bench/cuda_ops
#     attention  attention beside PyTorch's varlen kernels         bench/gpu/attention.py
#     steps      step times at all stages, all GPUs                bench/gpu/steps.py
#     one        the same on one GPU, also with full sequences of 384 tokens; the rate of products
#     breakdown  where a step's time goes: traces, and kernels through CUPTI
#     variants   windows, updates, tables, what is kept, GEMM plan, collectives left out, blocks of
#                NCCL's kernels
#     recipe     a whole fine-tuning; TRAIN="FILE..." EVAL=FILE name the questions
#
# What PyTorch does is left out where PYTHON has no torch and transformers, with a line that says so.
# Tables go to standard output; JSON, as it comes, and traces to OUT (build/bench-gpu). CELLS, ROUNDS
# and BUDGET (seconds for a call of steps.py) make it shorter. --dry-run tries the parts on CPU ranks.
# Exit code 1: a part failed, or there is no GPU.
set -u
cd "$(dirname "$0")/.." || exit 1
python=${PYTHON:-python3}
out=${OUT:-build/bench-gpu}
cells=${CELLS:-base:8 base:32 large:16 large:64}
rounds=${ROUNDS:-5}
budget=${BUDGET:-3600}
dry=
parts=
for argument in "$@"; do
    case $argument in
    --dry-run) dry=--dry-run ;;
    check | ops | attention | steps | one | breakdown | variants | recipe) parts="$parts $argument" ;;
    *)
        echo "run-bench-gpu: unknown part \"$argument\"; see the top of $0" >&2
        exit 2
        ;;
    esac
done
[ -n "$parts" ] || parts="check ops attention steps one breakdown variants recipe"

gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ')
if [ "$gpus" -eq 0 ] && [ -z "$dry" ]; then
    echo "bench-gpu: no GPU here (nvidia-smi -L lists none): nothing was measured" >&2
    exit 1
fi
if ! command -v "$python" >/dev/null; then
    echo "bench-gpu: no $python (PYTHON= names one)" >&2
    exit 1
fi
torch=yes
if [ -n "$dry" ] || ! "$python" -c 'import torch, transformers' >/dev/null 2>&1; then
    torch=no
    echo "SKIP: PyTorch's rows: $python has no torch and transformers, or this is a dry run"
fi
mkdir -p "$out"
code=0

# peers LIST: for steps.py; without PyTorch none.
peers() {
    if [ "$torch" = yes ]; then echo "$1"; else echo none; fi
}

# steps NAME ARGUMENT...: one call of steps.py, its JSON as OUT/NAME.json.
steps() {
    name=$1
    shift
    "$python" bench/gpu/steps.py "$@" --rounds "$rounds" --budget "$budget" \
        --out "$out/$name.json" ${dry:+"$dry"} || code=1
}

part_check() {
    "$python" bench/gpu/check.py --budget "$budget" --out "$out/check.json" \
        ${dry:+--device cpu --gpus 2 --only fp32} || code=1
}

part_ops() {
    for program in build/gpu/bench/cuda_ops build/release/bench/cuda_ops; do
        if [ -x "$program" ]; then
            run=
            [ "$program" != build/gpu/bench/cuda_ops ] || run=build/gpu/run
            for rows in 1408 2816 5632 11136; do
                $run "${run:+bench/}${run:+cuda_ops}${run:-$program}" "$rows" || code=1
            done
            return
        fi
    done
    echo "SKIP: no bench/cuda_ops (scripts/gpu-carry.sh, or make build/release/bench/cuda_ops)"
}

part_attention() {
    if [ -x build/gpu/bench/cuda_attention ]; then
        build/gpu/run bench/cuda_attention || code=1
    elif [ -x build/release/bench/cuda_attention ]; then
        build/release/bench/cuda_attention || code=1
    fi
    if [ "$torch" = yes ]; then
        "$python" bench/gpu/attention.py || code=1
    else
        echo "SKIP: attention: it is compared with PyTorch"
    fi
}

part_steps() {
    # shellcheck disable=SC2086
    steps steps $cells --peers "$(peers ddp,ddp-c,ddp-cm,zero1,fsdp2,fsdp2-c,fsdp3,fsdp3-c)"
}

part_one() {
    # shellcheck disable=SC2086
    steps one $cells --gpus 1 --stages 0 --padded --peers "$(peers one,one-c,one-graphs)"
    steps full large:64 --gpus 1 --stages 0 --full --peers "$(peers one-c)"
    if [ "$torch" = yes ]; then
        "$python" bench/gpu/product.py || code=1
    else
        echo "SKIP: the rate of products that full sequences are a share of: it is PyTorch's"
    fi
}

part_breakdown() {
    # shellcheck disable=SC2086
    steps traced $cells --peers none --trace "$out/traces"
    for trace in "$out"/traces/*.json; do
        case $trace in
        *.rank[1-9]*) continue ;;
        esac
        [ ! -e "$trace" ] || "$python" bench/gpu/breakdown.py "$trace" || code=1
    done
    if [ -n "$dry" ] || [ ! -e build/gpu/lib/libkernels.so ]; then
        echo "SKIP: kernels: no build/gpu/lib/libkernels.so (scripts/gpu-carry.sh), or a dry run"
        return
    fi
    kernels one 1 16 0
    [ "$gpus" -gt 1 ] || return 0
    for cell in 16:0 16:1 64:0 64:3; do
        kernels "large-${cell%:*}-stage${cell#*:}" "$gpus" "${cell%:*}" "${cell#*:}"
    done
}

# kernels NAME RANKS SEQUENCES STAGE: every kernel of BERT-large, a file a rank.
kernels() {
    CUDA_INJECTION64_PATH=$PWD/build/gpu/lib/libkernels.so TESSERA_KERNELS=$out/kernels-$1 \
        build/gpu/run tessera train --config bench/gpu/bert-large.yaml --steps 40 --ranks "$2" \
        --set train.micro_batch="$3" --zero-stage "$4" \
        --output-dir "$out/kernels-run-$1" >"$out/kernels-$1.log" 2>&1 &&
        "$python" bench/gpu/breakdown.py --kernels "$out/kernels-$1".*.csv || code=1
}

part_variants() {
    steps windows-off large:16 --stages 0,1,3 --peers none --set train.windows=none
    steps update-early large:16 --stages 0,1,3 --peers none --set train.update=early
    steps overlap-off large:16 --stages 0,1,3 --peers none --set train.overlap=false
    steps tables-whole large:16 base:8 --stages 0,1,3 --peers none --set train.tables=whole
    steps recompute-gelu large:16 base:8 --gpus 1 --stages 0 --peers none --set train.recompute=gelu
    steps plan-off large:16 base:32 large:64 --gpus 1 --stages 0 --peers none \
        --set train.gemm_plan=off
    echo "Collectives left out: these steps compute nothing that is right."
    TESSERA_SKIP_COLLECTIVES=1
    export TESSERA_SKIP_COLLECTIVES
    steps no-collectives large:16 large:64 base:8 --stages 0,1,3 --peers none
    unset TESSERA_SKIP_COLLECTIVES
    echo "As many blocks for each of NCCL's kernels as it would take itself:"
    NCCL_MAX_CTAS=64
    export NCCL_MAX_CTAS
    steps max-ctas-64 large:16 --stages 0,1 --peers none
    unset NCCL_MAX_CTAS
}

part_recipe() {
    if [ -z "${TRAIN:-}" ] || [ -z "${EVAL:-}" ]; then
        echo "SKIP: the recipe: TRAIN=\"FILE...\" and EVAL=FILE name no questions"
        return
    fi
    if [ ! -d build/minilm ]; then
        echo "SKIP: the recipe: no build/minilm (scripts/minilm.sh)"
        return
    fi
    set --
    for file in $TRAIN; do
        set -- "$@" --train "$file"
    done
    [ "$torch" = yes ] || set -- "$@" --programs tessera
    "$python" bench/gpu/recipe.py "$@" --eval "$EVAL" --out "$out/recipe.json" \
        ${dry:+"$dry"} || code=1
}

for part in $parts; do
    echo "== $part"
    case $part in
    check) part_check ;;
    ops) part_ops ;;
    attention) part_attention ;;
    steps) part_steps ;;
    one) part_one ;;
    breakdown) part_breakdown ;;
    variants) part_variants ;;
    recipe) part_recipe ;;
    esac
done
exit $code
