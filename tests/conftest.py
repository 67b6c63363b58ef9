"""Fixtures that several folders of tests use."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from plugin_site import Install, write_plugin

# Read before any fixture changes it.
CALLERS_CACHE = os.environ.get("DS_PLUGIN_CACHE_DIR")


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the settings or the cache of the user who runs it."""
    monkeypatch.setenv("DS_PLUGIN_CACHE_DIR", str(tmp_path / "kernel-cache"))
    for variable in ("DS_ACCELERATOR", "DS_PLUGINS", "DS_PLUGIN_COMPILE", "DS_PLUGIN_FALLBACK", "DS_PLUGIN_PROVENANCE"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture(autouse=True)
def same_numbers(request: pytest.FixtureRequest) -> None:
    """A test draws the same numbers in each run, whichever tests ran before it in its process."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(zlib.crc32(request.node.nodeid.encode()) + int(os.environ.get("DS_TEST_SEED") or 0))


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """``install("zap", ...)`` is `plugin_site.write_plugin` into a folder on ``sys.path`` and ``PYTHONPATH``."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
    before = set(sys.modules)
    yield functools.partial(write_plugin, site)
    importlib.invalidate_caches()
    for module in set(sys.modules) - before:
        own = module.startswith("ds_plugin_") and not module.startswith(("ds_plugin_sdk", "ds_plugin_cpu"))
        if own or module.startswith("zap_"):
            del sys.modules[module]


@pytest.fixture
def sdk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """``sdk("report", "--json", status=0)`` runs the command in this process, and gives its output and messages."""
    from ds_plugin_sdk.cli import main

    def run(*arguments: str, status: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["sdk", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        text = "".join(capsys.readouterr())
        assert (stop.value.code or 0) == status, text
        return text

    return run


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all tests that need native code and are not about caches, so that each op is compiled once."""
    return Path(CALLERS_CACHE) if CALLERS_CACHE else tmp_path_factory.mktemp("kernels")


@pytest.fixture
def compiled_once(private_cache: None, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test and its processes use the one cache, instead of an empty one of their own."""
    monkeypatch.setenv("DS_PLUGIN_CACHE_DIR", str(kernel_cache))


@pytest.fixture(scope="session")
def native(kernel_cache: Path) -> Callable[..., None]:
    """``native("adam", "lamb")`` loads the CPU's native kernels of families; without a compiler the test fails."""
    from ds_plugin_sdk.op_builder import load_family

    def load(*families: str) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DS_PLUGIN_CACHE_DIR", str(kernel_cache))
            patch.setenv("DS_PLUGIN_FALLBACK", "0")
            for family in families:
                load_family(family, "cpu")

    return load
