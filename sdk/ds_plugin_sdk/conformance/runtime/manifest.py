"""R10: what a plugin says of itself, before torch is imported, and whether it is so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ds_plugin_sdk.conformance import programs
from ds_plugin_sdk.conformance.check import Clause, Parameters, check, expect, expect_equal
from ds_plugin_sdk.conformance.runtime.support import has_two_devices
from ds_plugin_sdk.conformance.target import Target
from ds_plugin_sdk.registry import Plugin, Probe

_PROBE_SECONDS = 1.0


def _needs_plugin(target: Target) -> str | None:
    return None if target.plugin is not None else "the target is a class, not an installed plugin"


def _plugin(target: Target) -> Plugin:
    assert target.plugin is not None
    return target.plugin


def _ask(target: Target, question: str, environment: Mapping[str, str] | None = None) -> Any:
    name = _plugin(target).name
    return programs.run("manifest", target, question, name, timeout=90.0, environment=environment)[0][0]


@check(
    "runtime.manifest.imports",
    Clause(
        "R10.1",
        "The module that holds the manifest imports neither torch nor DeepSpeed, and neither does `probe()`.",
        reason="Every process on a machine that imports DeepSpeed reads the manifests of all plugins.",
    ),
    needs=_needs_plugin,
)
def imports(target: Target) -> None:
    expect_equal(_ask(target, "probe")["imported"], [], "heavy packages that manifest and probe() import")


@check(
    "runtime.manifest.probe_time",
    Clause(
        "R10.2",
        f"`probe()` gives a `Probe` within {_PROBE_SECONDS:g} s, the manifest's import included, in a fresh process.",
        reason="It is asked before every choice, on login nodes too, where there is no device.",
    ),
    needs=_needs_plugin,
)
def probe_time(target: Target) -> None:
    # The best of three: the machine may be busy, the probe must not be.
    answers = [_ask(target, "probe") for _ in range(3)]
    expect(answers[0]["probe"], f"probe() gave {answers[0]['answer']}", why="expected a Probe")
    seconds = min(answer["seconds"] for answer in answers)
    expect(
        seconds <= _PROBE_SECONDS, f"manifest and probe() took {seconds:.2f} s", why=f"allowed: {_PROBE_SECONDS:g} s"
    )


def _visible(target: Target) -> Iterator[Parameters]:
    """As the process is, and where one of several devices is visible."""
    yield {}
    if has_two_devices(target):
        yield {"visible": "1"}


@check(
    "runtime.manifest.probe_is_honest",
    Clause(
        "R10.3",
        "Where the device can be used, `probe()` says available, with as many devices as `device_count()`: those that "
        "are hidden do not count.",
        reason="`sdk list` and the choice of an accelerator use it.",
    ),
    needs=_needs_plugin,
    cases=_visible,
)
def probe_is_honest(target: Target, visible: str = "") -> None:
    if visible:
        environment: dict[str, str] = {}
        target.accelerator.set_visible_devices_envs(environment, [int(visible)])
        devices = _ask(target, "probe", environment)["devices"]
        expect_equal(devices, 1, f"the number of devices that probe() gives with {environment}")
        return
    probe = _plugin(target).probe()
    expect(isinstance(probe, Probe), f"probe() gave {probe!r}", why="expected a Probe")
    expect_equal(probe.state, "available", "the state that probe() gives for a device in use")
    expect_equal(probe.devices, target.accelerator.device_count(), "the number of devices that probe() gives")


@check(
    "runtime.manifest.chosen_by_name",
    Clause(
        "R10.4",
        "With `DS_ACCELERATOR=<name>` a fresh process gets the manifest's accelerator.",
        reason="How users and launchers ask for it.",
    ),
    needs=_needs_plugin,
)
def chosen_by_name(target: Target) -> None:
    plugin = _plugin(target)
    environment = {"DS_ACCELERATOR": plugin.name}
    given = programs.run("manifest", target, "choose", plugin.name, timeout=300.0, environment=environment)[0][0]
    expect_equal(given["accelerator"], plugin.accelerator, f"the accelerator with DS_ACCELERATOR={plugin.name}")
    expect_equal(given["device"], target.device_type, f"its device with DS_ACCELERATOR={plugin.name}")


@check(
    "runtime.manifest.silent",
    Clause(
        "R10.6",
        "Importing the manifest's module and `probe()` print nothing.",
        reason="Programs whose output others read, from `sdk report --json` to launchers, find plugins by them.",
    ),
    needs=_needs_plugin,
)
def silent(target: Target) -> None:
    expect_equal(_ask(target, "probe")["printed"], "", "what manifest and probe() print")


@check(
    "runtime.manifest.another_instance",
    Clause(
        "R10.5",
        "The accelerator's class can be made again; the instances agree, and the device keeps working.",
        reason="DeepSpeed's detection, tests and tools make instances of their own.",
    ),
)
def another_instance(target: Target) -> None:
    before = target.accelerator.current_device_name()
    other = type(target.accelerator)()
    for member in ("device_name", "device_count", "current_device_name", "communication_backend_name"):
        ours, theirs = getattr(target.accelerator, member)(), getattr(other, member)()
        expect_equal(theirs, ours, f"{member}() of a second instance")
    expect_equal(target.accelerator.current_device_name(), before, "current_device_name() after it was made")
