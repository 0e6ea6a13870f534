#!/usr/bin/env python3
"""Step times of Tessera beside PyTorch's, in turn on the same cards.

usage: bench/gpu/steps.py [CELL...] [--stages 0,1,2,3] [--peers ddp,fsdp3-c,...] [--rounds 3]

A cell is MODEL:SEQUENCES, the sequences a GPU in a step (base:8, large:16 by default). For each
cell the peers (peer.py lists them) are started and warmed up side by side and then wait with idle
GPUs, while rounds of (every Tessera stage, every peer) are measured one after the other. Shown is
the median over the rounds, and their spread.

Tessera trains on windows of real questions, packed; the peers on sequences of like lengths, padded
to 384, as their users do; full batches alone count. --padded adds rows of Tessera with padding;
--full gives both sequences of 384 tokens, and Tessera's rows the rate of their operations. Both
report the mean over `--steps` steps without a host synchronisation between them: metrics.jsonl has
the time from report to report, and the host, one step ahead, only waits for the GPU.

Prints each measurement as it comes and a Markdown table a cell for bench/RESULTS.md; --out FILE keeps
every round as JSON, written anew with each. --dry-run tries the script without a GPU: the CPU build,
tiny steps, no peers.
"""
import argparse
import datetime
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import runs  # noqa: E402
import weights  # noqa: E402

PEERS_ONE = "one,one-c,one-graphs"
PEERS_MANY = "ddp,ddp-c,ddp-cm,zero1,fsdp2,fsdp2-c,fsdp3,fsdp3-c"
STAGE_OF = {"ddp": 0, "zero1": 1, "fsdp2": 2, "fsdp3": 3, "one": 0}


class Peer:
    """A PyTorch job that measures when asked (peer.py)."""

    def __init__(self, cell, strategy, world, folder, port, full):
        self.strategy, self.folder, self.number = strategy, folder, 0
        os.makedirs(folder)
        self.log = open(os.path.join(folder, "log"), "wb")
        # Compilers of several jobs run at once here.
        env = dict(os.environ, OMP_NUM_THREADS="4", TORCHINDUCTOR_COMPILE_THREADS="4",
                   TOKENIZERS_PARALLELISM="false")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={world}",
             f"--master-port={port}", os.path.join(HERE, "peer.py"), cell, strategy, folder] +
            (["full"] if full else []),
            stdout=self.log, stderr=subprocess.STDOUT, env=env)
        self.about = None

    def wait(self, name, limit):
        path = os.path.join(self.folder, name)
        end = time.time() + limit
        while time.time() < end:
            if os.path.exists(path):
                with open(path, encoding="utf-8") as f:
                    return json.load(f)
            if self.process.poll() is not None:
                return None
            time.sleep(0.02)
        return None

    def measure(self, steps, limit):
        self.number += 1
        path = os.path.join(self.folder, f"go.{self.number}")
        with open(path + ".part", "w", encoding="utf-8") as f:
            f.write(str(steps))
        os.rename(path + ".part", path)
        return self.wait(f"done.{self.number}", limit)

    def tail(self):
        with open(os.path.join(self.folder, "log"), "rb") as f:
            return "\n".join(f.read().decode("utf-8", "replace").splitlines()[-15:])

    def close(self):
        with open(os.path.join(self.folder, "stop"), "w", encoding="utf-8"):
            pass
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.terminate()  # torchrun then ends its workers
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.log.close()


SIZES = {"base": (768, 12, 3072), "large": (1024, 24, 4096)}
LENGTH = 384


def start_weights(name, args):
    """A folder to start from: drawing 335 M numbers in each run would take longer than the run."""
    if args.random_init or args.dry_run:
        return ""
    folder = os.path.join(args.folder, "weights-" + name)
    if not os.path.exists(folder):
        hidden, layers, ffn = SIZES[name]
        weights.write(folder, vocab=30522, hidden=hidden, layers=layers, ffn=ffn, positions=512,
                      types=2)
    return folder


def full_questions(sequences, args):
    """A file whose windows are all full, and as many as fill whole batches."""
    path = os.path.join(args.folder, f"full-{sequences}.json")
    if not os.path.exists(path):
        # 3 tokens and the question's 2 are not text; windows overlap by 128.
        context = "a " * (LENGTH - 5 + (LENGTH - 5 - 128) * 20)
        ask = [{"id": f"q{i}", "question": "a a", "answers": [{"text": "a", "answer_start": 2 * i}]}
               for i in range(sequences * ranks_of(args))]
        paragraphs = [{"context": context.strip(), "qas": ask}]
        with open(path, "w", encoding="utf-8") as f:
            json.dump({"version": "1.1", "data": [{"title": "full", "paragraphs": paragraphs}]}, f)
    return path


def ranks_of(args):
    """A GPU may play one of several ranks (comm/imitate.h)."""
    return args.gpus * int(os.environ.get("TESSERA_IMITATE_RANKS", "1"))


