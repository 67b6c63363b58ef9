"""DeepSpeed's inference_all_reduce on the CPU plugin beside all_reduce over gloo, DeepSpeed's and torch's own, in turn;
and over and over, with nothing in between:

OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu torchrun --nproc_per_node 2 benchmarks/inference_all_reduce.py

Where no plugin is installed it measures DeepSpeed's own op, if LOCAL_SIZE=2 is set.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
from deepspeed import comm

WAYS: dict[str, Callable[[torch.Tensor], Any]] = {
    "inference_all_reduce": comm.inference_all_reduce,
    "deepspeed.comm.all_reduce": comm.all_reduce,
    "torch.distributed.all_reduce": torch.distributed.all_reduce,
}
SIZES = (1024, 16 * 1024, 1024 * 1024)  # hidden size 1024: a token's activations, 16 tokens', a long prompt's
TURNS = 99
CALLS = 5  # one after the other, as a model's layers have them
ROW = 200  # over and over


def seconds(reduce: Callable[[torch.Tensor], Any], tensor: torch.Tensor, calls: int = CALLS) -> float:
    """Of one call among several."""
    torch.distributed.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        reduce(tensor)
    return (time.perf_counter() - start) / calls


def measure(tensor: torch.Tensor) -> dict[str, list[float]]:
    """Seconds of each way in each turn; who is first changes from turn to turn."""
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    names = list(WAYS)
    for turn in range(TURNS):
        first = turn % len(names)
        for way in names[first:] + names[:first]:
            times[way].append(seconds(WAYS[way], tensor))
    return times


def main() -> None:
    """Print the medians for each size, and the median over the turns of how many times as long ours takes."""
    deepspeed.init_distributed("gloo", verbose=False)
    for dtype in (torch.float32, torch.bfloat16):
        for numel in SIZES:
            tensor = torch.zeros(numel, dtype=dtype)
            times = measure(tensor)
            row = statistics.median(seconds(comm.inference_all_reduce, tensor, ROW) for _ in range(9))
            if comm.get_rank() == 0:
                sys.stdout.write(f"{numel} elements of {str(dtype)[6:]}\n")
                sys.stdout.write(f"    over and over                  {row * 1e6:7.1f} us\n")
                for way, taken in times.items():
                    pairs = zip(times["inference_all_reduce"], taken, strict=True)
                    ratio = statistics.median(ours / theirs for ours, theirs in pairs)
                    median = statistics.median(taken) * 1e6
                    sys.stdout.write(f"    {way:30} {median:7.1f} us; ours takes {ratio:.2f} times as long\n")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
