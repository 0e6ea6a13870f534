"""Run `tessera train` and read what it leaves behind. For the scripts of this folder."""
import dataclasses
import json
import os
import subprocess
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def tessera():
    """How to start it: $TESSERA, what scripts/gpu-carry.sh collected, or the program built here."""
    if os.environ.get("TESSERA"):
        return os.environ["TESSERA"].split()
    carried = os.path.join(ROOT, "build/gpu/run")
    if not os.path.exists(carried):
        return [os.path.join(ROOT, "tessera")]
    if "TESSERA_CUDA_PATH" not in os.environ:  # looked for once, and not in every run's time
        found = subprocess.run([carried, "/usr/bin/env"], stdout=subprocess.PIPE, text=True)
        for line in found.stdout.splitlines():
            if line.startswith("TESSERA_CUDA_PATH="):
                os.environ["TESSERA_CUDA_PATH"] = line.partition("=")[2]
    return [carried, "tessera"]


def gpu_count():
    """GPUs that this process may use; 0 without a driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([v for v in visible.split(",") if v.strip()])
    try:
        out = subprocess.run(["nvidia-smi", "-L"], stdout=subprocess.PIPE, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in out.stdout.splitlines())


def visible(gpus):
    """CUDA_VISIBLE_DEVICES for some of those that this process may use."""
    names = [v for v in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if v]
    return ",".join(names[g] if names else str(g) for g in gpus)


def shares_gpus():
    """Several ranks may have one GPU (NCCL 2.30 or later): --gpus then counts ranks."""
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


def gpu_name():
    try:
        out = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version",
                              "--format=csv,noheader"], stdout=subprocess.PIPE, text=True, timeout=60)
        return out.stdout.splitlines()[0] if out.returncode == 0 and out.stdout else "no GPU"
    except (OSError, subprocess.TimeoutExpired):
        return "no GPU"


def write_json(path, value):
    """The whole file or the one before: a reader, and a run that is cut off, never see a half."""
    with open(path + ".part", "w", encoding="utf-8") as f:
        json.dump(value, f, indent=1)
    os.replace(path + ".part", path)


@dataclasses.dataclass
class Run:
    command: list
    rc: int
    log: str
    seconds: float
    steps: list = dataclasses.field(default_factory=list)  # objects of metrics.jsonl
    evaluations: list = dataclasses.field(default_factory=list)
    summary: dict = dataclasses.field(default_factory=dict)

    @property
    def ok(self):
        return self.rc == 0 and bool(self.summary)

    def tail(self, lines=12):
        return "\n".join(self.log.splitlines()[-lines:])

    def bits(self):
        """What must be equal to the last digit: 17 of them give a double back."""
        return ([(s["loss"], s["grad_norm"], s["lr"], s["tokens"]) for s in self.steps] +
                [(e["loss"], e["f1"]) for e in self.evaluations])


def train(config, folder, ranks=1, device="cuda", gpus=None, timeout=300, options=(), **sets):
    """One run. @sets: keys of the configuration with __ for the dot (train__zero_stage=3)."""
    command = tessera() + ["train", "--config", os.path.join(ROOT, config), "--device", device,
                           "--ranks", str(ranks), "--output-dir", folder, *options]
    for key, value in sets.items():
        if isinstance(value, bool):
            value = "true" if value else "false"
        command += ["--set", f"{key.replace('__', '.', 1)}={value}"]
    env = dict(os.environ)
    if gpus is not None and device == "cuda" and not shares_gpus():
        env["CUDA_VISIBLE_DEVICES"] = visible(gpus)
    begin = time.time()
    try:
        done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, timeout=timeout)
        rc, log = done.returncode, done.stdout.decode("utf-8", "replace")
    except subprocess.TimeoutExpired as e:
        rc, log = 124, (e.stdout or b"").decode("utf-8", "replace") + f"\nno end in {timeout} s"
    except OSError as e:
        rc, log = 127, str(e)
    run = Run(command, rc, log, time.time() - begin)
    try:
        with open(os.path.join(folder, "metrics.jsonl"), encoding="utf-8") as f:
            for line in f:
                record = json.loads(line)
                (run.evaluations if "evaluation" in record else run.steps).append(record)
        with open(os.path.join(folder, "summary.json"), encoding="utf-8") as f:
            run.summary = json.load(f)
    except (OSError, ValueError) as e:
        run.log += f"\n{e}"
    return run
