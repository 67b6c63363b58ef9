"""Lightning's ``DeepSpeedStrategy``, of the Trainer and of Fabric, on the device that DeepSpeed uses.

Lightning allows DeepSpeed on CUDA alone. Where the strategy is DeepSpeed's and DeepSpeed's accelerator is a plugin's,
``accelerator="auto"`` and ``"gpu"`` mean that accelerator, and so does its own name. All else stays Lightning's.

The import hook calls each function once its module has been executed.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar


def follow_in_connector(connector: Any) -> None:
    """What the Trainer's and Fabric's ``accelerator=`` means.

    Args:
        connector: ``lightning.pytorch.trainer.connectors.accelerator_connector`` or ``lightning.fabric.connector``.
    """
    if not _asks_for_cuda(connector.DeepSpeedStrategy):
        return
    cls = getattr(connector, "_AcceleratorConnector", None) or connector._Connector
    check = cls._check_config_and_set_final_flags

    @functools.wraps(check)
    def _check_config_and_set_final_flags(self: Any, strategy: Any, accelerator: Any, **others: Any) -> None:
        ours = _accelerator_for(connector, strategy, accelerator)
        # Where a strategy has devices of these types, Lightning asks that the accelerator is a name.
        by_name = ours is None or _device_type_of(strategy) in ("cpu", "cuda")
        check(self, strategy=strategy, accelerator=accelerator if by_name else ours, **others)
        if ours is not None:
            self._accelerator_flag = ours

    cls._check_config_and_set_final_flags = _check_config_and_set_final_flags


def _accelerator_for(connector: Any, strategy: Any, accelerator: Any) -> Any:
    """The plugin's accelerator, if that is meant: the devices of a strategy's object may be others."""
    deepspeed = isinstance(strategy, connector.DeepSpeedStrategy) and strategy._accelerator is None
    if not (deepspeed or (isinstance(strategy, str) and strategy.lower().startswith("deepspeed"))):
        return None
    from ds_plugin_sdk.integrations.deepspeed.adopt import in_use

    device = in_use()
    if device is None or device.device_name() == "cuda" or accelerator not in _names_of(device):
        return None
    if _device_type_of(strategy) not in (None, device.device_name()):
        return None
    members = {"device": device, "registry": getattr(connector, "AcceleratorRegistry", None)}
    return type("PluginAccelerator", (_Methods, connector.Accelerator), members)()


def _device_type_of(strategy: Any) -> str | None:
    """That of the devices that a strategy's object was given, if it was."""
    devices = getattr(strategy, "parallel_devices", None)
    return str(devices[0].type) if devices else None


def follow_in_strategy(module: Any) -> None:
    """The strategy itself: no check for CUDA, and the device's own collectives.

    Args:
        module: ``lightning.pytorch.strategies.deepspeed`` or ``lightning.fabric.strategies.deepspeed``.
    """
    cls = module.DeepSpeedStrategy
    if not _asks_for_cuda(cls):
        return
    setup = cls.setup_environment

    @functools.wraps(setup)
    def setup_environment(self: Any) -> None:
        if not isinstance(self.accelerator, _Methods):
            setup(self)
            return
        if self._process_group_backend is None:
            self._process_group_backend = self.accelerator.device.communication_backend_name()
        # A CPU has no index, and Lightning hands a device's to DeepSpeed as the rank's.
        self.parallel_devices = [
            type(device)(device.type, index) if device.index is None else device
            for index, device in enumerate(self.parallel_devices)
        ]
        super(cls, self).setup_environment()

    cls.setup_environment = setup_environment


def _asks_for_cuda(strategy: Any) -> bool:
    """Whether this release of Lightning allows DeepSpeed on CUDA alone."""
    setup = vars(strategy).get("setup_environment")
    return setup is not None and "CUDAAccelerator" in _original(setup).__code__.co_names


def _original(function: Any) -> Any:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def _names_of(device: Any) -> tuple[str, ...]:
    return ("auto", "gpu", device.device_name())


class _Methods:
    """Lightning's `Accelerator` by DeepSpeed's, which is `device`; `registry` has Lightning's own."""

    device: ClassVar[Any]
    registry: ClassVar[Any]

    @classmethod
    def parse_devices(cls, devices: int | str | list[int]) -> list[int]:
        if isinstance(devices, str):
            devices = [int(part) for part in devices.split(",") if part.strip()] if "," in devices else int(devices)
        if isinstance(devices, int):
            return list(range(cls.device.device_count() if devices == -1 else devices))
        return list(devices)

    @classmethod
    def get_parallel_devices(cls, devices: list[int]) -> list[Any]:
        import torch

        return [torch.device(cls.device.device_name(index)) for index in devices]

    @classmethod
    def auto_device_count(cls) -> int:
        return int(cls.device.device_count())

    @classmethod
    def is_available(cls) -> bool:
        return bool(cls.device.is_available())

    @classmethod
    def name(cls) -> str:
        return str(cls.device.device_name())

    def setup_device(self, which: Any) -> None:
        self.device.set_device(which.index or 0)

    def get_device_stats(self, which: Any) -> dict[str, Any]:
        stats: dict[str, Any] = self.device.memory_stats(which.index)
        if which.type == "cpu":  # of others Lightning asks for the CPU's itself
            stats.update(self.registry.get("cpu").get_device_stats(which))
        return stats

    def teardown(self) -> None:
        self.device.empty_cache()
