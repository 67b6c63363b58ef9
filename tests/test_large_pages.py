"""Tensors in memory of their own, in large pages where the system gives them."""

from __future__ import annotations

import gc
import mmap
import os
import resource
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


def test_the_smallest_that_fits_is_taken(mapped: Callable[[], int]) -> None:
    kept = [large_pages.zeros((rows, *LARGE[1:]), torch.zeros(1)) for rows in (8, 6)]  # 32 and 24 MiB, less pages
    places = [each.data_ptr() for each in kept]
    del kept
    gc.collect()
    assert large_pages.zeros((6, *LARGE[1:]), torch.zeros(1)).data_ptr() == places[1]


def test_one_so_large_that_others_would_go_is_not_kept(mapped: Callable[[], int]) -> None:
    for rows in (8, 144):  # 32 and 576 MiB
        large_pages.zeros((rows, *LARGE[1:]), torch.zeros(1))
    assert 32 << 20 <= mapped() < 64 << 20


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")  # from Python 3.12 on, with threads
def test_what_a_fork_has_too_is_not_kept(mapped: Callable[[], int]) -> None:
    """Linux takes no pages back that two processes have."""
    held = large_pages.zeros((64, *LARGE[1:]), torch.zeros(1))
    large_pages.zeros((32, *LARGE[1:]), torch.zeros(1))
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert 256 << 20 <= mapped() < 384 << 20, "what was kept is gone"
    del held
    assert mapped() < 128 << 20
    large_pages.zeros((64, *LARGE[1:]), torch.zeros(1))
    assert mapped() >= 256 << 20, "later ones are kept again"


@pytest.mark.parametrize("kind", [resource.RLIMIT_AS, resource.RLIMIT_DATA])
def test_it_is_not_kept_where_address_space_is_limited(mapped: Callable[[], int], kind: int) -> None:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (1 << 40, before[1]))
    try:
        large_pages.zeros((64, *LARGE[1:]), torch.zeros(1))
    finally:
        resource.setrlimit(kind, before)
    assert mapped() < 128 << 20


def test_it_is_not_kept_where_the_system_would_not_take_it_back(
    mapped: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_pages, "_MADV_FREE", 12345)  # as where there is none: EINVAL
    large_pages.zeros((64, *LARGE[1:]), torch.zeros(1))
    assert mapped() < 128 << 20


def test_kept_memory_goes_before_there_is_none(mapped: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> None:
    large_pages.zeros((64, *LARGE[1:]), torch.zeros(1))
    original = mmap.mmap

    def only_without_it(*args: Any, **options: Any) -> mmap.mmap:
        if mapped() >= 256 << 20:
            raise OSError(12, "Cannot allocate memory")
        return original(*args, **options)

    monkeypatch.setattr(mmap, "mmap", only_without_it)
    assert large_pages.zeros((32, *LARGE[1:]), torch.zeros(1)).data_ptr() % (2 << 20) == 0


def test_a_tensor_may_end_while_others_are_looked_at(mapped: Callable[[], int]) -> None:
    """The collector runs amid any code, and ends tensors of cycles: when that is depends on all that was made."""
    thresholds = gc.get_threshold()
    gc.set_threshold(50)
    try:
        for made in range(300):
            objects: list[Any] = [[] for _ in range(made % 50)]
            objects += [large_pages.zeros((1, 1 << 19), torch.zeros(1)) for _ in range(30)]
            objects.append(objects)
    finally:
        gc.set_threshold(*thresholds)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, in its first jvp
@pytest.mark.parametrize("transform", [torch.func.grad, lambda f: lambda x: torch.func.jvp(f, (x,), (x,))])
def test_kept_memory_serves_transforms(mapped: Callable[[], int], transform: Callable[..., Any]) -> None:
    def squared(x: torch.Tensor) -> torch.Tensor:
        return (large_pages.zeros(LARGE, x).sum() + x) ** 2

    for _ in range(2):
        transform(squared)(torch.tensor(2.0))
        gc.collect()


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
