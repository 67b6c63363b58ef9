"""Tensors in memory of their own, in large pages where the system gives them."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_plugin_sdk import large_pages

LARGE = (4, 1024, 1024)


@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3), LARGE, (3, 1_000_003)], ids=str)
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32], ids=str)
def test_they_are_zeros_like_any_other(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    found = large_pages.zeros(shape, torch.ones(3, dtype=dtype))
    assert found.shape == shape and found.dtype == dtype and found.is_contiguous()
    assert not found.any()
    found.fill_(1)
    assert found.all() and found.clone().equal(found)


def test_a_large_one_begins_with_a_page() -> None:
    assert large_pages.zeros(LARGE, torch.zeros(1)).data_ptr() % (2 << 20) == 0


def test_its_memory_is_given_back_with_the_last_view() -> None:
    def mapped() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE

    large_pages.zeros(LARGE, torch.zeros(1))  # what the first call makes
    gc.collect()
    before = mapped()
    view = large_pages.zeros((64, *LARGE[1:]), torch.zeros(1))[3, :2]
    assert mapped() - before >= 256 << 20 and not view.any()
    del view
    gc.collect()
    assert mapped() - before < 128 << 20


def test_without_more_mappings_memory_is_the_allocators(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    found = large_pages.zeros(LARGE, torch.zeros(1))
    assert found.shape == LARGE and not found.any()


def test_a_compiled_program_has_the_allocators() -> None:
    compiled = torch.compile(lambda x: large_pages.zeros(LARGE, x) + 1, backend="eager", fullgraph=True)
    assert compiled(torch.zeros(1)).all()


def test_another_device_has_its_own() -> None:
    assert large_pages.zeros(LARGE, torch.zeros(1, device="meta")).device.type == "meta"
