#!/usr/bin/env python3
"""Checkpoints of a real run: how small, how fast, and beside torch.distributed.checkpoint.

usage: bench/checkpoint/measure.py [--folder build/bench-checkpoint] [--rounds 5] [--ranks 2]
                                   [--only sizes|saves] [--checkpoint PATH]
       bench/checkpoint/measure.py --fsdp2 bench/gpu/bert-large.yaml [--device cuda] [--budget 145]

1. Trains all-MiniLM-L6-v2 (scripts/minilm.sh) on two questions of each bundled SQuAD paragraph, as
   `make demo WEIGHTS=minilm` does: checkpoints of step 1, step 100 and the end. Minutes; done once.
2. sizes: bench/checkpoint_sizes of the three. A Markdown table.
3. saves: the last one is saved and loaded by Tessera (bench/checkpoint_ranks) and, the same values, by
   PyTorch (peer.py), both by RANKS ranks of one machine into one folder. All files are flushed
   (fsync) on both sides. In each round every case is measured once, in turn. Loading is measured
   from memory (the files have just been written) and from the disk (their pages are dropped
   before). Beside them the floor: copying the state, planes and zstd alone, writing and reading
   files of the same sizes. Shown are medians, with lowest and highest.

--fsdp2: beside FSDP2 itself, on one rank. A model of that configuration trains 39 steps, without a save
and with one behind the 20th: by how much longer the same steps take is how long training is held up.
That checkpoint is then saved and loaded as in 3, and beside it the state of the same model in
transformers under fully_shard with AdamW. Each time is printed as it comes. The budget is in seconds, for
everything from the start on: a further round is made only if it fits, what is left when the budget is spent
is not measured, and the tables show what there is (exit code 1). At most 4 times the plain bytes of the
state lie on the disk (16 GB for BERT-large); they are removed at the end.

What is loaded is compared on both sides. BENCH= names the folder of the programs
(build/release-cpu/bench), TESSERA= and RUN= how to start tessera and them. Without torch in this Python,
PyTorch is left out. Exit code 1: something failed or loaded values were wrong; that a goal was missed is
only shown.
"""
import argparse
import gzip
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
TESSERA = shlex.split(os.environ.get("TESSERA", "./tessera"))
RUN = shlex.split(os.environ.get("RUN", ""))
BENCH = os.environ.get("BENCH", "build/release-cpu/bench")
WARMUP_STEPS = 34
GOALS = {"blocked": 0.25, "save": 1.0, "load": 1.0, "ratio": 1.15}
BEGUN = time.monotonic()


def elapsed():
    return time.monotonic() - BEGUN


