"""The native kernels of this process, compiled once into a cache of their own."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def kernels(tmp_path_factory: pytest.TempPathFactory) -> None:
    from ds_plugin_sdk.op_builder import load_kernels

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_PLUGIN_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
        patch.setenv("DS_PLUGIN_FALLBACK", "0")
        for family in ("adam", "adagrad", "lion"):
            load_kernels(family, "cpu")
