#!/usr/bin/env python3
"""One rank of torch.distributed.checkpoint, measuring when asked; bench/checkpoint/measure.py starts them.

usage: peer.py RANK RANKS PORT --raw RAW TABLE
       peer.py RANK RANKS PORT --bert HIDDEN LAYERS HEADS FFN [--device cuda]

RAW and TABLE are what `checkpoint_ranks dump` writes: the same values that Tessera saves. Each tensor
and state becomes a DTensor in pieces of its first dimension, as FSDP2 has it. --bert is FSDP2 itself: a
BERT for question answering of transformers, random weights, fully_shard on each layer and on the whole,
and AdamW after a step; its state is what get_state_dict() gives. On CPUs over gloo, on GPUs over NCCL.
Each rank waits for a line on stdin before it makes its state. Rank 0 takes orders from
there and prints a JSON line for each; a time is that of the last rank to be ready.

    save THREADS PATH   dcp.save, every file flushed (sync_files)
    async MODE PATH     dcp.async_save, then wait for it; MODE: default: a stager of its own for each
                        call (on GPUs none is named, as users do: the writer stages); cached: one
                        stager, whose memory is used again (on GPUs BlockingAsyncStager, pinned);
                        staged: a DefaultStager that copies in a thread (blocked: until that copy is
                        done; call_s: until the call returns). What this PyTorch cannot do is
                        answered by {"failed": why}: 2.11's DefaultStager can copy only once
    load THREADS PATH   dcp.load into the same tensors
    spoil               overwrite them
    check               do they hold the values that they had at first?
"""
import argparse
import json
import os
import sys
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

warnings.filterwarnings("ignore")


# ---- the state -----------------------------------------------------------------------------------

def tensors(raw, table):
    state, first = {}, 0
    for line in open(table):
        entry = json.loads(line)
        numel = 1
        for size in entry["shape"]:
            numel *= size
        whole = torch.from_file(raw, size=first + numel, dtype=torch.float32)[first:]
        state[entry["state"] + "." + entry["name"]] = whole.reshape(entry["shape"])
        first += numel
    return state


def piece(whole, mesh):
    """This rank's part in memory of its own: as a view its stager and writer would copy more."""
    local = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None).to_local().clone()
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=whole.shape,
                              stride=whole.stride())


def fsdp2(sizes, mesh, device):
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard
    from transformers import BertConfig, BertForQuestionAnswering
    hidden, layers, heads, ffn = sizes
    with torch.device(device):
        model = BertForQuestionAnswering(BertConfig(
            hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
            intermediate_size=ffn))
    for layer in model.bert.encoder.layer:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), fused=device == "cuda")
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


def leaves(tree):
    """Its tensors, each rank's own part."""
    if isinstance(tree, torch.Tensor):
        yield tree.to_local() if isinstance(tree, DTensor) else tree
    elif isinstance(tree, (dict, list, tuple)):
        for child in tree.values() if isinstance(tree, dict) else tree:
            yield from leaves(child)


class State:
    def __init__(self, args, mesh):
        if args.bert:
            self.tree = fsdp2(args.bert, mesh, args.device)
        else:
            self.tree = {name: piece(whole, mesh) for name, whole in tensors(*args.raw).items()}
        self.right = None
        self.count = sum(1 for _ in leaves(self.tree))
        self.bytes = sum(t.numel() * t.element_size() for t in leaves(self.tree))

    def spoil(self):
        self.right = [t.clone() for t in leaves(self.tree)]
        for t in leaves(self.tree):
            t.fill_(-1)

    def wrong(self):
        return sum(not torch.equal(t, right) for t, right in zip(leaves(self.tree), self.right))


# ---- orders --------------------------------------------------------------------------------------

def writer(path, threads=1):
    return dcp.FileSystemWriter(path, thread_count=threads, sync_files=True)


def planner():
    return dcp.DefaultSavePlanner(enable_plan_caching=True)


