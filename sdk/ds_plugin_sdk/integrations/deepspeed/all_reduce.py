"""DeepSpeed's ``inference_all_reduce`` in memory that the ranks share, for the ranks that it was asked for.

DeepSpeed's own op of that kind sums over all ranks whatever the group and the reduction, and crashes under launchers
that do not say how many ranks are on a machine; none of the SDK's accelerators offer it. What is left of DeepSpeed's
method then is `torch.distributed.all_reduce`, after a search for the op in each call.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from torch import Tensor, distributed

from ds_plugin_sdk import comm
from ds_plugin_sdk.integrations.deepspeed.adopt import when_used


def replace(backend: ModuleType) -> None:
    """Let ``TorchBackend.inference_all_reduce`` call `ds_plugin_sdk.comm.all_reduce` where DeepSpeed has no op for it.

    Args:
        backend: ``deepspeed.comm.torch``, executed.
    """
    when_used(_replace, backend)


def _replace(backend: ModuleType) -> None:
    own = getattr(backend.TorchBackend, "inference_all_reduce", None)
    if own is None:
        return

    @functools.wraps(own)
    def inference_all_reduce(self: Any, tensor: Tensor, op: Any, group: Any = None, *rest: Any) -> Any:
        # Older releases have one argument more, and may return a handle to wait for.
        if rest or getattr(self, "shm_comm_op", own) is not None:
            return own(self, tensor, op, group, *rest)
        if distributed.get_world_size(group) > 1:
            comm.all_reduce(tensor, self._reduce_op(op), group)
        return tensor

    backend.TorchBackend.inference_all_reduce = inference_all_reduce
