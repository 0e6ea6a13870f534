#!/usr/bin/env python3
"""How far predicted steps are from measured ones: stages 0 to 3 on this machine.

usage: bench/forecast.py [--ranks 2] [--device cpu] [--config bench/cpu/small.yaml] [--micro-batch 4]
                         [--steps 8] [--rounds 2] [--profile FILE]

`tessera calibrate` measures the machine, `tessera plan --data --profile` predicts a step of each
stage, then short runs of the stages in turns, several rounds, give the measured one: the fastest
round's median of its steps, the first two left out. The calibration runs with the same ranks and
threads. --profile skips it. On a GPU: --device cuda --ranks N --config bench/gpu/bert-large.yaml.
Prints a Markdown table; exit code 1 if a run failed. Standard library only.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "gpu"))
import runs  # noqa: E402

WARM = 2


def tessera(*words):
    done = subprocess.run(runs.tessera() + list(words), cwd=runs.ROOT, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise SystemExit(f"tessera {' '.join(words)}\n{done.stderr}")
    return done.stdout


def predict(args, profile):
    out = tessera("plan", "--config", args.config, "--ranks", str(args.ranks), "--data", "--json",
                  "--profile", profile, "--set", f"train.micro_batch={args.micro_batch}")
    return {s["zero_stage"]: s for s in json.loads(out)["stages"]}


def measure(args, stage, folder):
    run = runs.train(args.config, folder, ranks=args.ranks, device=args.device, timeout=600,
                     train__zero_stage=stage, train__steps=args.steps + WARM, output__log_every=1,
                     train__micro_batch=args.micro_batch, output__model=False)
    if not run.ok:
        raise SystemExit(run.tail())
    return statistics.median(s["ms"] for s in run.steps[WARM:])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--config", default="bench/cpu/small.yaml")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--profile")
    args = parser.parse_args()
    measured = {stage: [] for stage in range(4)}
    with tempfile.TemporaryDirectory() as folder:
        profile = args.profile or os.path.join(folder, "machine.yaml")
        if not args.profile:
            print(tessera("calibrate", "--device", args.device, "--ranks", str(args.ranks),
                          "--output", profile))
        predicted = predict(args, profile)
        for _ in range(args.rounds):
            for stage in range(4):
                measured[stage].append(measure(args, stage, os.path.join(folder, "run")))
    print(f"{args.config}, {args.ranks} ranks, {args.micro_batch} sequences a rank, "
          f"{args.rounds} rounds of {args.steps} steps, load {os.getloadavg()[0]:.1f}\n")
    print("| stage | predicted ms | exposed | measured ms (rounds) | error |\n|---|---|---|---|---|")
    for stage in range(4):
        best, want = min(measured[stage]), predicted[stage]["predicted_ms"]
        rounds = ", ".join(f"{ms:.0f}" if ms >= 100 else f"{ms:.2f}" for ms in measured[stage])
        print(f"| {stage} | {want:.1f} | {predicted[stage]['exposed_ms']:.1f} | {best:.1f} ({rounds})"
              f" | {100 * (want / best - 1):+.0f}% |")


if __name__ == "__main__":
    main()