def say(text):
    print(f"[{elapsed():6.1f} s] {text}", flush=True)


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
        [*TESSERA, "train", "--config", "configs/minilm-squad.yaml", "--device", "cpu",
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


STEPS, SAVED_AT = 39, 20


def step_ms(args, name, *options):
    out = os.path.join(args.folder, name)
    shutil.rmtree(out, ignore_errors=True)
    done = subprocess.run(
        [*TESSERA, "train", "--config", args.fsdp2, "--device", args.device, "--ranks", "1",
         "--set", "output.model=false", "--set", "output.log_every=1", "--steps", str(STEPS),
         "--output-dir", out, *options],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    with open(os.path.join(out, "metrics.jsonl"), encoding="utf-8") as f:
        return out, {step["step"]: step["ms"] for step in map(json.loads, f) if "ms" in step}


def held_up(args):
    """Trains without a save and with one; returns its checkpoint."""
    _, without = step_ms(args, "no-save")
    say(f"trained {STEPS} steps without a save")
    out, with_one = step_ms(args, "one-save", "--checkpoint-every", str(SAVED_AT), "--keep", "0")
    for name, steps in (("before", range(5, SAVED_AT)), ("from the save on", range(SAVED_AT, STEPS))):
        plain, saved = (sum(ms[k] for k in steps) for ms in (without, with_one))
        say(f"{args.fsdp2}: steps {steps[0]} to {steps[-1]}, {name}: {plain:.1f} ms in all without a "
            f"save, {saved:.1f} ms with one behind step {SAVED_AT}")
    return os.path.join(out, "checkpoints", f"step-{SAVED_AT:08d}")


# ---- the two sides -------------------------------------------------------------------------------

class Side:
    """Processes that measure when asked; the first one answers."""

    def __init__(self, commands):
        self.processes = [subprocess.Popen(c, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                          for c in commands]
        self.about = None

    def begin(self):
        """Imports are made; now the state."""
        for p in self.processes:
            p.stdin.write("begin\n")
            p.stdin.flush()
        return self

    def ready(self):
        self.about = self.read()
        return self

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

    def kill(self):
        for p in self.processes:
            p.kill()
            p.wait()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def open_peer(ranks, *state):
    """Imports torch meanwhile; None without it."""
    if importlib.util.find_spec("torch") is None:
        return None
    port = free_port()
    return Side([[sys.executable, os.path.join(HERE, "peer.py"), str(r), str(ranks), str(port), *state]
                 for r in range(ranks)])


def open_mine(checkpoint, folder, ranks, args):
    return Side([[*RUN, f"{BENCH}/checkpoint_ranks", checkpoint, os.path.join(folder, "tessera"),
                  str(ranks), args.device]])


def open_sides(checkpoint, folder, args):
    """Tessera's, and PyTorch's or None; both start at the same time."""
    raw, table = os.path.join(folder, "state.raw"), os.path.join(folder, "state.jsonl")
    with open(table, "w") as f:
        subprocess.run([*RUN, f"{BENCH}/checkpoint_ranks", "dump", checkpoint, raw], check=True, stdout=f)
    peer = open_peer(args.ranks, "--raw", raw, table)
    mine = open_mine(checkpoint, folder, args.ranks, args)
    return mine.ready(), peer and peer.begin().ready()


def open_fsdp2(args):
    with open(args.fsdp2, encoding="utf-8") as f:
        model = dict(re.findall(r"^  (hidden|layers|heads|ffn): (\d+)", f.read(), re.M))
    return open_peer(1, "--bert", *(model[k] for k in ("hidden", "layers", "heads", "ffn")),
                     "--device", args.device)


def drop_pages(folder):
    """From memory; what was flushed stays on the disk."""
    for name in os.listdir(folder):
        fd = os.open(os.path.join(folder, name), os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def folder_bytes(folder):
    return sum(os.path.getsize(os.path.join(folder, name)) for name in os.listdir(folder))


class Comparison:
    def __init__(self, ranks, folder, threads=(1, 2), places=("memory", "disk"),
                 modes=("default", "cached", "staged")):
        self.seen, self.ranks, self.folder = {}, ranks, folder
        self.threads, self.places, self.modes, self.bytes = threads, places, modes, {}
        self.loud, self.prefix = False, ""
        self.packing, self.loading = 0, 1  # threads of Tessera

    def know(self, about):
        self.packing, self.loading = about["packing"], about["loading"]
        say(f"Tessera packs in {self.packing} threads beside the one that writes (0: that one does) and "
            f"loads in {self.loading}; PyTorch's save has {' or '.join(map(str, self.threads))}, async_save "
            "and load 1")

    def note(self, case, seconds):
        self.seen.setdefault(case, []).append(seconds)
        if self.loud:
            say(f"{self.prefix}{case}: {seconds * 1e3:.1f} ms")

    def loads(self, side, label, order, path):
        for name in self.places:
            if name == "disk":
                drop_pages(path)
            self.note(f"{label} load from {name}", side.ask(f"{order} {path}")["whole_s"])

    def tessera(self, side):
        result = side.ask("save")
        self.note("tessera blocked", result["blocked_s"])
        self.note("tessera call", result["call_s"])
        self.note("tessera save", result["whole_s"])
        self.bytes["tessera"] = folder_bytes(result["path"])
        self.loads(side, "tessera", "load", result["path"])
        return result["path"]

    def torch(self, side):
        path = os.path.join(self.folder, "torch")
        shutil.rmtree(path, ignore_errors=True)
        for mode in self.modes:
            self.torch_async(side, mode)
        for threads in self.threads:
            shutil.rmtree(path, ignore_errors=True)
            result = side.ask(f"save {threads} {path}")
            self.note(f"torch save, {threads} threads", result["whole_s"])
        self.bytes["torch"] = folder_bytes(path)
        self.loads(side, "torch", "load 1", path)

    def torch_async(self, side, mode):
        path = os.path.join(self.folder, "torch")
        shutil.rmtree(path, ignore_errors=True)
        result = side.ask(f"async {mode} {path}")
        if "failed" in result:
            say(f"torch async {mode} is left out: {result['failed']}")
            self.modes = [m for m in self.modes if m != mode]
            return
        for name in ("call", "blocked", "whole"):
            self.note(f"torch async {mode} {name}", result[name + "_s"])

    def floor(self, side, names=("tessera", "torch")):
        for name in names:
            if name in self.bytes:
                result = side.ask(f"floor {self.bytes[name] // self.ranks}")
                for case in ("write", "cold", "warm"):
                    self.note(f"floor {name} {case}", result[case + "_s"])
                for case in ("copy", "pack", "unpack"):
                    self.note(f"floor {case}", result[case + "_s"])

    def has(self, *cases):
        return all(case in self.seen for case in cases)

    def median(self, case):
        return statistics.median(self.seen[case])


def print_cases(c):
    print("\n| case | median ms | lowest - highest |\n|---|---|---|")
    for case, seconds in sorted(c.seen.items()):
        print(f"| {case} | {statistics.median(seconds) * 1e3:.1f} "
              f"| {min(seconds) * 1e3:.1f} - {max(seconds) * 1e3:.1f} |")


def print_ratios(c):
    """Tessera's time over PyTorch's, the best of its ways for each question."""
    saves = [f"torch save, {n} threads" for n in c.threads]
    whole = saves + [f"torch async {m} whole" for m in c.modes]
    rows = [("blocked, beside save", "tessera blocked", saves, "blocked"),
            ("blocked, beside async_save as it comes", "tessera blocked",
             ["torch async default blocked"], "blocked"),
            ("blocked, beside async_save that uses its memory again", "tessera blocked",
             ["torch async cached blocked"], "blocked"),
            ("blocked, beside async_save that copies in a thread", "tessera blocked",
             ["torch async staged blocked"], "blocked"),
            ("save until it is on the disk", "tessera save", whole, "save")]
    rows += [(f"load from {place}", f"tessera load from {place}", [f"torch load from {place}"], "load")
             for place in c.places]
    print("\n| | Tessera ms | PyTorch ms | ratio | at most |\n|---|---|---|---|---|")
    for name, mine, theirs, goal in rows:
        theirs = [case for case in theirs if c.has(case)]
        if not theirs or not c.has(mine):
            continue
        best = min(c.median(case) for case in theirs)
        ratio = c.median(mine) / best
        print(f"| {name} | {c.median(mine) * 1e3:.1f} | {best * 1e3:.1f} | {ratio:.2f} "
              f"| {GOALS[goal]}{'' if ratio <= GOALS[goal] else ' MISSED'} |")


def print_floor(c):
    """What cannot be avoided. Where threads pack while another one writes the slower counts."""
    at = {name[len("floor "):]: c.median(name) for name in c.seen if name.startswith("floor ")}
    if not at:
        return
    save = {"copy": at["copy"], "pack": at["pack"] / max(c.packing, 1), "write": at["tessera write"]}
    if c.packing > 0:
        del save["pack" if save["pack"] < save["write"] else "write"]
    cases = [("blocked", "tessera blocked", {"copy": at["copy"]}), ("save", "tessera save", save)]
    cases += [(f"load from {place}", f"tessera load from {place}",
               {"read": at[f"tessera {cache}"] / c.loading, "unpack": at["unpack"] / c.loading})
              for place, cache in (("memory", "warm"), ("disk", "cold")) if place in c.places]
    print("\n| Tessera | ms | floor | ms | reached |\n|---|---|---|---|---|")
    for name, mine, parts in cases:
        if not c.has(mine):
            continue
        floor = sum(parts.values())
        text = " + ".join(f"{p} {s * 1e3:.0f}" for p, s in parts.items())
        print(f"| {name} | {c.median(mine) * 1e3:.1f} | {text} | {floor * 1e3:.1f} "
              f"| {100 * floor / c.median(mine):.0f}% |")


def same_as_saved(checkpoint, path):
    diff = subprocess.run([*TESSERA, "checkpoint", "diff", checkpoint, path], check=False,
                          stdout=subprocess.PIPE, text=True).stdout
    same = re.search(r"^[1-9]\d* states are equal to the bit, 0 differ, 0 cannot be compared", diff, re.M) is not None
    print("what Tessera saved is the same:", same, flush=True)
    return same


def loads_right(peer, path):
    """What it saved last."""
    peer.ask("spoil")
    peer.ask(f"load 1 {path}")
    wrong = peer.ask("check")["wrong"]
    print("what PyTorch loaded is the same:", wrong == 0, flush=True)
    return wrong == 0


def rounds(c, warm, mine, peer, checkpoint, args):
    """All cases in turn, first to warm up and to look whether they are right."""
    ok = True
    for i in range(-1, args.rounds):
        now = warm if i < 0 else c
        path = now.tessera(mine)
        if i < 0:
            ok &= same_as_saved(checkpoint, path)
        shutil.rmtree(path)
        if peer:
            now.torch(peer)
        now.floor(mine)
        print(f"round {i + 1} of {args.rounds}, load {os.getloadavg()[0]:.1f}", flush=True)
    if peer:
        ok &= loads_right(peer, os.path.join(c.folder, "torch"))
    return ok


def show(c, peer):
    for name, size in c.bytes.items():
        print(f"files of {name}: {size / 2**20:.1f} MiB")
    print_cases(c)
    if peer:
        print_ratios(c)
    print_floor(c)
    sys.stdout.flush()


def about(peer):
    say(f"PyTorch {peer.about['torch']}, {peer.about['tensors']} tensors, "
        f"{peer.about['bytes'] / 1e9:.2f} GB of rank 0, {peer.about['threads']} threads" if peer
        else "PyTorch is left out: no torch in this Python")


def compare(checkpoint, args):
    folder = os.path.join(args.folder, "saves")
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    mine, peer = open_sides(checkpoint, folder, args)
    about(peer)
    c, warm = (Comparison(args.ranks, folder) for _ in range(2))
    c.know(mine.about)
    ok = rounds(c, warm, mine, peer, checkpoint, args)
    show(c, peer)
    ok &= mine.close() == 0
    ok &= peer is None or peer.close() == 0
    shutil.rmtree(folder)
    return ok


# ---- beside FSDP2, where time is short -----------------------------------------------------------

def warm_up(warm, mine, peer):
    """First saves find no memory yet; PyTorch's stagers keep theirs from here on."""
    result = mine.ask("save")
    warm.note("tessera save", result["whole_s"])
    for mode in warm.modes if peer else ():
        if mode != "default":
            warm.torch_async(peer, mode)
    return result["path"]


def rounds_in_time(c, mine, peer, checkpoint, path, args):
    """At least one; what comes behind the rounds takes no longer than one."""
    took, ok = 0, True
    for i in range(args.rounds):
        if i > 0 and elapsed() + 2 * took > args.budget:
            break
        began = elapsed()
        shutil.rmtree(path)
        path = c.tessera(mine)
        if peer:
            c.torch(peer)
            print_ratios(c)
        took = elapsed() - began
        say(f"round {i + 1} of {args.rounds}: {took:.1f} s, load {os.getloadavg()[0]:.1f}")
    ok &= same_as_saved(checkpoint, path)
    if peer:
        ok &= loads_right(peer, os.path.join(c.folder, "torch"))
        shutil.rmtree(os.path.join(c.folder, "torch"))
    c.floor(mine, ("tessera",))
    return ok


def out_of_time(_signal, _frame):
    raise TimeoutError


def beside_fsdp2(args):
    args.folder = os.path.join(args.folder, "fsdp2") # all of it is removed at the end
    folder = os.path.join(args.folder, "saves")
    shutil.rmtree(args.folder, ignore_errors=True)
    os.makedirs(folder)
    c, warm = (Comparison(1, folder, (4,), ["memory"], ["default", "cached"]) for _ in range(2))
    c.loud, warm.loud, warm.prefix = True, True, "to warm up: "
    signal.signal(signal.SIGALRM, out_of_time)
    signal.signal(signal.SIGTERM, out_of_time) # of timeout(1)
    if args.budget:
        signal.setitimer(signal.ITIMER_REAL, args.budget)
    peer, mine, ok = None, None, False
    try:
        if args.device == "cuda":
            peer = open_fsdp2(args) # on CPUs its imports would take the cores that train
        checkpoint = held_up(args)
        peer = peer or open_fsdp2(args)
        mine = open_mine(checkpoint, folder, 1, args)
        if peer:
            peer.begin().ready()
        about(peer)
        c.know(mine.ready().about)
        path = warm_up(warm, mine, peer)
        c.modes = warm.modes
        ok = rounds_in_time(c, mine, peer, checkpoint, path, args)
        say("the measurement is complete")
    except TimeoutError:
        say("the time is spent: the measurement is not complete")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        show(c, peer)
        for side in filter(None, (peer, mine)):
            side.kill()
        shutil.rmtree(args.folder, ignore_errors=True)
    return ok


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--folder", default="build/bench-checkpoint")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", choices=["sizes", "saves"])
    parser.add_argument("--checkpoint", help="save and load this one; nothing is trained")
    parser.add_argument("--fsdp2", metavar="CONFIG", help="beside FSDP2 of this model, on one rank")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--budget", type=float, default=0, help="seconds for all of --fsdp2; 0: no end")
    args = parser.parse_args()
    os.chdir(ROOT)
    if args.fsdp2:
        sys.exit(0 if beside_fsdp2(args) else 1)
    paths = [args.checkpoint] if args.checkpoint else checkpoints(args.folder)
    ok = True
    if args.only != "saves":
        ok &= subprocess.run([f"{BENCH}/checkpoint_sizes", *paths], check=False).returncode == 0
    if args.only != "sizes":
        ok &= compare(paths[-1], args)
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
