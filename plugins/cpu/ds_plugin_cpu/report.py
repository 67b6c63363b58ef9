"""What `sdk report` says about the CPU."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ds_plugin_cpu import collectives, memory, threads, topology


def lines() -> Iterable[tuple[str, str]]:
    """Cores, threads, instruction set, memory policy, collectives."""
    nodes = topology.numa_nodes()
    count, reason = threads.choose()
    kept = memory.keep_large_blocks()
    yield "cores", f"{len(topology.usable_cores())} in {len(nodes)} NUMA node{'s' if len(nodes) != 1 else ''}"
    yield "threads of a rank", f"{count} ({reason})"
    yield "instruction set", str(torch.backends.cpu.get_cpu_capability())
    yield "memory", f"{memory.available() / 2**30:.1f} of {memory.total() / 2**30:.1f} GiB available"
    yield (
        "allocator",
        f"keeps freed blocks up to {kept / 2**30:.1f} GiB" if kept else "gives freed blocks back",
    )
    backend, why = collectives.choose()
    yield "collectives of the CPU", f"{backend} ({why})"
    ipex = collectives.ipex()
    if ipex is not None:
        yield "IPEX", ipex
