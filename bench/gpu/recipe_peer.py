"""The recipe of recipe.py in PyTorch and transformers. Started by recipe.py.

usage: recipe_peer.py features FOLDER DEVICE VOCAB
       torchrun ... recipe_peer.py run FOLDER DEVICE WEIGHTS LR SEED EPOCHS ACCUM STEPS

`features` cuts FOLDER/train.json and eval.json into windows: FOLDER/train.pt, eval.pt, and
train.tsv, eval.tsv in the layout of `tessera features`. `run` trains and answers:
FOLDER/predictions.json and run.json.
"""
import json
import math
import os
import sys
import time
import zlib

import numpy as np
import torch

LENGTH, STRIDE, GLOBAL_BATCH, EVAL_BATCH = 384, 128, 32, 64
N_BEST, LONGEST = 20, 30
CLS, SEP = 101, 102  # of BERT's uncased vocabulary


# ---- windows ----

def label(window, answer):
    """Tokens of the first answer as run_qa labels them: (0, 0) unless wholly in the window."""
    first, last = window["context"]
    if answer is None or last < first:
        return 0, 0
    begins, ends = window["offsets"][first:last + 1].T
    begin = answer["answer_start"]
    end = begin + len(answer["text"])
    if begins[0] > begin or ends[-1] < end:
        return 0, 0
    return (first + int(np.searchsorted(begins, begin, side="right")) - 1,
            first + int(np.searchsorted(ends, end, side="left")))


def cut(question, context, offsets, example):
    """[CLS] question [SEP] window [SEP]; windows share STRIDE tokens of the context."""
    room = LENGTH - 3 - len(question)
    windows, first = [], 0
    while True:
        part = context[first:first + room]
        ids = np.array([CLS, *question, SEP, *part, SEP], np.int32)
        before, count = len(question) + 2, len(part)
        types = np.zeros(len(ids), np.int8)
        types[before:] = 1
        spans = np.zeros((len(ids), 2), np.int32)
        spans[before:before + count] = offsets[first:first + count]
        windows.append({"example": example, "ids": ids, "types": types, "offsets": spans,
                        "context": (before, before + count - 1)})
        if first + room >= len(context):
            return windows
        first += room - STRIDE


def make_features(folder, name, tokenizer):
    with open(os.path.join(folder, name + ".json"), encoding="utf-8") as f:
        articles = json.load(f)["data"]
    questions = [(q, p["context"]) for a in articles for p in a["paragraphs"] for q in p["qas"]]
    texts = list(dict.fromkeys(c for _, c in questions))
    contexts = {}
    for text, e in zip(texts, tokenizer.encode_batch(texts, add_special_tokens=False)):
        contexts[text] = (e.ids, np.array(e.offsets, np.int32).reshape(-1, 2))
    asked = tokenizer.encode_batch([q["question"] for q, _ in questions], add_special_tokens=False)
    windows, lines = [], []
    for i, (question, text) in enumerate(questions):
        mine = cut(asked[i].ids, *contexts[text], i)
        answer = question["answers"][0] if question.get("answers") else None
        checksum = 0
        for w in mine:
            w["label"] = label(w, answer)
            checksum = zlib.crc32(w["ids"].tobytes(), checksum)
        windows += mine
        labels = " ".join("{}:{}".format(*w["label"]) for w in mine)
        lines.append("\t".join([question["id"], str(len(mine)), f"{checksum:08x}", labels]))
    count = len(windows)
    ids, types = np.zeros((count, LENGTH), np.int32), np.zeros((count, LENGTH), np.int8)
    for k, w in enumerate(windows):
        ids[k, :len(w["ids"])] = w["ids"]
        types[k, :len(w["ids"])] = w["types"]
    torch.save({"ids": torch.from_numpy(ids), "types": torch.from_numpy(types),
                "lengths": torch.tensor([len(w["ids"]) for w in windows]),
                "labels": torch.tensor([w["label"] for w in windows]),
                "example": [w["example"] for w in windows],
                "context": [w["context"] for w in windows],
                "offsets": [w["offsets"] for w in windows] if name == "eval" else [],
                "keys": [q["id"] for q, _ in questions],
                "texts": [c for _, c in questions] if name == "eval" else []},
               os.path.join(folder, name + ".pt"))
    with open(os.path.join(folder, name + ".tsv"), "w", encoding="utf-8") as f:
        f.write("\n".join(lines) + "\n")
    return count


def features(folder, vocab):
    from tokenizers import BertWordPieceTokenizer
    tokenizer = BertWordPieceTokenizer(vocab, lowercase=True)
    counts = {name: make_features(folder, name, tokenizer) for name in ("train", "eval")}
    with open(os.path.join(folder, "features.json"), "w", encoding="utf-8") as f:
        json.dump(counts, f)


# ---- training ----

def on_device(data, device):
    """All windows of a split on the card: nothing is copied in a step."""
    ids = data["ids"].to(device).long()
    mask = (torch.arange(LENGTH)[None] < data["lengths"][:, None]).long().to(device)
    labels = data["labels"].to(device)
    return {"input_ids": ids, "token_type_ids": data["types"].to(device).long(),
            "attention_mask": mask, "start_positions": labels[:, 0].contiguous(),
            "end_positions": labels[:, 1].contiguous()}


def half_precision(device):
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def pick(columns, rows):
    return {name: column[rows] for name, column in columns.items()}


