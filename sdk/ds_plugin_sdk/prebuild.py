"""Compiling ops ahead of time: for ``sdk build``, and for wheels that carry their binaries.

It is the JIT's own path with another destination.
"""

from __future__ import annotations

import importlib
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

from ds_plugin_sdk import jit, op_builder, privateuse1, registry
from ds_plugin_sdk.errors import BuildError, OpError, UnknownAcceleratorError
from ds_plugin_sdk.op_builder import OpBuilder, SourcelessOpBuilder, check_sources
from ds_plugin_sdk.settings import settings


def builders_of(plugin: str, ops: Sequence[str] = ()) -> list[OpBuilder]:
    """Builders of a plugin's native ops and of its torch device, one for each library.

    Args:
        plugin: name of an installed plugin.
        ops: names of ops (``fused_adam``) or of families (``adam``); all if empty.

    Raises:
        UnknownAcceleratorError: no such plugin.
        OpError: no such op.
    """
    installed = registry.scan()
    if plugin not in installed:
        raise UnknownAcceleratorError(
            "there is no such plugin",
            plugin=plugin,
            why=f"installed: {', '.join(installed) or 'none'}",
            hint=registry.how_to_have(plugin),
        )
    accelerator = registry.load(registry.only(installed[plugin]))
    classes = op_builder.builders(accelerator.op_builders, accelerator.device_name()).values()
    found = [op_builder.made(cls) for cls in classes if not issubclass(cls, SourcelessOpBuilder)]
    if privateuse1.installed_name() == accelerator.device_name():
        found += privateuse1.installed_builders()
    unknown = set(ops) - {builder.name for builder in found} - {builder.library() for builder in found}
    if unknown:
        raise OpError(
            "there is no such op",
            plugin=plugin,
            op=min(unknown),
            why=f"its native ops are {', '.join(builder.name for builder in found)}",
            hint="`sdk report` lists all ops and where each comes from",
        )
    return distinct(builder for builder in found if not ops or {builder.name, builder.library()} & set(ops))


def builders_in(names: Iterable[str]) -> list[OpBuilder]:
    """The builders that a project lists: all that a package's modules define, or one as ``"module:Class"``.

    Raises:
        BuildError: one cannot be imported.
    """
    found: list[OpBuilder] = []
    for name in names:
        module, _, cls = name.partition(":")
        try:
            imported = importlib.import_module(module)
            found += [made() for made in ([getattr(imported, cls)] if cls else _defined_in(module))]
        except Exception as error:
            why = f"{name}: {type(error).__name__}: {error}"
            raise BuildError("a builder that the project lists cannot be imported", why=why) from error
    return found


def _defined_in(package: str) -> list[type[OpBuilder]]:
    with warnings.catch_warnings():
        # At run time a module that cannot be imported has no ops; a wheel must not lack them.
        warnings.filterwarnings("error", message="ds-plugin-sdk: the builders in")
        found = op_builder.builders(package, "").values()
    return [
        cls
        for cls in found
        if f"{cls.__module__}.".startswith(f"{package}.") and not issubclass(cls, SourcelessOpBuilder)
    ]


def distinct(builders: Iterable[OpBuilder]) -> list[OpBuilder]:
    """The first builder of each library: several ops may share one.

    Raises:
        BuildError: two that share one list different sources.
    """
    libraries: dict[tuple[str, str], OpBuilder] = {}
    for builder in builders:
        check_sources(libraries.setdefault((builder.owner(), builder.library()), builder), builder)
    return list(libraries.values())


def build(builder: OpBuilder, into: Path | None) -> jit.Artifact:
    """Compile one op into the cache, or portably into a folder.

    Raises:
        BuildError: it cannot be compiled, or its builder raises.
    """
    spec = builder.build_spec(portable=into is not None)
    return jit.acquire(spec) if into is None else jit.build_into(spec, into)


def check_writable(folder: Path) -> None:
    """Make a folder for binaries, before anything is compiled.

    Raises:
        BuildError: files cannot be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise BuildError(
            f"binaries cannot be put into {folder}", why=error.strerror or str(error), hint="choose another folder"
        ) from error


def wanted_in_wheel(builder: OpBuilder) -> bool:
    """What ``DS_BUILD_<OP>`` says of an op, and ``DS_BUILD_OPS`` where that is unset.

    Raises:
        SettingError: a variable says neither yes nor no.
    """
    choice = settings.build_op(builder.BUILD_VAR)
    return settings.build_ops if choice is None else choice
