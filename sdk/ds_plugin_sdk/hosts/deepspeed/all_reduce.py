"""Spares DeepSpeed's ``inference_all_reduce`` the search for an op that nobody has.

Each call asks ``torch.ops`` for DeepSpeed's shared-memory op, and what is not there torch looks for anew each time.
That is 7 of the 24 us that a call takes in a group of one. A backend that has loaded no such op need not ask.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from torch import Tensor, distributed


def shorten(backend: ModuleType) -> None:
    """Let ``TorchBackend.inference_all_reduce`` call the process group at once where there is no shared-memory op.

    Args:
        backend: ``deepspeed.comm.torch``, executed.
    """
    own = getattr(backend.TorchBackend, "inference_all_reduce", None)
    if own is None:
        return

    @functools.wraps(own)
    def inference_all_reduce(self: Any, tensor: Tensor, op: Any, group: Any = None, *rest: Any) -> Any:
        # Older releases have one argument more; they do not look for the op.
        if rest or getattr(self, "shm_comm_op", own) is not None or distributed.get_world_size(group) <= 1:
            return own(self, tensor, op, group, *rest)
        return distributed.all_reduce(tensor, op=self._reduce_op(op), group=group)

    backend.TorchBackend.inference_all_reduce = inference_all_reduce
