"""`sdk bench async-io`: all peers write and read the whole file, and the command ends."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_plugin_sdk.bench import async_io, chart, timing
from ds_plugin_sdk.cli import main
from ds_plugin_sdk.ops import pin_memory

pytestmark = pytest.mark.compiler

PAGE = 4096


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_TURN", 0.0)


def _plain_rows(folder: Path, **more: Any) -> list[async_io.Row]:
    return list(async_io.run(folder, 16 * PAGE, blocks=(PAGE, 4 * PAGE), threads=(1, 3), seconds=0, **more))


def test_every_way_has_a_row_for_each_setting(native: Callable[..., None], tmp_path: Path) -> None:
    native("async_io")
    rows = _plain_rows(tmp_path, deepspeed=False)
    settings = {(row.block_kib, row.threads) for row in rows}
    assert settings == {(4, 1), (4, 3), (16, 1), (16, 3)}
    for setting in settings:
        hows = {row.how for row in rows if (row.block_kib, row.threads) == setting}
        assert hows - {"io_uring"} == {"threads", "python", "plain"}
    assert all(row.write_gb_s > 0 and row.read_gb_s > 0 for row in rows)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("threads", [1, 3, 7])
def test_plain_calls_move_every_byte(threads: int, tmp_path: Path) -> None:
    memory = pin_memory.empty(11 * PAGE, torch.uint8)
    memory.copy_(torch.arange(11 * PAGE, dtype=torch.int32) % 251)
    before, path = memory.clone(), tmp_path / "file"
    write, read = async_io._plain(memory, path, 2 * PAGE, threads)
    write()
    assert path.read_bytes() == before.numpy().tobytes()
    memory.zero_()
    read()
    assert torch.equal(memory, before)


def test_a_peer_that_does_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """DeepSpeed's own op prints and gives -1 where it fails: that would look very fast."""

    class Handle:
        def __init__(self, *settings: object) -> None:
            pass

        def new_cpu_locked_tensor(self, count: int, like: torch.Tensor) -> torch.Tensor:
            return torch.empty_like(like)

        def sync_pwrite(self, *arguments: object) -> int:
            return -1

    builder = SimpleNamespace(
        is_compatible=lambda verbose: True, load=lambda verbose: SimpleNamespace(aio_handle=Handle)
    )
    own = SimpleNamespace(AsyncIOBuilder=lambda: builder)
    monkeypatch.setattr(async_io.importlib, "import_module", lambda name: own)
    with pytest.raises(RuntimeError, match="DeepSpeed's own op gave -1"):
        _plain_rows(tmp_path)


def test_a_peer_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    builder = SimpleNamespace(is_compatible=lambda verbose: False)
    own = SimpleNamespace(AsyncIOBuilder=lambda: builder)
    monkeypatch.setattr(async_io.importlib, "import_module", lambda name: own)
    with pytest.warns(RuntimeWarning, match="not compared: it does not find libaio"):
        rows = _plain_rows(tmp_path)
    assert "libaio" not in {row.how for row in rows}
    assert all(row.write_ratio == 1 for row in rows if row.how == "plain")


def test_json_stands_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """DeepSpeed, whose op is a peer, writes its log to standard output."""

    def run(*settings: object, **more: object) -> list[async_io.Row]:
        sys.stdout.write("[WARNING] please install the libaio-dev package with apt\n")
        return [async_io.Row(128, 1, "plain", 1.0, 2.0, None, None)]

    monkeypatch.setattr(async_io, "run", run)
    monkeypatch.setattr(sys, "argv", ["sdk", "bench", "async-io", "--json"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code
    said = capsys.readouterr()
    assert [row["how"] for row in json.loads(said.out)] == ["plain"]
    assert "[WARNING]" in said.err


def test_the_command_ends(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ["--folder", str(tmp_path), "--mib", "1", "--no-deepspeed", "--seconds", "0", "--json"]
    monkeypatch.setattr(sys, "argv", ["sdk", "bench", "async-io", *options])
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code
    found = json.loads(capsys.readouterr().out)
    settings = {(row["block_kib"], row["threads"]) for row in found}
    assert settings == {(block // 1024, threads) for block in async_io.BLOCKS for threads in async_io.THREADS}


def test_a_chart_is_drawn(tmp_path: Path) -> None:
    rows = [
        async_io.Row(block, threads, how, 1.0, 2.0, None, None)
        for block in (128, 8192)
        for threads in (1, 4)
        for how in ("io_uring", "plain")
    ]
    assert chart.draw_files(rows, tmp_path).read_bytes().startswith(b"\x89PNG")
