#!/bin/sh
# Fine-tune a small BERT on two ranks at zero stage 3, show what each stage needs, ask the model a
# question, and kill a run that then goes on elsewhere.
#
# usage: scripts/demo.sh     (`make demo` installs and builds what it needs, then calls it)
# TESSERA names the program; ./tessera if it is not set. Everything printed here is measured.
set -eu
cd "$(dirname "$0")/.."
tessera=${TESSERA:-./tessera}
config=configs/demo.yaml
dir=runs/demo

title() {
    printf '\n== %s\n' "$*"
}

# evaluation SPLIT first|last: "loss, EM, F1" of that evaluation, from metrics.jsonl
evaluation() {
    grep "\"evaluation\":\"$1\"" "$dir/metrics.jsonl" | case $2 in first) head -n 1 ;; *) tail -n 1 ;; esac |
        sed 's/.*"loss":\([^,]*\).*"exact_match":\([^,]*\),"f1":\([^,]*\).*/\1 \2 \3/' |
        awk '{ printf "loss %7.4f  EM %6.2f  F1 %6.2f", $1, $2, $3 }'
}

title "A small BERT with random weights learns questions of SQuAD: zero stage 3, two ranks"
mkdir -p "$dir"
# The resolved configuration goes to stdout too; it is in $dir/config.yaml.
"$tessera" train --config $config --zero-stage 3 --ranks 2 --output-dir $dir >$dir/stdout.txt
sed -n '/^ epoch /,$p' $dir/stdout.txt
rm -f $dir/stdout.txt

title "Before and after"
printf 'questions trained on   before: %s\n' "$(evaluation train first)"
printf '                       after:  %s\n' "$(evaluation train last)"
printf 'other questions        before: %s\n' "$(evaluation eval first)"
printf '                       after:  %s\n' "$(evaluation eval last)"
cat <<'TEXT'
EM and F1 are percent. The model has learnt most of its training questions by heart and little
about the others; it is surer of its wrong answers there, so their loss rises. That is what a small
model that starts from random weights can do. To answer new questions, start from a pretrained
BERT (docs/usage.md).
TEXT

title "Memory of the same run at every zero stage (tessera plan --data)"
"$tessera" plan --config $config --ranks 2 --data

if [ -f $dir/model/model.safetensors ]; then
    title "One of the training questions (tessera predict)"
    # The first paragraph of the training file, and the answer that its authors gave.
    python3 - data/squad/squad-train-v1.1-part.json.gz $dir/question.txt $dir/context.txt <<'PY'
import gzip, json, sys
with gzip.open(sys.argv[1]) as f:
    paragraph = json.load(f)["data"][0]["paragraphs"][0]
asked = paragraph["qas"][0]
open(sys.argv[2], "w").write(asked["question"])
open(sys.argv[3], "w").write(paragraph["context"])
print("question:", asked["question"])
print("expected:", asked["answers"][0]["text"])
PY
    printf 'answered: '
    "$tessera" predict --model $dir/model --question "$(cat $dir/question.txt)" \
        --context-file $dir/context.txt
    rm -f $dir/question.txt $dir/context.txt
fi

title "Another run is killed (SIGKILL) and goes on: 2 ranks at stage 3, then 4 ranks at stage 1"
crash=$dir/crash
total=40
rm -rf $crash
mkdir -p $crash
# The model and data of above without evaluations; the batch of 8 is dealt to twice the ranks later.
set -- --config $config --output-dir $crash --steps $total --checkpoint-every 8 \
    --set data.eval= --set eval.before=false --set eval.train_samples=0
"$tessera" train "$@" --ranks 2 --zero-stage 3 >$crash/first.txt 2>&1 &
victim=$!
trap 'kill -KILL $victim 2>/dev/null || true' EXIT
until [ -d $crash/checkpoints/step-00000016 ]; do
    kill -0 $victim 2>/dev/null || { cat $crash/first.txt; exit 1; }
    sleep 0.1
done
sleep 0.4
kill -KILL $victim
wait $victim 2>/dev/null || true
trap - EXIT
saved=$(ls -d $crash/checkpoints/step-* | tail -n 1 | sed 's/.*step-0*//')
printf 'killed after step %d of %d; the newest complete checkpoint is of step %d\n' \
    "$(grep -c '^{"step":' $crash/metrics.jsonl)" $total "$saved"
"$tessera" train "$@" --ranks 4 --zero-stage 1 --set train.micro_batch=2 --resume latest \
    >$crash/second.txt 2>&1 || { cat $crash/second.txt; exit 1; }
went_on=$(sed -n 's/.*going on from .*: step \([0-9]*\),.*/\1/p' $crash/second.txt)
printf 'went on at step %s on 4 ranks at stage 1, and came to step %d\n' "$went_on" \
    "$(sed -n '$s/.*"step":\([0-9]*\).*/\1/p' $crash/metrics.jsonl)"
# It went on from the checkpoint, and the record has every step once.
[ "$went_on" = "$saved" ] || { echo "expected to go on at step $saved"; exit 1; }
sed -n 's/^{"step":\([0-9]*\).*/\1/p' $crash/metrics.jsonl | awk -v total=$total '
    $1 != NR { wrong = 1 } END { exit wrong || NR != total }' ||
    { echo "$crash/metrics.jsonl does not have the steps 1 to $total, each once"; exit 1; }
sed -n 's/^{"step":\([0-9]*\),.*"loss":\([^,]*\),.*/\1 \2/p' $crash/metrics.jsonl |
    awk -v saved="$saved" '{ sum += $2; n++ }
        $1 == saved { printf "mean loss of steps 1 to %d: %.3f", $1, sum / n; sum = n = 0 }
        END { printf "; of steps %d to %d: %.3f\n", saved + 1, $1, sum / n }'
"$tessera" checkpoint list $crash/checkpoints

title "Files"
echo "$dir: $(ls -m $dir)"
