#!/usr/bin/env python3
"""One rank of torch.distributed.checkpoint, measuring when asked; bench/checkpoint/measure.py starts them.

usage: peer.py RAW TABLE RANK RANKS PORT

RAW and TABLE are what `checkpoint_ranks dump` writes: the same values that Tessera saves. Each tensor
and state becomes a DTensor in pieces of its first dimension, as FSDP2 has it, over gloo. Rank 0 takes
orders from stdin and prints a JSON line for each; a time is that of the last rank to be ready.

    save THREADS PATH   dcp.save, every file flushed (sync_files)
    async MODE PATH     dcp.async_save, then wait for it; MODE: default: a stager of its own for each
                        call; cached: one stager, whose memory is used again; staged: the same, copying
                        in a thread (blocked: until that copy is done; call_s: until the call returns)
    load THREADS PATH   dcp.load into the same tensors
    check               do they hold RAW's values?
"""
import json
import os
import sys
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

warnings.filterwarnings("ignore")
RAW, TABLE, RANK, RANKS, PORT = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])


def tensors(mesh):
    state, first = {}, 0
    for line in open(TABLE):
        entry = json.loads(line)
        numel = 1
        for size in entry["shape"]:
            numel *= size
        whole = torch.from_file(RAW, size=first + numel, dtype=torch.float32)[first:]
        whole = whole.reshape(entry["shape"])
        state[entry["state"] + "." + entry["name"]] = (whole, mesh)
        first += numel
    return state


def sharded(wholes):
    return {name: piece(whole, mesh) for name, (whole, mesh) in wholes.items()}


def piece(whole, mesh):
    """This rank's part in memory of its own: as a view its stager and writer would copy more."""
    local = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None).to_local().clone()
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=whole.shape,
                              stride=whole.stride())


def writer(path, threads=1):
    return dcp.FileSystemWriter(path, thread_count=threads, sync_files=True)


def planner():
    return dcp.DefaultSavePlanner(enable_plan_caching=True)


class Stagers:
    def __init__(self):
        self.cached = DefaultStager(StagingOptions(False, False, False, False))
        self.staged = DefaultStager(StagingOptions(False, False, True, False))


def save_async(state, mode, path, stagers):
    stager = {"default": None, "cached": stagers.cached, "staged": stagers.staged}[mode]
    if stager is None:  # or the writer would be the stager, which is slower
        stager = DefaultStager(StagingOptions(False, False, False, False))
    begun = time.perf_counter()
    answer = dcp.async_save(state, storage_writer=writer(path), async_stager=stager,
                            planner=planner())
    call = time.perf_counter() - begun
    blocked, upload = call, answer
    if mode == "staged":
        answer.staging_completion.result()
        blocked, upload = time.perf_counter() - begun, answer.upload_completion
    upload.result()
    whole = time.perf_counter() - begun
    if mode == "default":
        stager.close()
    return {"call_s": call, "blocked_s": blocked, "whole_s": whole}


def obey(order, state, wholes, stagers):
    words = order.split()
    dist.barrier()
    begun = time.perf_counter()
    if words[0] == "save":
        dcp.save(state, storage_writer=writer(words[2], int(words[1])), planner=planner())
        whole = time.perf_counter() - begun
        return {"blocked_s": whole, "whole_s": whole}
    if words[0] == "async":
        return save_async(state, words[1], words[2], stagers)
    if words[0] == "load":
        dcp.load(state, storage_reader=dcp.FileSystemReader(words[2]))
        return {"whole_s": time.perf_counter() - begun}
    if words[0] == "check":
        wrong = sum(not torch.equal(state[name].to_local(), right.to_local())
                    for name, right in sharded(wholes).items())
        return {"wrong": float(wrong)}
    if words[0] == "spoil":
        for tensor in state.values():
            tensor.to_local().fill_(-1)
    return {}


def main():
    torch.set_num_threads(max(len(os.sched_getaffinity(0)) // RANKS, 1))
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{PORT}", rank=RANK,
                            world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    wholes = tensors(mesh)
    state, stagers = sharded(wholes), Stagers()
    if RANK == 0:
        print(json.dumps({"torch": torch.__version__, "tensors": len(state)}), flush=True)
    while True:
        order = [sys.stdin.readline().strip() if RANK == 0 else None]
        dist.broadcast_object_list(order, src=0)
        if not order[0]:
            break
        result = obey(order[0], state, wholes, stagers)
        names = sorted(result)
        times = torch.tensor([result[name] for name in names], dtype=torch.float64)
        if names:
            dist.all_reduce(times, dist.ReduceOp.MAX)
        if RANK == 0:
            print(json.dumps(dict(zip(names, times.tolist()))), flush=True)
    stagers.cached.close()
    stagers.staged.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
