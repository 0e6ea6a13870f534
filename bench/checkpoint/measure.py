#!/usr/bin/env python3
"""Checkpoints of a real run: how small, how fast, and beside torch.distributed.checkpoint.

usage: bench/checkpoint/measure.py [--folder build/bench-checkpoint] [--rounds 5] [--ranks 2]
                                   [--only sizes|saves] [--checkpoint PATH]

1. Trains all-MiniLM-L6-v2 (scripts/minilm.sh) on two questions of each bundled SQuAD paragraph, as
   `make demo WEIGHTS=minilm` does: checkpoints of step 1, step 100 and the end. Minutes; done once.
2. sizes: bench/checkpoint_sizes of the three. A Markdown table.
3. saves: the last one is saved and loaded by Tessera (bench/checkpoint_ranks) and, the same values, by
   PyTorch (peer.py), both by RANKS ranks of one machine into one folder. All files are flushed
   (fsync) on both sides. In each round every case is measured once, in turn. Loading is measured
   from memory (the files have just been written) and from the disk (their pages are dropped
   before). Beside them the floor: copying the state, planes and zstd alone, writing and reading
   files of the same sizes. Shown are medians, with lowest and highest.

What is loaded is compared on both sides. BENCH= names the folder of the programs
(build/release-cpu/bench). Without torch in this Python, PyTorch is left out. Exit code 1: something
failed or loaded values were wrong; that a goal was missed is only shown.
"""
import argparse
import gzip
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
TESSERA = os.environ.get("TESSERA", "./tessera")
BENCH = os.environ.get("BENCH", "build/release-cpu/bench")
WARMUP_STEPS = 34
GOALS = {"blocked": 0.25, "save": 1.0, "load": 1.0, "ratio": 1.15}


# ---- a real run ----------------------------------------------------------------------------------

def write_questions(path, each):
    with gzip.open("data/squad/squad-train-v1.1-part.json.gz", "rt", encoding="utf-8") as f:
        data = json.load(f)
    for article in data["data"]:
        for paragraph in article["paragraphs"]:
            paragraph["qas"] = paragraph["qas"][:each]
    with open(path, "w", encoding="utf-8") as f:
        json.dump(data, f)


def train(folder, name, *options):
    out = os.path.join(folder, name)
    if os.path.exists(os.path.join(out, "done")):
        return os.path.join(out, "checkpoints")
    shutil.rmtree(out, ignore_errors=True)
    print(f"training: {out}", flush=True)
    subprocess.run(
        [TESSERA, "train", "--config", "configs/minilm-squad.yaml", "--device", "cpu",
         "--zero-stage", "3", "--ranks", "2", "--set", "train.micro_batch=2",
         "--set", "train.grad_accum=1", "--set", "optim.lr=2e-4",
         "--set", f"optim.warmup_steps={WARMUP_STEPS}", "--set", f"data.train={folder}/train.json",
         "--set", "data.eval=", "--set", "output.model=false", "--keep", "0",
         "--output-dir", out, *options], check=True, stdout=subprocess.DEVNULL)
    open(os.path.join(out, "done"), "w").close()
    return os.path.join(out, "checkpoints")


def checkpoints(folder):
    """Of step 1, of step 100 and of the end."""
    os.makedirs(folder, exist_ok=True)
    subprocess.run(["scripts/minilm.sh"], check=True)
    questions = os.path.join(folder, "train.json")
    if not os.path.exists(questions):
        write_questions(questions, 2)
    first = train(folder, "one", "--steps", "1", "--checkpoint-every", "1")
    whole = train(folder, "long", "--epochs", "1", "--checkpoint-every", "100")
    last = sorted(name for name in os.listdir(whole) if name.startswith("step-"))[-1]
    return [os.path.join(first, "step-00000001"), os.path.join(whole, "step-00000100"),
            os.path.join(whole, last)]


# ---- the two sides -------------------------------------------------------------------------------

