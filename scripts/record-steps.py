#!/usr/bin/env python3
"""Record instruction timings of real steps, for tests/train_recorded.c.

usage: scripts/record-steps.py [--tessera ./tessera] [--out tests/data/steps] [--steps 3]
       scripts/record-steps.py --card NAME CONFIG MICRO_BATCH STAGE TRACE.json

Two ranks of one thread train the demo's model on the CPU at each zero stage with --trace; rank 0's
instructions become tests/data/steps/stageS.tsv:

    # rows 1664                     most rows of a micro-batch, for the plan
    # tokens 701 655 690            of rank 0 in each recorded step
    # step_us 81234.0 80111.1 ...   each step, from its first instruction to the last
    instr  op  unit  micro_batch  us  us  us

us is what the rank itself spent on the instruction ("busy" of engine/train/trace.h).

--card turns a trace of a card (`tessera train --config CONFIG --set train.micro_batch=MICRO_BATCH
--zero-stage STAGE --trace` on one GPU, made there) into tests/data/steps/NAME.tsv, where streams overlap:

    # card NVIDIA H200
    # config bench/gpu/bert-base.yaml micro_batch 8 stage 0
    # rows 1792 class 1536           most rows of a micro-batch, for the plan; those of this step
    # tokens 1495 squared_lengths 331801
    # step_us 4686.592
    instr  op  unit  micro_batch  begin_us  us

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
        "eval.train_samples=0", "train.threads=1", "train.tables=whole", "output.model=false",
        "data.cache_dir="]


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


def mean_of(args, config, micro_batch, steps):
    plan = json.loads(run([args.tessera, "plan", "--config", config, "--device", "cuda", "--ranks", "1",
                           "--set", f"train.micro_batch={micro_batch}", "--data", "--json",
                           "--set", f"train.steps={steps}"]))
    return plan["rows"], {key: value * steps for key, value in plan["mean_micro_batch"].items()}


def record_card(args, name, config, micro_batch, stage, path):
    trace = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    facts, events = trace["otherData"], [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert facts["world_size"] == 1 and [e["args"]["instr"] for e in events] == list(range(len(events)))
    _, until = mean_of(args, config, micro_batch, facts["step"])
    _, before = mean_of(args, config, micro_batch, facts["step"] - 1)
    step = {key: round(until[key] - before[key]) for key in until}
    assert step["tokens"] == facts["tokens"], (step, facts)
    rows, _ = mean_of(args, config, micro_batch, args.card_steps)
    lines = [f"# card {facts['device']}", f"# config {config} micro_batch {micro_batch} stage {stage}",
             f"# rows {rows} class {step['rows_of_length_class']}",
             f"# tokens {step['tokens']} squared_lengths {step['squared_lengths']}",
             f"# step_us {facts['step_us']:.3f}"]
    for event in events:
        a = event["args"]
        lines.append("\t".join([str(a["instr"]), a["op"], a["unit"] or "-", str(a["micro_batch"]),
                                f"{event['ts']:.3f}", f"{event['dur']:.3f}"]))
    out = pathlib.Path(args.out) / f"{name}.tsv"
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tessera", default="./tessera")
    parser.add_argument("--out", default="tests/data/steps")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--card", nargs=5, metavar=("NAME", "CONFIG", "MICRO_BATCH", "STAGE", "TRACE"))
    parser.add_argument("--card-steps", type=int, default=12, help="of the traced run, for its plan")
    args = parser.parse_args()
    if args.card:
        record_card(args, *args.card)
        return
    for stage in range(4):
        record(args, stage)


if __name__ == "__main__":
    main()
