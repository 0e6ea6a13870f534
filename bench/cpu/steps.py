#!/usr/bin/env python3
"""Fine-tuning steps on CPU cores: Tessera beside PyTorch with transformers, in turn on the same cores.

usage: bench/cpu/steps.py [MODEL:SEQUENCES...] [--threads 2] [--rounds 3] [--budget 400]

For each cell (small:8 and base:8: bench/cpu/MODEL.yaml) the peer (peer.py) is started, warms up and
then waits without work, while rounds of these are measured one after the other:

    packed           one rank with all threads, windows of real questions end to end
    padded           the same, every window padded to 384
    2 ranks, stage N two ranks with one thread each, half of the sequences each (small alone)
    PyTorch          the same questions padded to 384, as its users do; all threads

Both sides run fp32 with dropout, clipping and AdamW, and choose their kernels themselves:
OPENBLAS_CORETYPE and OPENBLAS_L2_SIZE are taken out of the environment. Shown is the median over the
rounds of a round's mean step. Before a table is printed the results are checked: the losses of 1 and 2
ranks agree, stages 0 and 3 give the same to the last bit. (Padded losses are others: as in transformers
their softmax runs over the padding too.)

Without torch and transformers in this Python the peer is left out, and said so. Exit code 1: a run
failed or a check did not hold; that a goal was missed is only shown.
"""
import argparse
import datetime
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(os.path.dirname(HERE), "gpu"))
import runs  # noqa: E402
import weights  # noqa: E402

SIZES = {"small": (384, 6, 1536), "base": (768, 12, 3072)}
# Steps measured a round; Tessera has WARM more before them in each of its runs.
STEPS = {"small": {"packed": 6, "padded": 4, "ranks": 6, "peer": 4},
         "base": {"packed": 3, "padded": 2, "ranks": 3, "peer": 2}}
WARM = 1
GOALS = {"packed": 2.5, "padded": 1.0, "stages": 1.15}
LOSS_BAND = 1e-4  # 1 and 2 ranks: sums in another order, the same samples and masks


def cores():
    return len(os.sched_getaffinity(0))