class Stagers:
    """Those that keep their memory; pinned where there is a GPU to copy from."""

    def __init__(self, device):
        self.pinned = device == "cuda"
        self.staged = self.new(True)
        self.cached = (BlockingAsyncStager(cache_staged_state_dict=True) if self.pinned
                       else self.new(False))

    def new(self, in_thread):
        return DefaultStager(StagingOptions(
            use_pinned_memory=self.pinned, use_shared_memory=False, use_async_staging=in_thread,
            use_non_blocking_copy=self.pinned))

    def close(self):
        self.cached.close()
        self.staged.close()


def save_async(state, mode, path, stagers):
    stager = {"default": None, "cached": stagers.cached, "staged": stagers.staged}[mode]
    own = stager is None and not stagers.pinned
    if own:  # or the writer would be the stager, which is slower
        stager = stagers.new(False)
    begun = time.perf_counter()
    answer = dcp.async_save(state.tree, storage_writer=writer(path), async_stager=stager,
                            planner=planner())
    call = time.perf_counter() - begun
    blocked, upload = call, answer
    if mode == "staged":
        answer.staging_completion.result()
        blocked, upload = time.perf_counter() - begun, answer.upload_completion
    upload.result()
    whole = time.perf_counter() - begun
    if own:
        stager.close()
    return {"call_s": call, "blocked_s": blocked, "whole_s": whole}


def obey(order, state, stagers):
    words = order.split()
    if stagers.pinned:
        torch.cuda.synchronize()
    dist.barrier()
    begun = time.perf_counter()
    if words[0] == "save":
        dcp.save(state.tree, storage_writer=writer(words[2], int(words[1])), planner=planner())
        whole = time.perf_counter() - begun
        return {"blocked_s": whole, "whole_s": whole}
    if words[0] == "async":
        try:
            return save_async(state, words[1], words[2], stagers)
        except Exception as e:  # pylint: disable=broad-except
            return {"failed": f"{type(e).__name__}: {e}"}
    if words[0] == "load":
        dcp.load(state.tree, storage_reader=dcp.FileSystemReader(words[2]))
        if stagers.pinned:
            torch.cuda.synchronize()
        return {"whole_s": time.perf_counter() - begun}
    if words[0] == "check":
        return {"wrong": float(state.wrong())}
    if words[0] == "spoil":
        state.spoil()
    return {}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("rank", type=int)
    parser.add_argument("ranks", type=int)
    parser.add_argument("port", type=int)
    parser.add_argument("--raw", nargs=2)
    parser.add_argument("--bert", nargs=4, type=int)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_args()
    if args.bert:
        import transformers # noqa: F401 (takes seconds; before the state is asked for)
        transformers.BertForQuestionAnswering # it is imported when it is named
    if not sys.stdin.readline():
        return
    if args.device == "cuda":
        torch.cuda.set_device(args.rank)
    torch.set_num_threads(max(len(os.sched_getaffinity(0)) // args.ranks, 1))
    dist.init_process_group("cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo",
                            init_method=f"tcp://127.0.0.1:{args.port}", rank=args.rank,
                            world_size=args.ranks)
    mesh = init_device_mesh(args.device, (args.ranks,))
    state, stagers = State(args, mesh), Stagers(args.device)
    if args.rank == 0:
        print(json.dumps({"torch": torch.__version__, "tensors": state.count, "bytes": state.bytes,
                          "threads": torch.get_num_threads()}), flush=True)
    while True:
        order = [sys.stdin.readline().strip() if args.rank == 0 else None]
        dist.broadcast_object_list(order, src=0, device=torch.device("cpu"))
        if not order[0]:
            break
        result = obey(order[0], state, stagers)
        if "failed" in result:  # on all ranks alike
            if args.rank == 0:
                print(json.dumps(result), flush=True)
            continue
        names = sorted(result)
        times = torch.tensor([result[name] for name in names], dtype=torch.float64)
        if names:
            dist.all_reduce(times, dist.ReduceOp.MAX)
        if args.rank == 0:
            print(json.dumps(dict(zip(names, times.tolist()))), flush=True)
    stagers.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
