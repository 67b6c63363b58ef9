"""Hugging Face's accelerate, and the Trainer of transformers above it, on the device that DeepSpeed uses.

accelerate looks for the device itself, in a list of its own. A plugin's device is not in it, and a CPU is used only
where the program asks for it, which in turn switches DeepSpeed off. Where DeepSpeed is asked for and a plugin's
accelerator is DeepSpeed's, these functions answer by that accelerator instead. Where accelerate's own answer is that
device already, and wherever DeepSpeed has no part, nothing changes.

The import hook calls each function once its module has been executed.
"""

from __future__ import annotations

import functools
from typing import Any


def _deepspeeds_accelerator() -> Any:
    """DeepSpeed's accelerator if it is a plugin's, or else None."""
    from ds_plugin_sdk.integrations.deepspeed.adopt import in_use

    return in_use()


def follow_in_state(state: Any) -> None:
    """The device and the process group of every `Accelerator` and `Trainer`.

    Args:
        state: ``accelerate.state``.
    """
    cls, flag = state.PartialState, state.parse_flag_from_env
    prepare_backend, set_device = cls._prepare_backend, cls.set_device
    none, deepspeed = state.DistributedType.NO, state.DistributedType.DEEPSPEED

    def accelerator_of(partial_state: Any) -> Any:
        wanted = not partial_state._cpu and flag("ACCELERATE_USE_DEEPSPEED")
        return _deepspeeds_accelerator() if wanted else None

    def launched() -> bool:
        return bool(state.get_int_from_env(["LOCAL_RANK"], -1) >= 0)

    @functools.wraps(prepare_backend)
    def _prepare_backend(self: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        backend, kind = prepare_backend(self, *args, **kwargs)
        accelerator = accelerator_of(self) if launched() else None
        if accelerator is None or _device_type(kind) == accelerator.device_name():
            return backend, kind
        given = kwargs.get("backend") or next(iter(args[2:]), None)  # by InitProcessGroupKwargs
        return given or accelerator.communication_backend_name(), deepspeed

    @functools.wraps(set_device)
    def _set_device(self: Any) -> None:
        accelerator = accelerator_of(self) if self.device is None else None
        theirs = self.distributed_type is not deepspeed and (
            self.distributed_type is not none
            or accelerator is None
            or self.default_device.type == accelerator.device_name()
        )
        if accelerator is None or theirs:
            set_device(self)
            return
        import torch

        accelerator.set_device(self.local_process_index % accelerator.device_count())
        self.device = torch.device(accelerator.current_device_name())

    @functools.wraps(flag)
    def parse_flag_from_env(key: str, *args: Any, **kwargs: Any) -> Any:
        """Where DeepSpeed itself is on the CPU, ``ACCELERATE_USE_CPU`` is no reason to train without it.

        But for ranks of a process group that no launcher has numbered, as those of `debug_launcher`: DeepSpeed cannot
        tell them apart.
        """
        given = flag(key, *args, **kwargs)
        if not (given and key == "ACCELERATE_USE_CPU" and flag("ACCELERATE_USE_DEEPSPEED")):
            return given
        accelerator = _deepspeeds_accelerator()
        numbered = launched() or not _has_process_group()
        return not (numbered and accelerator is not None and accelerator.device_name() == "cpu")

    cls._prepare_backend, cls.set_device = _prepare_backend, _set_device
    state.parse_flag_from_env = parse_flag_from_env


def follow_in_launch(launch: Any) -> None:
    """As many processes by ``accelerate launch --use_deepspeed`` as there are devices, where nobody says how many.

    Args:
        launch: ``accelerate.utils.launch``. The command's own module may be ``__main__``, which is not imported.
    """
    prepare = launch.prepare_deepspeed_cmd_env

    @functools.wraps(prepare)
    def prepare_deepspeed_cmd_env(args: Any) -> Any:
        accelerator = _deepspeeds_accelerator() if args.num_processes == 0 else None
        if accelerator is not None:
            args.num_processes = accelerator.device_count()
        return prepare(args)

    launch.prepare_deepspeed_cmd_env = prepare_deepspeed_cmd_env


def follow_in_trainer(training_args: Any) -> None:
    """bfloat16 of the `Trainer` where DeepSpeed's accelerator has it.

    Args:
        training_args: ``transformers.training_args``.
    """
    cls, has_bf16 = training_args.TrainingArguments, training_args.is_torch_bf16_gpu_available
    post_init = cls.__post_init__

    def launched() -> bool:
        """Whether ``accelerate launch`` was told to use DeepSpeed."""
        if not training_args.is_accelerate_available():
            return False
        from accelerate.utils import parse_flag_from_env

        return bool(parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"))

    @functools.wraps(post_init)
    def initialize(self: Any) -> None:
        accelerator = _deepspeeds_accelerator() if self.deepspeed or launched() else None
        if accelerator is None:
            post_init(self)
            return
        training_args.is_torch_bf16_gpu_available = accelerator.is_bf16_supported
        try:
            post_init(self)
        finally:
            training_args.is_torch_bf16_gpu_available = has_bf16

    cls.__post_init__ = initialize


def _has_process_group() -> bool:
    from torch import distributed

    return distributed.is_available() and distributed.is_initialized()


def _device_type(kind: Any) -> str:
    """torch's name of the device of a ``DistributedType`` such as ``MULTI_GPU``."""
    name = str(kind.value).lower().removeprefix("multi_")
    return "cuda" if name == "gpu" else name