def operations(cell):
    """Of a GPU's matrix products in a step of full sequences: weights six times, scores twelve."""
    name, sequences = cell.split(":")
    hidden, layers, ffn = SIZES[name]
    tokens = int(sequences) * LENGTH
    return tokens * layers * (6 * (4 * hidden * hidden + 2 * hidden * ffn) + 12 * hidden * LENGTH)


def tessera(cell, stage, args, folder, padded=False, alone=True):
    """One run; what a round records, or None. @alone: no peers wait on the cards."""
    name, sequences = cell.split(":")
    sets = {"train__zero_stage": stage, "train__micro_batch": int(sequences),
            "train__steps": args.warm + args.steps, "train__timeout_s": 60,
            "model__init_from": start_weights(name, args),
            "data__cache_dir": os.path.join(args.folder, "features")}
    if args.full:
        sets["data__train"] = full_questions(int(sequences), args)
    sets.update(item.split("=", 1) for item in args.set)
    options = ["--padded"] if padded else []
    config = f"bench/gpu/bert-{name}.yaml"
    if args.dry_run:
        config = "bench/gpu/check.yaml"
    trace = None
    if args.trace and not padded:
        os.makedirs(args.trace, exist_ok=True)
        trace = os.path.join(args.trace, f"{name}-{sequences}-stage{stage}.json")
        options += ["--trace", trace, "--trace-step", "5"]
    run = runs.train(config, folder, args.gpus, "cpu" if args.dry_run else "cuda",
                     timeout=args.limit, options=options, **sets)
    if not run.ok:
        print(f"tessera {cell} stage {stage}: exit code {run.rc}\n{run.tail()}", file=sys.stderr)
        return None
    # The step that ends a pass over the questions holds fewer; the peers' steps are all full.
    steps = [s for s in run.steps[args.warm:] if s["sequences"] == int(sequences) * ranks_of(args)]
    if not steps:
        print(f"tessera {cell} stage {stage}: no full step", file=sys.stderr)
        return None
    ms = [s["ms"] for s in steps]
    tokens = [s["tokens"] for s in steps]
    sequences_done = sum(s["sequences"] for s in steps)
    card = run.summary.get("card_bytes", {})
    if args.full and set(tokens) != {int(sequences) * LENGTH * ranks_of(args)}:
        sys.exit(f"windows of --full are not full: {sorted(set(tokens))} tokens a step")
    return {"ms": statistics.fmean(ms), "median_ms": statistics.median(ms),
            "per_s": sequences_done / sum(ms) * 1e3, "tokens": statistics.fmean(tokens),
            "skipped": run.summary["skipped"], "seconds": run.seconds,
            "gib": run.summary["bytes_per_rank"]["arena"] / 2**30, "card": card,
            # What the driver says of the card counts others too.
            "process_gib": card["all"] / 2**30 if alone and "all" in card else None,
            "tflops": operations(cell) / statistics.fmean(ms) / 1e9 if args.full else None,
            "loss": run.steps[-1]["loss"]}


def start_peers(cell, args, folder):
    peers = []
    for i, strategy in enumerate(args.peers):
        peers.append(Peer(cell, strategy, args.gpus, os.path.join(folder, strategy),
                          29600 + os.getpid() % 1000 + i, args.full))
    ready = []
    end = time.time() + args.start_limit
    for p in peers:
        p.about = p.wait("ready", max(end - time.time(), 1))
        if p.about is None:
            print(f"{cell} {p.strategy}: did not start\n{p.tail()}", file=sys.stderr)
            p.close()
        else:
            ready.append(p)
    return ready


def run_cell(cell, args, folder, got, note):
    """Add the records of all rounds to @got: label -> list. @note hears of each as it comes."""
    sequences = int(cell.split(":")[1])
    peers = start_peers(cell, args, folder) if args.peers else []
    try:
        for i in range(args.rounds):
            for stage in args.stages:
                for padded in (False, True) if args.padded else (False,):
                    label = f"Tessera, stage {stage}" + (", padded" if padded else "")
                    record = tessera(cell, stage, args, os.path.join(folder, "run"), padded,
                                     alone=not peers)
                    if record:
                        got.setdefault(label, []).append(record)
                        note(cell, i, label, record)
            for p in peers:
                record = p.measure(args.peer_steps, args.limit)
                if record is None:
                    print(f"{cell} {p.strategy}: no answer\n{p.tail()}", file=sys.stderr)
                    continue
                record["per_s"] = sequences * args.gpus / record["ms"] * 1e3
                record["gib"] = record["reserved_gib"]
                got.setdefault(f"PyTorch {p.strategy}", []).append(record)
                args.about = p.about
                note(cell, i, f"PyTorch {p.strategy}", record)
    finally:
        for p in peers:
            p.close()


def stage_of(label):
    return int(label.split("stage ")[1][0]) if label.startswith("Tessera") else \
        STAGE_OF[label.split()[1].split("-")[0]]


