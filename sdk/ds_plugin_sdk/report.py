"""The facts of ``sdk report``: versions, the chosen plugin, compilers, settings, and the source of each op."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ds_plugin_sdk import jit, op_builder, registry
from ds_plugin_sdk.accelerator import DeepSpeedAccelerator, installed
from ds_plugin_sdk.errors import BuildError, SdkError, SettingError, ToolchainError
from ds_plugin_sdk.integrations.deepspeed.builtin_names import builtin_names
from ds_plugin_sdk.op_builder import (
    CombinedOpBuilder,
    LentOpBuilder,
    NotImplementedBuilder,
    OpBuilder,
    ReferenceOpBuilder,
    op_table,
)
from ds_plugin_sdk.provenance import Record
from ds_plugin_sdk.settings import child_environment, settings


@dataclass(frozen=True)
class OpStatus:
    """Where an op would come from in a new process.

    Attributes:
        name: DeepSpeed's op name.
        origin: ``prebuilt``, ``cache``, ``compiles`` (at first use), ``failed`` (the latest build),
            ``reference``, ``missing`` (there is none, and no native code can be had), ``combined`` (of several
            families), ``lent`` (DeepSpeed's own), ``not offered`` or ``broken``.
        provider: distribution that provides it.
        reason: why this and not a better one.
    """

    name: str
    origin: str
    provider: str
    reason: str


@dataclass
class Facts:
    """Everything `sdk report` prints."""

    versions: dict[str, str] = field(default_factory=dict)
    accelerator: list[tuple[str, str]] = field(default_factory=list)
    compilers: dict[str, str] = field(default_factory=dict)
    settings: list[tuple[str, str, str]] = field(default_factory=list)
    ops: list[OpStatus] = field(default_factory=list)


def collect() -> Facts:
    """The facts of this machine and environment; a part that fails says so in its own place."""
    facts = Facts(versions=versions(), compilers=_compilers(), settings=_settings())
    try:
        decision = registry.preview(builtin_names())
    except SdkError as error:
        facts.accelerator.append(("problem", str(error)))
        return facts
    facts.accelerator.extend((step.subject, f"{step.verdict}: {step.reason}") for step in decision.steps)
    if decision.chosen is None:
        facts.accelerator.append(("chosen", "none of the plugins; DeepSpeed's own detection decides"))
        return facts
    try:
        accelerator = registry.load(decision.chosen)
    except SdkError as error:
        facts.accelerator.append(("problem", str(error)))
        return facts
    facts.accelerator.append(("accelerator", repr(accelerator)))
    facts.accelerator.append(("collectives", _answer(accelerator.communication_backend_name)))
    facts.accelerator.append(("types", _answer(lambda: _names_of(accelerator.supported_dtypes()))))
    facts.accelerator.extend(_plugin_lines(decision.chosen))
    facts.ops = ops(accelerator)
    return facts


def _answer(question: Callable[[], str]) -> str:
    try:
        return question()
    except Exception as error:  # the vendor's own code
        return f"raises {type(error).__name__}: {error}"


def _names_of(dtypes: Iterable[object]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def status(builder: type[OpBuilder]) -> OpStatus:
    """Where one op would come from now. Compiles nothing, writes nothing."""
    try:
        op = op_builder.made(builder)
    except BuildError as error:
        return OpStatus(builder.NAME, "broken", error.plugin or "", str(error))
    if isinstance(op, LentOpBuilder):
        return status(op.OURS)  # `ops` has those that are lent
    if isinstance(op, NotImplementedBuilder | CombinedOpBuilder | ReferenceOpBuilder):
        return _without_code(op)
    try:
        origin, reason = _origin(op)
    except SdkError as error:
        origin, reason = "broken", str(error)
    except Exception as error:  # the vendor's own code
        origin, reason = "broken", f"its builder raises {type(error).__name__}: {error}"
    return OpStatus(op.name, origin, op.owner(), reason)


def _origin(op: OpBuilder) -> tuple[str, str]:
    """Where an op with sources would come from, and why."""
    spec = op.build_spec()
    artifact = jit.find(spec)
    if artifact is not None:
        return artifact.origin, artifact.reason
    reason = "; ".join(jit.explain(spec))
    if not op.is_compatible() or jit.refusal(spec):
        return "reference" if op.has_reference() else "missing", op.error_log or reason
    if failure := jit.failure(spec):
        return "failed" if op.has_reference() else "missing", f"{failure}; it is tried again at the next use"
    return "compiles", f"at first use: {reason}"


def _without_code(op: OpBuilder) -> OpStatus:
    """Where an op without sources of its own comes from."""
    if isinstance(op, NotImplementedBuilder):
        return OpStatus(op.name, "not offered", "-", "neither the plugin nor the SDK implements it")
    if isinstance(op, CombinedOpBuilder):
        return OpStatus(op.name, "combined", op.owner(), f"made of {', '.join(op.families())}")
    return OpStatus(op.name, "reference", op.owner(), "the plugin has no native kernel for this op")


def summarise(records: Iterable[Record]) -> list[RunRow]:
    """The records of a run's ranks, a row for each thing loaded and place it came from; the accelerator first."""
    ranks: dict[tuple[str, str, str, str, str], set[int]] = {}
    for entry in records:
        key = (entry.name, entry.plugin, entry.version, _phrase(entry), entry.detail)
        ranks.setdefault(key, set()).add(entry.rank)
    rows = [
        RunRow(name, plugin, version, origin, sorted(found), detail)
        for (name, plugin, version, origin, detail), found in ranks.items()
    ]
    return sorted(rows, key=lambda row: (row.origin != "accelerator", row.name, row.ranks))


@dataclass(frozen=True)
class RunRow:
    """One thing that a run loaded: by which ranks, from where."""

    name: str
    plugin: str
    version: str
    origin: str
    ranks: list[int]
    detail: str


def _phrase(entry: Record) -> str:
    return f"compiled in {entry.seconds:.1f} s" if entry.origin == "compiled" else entry.origin


def ops(accelerator: DeepSpeedAccelerator) -> list[OpStatus]:
    """The SDK's and the plugin's ops, and those that are DeepSpeed's own on this device."""
    package, device = accelerator.op_builders, accelerator.device_name()
    ours = {name: accelerator.get_op_builder(name) for name in op_builder.builders(package, device)}
    lent = {
        name: _lent(name, compatible)
        for name, compatible in _deepspeeds_own(device).items()
        if name not in ours or (compatible and not op_builder.is_native(ours[name]))
    }
    found = {**{name: status(builder) for name, builder in ours.items() if name not in lent}, **lent}
    return [found[name] for name in sorted(found)]


def _lent(class_name: str, compatible: bool) -> OpStatus:
    reason = "DeepSpeed's own" if compatible else "DeepSpeed's own, which says that it is not compatible here"
    return OpStatus(op_table.by_builder(class_name).name, "lent", "deepspeed", reason)


@functools.cache
def _deepspeeds_own(device_type: str) -> dict[str, bool]:
    """The ops that DeepSpeed lends to a device, by their builders' names, and whether they are compatible.

    A process of its own is asked, since that takes DeepSpeed. Where DeepSpeed cannot be imported it lends nothing.
    """
    if not installed("deepspeed"):
        return {}
    module = "ds_plugin_sdk.integrations.deepspeed.deepspeed_builders"
    environment = child_environment(DS_PLUGIN_AUTOLOAD="0", DS_ACCELERATOR="cpu")
    command = [sys.executable, "-m", module, device_type]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)
    found: dict[str, bool] = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}
    return {name: compatible for name, compatible in found.items() if not op_table.by_builder(name).optional}


