"""Choosing one plugin, and remembering why."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ds_plugin_sdk.errors import PluginConflictError, PluginError, SdkError, UnknownAcceleratorError
from ds_plugin_sdk.registry.scan import Candidate, how_to_have, only, scan
from ds_plugin_sdk.settings import settings

_LEFT = "left to DeepSpeed"
_NOT_USED = "not used"


@dataclass(frozen=True)
class Step:
    """One line of the decision: a plugin (or a rule), and what became of it."""

    subject: str
    verdict: str
    reason: str

    def __str__(self) -> str:
        return f"{self.subject}: {self.verdict}, {self.reason}"


@dataclass
class Decision:
    """The chosen plugin, or None where DeepSpeed's own choice stands, with the steps that led there."""

    chosen: Candidate | None = None
    steps: list[Step] = field(default_factory=list)

    def note(self, subject: str, verdict: str, reason: str) -> None:
        self.steps.append(Step(subject, verdict, reason))

    @property
    def is_deepspeeds(self) -> bool:
        """Whether no plugin is to be used: DeepSpeed was asked for by name, or has hardware of its own."""
        return self.chosen is None and bool(self.steps) and self.steps[-1].verdict in (_LEFT, _NOT_USED)

    def __str__(self) -> str:
        return "\n".join(map(str, self.steps))


def decide(
    other_hardware: Callable[[], str | None],
    builtin_names: tuple[str, ...] = (),
    *,
    deepspeed_installed: bool = True,
) -> Decision:
    """Choose a plugin: ``DS_ACCELERATOR`` first, else the highest priority among those available.

    With ``DS_PLUGIN_AUTOLOAD=0`` it is none, unless ``DS_ACCELERATOR`` has a name that is not in `builtin_names`.

    Args:
        other_hardware: gives what hardware DeepSpeed would use without plugins, or None for a CPU alone. Called only
            when the best plugin has a negative priority.
        builtin_names: names that DeepSpeed itself understands in ``DS_ACCELERATOR``.
        deepspeed_installed: whether DeepSpeed could use such hardware; if not, the plugin is used in spite of it.

    Raises:
        PluginError: a plugin was requested by name, and it is unknown, not allowed, broken, or absent and no name of
            DeepSpeed's own.
    """
    requested = settings.accelerator
    decision = Decision()
    if not settings.autoload and requested in (None, *builtin_names):
        decision.note(requested or "every plugin", _LEFT, "DS_PLUGIN_AUTOLOAD=0")
        return decision
    installed = scan()
    if requested is not None:
        return _explicit(requested, installed, builtin_names)
    best = _best_available(installed, decision)
    if best is not None and best.manifest.priority < 0:
        hardware = other_hardware()
        if hardware is not None and deepspeed_installed:
            decision.note(best.name, _NOT_USED, f"'{hardware}' was found, which needs no plugin")
            return decision
        if hardware is not None:
            why = f"'{hardware}' was found, but DeepSpeed, which could use it, is not installed"
            decision.note(best.name, "not skipped", why)
    decision.chosen = best
    if best is not None:
        decision.note(best.name, "chosen", f"the best available: priority {best.manifest.priority}")
    return decision


def allowed(name: str) -> bool:
    """Whether ``DS_PLUGINS`` admits a plugin."""
    return settings.allowed_plugins is None or name in settings.allowed_plugins


def _explicit(name: str, installed: Mapping[str, list[Candidate]], builtin_names: tuple[str, ...]) -> Decision:
    decision = Decision()
    if name not in installed:
        if name in builtin_names:
            decision.note(name, _LEFT, f"DS_ACCELERATOR={name}, and no plugin has that name")
            return decision
        raise UnknownAcceleratorError(
            f"DS_ACCELERATOR={name} names nothing that is installed",
            why=f"installed plugins: {', '.join(sorted(installed)) or 'none'}; "
            f"built into DeepSpeed: {', '.join(builtin_names) or 'unknown until it is imported'}",
            hint=f"{how_to_have(name)}; or unset DS_ACCELERATOR",
        )
    if not allowed(name):
        raise PluginError(
            "the requested plugin may not be loaded",
            plugin=name,
            why=f"DS_PLUGINS={','.join(settings.allowed_plugins or ())} does not list it",
            hint=f"add {name} to DS_PLUGINS, or unset DS_ACCELERATOR",
        )
    candidate = only(installed[name])
    manifest = candidate.manifest
    probe = candidate.probe()
    if probe.state == "absent" and name in builtin_names:  # DeepSpeed builds its own ops on machines without the device
        decision.note(name, _LEFT, f"DS_ACCELERATOR={name}; {candidate}, {probe}")
        return decision
    if probe.state != "available":
        raise PluginError(
            "the requested accelerator cannot be used",
            plugin=manifest.name,
            why=f"{candidate} says {probe}",
            hint="make its device visible to this process, or unset DS_ACCELERATOR",
        )
    decision.chosen = candidate
    decision.note(name, "chosen", f"DS_ACCELERATOR={name}; {candidate}, {probe}")
    return decision


def _best_available(installed: Mapping[str, list[Candidate]], decision: Decision) -> Candidate | None:
    available: list[Candidate] = []
    if installed and not any(map(allowed, installed)):
        listed = ",".join(settings.allowed_plugins or ())
        _warn(f"DS_PLUGINS={listed} lists none of the installed plugins: {', '.join(sorted(installed))}")
    for name, candidates in installed.items():
        if not allowed(name):
            decision.note(name, "skipped", "DS_PLUGINS does not list it")
            continue
        try:
            candidate = only(candidates)
        except PluginConflictError as error:
            _skip_loudly(decision, name, error)
            continue
        probe = candidate.probe()
        if probe.state == "available":
            available.append(candidate)
            decision.note(name, "available", f"{candidate}, {probe}, priority {candidate.manifest.priority}")
        elif probe.state == "absent":
            decision.note(name, "skipped", f"{candidate}, {probe}")
        else:
            _skip_loudly(decision, name, probe.detail)
    if not available:
        return None
    available.sort(key=lambda candidate: candidate.manifest.priority, reverse=True)
    if len(available) > 1 and available[0].manifest.priority == available[1].manifest.priority:
        first, second = available[0].name, available[1].name
        raise PluginConflictError(
            "two plugins have the same priority",
            plugin=first,
            why=f"'{first}' and '{second}' are both available with priority {available[0].manifest.priority}",
            hint=f"say which: DS_ACCELERATOR={first} or DS_ACCELERATOR={second}",
        )
    return available[0]


def _skip_loudly(decision: Decision, name: str, problem: SdkError | str) -> None:
    """Record that a broken plugin is not used, and warn."""
    decision.note(name, "broken", str(problem))
    _warn(f"plugin '{name}' is skipped: {problem}")


def _warn(text: str) -> None:
    with contextlib.suppress(Warning):  # under -W error it is an exception, and the others are still to be tried
        warnings.warn(f"ds-plugin-sdk: {text}", RuntimeWarning, stacklevel=3)