class Peer:
    """PyTorch, measuring when asked (peer.py)."""

    def __init__(self, cell, strategy, threads):
        self.process = subprocess.Popen(
            [sys.executable, os.path.join(HERE, "peer.py"), cell, strategy, str(threads)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.about = self.read()

    def read(self):
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def measure(self, steps):
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        record = self.read()
        return record and statistics.fmean(record["ms"])

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def peer_is_there():
    probe = "import torch, transformers"
    return subprocess.run([sys.executable, "-c", probe], stdout=subprocess.DEVNULL,
                          stderr=subprocess.DEVNULL).returncode == 0


class Cell:
    """What the rounds of one model gave."""

    def __init__(self, name, sequences, args):
        self.name, self.sequences, self.args = name, sequences, args
        self.ms, self.runs, self.failed = {}, {}, []
        hidden, layers, ffn = SIZES[name]
        self.weights = os.path.join(args.folder, "weights-" + name)
        weights.write(self.weights, vocab=30522, hidden=hidden, layers=layers, ffn=ffn,
                      positions=512, types=2)

    def tessera(self, label, steps, ranks=1, options=(), **sets):
        run = runs.train(f"bench/cpu/{self.name}.yaml", os.path.join(self.args.folder, "run"),
                         ranks, "cpu", options=options, timeout=600, train__steps=WARM + steps,
                         train__micro_batch=self.sequences // ranks,
                         train__threads=max(self.args.threads // ranks, 1),
                         model__init_from=self.weights,
                         data__cache_dir=os.path.join(self.args.folder, "features"), **sets)
        if not run.ok:
            print(f"{label}: exit code {run.rc}\n{run.tail()}", file=sys.stderr)
            self.failed.append(label)
            return
        self.ms.setdefault(label, []).append(statistics.fmean(s["ms"] for s in run.steps[WARM:]))
        self.runs[label] = run

    def round(self, peer):
        steps = {kind: self.args.steps or n for kind, n in STEPS[self.name].items()}
        self.tessera("packed", steps["packed"])
        self.tessera("padded", steps["padded"], options=["--padded"])
        if self.name == "small":
            for stage in (0, 3):
                self.tessera(f"2 ranks, stage {stage}", steps["ranks"], ranks=2,
                             train__zero_stage=stage)
        if peer:
            ms = peer.measure(steps["peer"])
            if ms is None:
                self.failed.append("PyTorch")
            else:
                self.ms.setdefault("PyTorch", []).append(ms)

    def check(self):
        """Do the results agree?"""
        said = []
        if "packed" in self.runs and "2 ranks, stage 0" in self.runs:
            pairs = zip(self.runs["packed"].steps, self.runs["2 ranks, stage 0"].steps)
            apart = max(abs(a["loss"] - b["loss"]) for a, b in pairs)
            said.append((apart < LOSS_BAND, f"losses of 1 and 2 ranks differ by {apart:.1e}"))
        both = [self.runs.get(f"2 ranks, stage {s}") for s in (0, 3)]
        if all(both):
            same = both[0].bits() == both[1].bits()
            said.append((same, "stages 0 and 3 are equal to the bit" if same else
                         "stages 0 and 3 differ"))
        return said

    def median(self, label):
        return statistics.median(self.ms[label]) if label in self.ms else None

    def rows(self):
        peer, out = self.median("PyTorch"), []
        for label, ms in self.ms.items():
            middle = statistics.median(ms)
            ratio, goal = "", ""
            if peer and label in GOALS:
                ratio, goal = f"{peer / middle:.2f} x PyTorch", f">= {GOALS[label]}"
            if label.endswith("stage 3") and self.median("2 ranks, stage 0"):
                ratio = f"{middle / self.median('2 ranks, stage 0'):.2f} x stage 0"
                goal = f"<= {GOALS['stages']}"
            out.append([f"{self.name}:{self.sequences} {label}", f"{middle:.0f}",
                        f"{min(ms):.0f} - {max(ms):.0f}", f"{self.sequences / middle * 1e3:.2f}",
                        ratio, goal])
        return out


def run_cell(cell, args, budget):
    name, sequences = cell.split(":")
    begin = time.time()
    got = Cell(name, int(sequences), args)
    peer = Peer(cell, args.strategy, args.threads) if args.peer else None
    if peer and peer.about is None:
        print(f"{cell}: the PyTorch peer did not start", file=sys.stderr)
        got.failed.append("PyTorch")
        peer = None
    about, longest = peer and peer.about, 0
    for i in range(args.rounds):
        if i > 0 and time.time() - begin + longest > budget:
            print(f"{cell}: {i} of {args.rounds} rounds in the time there is", file=sys.stderr)
            break
        start = time.time()
        got.round(peer)
        longest = max(longest, time.time() - start)
    if peer:
        peer.close()
    return got, about


def show(rows):
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    for r in rows:
        print("  ".join(c.ljust(w) if i in (0, 4) else c.rjust(w)
                        for i, (c, w) in enumerate(zip(r, widths))).rstrip())


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("cells", nargs="*", metavar="MODEL:SEQUENCES", help="small:8 base:8")
    p.add_argument("--threads", type=int, default=cores(), help="of either side (all cores)")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--steps", type=int, help="measured in each round, of every program")
    p.add_argument("--budget", type=float, default=400,
                   help="seconds; what is left of the rounds then is left out")
    p.add_argument("--strategy", default="eager", choices=("eager", "compile"), help="of PyTorch")
    p.add_argument("--no-peer", action="store_true", help="Tessera alone")
    args = p.parse_args()
    for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
        os.environ.pop(name, None)
    args.cells = args.cells or ["small:8", "base:8"]
    args.peer = not args.no_peer and peer_is_there()
    if not args.peer and not args.no_peer:
        print(f"SKIP PyTorch: {sys.executable} has no torch with transformers (PYTHON= names another)")
    args.folder = tempfile.mkdtemp(prefix="tessera-cpu-")
    begin, cells, about = time.time(), [], None
    try:
        for i, cell in enumerate(args.cells):
            left = args.budget - (time.time() - begin)
            got, said = run_cell(cell, args, left / (len(args.cells) - i))
            cells.append(got)
            about = said or about
    finally:
        shutil.rmtree(args.folder, ignore_errors=True)
    ok = all(not c.failed for c in cells)
    rows = [["step", "ms", "lowest - highest", "sequences/s", "ratio", "goal"]]
    for c in cells:
        rows += c.rows()
        for holds, text in c.check():
            ok = ok and holds
            print(f"{'ok' if holds else 'FAIL'}  {c.name}: {text}")
    for c in cells:
        if "packed" in c.runs:
            run = c.runs["packed"]
            tokens = statistics.fmean(s["tokens"] for s in run.steps)
            print(f"{c.name}: {tokens:.0f} of {384 * c.sequences} tokens a step are real")
    device = next((c.runs["packed"].summary["device"] for c in cells if "packed" in c.runs), "?")
    print(f"{datetime.date.today()}, Tessera: {device}, {args.threads} threads")
    if about:
        print(f"PyTorch {about['torch']} ({args.strategy}), transformers {about['transformers']}, "
              f"{about['threads']} threads, AdamW {about['adamw']}; " + "; ".join(about["kernels"]))
    print()
    show(rows)
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
