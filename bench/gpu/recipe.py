#!/usr/bin/env python3
"""A whole fine-tuning run, Tessera beside PyTorch on the same cards: time, EM and F1.

usage: bench/gpu/recipe.py --train FILE [--train FILE] --eval FILE [--weights build/minilm]
                           [--gpus N] [--lr R]... [--seeds N] [--stages 1,3] [--out FILE]

Both start from the same weights and train on the same windows for as many steps, with the schedule,
decay, clipping, dropout and batch of configs/minilm-squad.yaml, and answer the same questions;
`tessera score` scores both. PyTorch is recipe_peer.py: transformers' BertForQuestionAnswering under
DistributedDataParallel, bf16 autocast, fused AdamW, SDPA, sequences padded to 384 as its users do.

Several --train files become one. With several --lr Tessera runs all of them, PyTorch the one that
was best; --seeds repeats Tessera to show what the seed alone does. Times are of whole processes and
of their parts: start (imports, libraries, communicator, reading, weights, graphs), training,
evaluation (forward, answers). Windows of tokens are in neither's time: Tessera's first run caches
its own (and has its own row), recipe_peer.py makes the peer's before; their ids and labels are
compared. GEMM plans are kept in a cache of this script.

--dry-run tries it on the CPU: gloo, few questions, few steps.
"""
import argparse
import datetime
import gzip
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import runs  # noqa: E402

CONFIG = "configs/minilm-squad.yaml"
LENGTH, STRIDE = 384, 128
GLOBAL_BATCH, MAX_MICRO_BATCH, EVAL_BATCH = 32, 32, 64


def read_questions(path):
    opened = gzip.open if path.endswith(".gz") else open
    with opened(path, "rt", encoding="utf-8") as f:
        return json.load(f)["data"]


def cut(articles, limit):
    """The first @limit questions; 0: all."""
    left = limit or 1 << 60
    for article in articles:
        for paragraph in article["paragraphs"]:
            paragraph["qas"] = paragraph["qas"][:left]
            left -= len(paragraph["qas"])
        article["paragraphs"] = [p for p in article["paragraphs"] if p["qas"]]
    return [a for a in articles if a["paragraphs"]]


def write_questions(path, articles):
    with open(path, "w", encoding="utf-8") as f:
        json.dump({"version": "1.1", "data": articles}, f, ensure_ascii=False)
    return sum(len(p["qas"]) for a in articles for p in a["paragraphs"])


