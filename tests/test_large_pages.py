"""Tensors in memory of their own, in large pages where the system gives them."""

from __future__ import annotations

import gc
import mmap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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


@pytest.fixture
def mapped() -> Iterator[Callable[[], int]]:
    """Bytes that the process has mapped beyond what it had before the test, with nothing kept."""

    def now() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE

    large_pages.zeros(LARGE, torch.zeros(1))  # what the first call makes
    large_pages.release()
    before = now()
    yield lambda: now() - before
    large_pages.release()


def test_its_memory_is_kept_with_the_last_view_until_it_is_released(mapped: Callable[[], int]) -> None:
    view = large_pages.zeros((64, *LARGE[1:]), torch.zeros(1))[3, :2]
    assert mapped() >= 256 << 20 and not view.any()
    large_pages.release()
    assert mapped() >= 256 << 20 and not view.any(), "it is in use"
    del view
    assert mapped() >= 256 << 20
    large_pages.release()
    assert mapped() < 128 << 20


def test_it_is_not_kept_where_memory_is_not(mapped: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_PLUGIN_CPU_KEEP_MEMORY", "0")
    large_pages.zeros((64, *LARGE[1:]), torch.zeros(1))
    assert mapped() < 128 << 20


def test_of_what_is_kept_the_oldest_goes_first(mapped: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_pages, "_KEPT", 300 << 20)
    for rows in (64, 16, 8):  # 256, 64 and 32 MiB
        large_pages.zeros((rows, *LARGE[1:]), torch.zeros(1))
    assert 96 << 20 <= mapped() < 128 << 20


def test_kept_memory_is_zeros_again(mapped: Callable[[], int]) -> None:
    first = large_pages.zeros(LARGE, torch.zeros(1)).fill_(torch.nan)
    place = first.data_ptr()
    del first
    gc.collect()
    smaller = (3, *LARGE[1:])
    for shape, same in [((1, *LARGE[1:]), False), ((5, *LARGE[1:]), False), (smaller, True), (smaller, False)]:
        found = large_pages.zeros(shape, torch.zeros(1))
        assert (found.data_ptr() == place) == same and found.shape == shape and not found.any()
    two = [large_pages.zeros(LARGE, torch.zeros(1)) for _ in range(2)]
    assert two[0].data_ptr() != two[1].data_ptr()


def test_threads_never_share_it(mapped: Callable[[], int]) -> None:
    def work(number: int) -> bool:
        for _ in range(50):
            mine = large_pages.zeros((1, *LARGE[1:]), torch.zeros(1))
            if mine.any() or not mine.fill_(number).eq(number).all():
                return False
        return True

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(1, 5)))


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
