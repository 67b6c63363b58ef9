"""`DeepSpeedAccelerator`: what DeepSpeed asks of a device, with a working answer wherever one can be given.

The class knows nothing of DeepSpeed and imports nothing of it, so a plugin written against it constructs on every
DeepSpeed release: it has the 68 members that releases 0.8.1 to 0.19.8 ever made abstract, and
`integrations.deepspeed` adds what a later release asks beyond them. Only what the vendor alone can know is abstract
here. Everything else is derived from it, each fact from one source:

    behaviour flags             from whether the device has `Stream` and `Event`
    memory_allocated() ...      from `memory_stats()`
    is_bf16_supported() ...     from `supported_dtypes()`
    device strings              from `device_name()` and `current_device()`

Most vendors do not subclass this class but `TorchAccelerator`, which answers the abstract members from torch.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import importlib.util
import math
import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch

from ds_plugin_sdk import op_builder
from ds_plugin_sdk.accelerator_names import check_names
from ds_plugin_sdk.errors import InvalidAcceleratorError
from ds_plugin_sdk.op_builder import op_table

_DEFAULT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class DeepSpeedAccelerator(abc.ABC):
    """One kind of device. An instance is stateless but for the names below; several may exist.

    Attributes:
        op_builders: dotted name of the package whose modules define this plugin's op builders; None means that the
            plugin brings no kernels of its own: the SDK's CPU kernels and reference implementations serve.
        op_info: dotted name of a module that describes ops of the plugin's own, for `sdk conformance`: its ``OPS`` are
            `ds_plugin_sdk.conformance.op_info.OpInfo`.
        visible_devices_env: environment variable by which a launcher hides devices from a rank.
        exported_envs: prefixes of the environment variables that a launcher should carry to other nodes.
        supports_nvtx_domain: whether `range_push` and `range_pop` understand ``domain=``.
    """

    op_builders: ClassVar[str | None] = None
    op_info: ClassVar[str | None] = None
    visible_devices_env: ClassVar[str | None] = None
    exported_envs: ClassVar[Sequence[str]] = ()
    supports_nvtx_domain: ClassVar[bool] = False

    # DeepSpeed reads and replaces it. Here for classes whose __init__ does not call this one.
    _compile_backend: str = "inductor"

    # False: pinning by torch does nothing here, and DeepSpeed need not count it.
    _torch_pins_host_memory: ClassVar[bool] = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_names(cls)

    def __init__(self) -> None:
        # DeepSpeed reads these directly: the device type, and a string it may replace.
        self._name: str = self.device_name()
        self._communication_backend_name: str = self.communication_backend_name()
        self._compile_backend = type(self)._compile_backend  # found faster on the instance
        self._check_flags()

    def __repr__(self) -> str:
        return f"<{type(self).__module__}.{type(self).__qualname__} on device '{self.device_name()}'>"

    def _check_flags(self) -> None:
        """Raise for a device that promises streams or events which it does not have.

        DeepSpeed would dereference None in the middle of a training step.
        """
        if self.Stream is None and not (self.is_synchronized_device() and self.resolves_data_dependency()):
            raise InvalidAcceleratorError(
                f"{type(self).__name__} contradicts itself",
                plugin=self._name,
                why="it says that work is asynchronous, but its Stream is None",
                hint="give Stream, or leave is_synchronized_device() and resolves_data_dependency() as inherited",
            )
        if self.Event is None and not (self.handles_memory_backpressure() and self.use_host_timers()):
            raise InvalidAcceleratorError(
                f"{type(self).__name__} contradicts itself",
                plugin=self._name,
                why="it asks DeepSpeed to record events, but its Event is None",
                hint="give Event, or leave handles_memory_backpressure() and use_host_timers() as inherited",
            )

    # ------------------------------------------------------------------ behaviour flags
    def is_synchronized_device(self) -> bool:
        """True when a call returns after its work is done; DeepSpeed then uses no side streams."""
        return self.Stream is None

    def resolves_data_dependency(self) -> bool:
        """True when the device orders dependent work by itself; DeepSpeed then never waits for a stream."""
        return self.Stream is None

    def handles_memory_backpressure(self) -> bool:
        """True when DeepSpeed need not hold back allocations by recording events."""
        return self.Event is None

    def use_host_timers(self) -> bool:
        """True when DeepSpeed should time with the host's clock instead of events."""
        return self.Event is None

    # ------------------------------------------------------------------ device
    @abc.abstractmethod
    def device_name(self, device_index: int | None = None) -> str:
        """The torch device string: ``"xpu"`` without an index, ``"xpu:1"`` with one."""

    @abc.abstractmethod
    def device_count(self) -> int:
        """Devices that a process of this machine can use: the number of ranks a launcher starts here."""

    @abc.abstractmethod
    def current_device(self) -> Any:
        """Index of the current device; where torch does not number devices, as on the CPU, the `torch.device`.

        DeepSpeed passes it on as ``device=``, which takes an integer only where devices have numbers.
        """

    @abc.abstractmethod
    def set_device(self, device_index: int) -> None:
        """Make a device current. Accepts the local rank of every process that a launcher starts."""

    @abc.abstractmethod
    def synchronize(self, device_index: int | None = None) -> None:
        """Return when all work submitted to the device is done. None: the current device."""

    # Any, so that a class which takes an index alone still overrides it.
    def device(self, device_index: Any = None) -> torch.device:
        """The `torch.device` of an index, or of what DeepSpeed passes in its place: a tensor's device, or a string.

        None, or a device without an index, is the current one.

        Raises:
            ValueError: it is a device of another kind.
        """
        if isinstance(device_index, (str, torch.device)):
            device = torch.device(device_index)
            if device.type != torch.device(self.device_name()).type:
                raise ValueError(f"{device} is no device of '{self.device_name()}'")
            device_index = device.index
        return torch.device(self.device_name(self.current_device() if device_index is None else device_index))

    def current_device_name(self) -> str:
        """Device string of the current device."""
        return self.device_name(self.current_device())

    def is_available(self) -> bool:
        """Whether there is a device to use."""
        return self.device_count() > 0

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on this kind of device."""
        return tensor.device.type == torch.device(self.device_name()).type

    # ------------------------------------------------------------------ random numbers
    def random(self) -> Any:
        """The functions of `torch.random`, of which ``fork_rng(devices=[...])`` keeps this device's generators."""
        return self._random

    @functools.cached_property
    def _random(self) -> Any:
        return types.SimpleNamespace(**{**vars(torch.random), "fork_rng": self._fork_rng})

    def _fork_rng(self, devices: Any = None, **options: Any) -> AbstractContextManager[None]:
        # torch's own means CUDA where no type is given. It keeps the CPU's generator in any case, and only that one.
        kept = () if self.device_name() == "cpu" else devices
        return torch.random.fork_rng(kept, device_type=self.device_name(), **options)

    @abc.abstractmethod
    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """State of the device's generator: a uint8 tensor on the CPU."""

    @abc.abstractmethod
    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """Restore a state that `get_rng_state` gave."""

    @abc.abstractmethod
    def manual_seed(self, seed: int) -> Any:
        """Seed the current device's generator."""

    @abc.abstractmethod
    def default_generator(self, device_index: int) -> torch.Generator:
        """The generator of a device."""

    def manual_seed_all(self, seed: int) -> Any:
        """Seed the generators of all devices."""
        return self.manual_seed(seed)

    def initial_seed(self, seed: int | None = None) -> int:
        """Seed the current device's generator started from. DeepSpeed before 0.14.3 passed a seed; it is ignored."""
        return self.default_generator(self.current_device()).initial_seed()

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        """Run a callback once the device is initialised; here that is now."""
        return callback()

    # ------------------------------------------------------------------ streams and events
    @property
    def Stream(self) -> Any:
        """Class of the device's streams, constructible without arguments; None on a synchronous device."""
        return None

    @property
    def Event(self) -> Any:
        """Class of the device's events, constructible with ``enable_timing=``; None on a device without any."""
        return None

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Context in which a stream is current. None: no change."""
        return contextlib.nullcontext()

    def current_stream(self, device_index: int | None = None) -> Any:
        """The current stream, or None on a synchronous device."""
        return None

    def default_stream(self, device_index: int | None = None) -> Any:
        """The default stream, or None on a synchronous device."""
        return None

    # ------------------------------------------------------------------ graphs
    def is_current_stream_capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""
        return False

    def create_graph(self) -> Any:
        """A new graph to capture into; None on a device without graphs."""
        return None

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> AbstractContextManager[Any]:
        """Context that captures the work submitted in it."""
        return contextlib.nullcontext()

    def replay_graph(self, graph: Any) -> None:
        """Submit a captured graph."""

    # ------------------------------------------------------------------ memory, in bytes
    @abc.abstractmethod
    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        """Allocator statistics under torch's names.

        ``allocated_bytes.all.current`` and ``.peak`` are needed; ``reserved_bytes.all.current`` and ``.peak`` where
        the allocator keeps more than it has given out.
        """

    @abc.abstractmethod
    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Reset the peaks to the current values."""

    @abc.abstractmethod
    def total_memory(self, device_index: int | None = None) -> int:
        """Memory of the device."""

    @abc.abstractmethod
    def available_memory(self, device_index: int | None = None) -> int:
        """Memory of the device that can still be allocated."""

    def empty_cache(self) -> None:
        """Give memory that the allocator keeps for reuse back to the device."""

    def _memory(self, kind: str, when: str, device_index: int | None) -> int:
        stats = self.memory_stats(device_index)
        key = f"{kind}_bytes.all.{when}"
        return int(stats.get(key, stats.get(f"allocated_bytes.all.{when}", 0)))

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes in use by tensors."""
        return self._memory("allocated", "current", device_index)

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Largest `memory_allocated` since the last reset."""
        return self._memory("allocated", "peak", device_index)

    def memory_reserved(self, device_index: int | None = None) -> int:
        """Bytes that the allocator holds."""
        return self._memory("reserved", "current", device_index)

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """Largest `memory_reserved` since the last reset."""
        return self._memory("reserved", "peak", device_index)

    def memory_cached(self, device_index: int | None = None) -> int:
        """Older name of `memory_reserved`."""
        return self.memory_reserved(device_index)

    def max_memory_cached(self, device_index: int | None = None) -> int:
        """Older name of `max_memory_reserved`."""
        return self.max_memory_reserved(device_index)

    def reset_max_memory_allocated(self, device_index: int | None = None) -> None:
        """Older name of `reset_peak_memory_stats`."""
        self.reset_peak_memory_stats(device_index)

    def reset_max_memory_cached(self, device_index: int | None = None) -> None:
        """Older name of `reset_peak_memory_stats`."""
        self.reset_peak_memory_stats(device_index)

    # ------------------------------------------------------------------ data types
    def supported_dtypes(self) -> list[torch.dtype]:
        """The floating-point types that one can train in on this device."""
        return list(_DEFAULT_DTYPES)

    def is_bf16_supported(self) -> bool:
        """Whether one can train in bfloat16."""
        return torch.bfloat16 in self.supported_dtypes()

    def is_fp16_supported(self) -> bool:
        """Whether one can train in float16."""
        return torch.float16 in self.supported_dtypes()

    def is_fp64_supported(self) -> bool:
        """Whether the device computes in float64; DeepSpeed then accumulates gradient norms in it."""
        return True

    def amp(self) -> Any:
        """The device's autocast module. DeepSpeed asked for it until 0.18.6."""
        return getattr(torch.get_device_module(self.device_name()), "amp", None)

    def _tensor_type(self, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
        return functools.partial(torch.tensor, dtype=dtype, device=self.device_name())

    @property
    def BFloat16Tensor(self) -> Callable[..., torch.Tensor]:
        """Makes a bfloat16 tensor on the device from a list."""
        return self._tensor_type(torch.bfloat16)

    @property
    def ByteTensor(self) -> Callable[..., torch.Tensor]:
        """Makes a uint8 tensor on the device from a list."""
        return self._tensor_type(torch.uint8)

    @property
    def DoubleTensor(self) -> Callable[..., torch.Tensor]:
        """Makes a float64 tensor on the device from a list."""
        return self._tensor_type(torch.float64)

    @property
    def FloatTensor(self) -> Callable[..., torch.Tensor]:
        """Makes a float32 tensor on the device from a list."""
        return self._tensor_type(torch.float32)

    @property
    def HalfTensor(self) -> Callable[..., torch.Tensor]:
        """Makes a float16 tensor on the device from a list."""
        return self._tensor_type(torch.float16)

    @property
    def IntTensor(self) -> Callable[..., torch.Tensor]:
        """Makes an int32 tensor on the device from a list."""
        return self._tensor_type(torch.int32)

    @property
    def LongTensor(self) -> Callable[..., torch.Tensor]:
        """Makes an int64 tensor on the device from a list."""
        return self._tensor_type(torch.int64)

    # ------------------------------------------------------------------ communication, compilation, profiling
    @abc.abstractmethod
    def communication_backend_name(self) -> str:
        """Name under which torch.distributed knows the device's collectives."""

    def is_triton_supported(self) -> bool:
        """Whether Triton generates code for the device."""
        return False

    def prefer_triton_grouped_mm(self) -> bool:
        """Whether Triton's grouped matrix product beats torch's on the device."""
        return False

    def get_compile_backend(self) -> str:
        """Name of the torch.compile backend."""
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        """Choose the torch.compile backend.

        Raises:
            ValueError: torch knows no backend of that name.
        """
        known = torch._dynamo.list_backends(exclude_tags=())
        if backend not in known:
            raise ValueError(
                f"torch.compile has no backend '{backend}' (device '{self.device_name()}'); it has {known}"
            )
        self._compile_backend = backend

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> Any:
        """Open a named range in the device's profiler."""

    def range_pop(self, domain: str | None = None) -> Any:
        """Close the innermost range."""

    # ------------------------------------------------------------------ page-locked host memory
    def _torch_pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory()

    def _torch_empty_pinned(self, tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        return tensor.new_empty(tuple(shape), pin_memory=True)

    def _torch_is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def _native_pins(self) -> Any:
        """DeepSpeed's own allocator, where ``DS_PIN_MEMORY_BACKEND=native`` asks for it, else None.

        `integrations.deepspeed.pinned` gives this method and the next their content.
        """
        return None

    def _count_pinned(self, num_bytes: int) -> None:
        """Add to DeepSpeed's count of pinned memory."""

    def pin_memory(
        self,
        tensor: torch.Tensor,
        make_copy: bool = True,
        match_shape: bool = True,
        align_bytes: int = 1,
    ) -> torch.Tensor:
        """Page-locked host memory for a tensor.

        Args:
            tensor: a tensor on the CPU.
            make_copy: copy the content; False gives fresh memory of the same dtype.
            match_shape: False gives one dimension.
            align_bytes: what DeepSpeed passed before 0.19.6; ignored.
        """
        pins = self._native_pins()
        if pins is None and not make_copy:
            return self._pinned(tensor, tensor.shape if match_shape else (tensor.numel(),))
        if pins is not None or self._torch_pins_host_memory:
            self._count_pinned(tensor.nbytes)
        if pins is None:
            return self._torch_pin_memory(tensor)
        pinned: torch.Tensor = pins.pin(tensor, make_copy=make_copy, match_shape=match_shape)
        return pinned

    def _pinned(self, example: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Fresh page-locked memory of an example's dtype."""
        pins = self._native_pins()
        if pins is not None or self._torch_pins_host_memory:
            self._count_pinned(math.prod(shape) * example.element_size())
        if pins is None:
            return self._torch_empty_pinned(example, shape)
        fresh: torch.Tensor = pins.pin_empty(example, shape)
        return fresh

    def pin_empty(self, *size: Any, dtype: torch.dtype, device: Any = "cpu") -> torch.Tensor:
        """Fresh page-locked host memory.

        Raises:
            ValueError: `device` is not the CPU.
        """
        if torch.device(device).type != "cpu":
            raise ValueError(f"pin_empty gives host memory; device must be cpu, not {device!r}")
        shape = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
        return self._pinned(torch.empty(0, dtype=dtype), tuple(shape))

    def pin_empty_like(
        self, tensor: torch.Tensor, device: Any = "cpu", dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Fresh page-locked host memory of a tensor's shape; ValueError if `device` is not the CPU."""
        return self.pin_empty(tuple(tensor.shape), dtype=dtype or tensor.dtype, device=device)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in page-locked host memory."""
        pins = self._native_pins()
        return (pins is not None and bool(pins.is_pinned(tensor))) or self._torch_is_pinned(tensor)

    def unpin_memory(self, tensor: torch.Tensor) -> Any:
        """Release page-locked memory early, where it is DeepSpeed's own; torch frees it with the tensor."""
        pins = self._native_pins()
        return None if pins is None else pins.unpin(tensor)

    # ------------------------------------------------------------------ op builders
    def op_builder_dir(self) -> str:
        """Dotted name of the package that DeepSpeed searches for builders."""
        return self.op_builders or op_builder.CPU_BUILDERS

    def get_op_builder(self, class_name: str) -> type[Any]:
        """The builder class of a DeepSpeed name such as ``FusedAdamBuilder``.

        Never raises: an op that is not offered gets a class whose ``load()`` raises `OpNotImplementedError`.
        """
        return op_builder.find(class_name, package=self.op_builders, device_type=self.device_name())

    def create_op_builder(self, class_name: str) -> Any:
        """A builder instance.

        None for the collectives that DeepSpeed would build as soon as it is offered them, unless they are the
        plugin's own, and for classes that builders derive from: DeepSpeed takes every name that ends in ``Builder``
        for an op's.

        Raises:
            BuildError: the builder's ``__init__`` raises.
        """
        builder = self.get_op_builder(class_name)
        own = issubclass(builder, op_builder.OpBuilder) and not issubclass(builder, op_builder.NotImplementedBuilder)
        optional = not own and op_table.by_builder(class_name).optional
        return None if optional or op_builder.is_base(class_name, self.op_builders) else op_builder.made(builder)

    def build_extension(self) -> Any:
        """The setuptools command that builds extensions."""
        from torch.utils.cpp_extension import BuildExtension

        return BuildExtension

    # ------------------------------------------------------------------ launcher
    def visible_devices_envs(self) -> list[str]:
        """Variables by which a launcher hides devices from a rank; never empty."""
        return [self.visible_devices_env or f"{self.device_name().upper()}_VISIBLE_DEVICES"]

    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: Sequence[int]) -> None:
        """Show only these devices to the processes started with `current_env`."""
        for variable in self.visible_devices_envs():
            current_env[variable] = ",".join(map(str, local_accelerator_ids))

    def export_envs(self) -> list[str]:
        """Prefixes of the variables that a launcher carries to other nodes. The SDK's settings need none: see
        `ds_plugin_sdk.integrations.deepspeed.launcher`."""
        return list(self.exported_envs)


def installed(module: str) -> bool:
    """Whether a module can be found, without importing it. A folder alone, as an uninstall may leave it, is none."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None
