#!/usr/bin/env python3
"""Is Tessera right on this machine's GPUs? Prints PASS or FAIL with numbers, a line a claim.

usage: bench/gpu/check.py [--gpus N] [--budget SECONDS] [--only WORD]... [--out FILE]

  tests    the cuda_* test programs
  fp32     the losses of 5 steps equal the CPU's within rounding: same seed, same ranks, dropout on
  bits     stages 0-3 have the same losses, norms and final evaluation to the last bit, as have
           overlap on and off, graphs on and off, early launches on and off, any prefetch,
           recomputation, a second run, and a traced run; with one micro-batch a step and with two;
           with tables moved by rows and (fp32) whole; on 1, 2, 4, ... GPUs
  curve    bf16 stays within a band of the CPU's fp32 curve over 300 steps of real questions
  resume   steps, a checkpoint, a resume and steps again = the steps at one go, to the last bit;
           on another world and stage nearly; the best weights exported answer as they did
  memory   what the driver says is taken = context + libraries + communicator + arena + graphs +
           set-up; nothing grows from step 2 to the end

A claim that the budget leaves no time for is SKIP. Exit code 1 if anything is FAIL. Standard
library only; see README.md beside this file.
"""
import argparse
import concurrent.futures
import contextlib
import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import runs  # noqa: E402

SMALL = "bench/gpu/check.yaml"
# The bands, and where they come from: README.md.
FP32_LOSS, FP32_NORM = 1e-5, 1e-4
CURVE_STEPS, CURVE_WINDOW = 300, 25
CURVE_BAND = {"bf16": 5e-3, "fp32": 1e-4, "auto": 1e-4} # relative
GRANULE = 2 << 20


class Cards:
    """Hands out GPUs: runs on few of them go side by side."""

    def __init__(self, count):
        self.free, self.changed = set(range(count)), threading.Condition()

    @contextlib.contextmanager
    def take(self, count):
        with self.changed:
            self.changed.wait_for(lambda: len(self.free) >= count)
            mine = sorted(self.free)[:count]
            self.free -= set(mine)
        try:
            yield mine
        finally:
            with self.changed:
                self.free |= set(mine)
                self.changed.notify_all()


