"""One PyTorch training step on the CPU, to measure Tessera against. Started by steps.py.

usage: peer.py MODEL:SEQUENCES STRATEGY THREADS

It builds, warms up, says "ready" with a JSON line, and then measures whenever a line with a number
of steps comes on standard input, again with a JSON line. While it waits it does nothing, so that it
and Tessera can be measured in turn on the same cores. An end of input ends it.

The step is what fine-tuning scripts do on a CPU: transformers' BertForQuestionAnswering in fp32 with
dropout, windows of real questions padded to 384 with an attention mask, clipping at 1.0, AdamW. What
PyTorch has to make it faster is on: SDPA attention, fused AdamW, gradients set to none, no
gradient checkpointing, all cores, batches made beforehand. Strategies:

    eager     as written
    compile   torch.compile of the model
"""
import gzip
import json
import os
import sys
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch  # noqa: E402
from transformers import BertConfig, BertForQuestionAnswering, BertTokenizerFast  # noqa: E402

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
DATA = os.path.join(ROOT, "data/squad/squad-train-v1.1-part.json.gz")
VOCAB = os.path.join(ROOT, "data/vocab/bert-base-uncased-vocab.txt")
SIZES = {
    "small": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12,
              "intermediate_size": 1536},
    "base": {},
}
LENGTH, STRIDE, BATCHES = 384, 128, 16


def say(record):
    print(json.dumps(record), flush=True)


def read_batches(sequences):
    """BATCHES batches of windows drawn from the bundled questions, and the mean of real tokens."""
    with gzip.open(DATA, "rt", encoding="utf-8") as f:
        articles = json.load(f)["data"]
    pairs = [(q["question"].lstrip(), p["context"])
             for a in articles for p in a["paragraphs"] for q in p["qas"]]
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(42)).tolist()
    chosen = [pairs[i] for i in order[:BATCHES * sequences]]
    windows = BertTokenizerFast(vocab_file=VOCAB)(
        [q for q, _ in chosen], [c for _, c in chosen], truncation="only_second",
        max_length=LENGTH, stride=STRIDE, return_overflowing_tokens=True, padding="max_length",
        return_tensors="pt")
    keys = ("input_ids", "token_type_ids", "attention_mask")
    out = []
    for i in range(BATCHES):
        part = slice(i * sequences, (i + 1) * sequences)
        batch = {k: windows[k][part].contiguous() for k in keys}
        last = batch["attention_mask"].sum(1) - 2
        batch["start_positions"], batch["end_positions"] = last - 1, last
        out.append(batch)
    real = sum(int(b["attention_mask"].sum()) for b in out) / BATCHES
    return out, real


def build(name, strategy):
    torch.manual_seed(0)
    model = BertForQuestionAnswering(BertConfig(attn_implementation="sdpa", **SIZES[name]))
    model.train()
    called = torch.compile(model) if strategy == "compile" else model
    parameters = list(model.parameters())
    try:
        optimizer = torch.optim.AdamW(parameters, lr=3e-5, weight_decay=0.01, fused=True)
        kind = "fused"
    except RuntimeError:  # versions without it on the CPU
        optimizer = torch.optim.AdamW(parameters, lr=3e-5, weight_decay=0.01)
        kind = "for each"

    def step(batch):
        loss = called(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step, kind


def kernels():
    """Whose products these are."""
    lines = torch.__config__.show().splitlines()
    wanted = ("Math Kernel", "MKL-DNN", "CPU capability", "OpenBLAS")
    return [line.strip(" -") for line in lines if any(w in line for w in wanted)]


def main():
    cell, strategy, threads = sys.argv[1:4]
    name, sequences = cell.split(":")
    torch.set_num_threads(int(threads))
    batches, real = read_batches(int(sequences))
    step, adamw = build(name, strategy)
    losses = [step(batches[i]) for i in range(2)]
    import transformers  # for its version
    say({"ready": True, "torch": torch.__version__, "transformers": transformers.__version__,
         "kernels": kernels(), "adamw": adamw, "real_tokens": real, "threads": int(threads),
         "losses": losses})
    at = len(losses)
    for line in sys.stdin:
        count, ms, cpu = int(line), [], time.process_time()
        for _ in range(count):
            begin = time.perf_counter()
            loss = step(batches[at % BATCHES])
            ms.append((time.perf_counter() - begin) * 1e3)
            at += 1
        say({"ms": ms, "cpu_ms": (time.process_time() - cpu) / count * 1e3, "loss": loss})


if __name__ == "__main__":
    main()
