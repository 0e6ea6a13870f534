#!/usr/bin/env python3
"""Record instruction timings of real steps, for tests/train_recorded.c.

usage: scripts/record-steps.py [--tessera ./tessera] [--out tests/data/steps] [--steps 3]

Two ranks of one thread train the demo's model on the CPU at each zero stage with --trace; rank 0's
instructions become tests/data/steps/stageS.tsv:

    # rows 1664                     most rows of a micro-batch, for the plan
    # tokens 701 655 690            of rank 0 in each recorded step
    # step_us 81234.0 80111.1 ...   each step, from its first instruction to the last
    instr  op  unit  micro_batch  us  us  us

us is what the rank itself spent on the instruction ("busy" of engine/train/trace.h).
Run it on a quiet machine; the files say what was measured, and nothing is edited in them.
Standard library only.
"""
import argparse
import json
import os
import pathlib
import subprocess
import tempfile

SETS = ["data.max_train_samples=64", "data.max_eval_samples=8", "eval.before=false", "eval.every=0",
        "eval.train_samples=0", "train.threads=1", "output.model=false", "data.cache_dir="]


def run(command):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout


def arguments(stage):
    sets = [word for key in SETS for word in ("--set", key)]
    return ["--config", "configs/demo.yaml", "--ranks", "2", "--zero-stage", str(stage)] + sets


def traced(tessera, folder, stage, step):
    path = os.path.join(folder, "t.json")
    run([tessera, "train", *arguments(stage), "--steps", "10", "--trace", path, "--trace-step", str(step),
         "--output-dir", os.path.join(folder, "run")])
    with open(os.path.join(folder, "t.rank0.json"), encoding="utf-8") as f:
        return json.load(f)


def record(args, stage):
    with tempfile.TemporaryDirectory() as folder:
        traces = [traced(args.tessera, folder, stage, 5 + k) for k in range(args.steps)]
        plan = json.loads(run([args.tessera, "plan", *arguments(stage), "--data", "--json"]))
    columns = [[e["args"] for e in t["traceEvents"] if e["ph"] == "X"] for t in traces]
    lines = [f"# rows {plan['rows']}",
             "# tokens " + " ".join(str(t["otherData"]["tokens"]) for t in traces),
             "# step_us " + " ".join(f"{t['otherData']['step_us']:.1f}" for t in traces)]
    for rows in zip(*columns):
        first = rows[0]
        assert all((r["instr"], r["op"]) == (first["instr"], first["op"]) for r in rows)
        lines.append("\t".join([str(first["instr"]), first["op"], first["unit"] or "-",
                                str(first["micro_batch"])] + [f"{r['busy']:.1f}" for r in rows]))
    out = pathlib.Path(args.out) / f"stage{stage}.tsv"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    sums = [sum(r["busy"] for r in rows) for rows in columns]
    for t, total in zip(traces, sums):
        print(f"stage {stage}: step {t['otherData']['step_us'] / 1e3:.2f} ms, instructions {total / 1e3:.2f} ms")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tessera", default="./tessera")
    parser.add_argument("--out", default="tests/data/steps")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    for stage in range(4):
        record(args, stage)


if __name__ == "__main__":
    main()