class Side:
    """Processes that measure when asked; the first one answers."""

    def __init__(self, commands):
        self.processes = [subprocess.Popen(c, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                          for c in commands]
        self.about = self.read()

    def read(self):
        line = self.processes[0].stdout.readline()
        if not line:
            raise RuntimeError("a process of a side has ended: " + self.processes[0].args[0])
        return json.loads(line)

    def ask(self, order):
        self.processes[0].stdin.write(order + "\n")
        self.processes[0].stdin.flush()
        return self.read()

    def close(self):
        self.processes[0].stdin.close()
        return max(p.wait() for p in self.processes)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def open_peer(raw, table, ranks):
    if subprocess.run([sys.executable, "-c", "import torch"], stderr=subprocess.DEVNULL).returncode:
        return None
    port = free_port()
    return Side([[sys.executable, os.path.join(HERE, "peer.py"), raw, table, str(r), str(ranks),
                  str(port)] for r in range(ranks)])


def drop_pages(folder):
    """From memory; what was flushed stays on the disk."""
    for name in os.listdir(folder):
        fd = os.open(os.path.join(folder, name), os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def folder_bytes(folder):
    return sum(os.path.getsize(os.path.join(folder, name)) for name in os.listdir(folder))


class Comparison:
    def __init__(self, ranks, folder):
        self.seen, self.ranks, self.folder = {}, ranks, folder
        self.bytes = {}

    def note(self, case, seconds):
        self.seen.setdefault(case, []).append(seconds)

    def loads(self, side, label, order, path):
        for name in ("memory", "disk"):
            if name == "disk":
                drop_pages(path)
            self.note(f"{label} load from {name}", side.ask(f"{order} {path}")["whole_s"])

    def tessera(self, side):
        result = side.ask("save")
        self.note("tessera blocked", result["blocked_s"])
        self.note("tessera save", result["whole_s"])
        self.bytes["tessera"] = folder_bytes(result["path"])
        self.loads(side, "tessera", "load", result["path"])
        return result["path"]

    def torch(self, side):
        path = os.path.join(self.folder, "torch")
        for threads in (1, 2):
            shutil.rmtree(path, ignore_errors=True)
            result = side.ask(f"save {threads} {path}")
            self.note(f"torch save, {threads} threads", result["whole_s"])
        self.bytes["torch"] = folder_bytes(path)
        self.loads(side, "torch", "load 1", path)
        for mode in ("default", "cached", "staged"):
            shutil.rmtree(path, ignore_errors=True)
            result = side.ask(f"async {mode} {path}")
            for name in ("call", "blocked", "whole"):
                self.note(f"torch async {mode} {name}", result[name + "_s"])
        shutil.rmtree(path, ignore_errors=True)

    def floor(self, side):
        for name in ("tessera", "torch"):
            if name in self.bytes:
                result = side.ask(f"floor {self.bytes[name] // self.ranks}")
                for case in ("write", "cold", "warm"):
                    self.note(f"floor {name} {case}", result[case + "_s"])
                for case in ("copy", "pack", "unpack"):
                    self.note(f"floor {case}", result[case + "_s"])

    def median(self, case):
        return statistics.median(self.seen[case])


def print_cases(c):
    print("\n| case | median ms | lowest - highest |\n|---|---|---|")
    for case, seconds in sorted(c.seen.items()):
        print(f"| {case} | {statistics.median(seconds) * 1e3:.1f} "
              f"| {min(seconds) * 1e3:.1f} - {max(seconds) * 1e3:.1f} |")


def print_ratios(c):
    """Tessera's time over PyTorch's, the best of its ways for each question."""
    saves = [f"torch save, {n} threads" for n in (1, 2)]
    whole = saves + [f"torch async {m} whole" for m in ("default", "cached", "staged")]
    rows = [("blocked, beside save", "tessera blocked", saves, "blocked"),
            ("blocked, beside async_save as it comes", "tessera blocked",
             ["torch async default blocked"], "blocked"),
            ("blocked, beside async_save that uses its memory again", "tessera blocked",
             ["torch async cached blocked"], "blocked"),
            ("blocked, beside async_save that copies in a thread", "tessera blocked",
             ["torch async staged blocked"], "blocked"),
            ("save until it is on the disk", "tessera save", whole, "save"),
            ("load from memory", "tessera load from memory", ["torch load from memory"], "load"),
            ("load from the disk", "tessera load from disk", ["torch load from disk"], "load")]
    print("\n| | Tessera ms | PyTorch ms | ratio | at most |\n|---|---|---|---|---|")
    for name, mine, theirs, goal in rows:
        best = min(c.median(case) for case in theirs)
        ratio = c.median(mine) / best
        print(f"| {name} | {c.median(mine) * 1e3:.1f} | {best * 1e3:.1f} | {ratio:.2f} "
              f"| {GOALS[goal]}{'' if ratio <= GOALS[goal] else ' MISSED'} |")


def print_floor(c):
    print("\n| Tessera | ms | floor | ms | reached |\n|---|---|---|---|---|")
    for name, mine, parts in (
            ("blocked", "tessera blocked", ["copy"]),
            ("save", "tessera save", ["copy", "pack", "tessera write"]),
            ("load from memory", "tessera load from memory", ["tessera warm", "unpack"]),
            ("load from the disk", "tessera load from disk", ["tessera cold", "unpack"])):
        floor = sum(c.median("floor " + part) for part in parts)
        text = " + ".join(f"{p} {c.median('floor ' + p) * 1e3:.0f}" for p in parts)
        print(f"| {name} | {c.median(mine) * 1e3:.1f} | {text} | {floor * 1e3:.1f} "
              f"| {100 * floor / c.median(mine):.0f}% |")


def compare(checkpoint, args):
    folder = os.path.join(args.folder, "saves")
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    raw, table = os.path.join(folder, "state.raw"), os.path.join(folder, "state.jsonl")
    with open(table, "w") as f:
        subprocess.run([f"{BENCH}/checkpoint_ranks", "dump", checkpoint, raw], check=True, stdout=f)
    mine = Side([[f"{BENCH}/checkpoint_ranks", checkpoint, os.path.join(folder, "tessera"),
                  str(args.ranks)]])
    peer = open_peer(raw, table, args.ranks)
    print(f"PyTorch {peer.about['torch']}, {peer.about['tensors']} tensors" if peer
          else "PyTorch is left out: no torch in this Python")
    c, ok = Comparison(args.ranks, folder), True
    warm = Comparison(args.ranks, folder)
    for i in range(-1, args.rounds):
        now = warm if i < 0 else c
        path = now.tessera(mine)
        if i < 0:
            same = subprocess.run([TESSERA, "checkpoint", "diff", checkpoint, path],
                                  stdout=subprocess.DEVNULL).returncode == 0
            print("what Tessera saved is the same:", same)
            ok &= same
        shutil.rmtree(path)
        if peer:
            now.torch(peer)
        now.floor(mine)
        print(f"round {i + 1} of {args.rounds}, load {os.getloadavg()[0]:.1f}", flush=True)
    if peer:
        shutil.rmtree(os.path.join(folder, "torch"), ignore_errors=True)
        peer.ask(f"save 1 {folder}/torch")
        peer.ask("spoil")
        peer.ask(f"load 1 {folder}/torch")
        wrong = peer.ask("check")["wrong"]
        print("what PyTorch loaded is the same:", wrong == 0)
        ok &= wrong == 0
    plain = os.path.getsize(raw)
    print(f"plain {plain / 2**20:.1f} MiB; Tessera's files {c.bytes['tessera'] / 2**20:.1f} MiB, "
          f"{plain / c.bytes['tessera']:.2f} times smaller")
    if "torch" in c.bytes:
        print(f"PyTorch's {c.bytes['torch'] / 2**20:.1f} MiB")
    print_cases(c)
    if peer:
        print_ratios(c)
    print_floor(c)
    ok &= mine.close() == 0
    ok &= peer is None or peer.close() == 0
    shutil.rmtree(folder)
    return ok


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--folder", default="build/bench-checkpoint")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", choices=["sizes", "saves"])
    parser.add_argument("--checkpoint", help="save and load this one; nothing is trained")
    args = parser.parse_args()
    os.chdir(ROOT)
    paths = [args.checkpoint] if args.checkpoint else checkpoints(args.folder)
    ok = True
    if args.only != "saves":
        ok &= subprocess.run([f"{BENCH}/checkpoint_sizes", *paths], check=False).returncode == 0
    if args.only != "sizes":
        ok &= compare(paths[-1], args)
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
