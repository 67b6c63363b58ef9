"""DeepSpeed's collectives of host memory in memory that the ranks share: `ds_plugin_sdk.comm`.

ZeRO's ``all_reduce``, ``all_gather_into_tensor`` and ``reduce_scatter_tensor`` are a fifth of a small model's step
through gloo's sockets. Of ``inference_all_reduce`` DeepSpeed has an op of its own, which sums over all ranks whatever
the group and the reduction, and crashes under launchers that do not say how many ranks are on a machine; none of the
SDK's accelerators offer it. What is left of DeepSpeed's method then is `torch.distributed.all_reduce`, after a search
for the op in each call.

What `ds_plugin_sdk.comm` does not do in shared memory is DeepSpeed's own methods', with all of their arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor, distributed

from ds_plugin_sdk import comm
from ds_plugin_sdk.integrations.deepspeed.adopt import when_used
from ds_plugin_sdk.privateuse1.process_group import Done

Method = Callable[..., Any]


def replace(backend: ModuleType) -> None:
    """Let the methods of ``TorchBackend`` call `ds_plugin_sdk.comm` where it has a way.

    Args:
        backend: ``deepspeed.comm.torch``, executed.
    """
    when_used(_replace, backend)


def _replace(backend: ModuleType) -> None:
    for ours in (_inference_all_reduce, _all_reduce, _all_gather_into_tensor, _reduce_scatter_tensor):
        name = ours.__name__[1:]
        own = getattr(backend.TorchBackend, name, None)
        if own is not None:
            setattr(backend.TorchBackend, name, functools.wraps(own)(ours(own)))


def _inference_all_reduce(own: Method) -> Method:
    def inference_all_reduce(self: Any, tensor: Tensor, op: Any, group: Any = None, *rest: Any) -> Any:
        # Older releases have one argument more, and may return a handle to wait for.
        if rest or getattr(self, "shm_comm_op", own) is not None:
            return own(self, tensor, op, group, *rest)
        if distributed.get_world_size(group) > 1:
            comm.all_reduce(tensor, self._reduce_op(op), group)
        return tensor

    return inference_all_reduce


def _all_reduce(own: Method) -> Method:
    def all_reduce(
        self: Any, tensor: Tensor, op: Any = distributed.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if comm.shared_all_reduce(tensor, self._reduce_op(op), group):
            return _work(tensor, async_op)
        return own(self, tensor, op, group, async_op)

    return all_reduce


def _all_gather_into_tensor(own: Method) -> Method:
    def all_gather_into_tensor(
        self: Any, output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        if comm.shared_all_gather(output_tensor, input_tensor, group):
            return _work(output_tensor, async_op)
        return own(self, output_tensor, input_tensor, group, async_op)

    return all_gather_into_tensor


def _reduce_scatter_tensor(own: Method) -> Method:
    def reduce_scatter_tensor(
        self: Any,
        output_tensor: Tensor,
        input_tensor: Tensor,
        op: Any = distributed.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if comm.shared_reduce_scatter(output_tensor, input_tensor, self._reduce_op(op), group):
            return _work(output_tensor, async_op)
        return own(self, output_tensor, input_tensor, op, group, async_op)

    return reduce_scatter_tensor


def _work(result: Tensor, async_op: bool) -> Any:
    """What `torch.distributed` gives of a collective that is done."""
    return Done([result]) if async_op else None