def table(cell, got, gpus):
    """Markdown; the last column compares Tessera with the fastest peer of the same stage."""
    name, sequences = cell.split(":")
    lines = [f"### BERT-{name}, {sequences} sequences a GPU, {gpus} GPU{'s' * (gpus > 1)}", "",
             "| program | ms a step | lowest - highest | sequences/s | GiB (arena; reserved) | GiB of the "
             "process | against the fastest PyTorch of the stage, of all |",
             "|---|---|---|---|---|---|---|"]
    mid = {k: statistics.median(r["ms"] for r in v) for k, v in got.items()}
    speed = {k: statistics.median(r["per_s"] for r in v) for k, v in got.items()}
    peers = [k for k in got if not k.startswith("Tessera")]
    for k in sorted(got, key=lambda k: (stage_of(k), not k.startswith("Tessera"), mid[k])):
        ratio = ""
        if k.startswith("Tessera") and peers:
            same = [speed[p] for p in peers if stage_of(p) == stage_of(k)]
            ratio = (f"{speed[k] / max(same):.2f} x, " if same else "") + \
                f"{speed[k] / max(speed[p] for p in peers):.2f} x"
        ms = [r["ms"] for r in got[k]]
        process = [r["process_gib"] for r in got[k] if r.get("process_gib") is not None]
        rate = got[k][0].get("tflops")
        if rate:
            ratio = f"{rate:.0f} TFLOP/s; {ratio}"
        lines.append(f"| {k} | {mid[k]:.2f} | {min(ms):.2f} - {max(ms):.2f} | {speed[k]:.0f} | "
                     f"{max(r['gib'] for r in got[k]):.2f} | "
                     f"{f'{max(process):.2f}' if process else '-'} | {ratio} |")
    return "\n".join(lines)


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    p.add_argument("cells", nargs="*", metavar="CELL", help="MODEL:SEQUENCES (base:8 large:16)")
    p.add_argument("--gpus", type=int, default=runs.gpu_count())
    p.add_argument("--stages", default="0,1,2,3")
    p.add_argument("--peers", help="of peer.py, or none")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--steps", type=int, default=60, help="measured steps a round")
    p.add_argument("--peer-steps", type=int, default=25, help="the same for the peers")
    p.add_argument("--random-init", action="store_true",
                   help="Tessera draws its weights itself, which takes longer")
    p.add_argument("--warm", type=int, default=12, help="Tessera's steps before them")
    p.add_argument("--padded", action="store_true", help="Tessera with padding too")
    p.add_argument("--full", action="store_true", help="all sequences of 384 tokens")
    p.add_argument("--trace", metavar="FOLDER", help="keep a trace of each cell and stage")
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                   help="of Tessera's configuration; repeatable")
    p.add_argument("--limit", type=float, default=120, help="seconds for one measurement")
    p.add_argument("--start-limit", type=float, default=180, help="seconds for the peers to start")
    p.add_argument("--budget", type=float, default=560, help="seconds; later cells are left out")
    p.add_argument("--out", metavar="FILE")
    p.add_argument("--dry-run", action="store_true")
    args = p.parse_args()
    args.cells = args.cells or ["base:8", "large:16"]
    args.stages = [int(s) for s in args.stages.split(",") if s]
    args.set = [s.replace(".", "__", 1) for s in args.set]
    if args.dry_run:
        args.gpus, args.steps, args.warm, args.peers = args.gpus or 2, 3, 1, "none"
    if args.gpus < 1:
        sys.exit("no GPU: nvidia-smi -L lists none (CUDA_VISIBLE_DEVICES?)")
    peers = args.peers or (PEERS_ONE if args.gpus == 1 else PEERS_MANY)
    args.peers = [] if peers == "none" else peers.split(",")
    folder = tempfile.mkdtemp(prefix="tessera-steps-")
    args.folder = folder
    args.about = {}
    begin, all_got, card = time.time(), {}, runs.gpu_name()

    def note(cell, number, label, record):
        """A row as it comes, and the file: what there is, should time run out."""
        print(f"{cell}  round {number + 1}/{args.rounds}  {label}: {record['ms']:.2f} ms, "
              f"{record['per_s']:.0f} sequences/s", flush=True)
        if args.out:
            runs.write_json(args.out, {"card": card, "gpus": args.gpus, "about": args.about,
                                       "command": sys.argv, "cells": all_got})

    for cell in args.cells:
        used = time.time() - begin
        if all_got and used + used / len(all_got) > args.budget:
            print(f"{cell}: left out, {args.budget - used:.0f} s are left", file=sys.stderr)
            continue
        all_got[cell] = {}
        run_cell(cell, args, os.path.join(folder, cell.replace(":", "-")), all_got[cell], note)
        if all_got[cell]:
            print(f"\n{table(cell, all_got[cell], args.gpus)}\n", flush=True)
    print(f"{datetime.date.today()}, {args.gpus} x {card}, PyTorch "
          f"{args.about.get('torch', '-')}, {args.rounds} rounds of {args.steps} steps "
          f"(PyTorch {args.peer_steps}), {time.time() - begin:.0f} s: `{shlex.join(['bench/gpu/steps.py'] + sys.argv[1:])}`")
    shutil.rmtree(folder, ignore_errors=True)
    if not any(all_got.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
