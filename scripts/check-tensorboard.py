#!/usr/bin/env python3
"""Train briefly on two CPU ranks and read what the run left with the real TensorBoard (PyPI: tensorboard).

usage: scripts/check-tensorboard.py [RUN]        $TESSERA names the program, ./tessera without it

RUN is a finished run's folder; without it a run of configs/demo.yaml is made. There is one event file; it
holds every value of metrics.jsonl under its tag and step, planned memory by category, and the
configuration. Exit code 0 also where there is no TensorBoard, with a line that says so.
"""
import json
import os
import subprocess
import sys
import tempfile

try:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
except ImportError:
    EventAccumulator = None

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
OF_STEP = {"train/loss": "loss", "train/lr": "lr", "train/grad_norm": "grad_norm", "train/epoch": "epoch",
           "speed/step_ms": "ms", "speed/tflops_per_rank": "tflops", "speed/mfu": "mfu"}
A_SECOND = {"speed/sequences_per_s": "sequences", "speed/tokens_per_s": "tokens"}
OF_EVALUATION = ("loss", "exact_match", "f1")
SPLITS = {"eval": "validation", "train": "trained_questions"}
MEMORY = ("parameters", "gradients", "master_weights", "adam_m", "adam_v", "in_flight", "activations",
          "workspace", "batch", "arena")


def fail(text):
    sys.exit(f"check-tensorboard: {text}")


def train(folder):
    words = os.environ.get("TESSERA", "./tessera").split()
    sets = ["data.max_eval_samples=20", "eval.every=6", "eval.train_samples=8", "output.model=false"]
    done = subprocess.run(words + ["train", "--config", "configs/demo.yaml", "--ranks", "2", "--steps", "12",
                                   "--zero-stage", "3", "--output-dir", folder] +
                          [word for key in sets for word in ("--set", key)], cwd=ROOT,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        fail(done.stdout[-2000:])


def expected(run):
    """(tag, step) of each value that metrics.jsonl has."""
    values = {}
    with open(os.path.join(run, "metrics.jsonl"), encoding="utf-8") as f:
        records = [json.loads(line) for line in f]
    for r in records:
        if "evaluation" in r:
            values.update({(f"{SPLITS[r['evaluation']]}/{key}", r["step"]): r[key] for key in OF_EVALUATION})
            continue
        values.update({(tag, r["step"]): r[key] for tag, key in OF_STEP.items() if r[key] is not None})
        values.update({(tag, r["step"]): r[key] * 1e3 / r["ms"] for tag, key in A_SECOND.items()})
    return values


def check(run):
    board = os.path.join(run, "tensorboard")
    files = os.listdir(board)
    if len(files) != 1:
        fail(f"{board}: {len(files)} files, not one")
    events = EventAccumulator(board, size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    tags = events.Tags()
    got = {(tag, e.step): e.value for tag in tags["scalars"] for e in events.Scalars(tag)}
    values = expected(run)
    for key, value in values.items():
        if key not in got or abs(got[key] - value) > 1e-6 * abs(value):
            fail(f"{key[0]} at step {key[1]}: {got.get(key)} in place of {value}")
    missing = [name for name in MEMORY if f"memory_MiB/{name}" not in tags["scalars"]]
    if missing:
        fail(f"no memory of {', '.join(missing)}")
    text = events.Tensors("configuration")[0].tensor_proto.string_val[0].decode()
    if "zero_stage:" not in text:
        fail("the configuration is not there")
    return len(values)


def main():
    if EventAccumulator is None:
        print("check-tensorboard: skipped, no TensorBoard (PyPI: tensorboard; PYTHON= one that has it)")
        return
    with tempfile.TemporaryDirectory() as folder:
        run = sys.argv[1] if len(sys.argv) > 1 else os.path.join(folder, "run")
        if len(sys.argv) == 1:
            train(run)
        print(f"check-tensorboard: {check(run)} values, as in metrics.jsonl")


if __name__ == "__main__":
    main()
