#!/usr/bin/env python3
"""Where a step's time goes.

usage: bench/gpu/breakdown.py TRACE.json...            of tessera train --trace, a file a rank
       bench/gpu/breakdown.py --kernels KERNELS.csv... of kernels.c

From a trace: time in FORWARD, BACKWARD, the norm and UPDATE, of which the last two may run beside
the others; communication that is hidden (one of these runs beside it) and exposed (none does); gaps
(all streams are idle). Times of instructions hold the small gaps between their kernels.

From kernels: shares of GEMM, attention, other kernels, NCCL exposed, gaps, in the steady part of the
run, and the kernels with the largest sums.
"""
import argparse
import csv
import json
import statistics
import sys

GROUPS = {"FORWARD": "forward", "RECOMPUTE": "recompute", "BACKWARD": "backward",
          "UPDATE": "update", "NORM": "norm, agree", "AGREE": "norm, agree", "BEGIN": "norm, agree",
          "ACCUMULATE": "accumulate"}


def union(spans):
    """Sorted, without overlap."""
    out = []
    for a, b in sorted(spans):
        if out and a <= out[-1][1]:
            out[-1][1] = max(out[-1][1], b)
        elif b > a:
            out.append([a, b])
    return out


def total(spans):
    return sum(b - a for a, b in spans)


def minus(spans, taken):
    """What of the union @spans is not in the union @taken."""
    out, i = [], 0
    for a, b in spans:
        while i < len(taken) and taken[i][1] <= a:
            i += 1
        at, k = a, i
        while k < len(taken) and taken[k][0] < b:
            if taken[k][0] > at:
                out.append([at, taken[k][0]])
            at = max(at, taken[k][1])
            k += 1
        if at < b:
            out.append([at, b])
    return out


def of_trace(path):
    with open(path, encoding="utf-8") as f:
        root = json.load(f)
    about = root["otherData"]
    events = [e for e in root["traceEvents"] if e["ph"] == "X"]
    moves, parts, compute = {}, {}, []
    for e in events:
        span = (e["ts"], e["ts"] + e["dur"])
        if e["cat"] in ("compute", "update"):
            compute.append(span)
            parts.setdefault(GROUPS.get(e["args"]["op"], "other"), []).append(span)
        else:
            moves.setdefault(e["cat"], []).append(span)
    busy = union(compute)
    comm = union(s for spans in moves.values() for s in spans)
    shown = {k: total(union(v)) for k, v in parts.items()}
    exposed = total(minus(comm, busy))
    step = about["step_us"]
    gaps = step - total(union([*busy, *comm]))
    by = {k: (total(union(v)), total(minus(union(v), busy))) for k, v in moves.items()}
    return about, step, shown, total(comm), exposed, gaps, by


def show_trace(path):
    about, step, shown, comm, exposed, gaps, by = of_trace(path)
    how = "captured" if about["captured"] else "not captured"
    print(f"{path}: step {about['step']}, rank {about['rank']} of {about['world_size']}, "
          f"{about['tokens']} tokens, {how}, {about['device']}: {step / 1e3:.3f} ms")
    for name, us in sorted(shown.items(), key=lambda x: -x[1]):
        print(f"  {name:24} {us / 1e3:9.3f} ms  {us / step:6.1%}")
    for name, us in (("exposed communication", exposed), ("gaps, all streams idle", gaps)):
        print(f"  {name:24} {us / 1e3:9.3f} ms  {us / step:6.1%}")
    print(f"  {'(communication in all':24} {comm / 1e3:9.3f} ms  {1 - exposed / max(comm, 1e-9):6.1%} "
          "of it hidden)")
    for name, (all_us, open_us) in by.items():
        print(f"  {'(  ' + name:24} {all_us / 1e3:9.3f} ms  exposed {open_us / 1e3:.3f} ms)")


def kind_of(name):
    low = name.lower()
    if any(w in low for w in ("nccl", "peers_gather", "peers_reduce", "imitate_kernel")):
        return "communication"
    if any(w in low for w in ("attention", "mma_forward", "mma_dkv", "mma_dq", "plain_")):
        return "attention"
    if any(w in low for w in ("gemm", "cutlass", "cublas", "nvjet", "xmma", "splitk", "split_k")):
        return "GEMM"
    if low.startswith("["):  # copies and fills
        return "copies and fills"
    return "other kernels"


def show_kernels(path, skip, top):
    """The steps are told apart by AGREE's kernel, one a step."""
    rows, takes = [], {}
    with open(path, encoding="utf-8", errors="replace", newline="") as f:
        for r in csv.DictReader(f):
            rows.append((int(r["start_ns"]), int(r["end_ns"]), r["name"]))
            takes[r["name"]] = (f"{r['threads']} x {r['registers']}, "
                                f"{int(r['shared_bytes']) / 1024:.0f} KiB")
    rows.sort()
    ends = [a for a, b, name in rows if "agree" in name.lower()]
    if len(ends) < skip + 3:
        sys.exit(f"{path}: {len(ends)} steps; more than {skip + 2} are needed")
    # From report to report; the median step and its parts.
    steps = list(zip(ends[skip:-2], ends[skip + 1:-1]))
    parts, sums, counts = {}, {}, {}
    lengths = [b - a for a, b in steps]
    at = 0
    for begin, end in steps:
        spans = {}
        while at < len(rows) and rows[at][0] < begin:
            at += 1
        i = at
        while i < len(rows) and rows[i][0] < end:
            a, b, name = rows[i]
            spans.setdefault(kind_of(name), []).append((a, min(b, end)))
            sums[name] = sums.get(name, 0) + b - a
            counts[name] = counts.get(name, 0) + 1
            i += 1
        move = union(spans.pop("communication", []))
        busy = union(s for v in spans.values() for s in v)
        for k, v in spans.items():
            parts.setdefault(k, []).append(sum(b - a for a, b in v))
        parts.setdefault("(communication in all)", []).append(total(move))
        parts.setdefault("exposed communication", []).append(total(minus(move, busy)))
        parts.setdefault("gaps", []).append(end - begin - total(union([*busy, *move])))
    mean = statistics.fmean(lengths)
    print(f"{path}: {len(steps)} steps, {mean / 1e6:.3f} ms each in the mean, median "
          f"{statistics.median(lengths) / 1e6:.3f} ms, {sum(counts.values()) / len(steps):.0f} "
          "kernels a step")
    for k, v in sorted(parts.items(), key=lambda x: -sum(x[1])):
        t = sum(v) / len(steps)
        print(f"  {k:24} {t / 1e6:9.3f} ms  {t / mean:6.1%}")
    print("  largest kernels (a block's threads x registers, shared memory):")
    for name in sorted(sums, key=lambda n: -sums[n])[:top]:
        print(f"  {sums[name] / len(steps) / 1e6:9.3f} ms  {counts[name] / len(steps):6.1f} x "
              f"{sums[name] / counts[name] / 1e3:8.1f} us  {takes[name]:18} {name[:110]}")


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    p.add_argument("files", nargs="+", metavar="FILE")
    p.add_argument("--kernels", action="store_true", help="files of kernels.c, not traces")
    p.add_argument("--skip", type=int, default=10, help="steps at the start that do not count")
    p.add_argument("--top", type=int, default=15, help="kernels to list")
    args = p.parse_args()
    for path in args.files:
        if args.kernels:
            show_kernels(path, args.skip, args.top)
        else:
            show_trace(path)


if __name__ == "__main__":
    main()
