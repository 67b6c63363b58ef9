"""What a plugin says about itself: a manifest, read without importing torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

ENTRY_POINT_GROUP = "ds_plugin_sdk.plugins"

STATES = ("available", "absent", "broken")


@dataclass(frozen=True)
class Probe:
    """Whether a plugin's device can be used by this process, and why (not)."""

    state: Literal["available", "absent", "broken"]
    detail: str = ""
    devices: int = 0

    @staticmethod
    def available(devices: int, detail: str = "") -> Probe:
        """The device is here: so many of it."""
        return Probe("available", detail, devices)

    @staticmethod
    def absent(reason: str) -> Probe:
        """There is no such device on this machine. The ordinary answer on a login node."""
        return Probe("absent", reason)

    @staticmethod
    def broken(error: str) -> Probe:
        """The device seems to be here but cannot be used: a driver does not match, a library is missing."""
        return Probe("broken", error)

    def problem(self) -> str | None:
        """Why this is no answer, or None."""
        if self.state not in STATES:
            return f"whose state must be one of {', '.join(STATES)}"
        counted = isinstance(self.devices, int) and not isinstance(self.devices, bool) and self.devices > 0
        if self.state == "available" and not counted:
            return "whose number of devices must be a whole one from 1 on; Probe.absent(reason) says that there is none"
        return None

    def __str__(self) -> str:
        if self.state != "available":
            return f"{self.state}: {self.detail}"
        counted = f"available: {self.devices} device{'s' if self.devices != 1 else ''}"
        return f"{counted} ({self.detail})" if self.detail else counted


@dataclass(frozen=True)
class Plugin:
    """A plugin's manifest: the object that its entry point names. The module that holds it imports no torch.

    Attributes:
        name: the device's name, as in ``DS_ACCELERATOR=<name>``.
        sdk_api: the SDK interface ``(major, minor)`` that the plugin was written for.
        accelerator: ``"module:Class"`` of its accelerator, imported only when the plugin is chosen.
        probe: returns in milliseconds, without torch and without initializing the device, whether it can be used.
        priority: the highest of the available ones is chosen. A plugin of negative priority is not used
            where DeepSpeed is installed and hardware is found that DeepSpeed itself can use.
        prebuilt: dotted name of a package that has compiled ops in its folder ``prebuilt``.
        report: ``"module:function"`` of a function without arguments that gives lines ``(what, value)`` for
            ``sdk report``: drivers, threads, memory policy. If it raises, the report says so and continues.
    """

    name: str
    sdk_api: tuple[int, int]
    accelerator: str
    probe: Callable[[], Probe]
    priority: int = 0
    prebuilt: str | None = None
    report: str | None = None

    def problem(self) -> str | None:
        """Which field has a value of another kind than it is declared with, or None."""
        api, report, prebuilt = self.sdk_api, self.report, self.prebuilt
        two_numbers = isinstance(api, tuple) and len(api) == 2 and all(type(number) is int for number in api)
        fields: tuple[tuple[bool, str, object, str], ...] = (
            (two_numbers, "sdk_api", api, "two whole numbers, such as (1, 0)"),
            (_names_attribute(self.accelerator), "accelerator", self.accelerator, "'module:Class'"),
            (callable(self.probe), "probe", self.probe, "a function"),
            (type(self.priority) is int, "priority", self.priority, "a whole number"),
            (report is None or isinstance(report, str), "report", report, "'module:function'"),
            (prebuilt is None or isinstance(prebuilt, str), "prebuilt", prebuilt, "a package's name"),
        )
        return next(
            (f"{name} is {value!r}, and must be {kind}" for fits, name, value, kind in fields if not fits), None
        )


def _names_attribute(value: object) -> bool:
    return isinstance(value, str) and all(map(str.strip, value.partition(":")))