def deal(count, rank, world, seed, epoch):
    """This rank's windows of an epoch, as DistributedSampler deals them."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed + epoch))
    missing = -count % world
    return torch.cat([order, order[:missing]])[rank::world]


def train(model, columns, device, rank, world, lr, seed, epochs, accum, steps):
    from transformers import get_linear_schedule_with_warmup
    count = len(columns["input_ids"])
    batch = GLOBAL_BATCH // world
    an_epoch = math.ceil(math.ceil(count / world) / batch)
    total = steps or an_epoch * epochs
    plain = [p for p in model.parameters() if p.ndim == 1]  # biases and LayerNorm
    decayed = [p for p in model.parameters() if p.ndim > 1]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.01},
                                   {"params": plain, "weight_decay": 0.0}],
                                  lr=lr, fused=device.type == "cuda")
    schedule = get_linear_schedule_with_warmup(optimizer, math.ceil(0.1 * total), total)
    parameters = list(model.parameters())
    order = None
    for step in range(total):
        epoch, at = divmod(step, an_epoch)
        if at == 0:
            order = deal(count, rank, world, seed, epoch).to(device)
        mine = order[at * batch:(at + 1) * batch]
        parts = torch.split(mine, max(batch // accum, 1))
        for k, rows in enumerate(parts):
            model.require_backward_grad_sync = k == len(parts) - 1
            with half_precision(device):
                loss = model(**pick(columns, rows)).loss
            (loss * (len(rows) / len(mine))).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
    return total, float(loss.detach())


# ---- answers ----

def forward(model, columns, device, rank, world):
    """Logits of all windows, on rank 0; each rank computes every world-th batch."""
    import torch.distributed as dist
    count = len(columns["input_ids"])
    each = math.ceil(count / world)
    rows = torch.arange(rank * each, (rank + 1) * each, device=device).clamp(max=count - 1)
    out = torch.zeros(each, 2, LENGTH, device=device)
    asked = ("input_ids", "token_type_ids", "attention_mask")
    with torch.inference_mode(), half_precision(device):
        for first in range(0, each, EVAL_BATCH):
            part = rows[first:first + EVAL_BATCH]
            got = model(**{name: columns[name][part] for name in asked})
            out[first:first + len(part), 0] = got.start_logits
            out[first:first + len(part), 1] = got.end_logits
    every = [torch.zeros_like(out) for _ in range(world)] if rank == 0 else None
    dist.gather(out, every)
    return torch.cat(every)[:count].float().cpu().numpy() if rank == 0 else None


def best_spans(start, end, first, last):
    """(score, start, end) of the spans of one window: the best starts with the best ends."""
    i = np.argsort(start)[-1:-N_BEST - 1:-1]
    j = np.argsort(end)[-1:-N_BEST - 1:-1]
    allowed = ((i[:, None] >= first) & (i[:, None] <= last) & (j[None] >= first) &
               (j[None] <= last) & (j[None] >= i[:, None]) & (j[None] - i[:, None] < LONGEST))
    rows, columns = np.nonzero(allowed)
    return [(float(start[i[r]] + end[j[c]]), int(i[r]), int(j[c]))
            for r, c in zip(rows, columns)]


def answers(data, logits):
    best = {}
    for k, example in enumerate(data["example"]):
        first, last = data["context"][k]
        spans = best_spans(logits[k, 0], logits[k, 1], first, last)
        if not spans:
            continue
        score, i, j = max(spans, key=lambda s: s[0])
        if example not in best or score > best[example][0]:
            offsets = data["offsets"][k]
            best[example] = (score, data["texts"][example][offsets[i][0]:offsets[j][1]])
    return {key: best[n][1] if n in best else "empty" for n, key in enumerate(data["keys"])}


def run(folder, kind, weights, lr, seed, epochs, accum, steps):
    import torch.distributed as dist
    import transformers
    from torch.nn.parallel import DistributedDataParallel
    from transformers import BertForQuestionAnswering
    transformers.logging.set_verbosity_error()
    rank, world, local = (int(os.environ[k]) for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = True
    dist.init_process_group("nccl" if kind == "cuda" else "gloo",
                            **({"device_id": device} if kind == "cuda" else {}))
    torch.manual_seed(seed)
    model = BertForQuestionAnswering.from_pretrained(weights, dtype=torch.float32,
                                                     attn_implementation="sdpa").to(device)
    torch.manual_seed(seed + 1000 * (rank + 1))  # dropout
    called = DistributedDataParallel(model, device_ids=[local] if kind == "cuda" else None,
                                     gradient_as_bucket_view=True)
    split = {name: torch.load(os.path.join(folder, name + ".pt"), weights_only=False)
             for name in ("train", "eval")}
    columns = {name: on_device(data, device) for name, data in split.items()}

    def now():
        if kind == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        return time.perf_counter()

    model.train()
    at = [now()]
    done, loss = train(called, columns["train"], device, rank, world, lr, seed, epochs, accum,
                       steps)
    at.append(now())
    model.eval()
    logits = forward(model, columns["eval"], device, rank, world)
    at.append(now())
    if rank == 0:
        chosen = answers(split["eval"], logits)
        with open(os.path.join(folder, "predictions.json"), "w", encoding="utf-8") as f:
            json.dump(chosen, f)
        at.append(time.perf_counter())
        with open(os.path.join(folder, "run.json"), "w", encoding="utf-8") as f:
            json.dump({"train_s": at[1] - at[0], "forward_s": at[2] - at[1],
                       "answers_s": at[3] - at[2], "steps": done, "loss": loss,
                       "torch": torch.__version__, "transformers": transformers.__version__}, f)
    dist.destroy_process_group()


def main():
    mode, folder, kind, *rest = sys.argv[1:]
    if mode == "features":
        features(folder, rest[0])
    else:
        weights, lr, *numbers = rest
        run(folder, kind, weights, float(lr), *(int(n) for n in numbers))


if __name__ == "__main__":
    main()