def versions() -> dict[str, str]:
    """Of Python, the SDK, torch, DeepSpeed and the installed plugins; and the machine's architecture."""
    wanted = ["ds-plugin-sdk", "torch", "deepspeed"]
    wanted += [candidate.distribution for group in registry.scan().values() for candidate in group]
    return {"python": platform.python_version(), "machine": platform.machine(), **versions_of(wanted)}


def versions_of(distributions: Iterable[str]) -> dict[str, str]:
    """By the name of a distribution; "not installed" for those that are not, "unknown" without metadata, as a clone on
    ``PYTHONPATH`` is.
    """
    found = {}
    for name in distributions:
        try:
            found[name] = importlib.metadata.version(name) or "unknown"  # None: it has no METADATA
        except importlib.metadata.PackageNotFoundError:
            found[name] = "unknown" if installed(name.replace("-", "_")) else "not installed"
        except (KeyError, ValueError):  # no METADATA, in later versions of Python; an empty name
            found[name] = "unknown"
    return found


def _compilers() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in jit.toolchain_names():
        try:
            found[name] = ", ".join(
                f"{compiler.path} {compiler.version}" for compiler in jit.get_toolchain(name).find().values()
            )
        except ToolchainError as error:
            found[name] = f"absent: {error.why or error.what}"
        except SettingError as error:
            found[name] = f"absent: {error.what}: {error.why}"
    return found


def _settings() -> list[tuple[str, str, str]]:
    rows: list[tuple[str, str, str]] = []
    for _, setting in settings:
        try:
            value = setting.read()
        except SdkError as error:
            rows.append((setting.variable, "broken", str(error)))
            continue
        if value != setting.default:
            rows.append((setting.variable, str(value), setting.doc))
    return rows


def _plugin_lines(candidate: registry.Candidate) -> list[tuple[str, str]]:
    """What the plugin's own function says; of one that raises, the lines that it gave before."""
    reference = candidate.manifest.report
    if reference is None:
        return []
    lines: list[tuple[str, str]] = []
    try:
        module, _, function = reference.partition(":")
        for what, value in getattr(importlib.import_module(module), function)():
            lines.append((str(what), str(value)))
    except (Exception, SystemExit) as error:
        lines.append((reference, f"broken: {type(error).__name__}: {error}"))
    return lines