class Recipe:
    def __init__(self, args):
        self.args = args
        self.folder = tempfile.mkdtemp(prefix="tessera-recipe-")
        self.train = os.path.join(self.folder, "train.json")
        self.eval = os.path.join(self.folder, "eval.json")
        articles = [a for path in args.train for a in read_questions(path)]
        self.train_count = write_questions(self.train, cut(articles, args.limit))
        self.eval_count = write_questions(self.eval, cut(read_questions(args.eval), args.limit))
        self.world = max(args.gpus, 1)
        self.device = "cpu" if args.dry_run else "cuda"
        self.micro = max(min(GLOBAL_BATCH // self.world, MAX_MICRO_BATCH), 1)
        self.accum = max(GLOBAL_BATCH // (self.micro * self.world), 1)
        self.rows = []

    def score(self, predictions):
        done = subprocess.run(runs.tessera() + ["score", "--data", self.eval, "--predictions",
                                                predictions], stdout=subprocess.PIPE, check=True)
        result = json.loads(done.stdout)
        return result["exact_match"], result["f1"]

    def row(self, label, **record):
        self.rows.append(dict(record, label=label))
        print(f"{label:34} whole {record['whole']:7.2f} s  start {record['start']:6.2f}  training "
              f"{record['train']:7.2f}  evaluation {record['eval']:6.2f}  EM {record['em']:6.2f}  "
              f"F1 {record['f1']:6.2f}  loss {record['loss']:.3f}  {record['note']}", flush=True)

    # ---- Tessera ----

    def sets(self):
        # Tessera's cache of features is keyed by content.
        sets = {"model__init_from": self.args.weights, "data__train": self.train,
                "data__eval": self.eval, "data__vocab": self.args.vocab,
                "data__cache_dir": os.path.join(self.folder, "features"),
                "train__gemm_plan": os.path.join(self.folder, "plans"),
                "train__micro_batch": self.micro, "train__grad_accum": self.accum,
                "eval__micro_batch": EVAL_BATCH, "output__log_every": 1000000,
                "train__epochs": self.args.epochs}
        if self.args.steps:
            sets["train__steps"] = self.args.steps
        return sets

    def tessera(self, label, lr, seed, **more):
        folder = os.path.join(self.folder, "tessera")
        sets = dict(self.sets(), optim__lr=lr, train__seed=seed, **more)
        run = runs.train(CONFIG if not self.args.config else self.args.config, folder, self.world,
                         self.device, timeout=self.args.limit_s, **sets)
        if not run.ok:
            print(f"{label}: exit code {run.rc}\n{run.tail()}", flush=True)
            return None
        evaluation = run.evaluations[-1]
        em, f1 = self.score(os.path.join(folder, "predictions.json"))
        train, evaluated = run.summary["train_s"], evaluation["ms"] / 1e3
        self.row(label, whole=run.seconds, start=run.seconds - train - evaluated, train=train,
                 eval=evaluated, em=em, f1=f1, loss=run.summary["last_loss"], lr=lr, seed=seed,
                 steps=run.summary["steps"],
                 note=f"{run.summary['steps']} steps, {evaluation['windows']} windows")
        return self.rows[-1]


    # ---- PyTorch ----

    def peer(self, mode, *more):
        """recipe_peer.py on its way."""
        command = [sys.executable]
        if mode == "run":
            command += ["-m", "torch.distributed.run", "--nproc-per-node", str(self.world),
                        "--master-port", str(29700 + os.getpid() % 1000)]
        command += [os.path.join(HERE, "recipe_peer.py"), mode, self.folder, self.device, *more]
        env = dict(os.environ, OMP_NUM_THREADS="4", TOKENIZERS_PARALLELISM="true",
                   HF_HUB_OFFLINE="1")
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT)

    def finish(self, mode, process):
        """What it wrote, or None after showing its last words."""
        try:
            log = process.communicate(timeout=self.args.limit_s)[0].decode("utf-8", "replace")
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun then ends its workers
            log = process.communicate()[0].decode("utf-8", "replace")
            log += f"\nno end in {self.args.limit_s} s"
        if process.returncode != 0:
            print(f"recipe_peer.py {mode} failed\n" + "\n".join(log.splitlines()[-12:]), flush=True)
            return None
        with open(os.path.join(self.folder, f"{mode}.json"), encoding="utf-8") as f:
            return json.load(f)

    def compare_windows(self):
        """Are the peer's windows Tessera's? Ids and labels of every question."""
        for name, path in (("train", self.train), ("eval", self.eval)):
            done = subprocess.run(
                runs.tessera() + ["features", "--data", path, "--vocab", self.args.vocab,
                                  "--max-length", str(LENGTH), "--doc-stride", str(STRIDE)],
                stdout=subprocess.PIPE, check=True)
            ours = [line for line in done.stdout.decode().splitlines()
                    if line and not line.startswith("#")]
            with open(os.path.join(self.folder, f"{name}.tsv"), encoding="utf-8") as f:
                theirs = f.read().splitlines()
            differ = [(a, b) for a, b in zip(ours, theirs) if a != b]
            count = len(differ) + abs(len(ours) - len(theirs))
            print(f"windows of {name}: {len(ours)} questions, {count} differ in ids or labels "
                  f"{differ[:1]}"[:300], flush=True)

    def torch(self, lr, seed):
        begin = time.time()
        result = self.finish("run", self.peer(
            "run", self.args.weights, str(lr), str(seed), str(self.args.epochs), str(self.accum),
            str(self.args.steps)))
        seconds = time.time() - begin
        if result is None:
            return None
        em, f1 = self.score(os.path.join(self.folder, "predictions.json"))
        evaluated = result["forward_s"] + result["answers_s"]
        self.row(f"PyTorch {result['torch']}, DDP, lr {lr:g}", whole=seconds,
                 start=seconds - result["train_s"] - evaluated, train=result["train_s"],
                 eval=evaluated, em=em, f1=f1, loss=result["loss"], lr=lr, seed=seed,
                 steps=result["steps"],
                 note=f"{result['steps']} steps; forward {result['forward_s']:.2f}, answers "
                      f"{result['answers_s']:.2f} s; transformers {result['transformers']}")
        return self.rows[-1]

    # ---- all ----

    def run(self):
        print(f"{self.train_count} training questions, {self.eval_count} to answer; {self.world} x "
              f"{runs.gpu_name()}; micro-batch {self.micro} x accumulation {self.accum} x "
              f"{self.world}", flush=True)
        with_torch = "torch" in self.args.programs.split(",")
        features = self.peer("features", self.args.vocab) if with_torch else None
        # Leaves the caches of features and of the GEMM plan, and the files in the page cache.
        if not self.tessera("Tessera, first run: nothing cached", self.args.lr[0], 42):
            sys.exit("the first run failed")
        if with_torch and self.finish("features", features):
            self.compare_windows()
        best = None
        for lr in self.args.lr:
            row = self.tessera(f"Tessera, stage 0, lr {lr:g}", lr, 42)
            if row and (best is None or row["f1"] > best["f1"]):
                best = row
        lr = best["lr"] if best else self.args.lr[0]
        if with_torch:
            theirs = self.torch(lr, 42)
            if theirs and best:
                both = (theirs["train"] + theirs["eval"]) / (best["train"] + best["eval"])
                print(f"F1 {best['f1'] - theirs['f1']:+.2f}; PyTorch takes "
                      f"{theirs['whole'] / best['whole']:.1f} x the whole time, "
                      f"{theirs['train'] / best['train']:.1f} x in training, "
                      f"{theirs['eval'] / best['eval']:.1f} x in evaluation, {both:.1f} x in both",
                      flush=True)
        for seed in range(43, 42 + self.args.seeds):
            self.tessera(f"Tessera, stage 0, lr {lr:g}, seed {seed}", lr, seed)
        for stage in (int(s) for s in self.args.stages.split(",") if s):
            self.tessera(f"Tessera, stage {stage}, lr {lr:g}", lr, 42, train__zero_stage=stage)


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    p.add_argument("--train", action="append", required=True, metavar="FILE")
    p.add_argument("--eval", required=True, metavar="FILE")
    p.add_argument("--weights", default=os.path.join(runs.ROOT, "build/minilm"), metavar="FOLDER")
    p.add_argument("--vocab", metavar="FILE",
                   default=os.path.join(runs.ROOT, "data/vocab/bert-base-uncased-vocab.txt"))
    p.add_argument("--config", help="another one than " + CONFIG)
    p.add_argument("--gpus", type=int, default=runs.gpu_count())
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--lr", type=float, action="append", help="repeatable")
    p.add_argument("--seeds", type=int, default=1, help="Tessera's runs with other seeds")
    p.add_argument("--stages", default="", help="other stages, as in 1,3")
    p.add_argument("--programs", default="tessera,torch")
    p.add_argument("--limit", type=int, default=0, help="the first so many questions of each file")
    p.add_argument("--steps", type=int, default=0, help="instead of --epochs")
    p.add_argument("--limit-s", type=float, default=600, help="seconds for one program")
    p.add_argument("--out", metavar="FILE")
    p.add_argument("--dry-run", action="store_true")
    args = p.parse_args()
    args.lr = args.lr or [2e-4]
    args.weights, args.vocab = os.path.abspath(args.weights), os.path.abspath(args.vocab)
    if args.dry_run:
        args.gpus, args.limit, args.steps = args.gpus or 2, args.limit or 24, args.steps or 2
    if args.gpus < 1:
        sys.exit("no GPU: nvidia-smi -L lists none (CUDA_VISIBLE_DEVICES?)")
    recipe = Recipe(args)
    recipe.run()
    command = shlex.join(["bench/gpu/recipe.py"] + sys.argv[1:])
    print(f"{datetime.date.today()}, {recipe.world} x {runs.gpu_name()}: `{command}`")
    if args.out:
        with open(args.out, "w", encoding="utf-8") as f:
            json.dump({"card": runs.gpu_name(), "command": sys.argv, "rows": recipe.rows}, f,
                      indent=1)
    shutil.rmtree(recipe.folder, ignore_errors=True)
    if not recipe.rows:
        sys.exit(1)


if __name__ == "__main__":
    main()
