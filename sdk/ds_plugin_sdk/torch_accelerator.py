"""`TorchAccelerator`: the accelerator of any device that torch knows, in about ten lines of the vendor's.

It answers every question from the device's torch module (``torch.xpu``, ``torch.<name>`` of a PrivateUse1 backend)
and, where that has no answer, from ``torch.accelerator``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch

from ds_plugin_sdk.accelerator import DeepSpeedAccelerator
from ds_plugin_sdk.errors import InvalidAcceleratorError


class TorchAccelerator(DeepSpeedAccelerator):
    """A device by its torch name.

    A vendor states, and nothing more::

        class ZAP_Accelerator(TorchAccelerator):
            device_type = "zap"
            communication_backend = "zapccl"
            op_builders = "ds_plugin_zap.op_builder"

    Attributes:
        device_type: torch's name of the device.
        communication_backend: torch.distributed backend; None asks torch for the device's default.
        synchronous: True when a call returns after its work is done: no streams, no events.
        dtypes: types one can train in; None asks ``torch.accelerator``.
        compile_backend: torch.compile backend.
        triton: whether Triton generates code for the device.
    """

    device_type: ClassVar[str]
    communication_backend: ClassVar[str | None] = None
    synchronous: ClassVar[bool] = False
    dtypes: ClassVar[Sequence[torch.dtype] | None] = None
    compile_backend: ClassVar[str] = "inductor"
    triton: ClassVar[bool] = False

    def __init__(self) -> None:
        if not isinstance(getattr(self, "device_type", None), str):
            raise InvalidAcceleratorError(
                f"{type(self).__name__} does not say which device it is",
                why="its class attribute device_type is missing",
                hint='write device_type = "<torch device name>" in the class body',
            )
        wrong = [each for each in self.dtypes or () if not isinstance(each, torch.dtype)]
        if wrong:
            raise InvalidAcceleratorError(
                f"{type(self).__name__} does not say in which types one can train",
                plugin=self.device_type,
                why=f"its class attribute dtypes has {', '.join(map(repr, wrong))}",
                hint="write torch's: dtypes = (torch.float32, torch.bfloat16)",
            )
        super().__init__()
        self._compile_backend = self.compile_backend

    @functools.cached_property
    def _module(self) -> Any:
        try:
            return torch.get_device_module(self.device_type)
        except RuntimeError as error:
            raise InvalidAcceleratorError(
                f"torch does not know a device '{self.device_type}'",
                plugin=self.device_type,
                why=str(error),
                hint="import the torch extension that registers the device before the accelerator is used",
            ) from error

    def _ask(self, *names: str) -> Callable[..., Any]:
        """The first of these functions that the device's module or torch.accelerator has."""
        for module in (self._module, torch.accelerator):
            for name in names:
                function = getattr(module, name, None)
                if function is not None:
                    return function  # type: ignore[no-any-return]  # a device module is untyped
        raise InvalidAcceleratorError(
            f"torch.{self.device_type} cannot answer",
            plugin=self.device_type,
            why=f"neither it nor torch.accelerator has {' or '.join(names)}()",
            hint=f"override the method in {type(self).__name__}, or add the function to the device's torch module",
        )

    # ------------------------------------------------------------------ device
    def device_name(self, device_index: int | None = None) -> str:
        return self.device_type if device_index is None else f"{self.device_type}:{device_index}"

    def device_count(self) -> int:
        return int(self._ask("device_count")())

    def current_device(self) -> int:
        return int(self._ask("current_device", "current_device_index")())

    def set_device(self, device_index: int) -> None:
        self._ask("set_device", "set_device_index")(device_index)

    def synchronize(self, device_index: int | None = None) -> None:
        self._ask("synchronize")(self.device(device_index))

    # ------------------------------------------------------------------ random numbers
    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        state: torch.Tensor = self._ask("get_rng_state")(self.device(device_index))
        return state

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        self._ask("set_rng_state")(new_state, self.device(device_index))

    def manual_seed(self, seed: int) -> Any:
        return self._ask("manual_seed")(seed)

    def manual_seed_all(self, seed: int) -> Any:
        return self._ask("manual_seed_all")(seed)

    def default_generator(self, device_index: int) -> torch.Generator:
        generator: torch.Generator = self._module.default_generators[device_index]
        return generator

    def initial_seed(self, seed: int | None = None) -> int:
        return int(self._ask("initial_seed")())

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        later = getattr(self._module, "_lazy_call", None)
        return later(callback) if later is not None else callback()

    # ------------------------------------------------------------------ streams and events
    @property
    def Stream(self) -> Any:
        if self.synchronous:
            return None
        return getattr(self._module, "Stream", None) or functools.partial(torch.Stream, self.device_type)

    @property
    def Event(self) -> Any:
        if self.synchronous:
            return None
        return getattr(self._module, "Event", None) or functools.partial(torch.Event, self.device_type)

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        if stream is None or self.synchronous:
            return contextlib.nullcontext()
        enter = getattr(self._module, "stream", None)
        context: AbstractContextManager[Any] = enter(stream) if enter is not None else stream
        return context

    def current_stream(self, device_index: int | None = None) -> Any:
        return None if self.synchronous else self._ask("current_stream")(self.device(device_index))

    def default_stream(self, device_index: int | None = None) -> Any:
        if self.synchronous:
            return None
        default = getattr(self._module, "default_stream", None)
        if default is not None:
            return default(self.device(device_index))
        # torch numbers a device's default stream 0 (c10/core/Stream.h).
        index = self.device(device_index).index
        kinds: Any = torch._C._autograd.DeviceType
        kind = getattr(kinds, self.device_type.upper(), kinds.PrivateUse1)
        return torch.Stream(stream_id=0, device_index=index, device_type=int(kind))  # pybind11's enum is none for it

    # ------------------------------------------------------------------ memory
    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        return dict(self._ask("memory_stats")(self.device(device_index)))

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        self._ask("reset_peak_memory_stats")(self.device(device_index))

    def total_memory(self, device_index: int | None = None) -> int:
        return int(self._ask("mem_get_info", "get_memory_info")(self.device(device_index))[1])

    def available_memory(self, device_index: int | None = None) -> int:
        return int(self._ask("mem_get_info", "get_memory_info")(self.device(device_index))[0])

    def empty_cache(self) -> None:
        self._ask("empty_cache")()

    # ------------------------------------------------------------------ the rest
    def supported_dtypes(self) -> list[torch.dtype]:
        if self.dtypes is not None:
            return list(self.dtypes)
        capability = torch.accelerator.get_device_capability(self.device())
        return [dtype for dtype in super().supported_dtypes() if dtype in capability["supported_dtypes"]]

    def communication_backend_name(self) -> str:
        if self.communication_backend is not None:
            return self.communication_backend
        backend = torch.distributed.Backend.default_device_backend_map.get(self.device_type)
        if backend is None:
            raise InvalidAcceleratorError(
                f"{type(self).__name__} has no collectives",
                plugin=self.device_type,
                why=f"torch.distributed knows no backend for device '{self.device_type}'",
                hint="register one with torch.distributed.Backend.register_backend, "
                "or name it in the class attribute communication_backend",
            )
        return backend

    def is_triton_supported(self) -> bool:
        return self.triton
