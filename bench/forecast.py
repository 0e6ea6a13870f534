#!/usr/bin/env python3
"""How far predicted steps are from measured ones: stages 0 to 3 on this machine.

usage: bench/forecast.py [--ranks 2] [--device cpu] [--config bench/cpu/small.yaml] [--micro-batch 4]
                         [--stages 0,1,2,3] [--steps 8] [--rounds 2] [--set KEY=VALUE]...
                         [--processor-time] [--profile FILE] [--record FILE]

In each round `tessera calibrate` measures the machine with the same ranks and threads, `tessera plan
--data --profile` predicts a step of each stage, and a short run of each stage measures it. Predicted
are the very steps that are measured: the prediction is for the mean batch of a run's steps, so that
for the first two, which warm up, is taken from that for all. The fastest of the rounds counts on both
sides: the fastest calibration, and for each step the fastest of its runs; of processor time, where a
difference could be fast by chance, the median.

Where others use the cores too, --processor-time calibrates and measures processor time instead of the
wall's (CPU ranks of one thread): a step is then what a rank computes and copies, without its waits. It
is the difference between runs of different lengths, over steps and ranks, and the prediction, which is
for the fullest rank, is scaled to the mean of the ranks' tokens.

On a GPU: --device cuda --ranks N --config bench/gpu/bert-large.yaml. --profile skips the calibration.
--record adds the measured steps to a file: tests/data/steps/h200-steps.tsv, which tests/train_forecast.c
holds against the built-in rates, is made of these.
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


def calibrate(args, path):
    words = ["--threads", "1", "--processor-time"] if args.processor_time else []
    tessera("calibrate", "--device", args.device, "--ranks", str(args.ranks), "--output", path, *words)


def plan(args, profile, steps):
    out = tessera("plan", "--config", args.config, "--ranks", str(args.ranks), "--data", "--json",
                  "--profile", profile, *options(args), "--set", f"train.steps={steps}")
    return json.loads(out)


def after_warming(args, of_all, of_first):
    """The mean over the measured steps from those over all and over the first."""
    return ((WARM + args.steps) * of_all - WARM * of_first) / args.steps


def record(args, stage, mean, ms):
    with open(args.record, "a", encoding="utf-8") as f:
        f.write(f"{args.config}\t{args.micro_batch}\t{stage}\t{mean['rows_of_length_class']:.0f}\t"
                f"{mean['squared_lengths']:.0f}\t{ms:.4f}\n")


def predict(args, profile):
    """Milliseconds by stage, and those of them in which communication is exposed; the mean batch."""
    few, all_steps = plan(args, profile, WARM), plan(args, profile, WARM + args.steps)
    mean = {key: after_warming(args, all_steps["mean_micro_batch"][key], before)
            for key, before in few["mean_micro_batch"].items()}
    scale = 1.0
    if args.processor_time:
        scale = mean["tokens"] / mean["tokens_of_fullest_rank"]
    return {stage: [scale * after_warming(args, a[key], b[key])
                    for key in ("predicted_ms", "exposed_ms")]
            for stage, (a, b) in enumerate(zip(all_steps["stages"], few["stages"]))}, mean


def measure(args, stage, folder, seen):
    """The wall's milliseconds of each step; @seen: a list for each, over the rounds."""
    run = runs.train(args.config, folder, ranks=args.ranks, device=args.device, timeout=600,
                     options=options(args), train__zero_stage=stage,
                     train__steps=args.steps + WARM, output__log_every=1)
    if not run.ok:
        raise SystemExit(run.tail())
    for step in run.steps[WARM:]:
        seen.setdefault(step["step"], []).append(step["ms"])


def processor_ms(args, stage, folder, seen):
    """Of all ranks, for runs of both lengths."""
    for steps in (WARM, WARM + args.steps):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run = runs.train(args.config, folder, ranks=args.ranks, device="cpu", timeout=600,
                         options=options(args), train__zero_stage=stage, train__steps=steps,
                         train__threads=1)
        if not run.ok:
            raise SystemExit(run.tail())
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seen.setdefault(steps, []).append(1e3 * (after.ru_utime + after.ru_stime -
                                                 before.ru_utime - before.ru_stime))


def a_step(args, seen, pick):
    if args.processor_time:
        return (pick(seen[WARM + args.steps]) - pick(seen[WARM])) / args.steps / args.ranks
    return statistics.fmean(pick(ms) for ms in seen.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--config", default="bench/cpu/small.yaml")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--stages", default="0,1,2,3")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--processor-time", action="store_true")
    parser.add_argument("--profile")
    parser.add_argument("--record", metavar="FILE")
    args = parser.parse_args()
    stages = [int(s) for s in args.stages.split(",")]
    measured, predicted = {stage: {} for stage in stages}, {stage: [] for stage in stages}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.rounds):
            profile = args.profile or os.path.join(folder, "machine.yaml")
            if not args.profile:
                calibrate(args, profile)
            times, mean = predict(args, profile)
            for stage in stages:
                predicted[stage].append(times[stage])
                how = processor_ms if args.processor_time else measure
                how(args, stage, os.path.join(folder, "run"), measured[stage])
    print(f"{args.config} {' '.join(args.set)}, {args.ranks} ranks, {args.micro_batch} sequences a rank, "
          f"{mean['tokens']:.0f} tokens, {args.rounds} rounds of {args.steps} steps, "
          f"{'processor time, ' if args.processor_time else ''}load {os.getloadavg()[0]:.1f}\n")
    print("| stage | predicted ms (slowest) | exposed | measured ms (slowest) | error |\n"
          "|---|---|---|---|---|")
    for stage in stages:
        usual = statistics.median if args.processor_time else min
        want, exposed = (usual(column) for column in zip(*predicted[stage]))
        slowest = max(predicted[stage])[0]
        best, worst = (a_step(args, measured[stage], pick) for pick in (usual, max))
        if args.record:
            record(args, stage, mean, best)
        print(f"| {stage} | {want:.2f} ({slowest:.2f}) | {exposed:.2f} | {best:.2f} ({worst:.2f})"
              f" | {100 * (want / best - 1):+.1f}% |", flush=True)


if __name__ == "__main__":
    main()
