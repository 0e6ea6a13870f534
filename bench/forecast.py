#!/usr/bin/env python3
"""How far predicted steps are from measured ones: stages 0 to 3 on this machine.

usage: bench/forecast.py [--ranks 2] [--device cpu] [--config bench/cpu/small.yaml] [--micro-batch 4]
                         [--steps 8] [--rounds 2] [--profile FILE]

`tessera calibrate` measures the machine, `tessera plan --data --profile` predicts a step of each
stage, then short runs of the stages in turns, several rounds, give the measured one: the fastest
round's median of its steps, the first two left out. The calibration runs with the same ranks and
threads. --profile skips it.

Where others use the cores too, --processor-time calibrates and measures processor time instead of the
wall's (CPU ranks of one thread): a step is then what a rank computes and copies, without its waits. It
is the difference between runs of different lengths, over steps and ranks.

A profile holds attention for heads of 64 channels; small.yaml has 32:
--set model.heads=6. On a GPU: --device cuda --ranks N --config bench/gpu/bert-large.yaml.
Prints a Markdown table; exit code 1 if a run failed. Standard library only.
"""
import argparse
import json
import os
import resource
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


def options(args):
    keys = args.set + [f"train.micro_batch={args.micro_batch}", "output.model=false"]
    return [word for key in keys for word in ("--set", key)]


def predict(args, profile):
    out = tessera("plan", "--config", args.config, "--ranks", str(args.ranks), "--data", "--json",
                  "--profile", profile, *options(args))
    return {s["zero_stage"]: s for s in json.loads(out)["stages"]}


def measure(args, stage, folder):
    run = runs.train(args.config, folder, ranks=args.ranks, device=args.device, timeout=600,
                     options=options(args), train__zero_stage=stage,
                     train__steps=args.steps + WARM, output__log_every=1)
    if not run.ok:
        raise SystemExit(run.tail())
    return statistics.median(s["ms"] for s in run.steps[WARM:])


def processor_seconds(args, stage, steps, folder):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = runs.train(args.config, folder, ranks=args.ranks, device="cpu", timeout=600,
                     options=options(args), train__zero_stage=stage, train__steps=steps,
                     train__threads=1)
    if not run.ok:
        raise SystemExit(run.tail())
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure_processor(args, stage, folder):
    few = processor_seconds(args, stage, WARM, folder)
    more = processor_seconds(args, stage, WARM + args.steps, folder)
    return (more - few) * 1e3 / args.steps / args.ranks


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--config", default="bench/cpu/small.yaml")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--processor-time", action="store_true")
    parser.add_argument("--profile")
    args = parser.parse_args()
    measured = {stage: [] for stage in range(4)}
    with tempfile.TemporaryDirectory() as folder:
        profile = args.profile or os.path.join(folder, "machine.yaml")
        if not args.profile:
            words = ["--threads", "1", "--processor-time"] if args.processor_time else []
            print(tessera("calibrate", "--device", args.device, "--ranks", str(args.ranks),
                          "--output", profile, *words))
        predicted = predict(args, profile)
        how = measure_processor if args.processor_time else measure
        for _ in range(args.rounds):
            for stage in range(4):
                measured[stage].append(how(args, stage, os.path.join(folder, "run")))
    print(f"{args.config} {' '.join(args.set)}, {args.ranks} ranks, {args.micro_batch} sequences a rank, "
          f"{args.rounds} rounds of {args.steps} steps, "
          f"{'processor time, ' if args.processor_time else ''}load {os.getloadavg()[0]:.1f}\n")
    print("| stage | predicted ms | exposed | measured ms (rounds) | error |\n|---|---|---|---|---|")
    for stage in range(4):
        best, want = min(measured[stage]), predicted[stage]["predicted_ms"]
        rounds = ", ".join(f"{ms:.0f}" if ms >= 100 else f"{ms:.2f}" for ms in measured[stage])
        print(f"| {stage} | {want:.1f} | {predicted[stage]['exposed_ms']:.1f} | {best:.1f} ({rounds})"
              f" | {100 * (want / best - 1):+.0f}% |")


if __name__ == "__main__":
    main()
