"""``pin_memory``: what DeepSpeed's ``NativePinnedMemory`` calls, with ``DS_PIN_MEMORY_BACKEND=native``.

The memory is that of `ds_plugin_sdk.ops.pin_memory`, and so are its errors and its warning.
"""

from __future__ import annotations

from torch import Tensor

from ds_plugin_sdk.ops import pin_memory


class PinnedMemory:
    """Page-locked host memory. All of a process's is one: what one object gave, another knows."""

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: Tensor) -> Tensor:
        """`num_elem` elements of the example's dtype, one dimension."""
        return pin_memory.empty(num_elem, example_tensor.dtype)

    def free_cpu_locked_tensor(self, locked_tensor: Tensor) -> bool:
        """Unlock such a tensor; False if it is none. It stays valid: the memory goes with its last tensor."""
        return pin_memory.free(locked_tensor.data_ptr())

    def is_pinned(self, buffer: Tensor) -> bool:
        """Whether it is in such memory, all of it, or pinned by torch."""
        return pin_memory.contains(buffer) or buffer.is_pinned()


class pin_handle(PinnedMemory):  # noqa: N801  # DeepSpeed's name
    """`PinnedMemory` with one function more."""

    def free_cpu_locked_tensor_by_ptr(self, address: int) -> bool:
        """`free_cpu_locked_tensor` by where the tensor began."""
        return pin_memory.free(address)


__all__ = ["pin_handle"]