class Check:
    def __init__(self, args):
        self.args = args
        self.begin = time.time()
        self.card = runs.gpu_name()
        self.cards = Cards(max(args.gpus, 1))
        self.folder = tempfile.mkdtemp(prefix="tessera-check-")
        self.rows, self.number, self.lock = [], 0, threading.Lock()
        self.cache = os.path.join(self.folder, "features")

    def left(self):
        return self.args.budget - (time.time() - self.begin)

    def row(self, claim, result, text, log=""):
        with self.lock:
            self.rows.append((claim, result, text, log))
            self.save()
        print(f"{result:4}  {claim:44}  {text}", flush=True)

    def save(self):
        """What there is, should time run out."""
        if self.args.out:
            runs.write_json(self.args.out, {"card": self.card, "rows": self.rows})

    def new_folder(self):
        with self.lock:
            self.number += 1
            return os.path.join(self.folder, f"run{self.number}")

    def train(self, config=SMALL, ranks=1, device=None, timeout=120, trace=False, folder=None,
              **sets):
        """A run on @ranks GPUs, or on the CPU."""
        device = device or self.args.device
        folder = folder or self.new_folder()
        sets.setdefault("data__cache_dir", self.cache)
        options = ["--trace", folder + ".json"] if trace else []
        if device == "cpu":
            cores = max(len(os.sched_getaffinity(0)) - 2, 1)
            sets.setdefault("train__threads", max(min(8, cores // ranks), 1))
            return runs.train(config, folder, ranks, "cpu", timeout=timeout, options=options, **sets)
        with self.cards.take(ranks) as mine:
            if self.left() < 5:
                return None
            return runs.train(config, folder, ranks, "cuda", gpus=mine, timeout=timeout,
                              options=options, **sets)

    # ---- tests ----

    def program(self, claim, path, under, env):
        """Runs a test program; it must end with 0, all its tests passed, at least one not skipped."""
        wrap = os.path.join(runs.ROOT, "build/gpu/run")
        command = ([wrap] if os.path.exists(wrap) else []) + under + [path]
        begin = time.time()
        try:
            done = subprocess.run(command, cwd=runs.ROOT, stdout=subprocess.PIPE,
                                  env=dict(env, CMOCKA_MESSAGE_OUTPUT="stdout"),
                                  stderr=subprocess.STDOUT, timeout=max(self.left(), 5))
            rc, log = done.returncode, done.stdout.decode("utf-8", "replace")
        except subprocess.TimeoutExpired as e:
            rc, log = 124, (e.stdout or b"").decode("utf-8", "replace")
        body = log.split("run.\n")[0]
        ok, skipped, failed = (len(re.findall(p, body, re.M)) for p in
                               (r"^\[       OK", r"^\[  SKIPPED", r"^\[  FAILED"))
        good = rc == 0 and ok > 0 and failed == 0
        found = re.findall(r"ERROR SUMMARY: .*|RACECHECK SUMMARY: .*", log)
        self.row(claim, "PASS" if good else "FAIL",
                 f"{ok} passed, {failed} failed, {skipped} skipped, {time.time() - begin:.1f} s"
                 + ("" if rc == 0 else f", exit code {rc}") + "".join("; " + f for f in found),
                 "" if good else log[-6000:])

    def test_programs(self):
        programs = sorted(p for folder in ("build/gpu/tests", "build/release/tests")
                          for p in glob.glob(os.path.join(runs.ROOT, folder, "cuda_*"))
                          if "." not in os.path.basename(p))
        if os.path.exists(os.path.join(runs.ROOT, "build/gpu/run")):
            programs = [p for p in programs if "build/gpu/" in p]
        return programs

    def tests(self):
        programs = self.test_programs()
        for path in programs:
            self.program(f"tests: {os.path.basename(path)}", path, [], os.environ)
        if not programs:
            self.row("tests", "FAIL", "no cuda_* test program was found")

    def sanitizer(self, pool):
        """The small cases: the tools take 10 to 100 times as long. Each has a card to itself."""
        tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
        if not os.path.exists(tool):
            self.row("sanitizer", "SKIP", "compute-sanitizer was not found")
            return []
        # cuda_gemm runs cuBLASLt's kernels only, whose barriers racecheck takes for races.
        return [pool.submit(self.sanitized, tool, check, path).result
                for check, names in (("memcheck", ("cuda_ops", "cuda_attention", "cuda_gemm")),
                                     ("racecheck", ("cuda_ops", "cuda_attention")))
                for path in self.test_programs() if os.path.basename(path) in names]

    def sanitized(self, tool, check, path):
        with self.cards.take(1) as cards:
            env = dict(os.environ, TESSERA_SMALL="1", CUDA_VISIBLE_DEVICES=runs.visible(cards))
            self.program(f"sanitizer: {check} {os.path.basename(path)}", path,
                         [tool, "--tool", check, "--error-exitcode", "9"], env)

    # ---- fp32 ----

    def fp32(self, pool):
        for name, config, worlds, sets in (
                ("small", SMALL, self.worlds(), {}),
                ("BERT-base", "bench/gpu/bert-base.yaml", [1], {"data__max_train_samples": 100,
                                                                "train__micro_batch": 4})):
            for world in worlds:
                common = dict(sets, train__steps=5, optim__warmup_steps=2, train__precision="fp32")
                cpu = self.cpu_pool.submit(self.train, config, world, "cpu", 200, **common)
                gpu = pool.submit(self.train, config, world, **common)
                yield lambda cpu=cpu, gpu=gpu, name=name, world=world: \
                    self.compare_fp32(f"fp32: {name}, 5 steps, ranks {world}", cpu, gpu)

    def compare_fp32(self, claim, cpu, gpu):
        cpu, gpu = cpu.result(), gpu.result()
        if not self.usable(claim, [cpu, gpu]):
            return
        loss = max(relative(a["loss"], b["loss"]) for a, b in zip(cpu.steps, gpu.steps))
        norm = max(relative(a["grad_norm"], b["grad_norm"]) for a, b in zip(cpu.steps, gpu.steps))
        good = len(gpu.steps) == 5 and loss <= FP32_LOSS and norm <= FP32_NORM
        self.row(claim, "PASS" if good else "FAIL",
                 f"largest relative difference: loss {loss:.1e} (band {FP32_LOSS:.0e}), "
                 f"norm {norm:.1e} (band {FP32_NORM:.0e})")

    # ---- bits ----

    def worlds(self):
        out, n = [], 1
        while n <= max(self.args.gpus, 1):
            out.append(n)
            n *= 2
        return out

    def variants(self, world):
        """Name, settings. The first one is what the others must equal."""
        # Two steps of each of a few length classes, an evaluation at the end.
        same = dict(train__steps=6, train__reduce="per_micro_batch", train__tables="rows",
                    data__eval="data/squad/xquad.en.json.gz", data__max_eval_samples=24)
        most = world == self.worlds()[-1]
        for name, extra in (("one micro-batch", {}), ("two micro-batches", {"train__grad_accum": 2})):
            group = [("stage 0", {})]
            group += [(f"stage {s}", {"train__zero_stage": s}) for s in (1, 2, 3)]
            if most or not extra:
                group += [("no graphs, stage 3", {"train__graphs": False, "train__zero_stage": 3}),
                          ("no overlap, stage 3", {"train__overlap": False,
                                                   "train__zero_stage": 3})]
            if not extra:
                group.append(("again", {}))
            if most and not extra:
                group += [("no graphs, stage 0", {"train__graphs": False}),
                          ("no early launches", {"train__early_launch": False}),
                          ("no overlap, stage 1", {"train__overlap": False, "train__zero_stage": 1}),
                          ("stage 3, prefetch 0", {"train__prefetch": 0, "train__zero_stage": 3}),
                          ("stage 3, prefetch 3", {"train__prefetch": 3, "train__zero_stage": 3}),
                          ("recompute, stage 3", {"train__recompute": "block",
                                                  "train__zero_stage": 3}),
                          ("all kept, stage 1", {"train__recompute": "none",
                                                 "train__zero_stage": 1}),
                          ("traced, stage 3", {"trace": True, "train__zero_stage": 3})]
            yield name, [(n, dict(same, **extra, **s)) for n, s in group]
        if most:
            fp32 = dict(same, train__precision="fp32", train__tables="whole")
            yield "fp32, whole tables", [("stage 0", fp32)] + \
                [(f"stage {s}", dict(fp32, train__zero_stage=s)) for s in (1, 2, 3)]

    def bits(self, pool):
        # Large worlds last: they need all cards at once.
        for world in self.worlds():
            for name, group in self.variants(world):
                jobs = [(n, pool.submit(self.train, SMALL, world, **s)) for n, s in group]
                yield lambda jobs=jobs, name=name, world=world: \
                    self.compare_bits(f"bits: {world} GPU{'s' * (world > 1)}, {name}", jobs)

    def compare_bits(self, claim, jobs):
        got = [(n, j.result()) for n, j in jobs]
        if not self.usable(claim, [r for _, r in got]):
            return
        first = got[0][1].bits()
        differ = []
        for name, run in got[1:]:
            other = run.bits()
            if other == first:
                continue
            where = next((i + 1 for i, (a, b) in enumerate(zip(first, other)) if a != b),
                         min(len(first), len(other)) + 1)
            far = max((relative(a[0], b[0]) for a, b in zip(first, other)), default=0)
            differ.append(f"{name} (from record {where}, loss by up to {far:.1e})")
        good = not differ and len(first) > 1
        self.row(claim, "PASS" if good else "FAIL",
                 f"{len(got)} runs of {len(first)} records are equal" if good
                 else "not as stage 0: " + "; ".join(differ) if differ else "nothing was recorded")

    # ---- resume ----

    # An epoch has 5 steps here: the checkpoint lies in the second, with dropout and accumulation.
    RESUME = dict(train__steps=10, data__max_train_samples=40, train__micro_batch=2,
                  train__grad_accum=2, checkpoint__every=6, checkpoint__keep=0,
                  checkpoint__keep_best="f1", checkpoint__export_best=True, eval__every=3,
                  data__eval="data/squad/xquad.en.json.gz", data__max_eval_samples=24)
    def resume(self, pool):
        for world in sorted({1, self.worlds()[-1]}):
            for stage in (0, 3) if world > 1 else (0,):
                job = pool.submit(self.resumed, world, stage)
                yield lambda job=job, world=world, stage=stage: \
                    self.compare_resumed(f"resume: {world} GPU{'s' * (world > 1)}, stage {stage}", job)

    def resumed(self, world, stage):
        """The run at one go, from its checkpoint, and from it elsewhere; what its export answers."""
        folder = self.new_folder()
        share = dict(self.RESUME, train__grad_accum=4 // world or 1, train__micro_batch=1) \
            if world > 1 else self.RESUME
        whole = self.train(ranks=world, folder=folder, train__zero_stage=stage, **share)
        if whole is None or not whole.ok:
            return [whole], None
        from_step = os.path.join(folder, "checkpoints", "step-00000006")
        same = self.train(ranks=world, train__zero_stage=stage, checkpoint__resume=from_step, **share)
        other = self.train(ranks=1, train__zero_stage=0 if stage else 1,
                           checkpoint__resume=from_step,
                           **dict(share, train__grad_accum=4, train__micro_batch=1))
        evaluated = subprocess.run(
            runs.tessera() + ["eval", "--model", os.path.join(folder, "model"), "--data",
                              os.path.join(runs.ROOT, share["data__eval"]), "--max-samples", "24",
                              "--device", self.args.device, "--set", "eval.micro_batch=8",
                              "--output-dir", folder + "-eval"],
            cwd=runs.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        return [whole, same, other], evaluated

    def compare_resumed(self, claim, job):
        got, evaluated = job.result()
        if not self.usable(claim, got):
            return
        whole, same, other = ([s for s in r.steps if s["step"] > 6] for r in got)
        equal = len(whole) == 4 and [(s["loss"], s["grad_norm"]) for s in same] == \
            [(s["loss"], s["grad_norm"]) for s in whole]
        far = max((relative(a["loss"], b["loss"]) for a, b in zip(whole, other)),
                  default=float("inf")) if len(other) == 4 else float("inf")
        best = max(e["f1"] for e in got[0].evaluations)
        text = evaluated.stdout.decode("utf-8", "replace")
        found = re.findall(r'"f1": *([0-9.]+)', text)
        band = CURVE_BAND["bf16" if self.args.device == "cuda" else "auto"]
        good = equal and far <= band and found and relative(float(found[-1]), best) < 1e-9
        self.row(claim, "PASS" if good else "FAIL",
                 f"4 steps after the resume {'equal' if equal else 'NOT equal'}; on 1 rank at another "
                 f"stage losses differ by up to {far:.1e} (band {band:.0e}); best F1 "
                 f"{best:.4f}, exported {found[-1] if found else 'none'}",
                 "" if good else text[-2000:])

    # ---- curve ----

    # More questions than the steps use, and a moderate rate: training that neither memorises nor
    # amplifies roundings (the same batches on 1 and 2 CPU ranks stay within 1e-7 for 300 steps).
    CURVE = dict(train__steps=CURVE_STEPS, data__max_train_samples=0, optim__lr=2e-4,
                 train__micro_batch=8)

    def start_curve(self):
        """The CPU's, beside all else: it takes the longest."""
        self.cpu_curve = self.cpu_pool.submit(self.train, "bench/gpu/check.yaml", 1, "cpu", 400,
                                              **self.CURVE)

    def curve(self, pool):
        for precision in ("bf16", "fp32"):
            if self.args.device == "cpu":
                precision = "auto"
            gpu = pool.submit(self.train, "bench/gpu/check.yaml", 1, train__precision=precision,
                              **self.CURVE)
            yield lambda gpu=gpu, precision=precision: \
                self.compare_curve(precision, self.cpu_curve, gpu)

    def compare_curve(self, precision, cpu, gpu):
        claim = f"curve: {precision}, {CURVE_STEPS} steps of real questions"
        band = CURVE_BAND[precision]
        cpu, gpu = cpu.result(), gpu.result()
        if not self.usable(claim, [cpu, gpu]):
            return
        a, b = ([s["loss"] for s in r.steps] for r in (cpu, gpu))

        def windows(x):
            return [sum(x[i:i + CURVE_WINDOW]) / CURVE_WINDOW
                    for i in range(0, len(x) - CURVE_WINDOW + 1, CURVE_WINDOW)]
        far = max(relative(x, y) for x, y in zip(windows(a), windows(b)))
        one = max(abs(x - y) for x, y in zip(a, b))
        good = len(a) == len(b) == CURVE_STEPS and far <= band
        self.row(claim, "PASS" if good else "FAIL",
                 f"means of {CURVE_WINDOW} steps differ by up to {far:.1e} (band {band:.0e}), "
                 f"single steps by up to {one:.3f}; last mean {windows(a)[-1]:.3f} on the CPU, "
                 f"{windows(b)[-1]:.3f} here")

    # ---- memory ----

    def memory(self, pool):
        world = self.worlds()[-1]
        for stage in (0, 3) if world > 1 else (0,):
            job = pool.submit(self.train, "bench/gpu/bert-base.yaml", world, None, 180,
                              train__zero_stage=stage, train__steps=40,
                              data__max_train_samples=1000)
            yield lambda job=job, stage=stage: self.compare_memory(
                f"memory: BERT-base, stage {stage}, {world} GPU{'s' * (world > 1)}", job)

    def compare_memory(self, claim, job):
        run = job.result()
        if not self.usable(claim, [run]):
            return
        card = run.summary.get("card_bytes")
        if card is None:
            self.row(claim, "FAIL", "summary.json has no card_bytes", run.tail(15))
            return
        parts = ("context", "library", "communicator", "arena", "windows", "set_up", "graphs", "checkpoints",
                 "first_steps", "later")
        arena = run.summary["bytes_per_rank"]["arena"]
        off = card["all"] - sum(card[p] for p in parts)  # below 0: given back on the way
        good = 0 <= card["arena"] - arena <= 2 * GRANULE and off <= 0 and card["later"] == 0
        self.row(claim, "PASS" if good else "FAIL",
                 f"plan's arena {mib(arena)}; the driver: " +
                 ", ".join(f"{p.replace('_', ' ')} {mib(card[p])}" for p in parts) +
                 f", all {mib(card['all'])} MiB" + (f"; {mib(-off)} given back" if off else ""))

    # ---- all ----

    def usable(self, claim, got):
        if any(r is None for r in got):
            self.row(claim, "SKIP", "no time left")
            return False
        for run in got:
            if not run.ok:
                self.row(claim, "FAIL", f"a run ended with code {run.rc}: {run.tail(1)[:200]}",
                         " ".join(run.command) + "\n" + run.tail(15))
                return False
        return True

    def wanted(self, name):
        if not self.args.only:
            return name != "sanitizer"
        return any(w in name for w in self.args.only)

    def go(self):
        # The tests use all cards; they come first and alone.
        workers = concurrent.futures.ThreadPoolExecutor(max(self.args.gpus, 1) + 1)
        with workers as pool, concurrent.futures.ThreadPoolExecutor(1) as self.cpu_pool:
            if self.wanted("curve"):
                self.start_curve()
            if self.wanted("tests") and self.args.device == "cuda":
                self.tests()
            reports = {name: list(getattr(self, name)(pool))
                       for name in ("curve", "fp32", "memory", "bits", "resume", "sanitizer")
                       if self.wanted(name)}
            for name in ("memory", "bits", "resume", "fp32", "curve", "sanitizer"):
                for report in reports.get(name, []):
                    report()
        self.finish()

    def finish(self):
        count = {r: sum(row[1] == r for row in self.rows) for r in ("PASS", "FAIL", "SKIP")}
        for claim, result, text, log in self.rows:
            if result == "FAIL" and log:
                print(f"\n--- {claim}\n{log.rstrip()}")
        print(f"\n{self.card}: {count['PASS']} passed, {count['FAIL']} failed, "
              f"{count['SKIP']} skipped in {time.time() - self.begin:.0f} s")
        if self.args.keep:
            print(f"runs kept in {self.folder}")
        else:
            shutil.rmtree(self.folder, ignore_errors=True)


def relative(a, b):
    if a is None or b is None or a != a or b != b:
        return float("inf")
    return abs(a - b) / max(abs(a), abs(b), 1e-30)


def mib(n):
    return f"{n / 1048576:.0f}"


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    p.add_argument("--gpus", type=int, default=runs.gpu_count(), help="use so many (all)")
    p.add_argument("--budget", type=float, default=330, help="seconds; later claims are skipped")
    p.add_argument("--only", action="append", metavar="WORD",
                   help="tests, fp32, bits, resume, curve, memory or sanitizer; repeatable")
    p.add_argument("--out", metavar="FILE", help="write the rows as JSON")
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda",
                   help="cpu: try this script without a GPU, with --gpus as ranks")
    p.add_argument("--keep", action="store_true", help="keep the runs' folders")
    args = p.parse_args()
    if args.device == "cuda" and args.gpus < 1:
        sys.exit("no GPU: nvidia-smi -L lists none (CUDA_VISIBLE_DEVICES?)")
    check = Check(args)
    check.go()
    sys.exit(1 if any(r[1] == "FAIL" for r in check.rows) else 0)


if __name__ == "__main__":
    main()
