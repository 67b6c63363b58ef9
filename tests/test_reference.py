"""The reference: every public name is on a page and has a docstring; pages made from the code are up to date."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import command_page
import ds_plugin_sdk
from ds_plugin_sdk import ops

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "reference"
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in FOLDER.glob("*.md"))
MODULES = re.findall(r"(?m)^\.\. automodule:: (\S+)$", TEXT)
SINGLE = re.findall(r"(?m)^\.\. auto(?:class|function):: (\S+)$", TEXT)

# Not called by programs: comm.all_reduce and the decoder layer's replacement call them.
INNER = {"all_reduce", "decoder_layer"}


def value(dotted: str) -> Any:
    module, _, name = dotted.rpartition(".")
    return getattr(importlib.import_module(module), name)


def public(module: ModuleType) -> list[str]:
    """What a page shows of a module: its `__all__`, or what it defines itself."""
    own = [name for name, found in vars(module).items() if getattr(found, "__module__", "") == module.__name__]
    return list(getattr(module, "__all__", [name for name in own if not name.startswith("_")]))


def undocumented(dotted: str, documented: Any) -> list[str]:
    """A function or class without a docstring, and the public members of a class that have none."""
    if not (inspect.isclass(documented) or inspect.isroutine(documented)):
        return []  # a constant, or a type's other name
    missing = [] if inspect.getdoc(documented) else [dotted]
    if not inspect.isclass(documented):
        return missing
    fields = {field.name for field in dataclasses.fields(documented)} if dataclasses.is_dataclass(documented) else set()
    for name, member in vars(documented).items():
        described = inspect.getdoc(member) or inspect.getdoc(getattr(documented, name, None))
        shown = inspect.isroutine(member) or isinstance(member, (property, classmethod, staticmethod))
        if shown and not name.startswith("_") and name not in fields and not described:
            missing.append(f"{dotted}.{name}")
    return missing


def test_the_page_of_commands_is_that_of_the_commands() -> None:
    assert command_page.PAGE.read_text(encoding="utf-8") == command_page.page(), "run `make command-page`"


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_of_a_module_is_documented(name: str) -> None:
    module = importlib.import_module(name)
    assert inspect.getdoc(module)
    assert [gap for part in public(module) for gap in undocumented(f"{name}.{part}", getattr(module, part))] == []


@pytest.mark.parametrize("dotted", SINGLE)
def test_every_member_of_a_class_is_documented(dotted: str) -> None:
    assert undocumented(dotted, value(dotted)) == []


def test_an_undocumented_member_is_found() -> None:
    class Zap:
        """A class."""

        def zip(self) -> None: ...

    assert undocumented("Zap", Zap) == ["Zap.zip"]


def test_every_public_name_is_on_a_page() -> None:
    families = {module.name for module in pkgutil.iter_modules(ops.__path__) if not module.name.startswith("_")}
    assert families - INNER == {name.rpartition(".")[2] for name in MODULES if name.startswith("ds_plugin_sdk.ops.")}
    top = {name for name in ds_plugin_sdk.__all__ if callable(getattr(ds_plugin_sdk, name))}
    assert top == {name.rpartition(".")[2] for name in SINGLE if name.count(".") == 1}
    parts = {"optim", "nn", "comm", "privateuse1", "simulator", "errors"}
    assert {f"ds_plugin_sdk.{part}" for part in parts} <= set(MODULES)


def test_every_header_of_a_family_is_on_a_page() -> None:
    headers = (ROOT / "kernels" / "include" / "ds_kernels" / "ops").glob("*.h")
    assert [file.name for file in headers if f"/ops/{file.name}\n" not in TEXT] == []
