"""Where ops came from, over all ranks of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ds_plugin_sdk import provenance
from ds_plugin_sdk.report import summarise


def test_a_run_is_collected_from_its_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.jsonl"
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("DS_PLUGIN_PROVENANCE", str(file))
    for rank, origin in (("0", "compiled"), ("1", "cache")):
        monkeypatch.setenv("LOCAL_RANK", rank)
        provenance.record("fused_adam", plugin="ds-plugin-sdk", version="0.1", origin=origin, seconds=1.26)  # type: ignore[arg-type]  # parametrized over the literals
        provenance.record("cpu", plugin="cpu", version="0.1", origin="accelerator", detail="CPU_Accelerator")
    monkeypatch.setenv("LOCAL_RANK", "2")
    provenance.record("fused_adam", plugin="ds-plugin-sdk", version="0.1", origin="reference", detail="no compiler")
    accelerator, *adam = summarise(provenance.read(file)[0])
    assert (accelerator.name, accelerator.ranks, accelerator.detail) == ("cpu", [0, 1], "CPU_Accelerator")
    assert {row.name for row in adam} == {"fused_adam"}
    # Why a rank is slow is read of its own row.
    assert [(row.origin, row.ranks, row.detail) for row in adam] == [
        ("compiled in 1.3 s", [0], ""),
        ("cache", [1], ""),
        ("reference", [2], "no compiler"),
    ]


def test_lines_that_are_no_records_are_named(
    tmp_path: Path, sdk: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.jsonl"
    monkeypatch.setenv("DS_PLUGIN_PROVENANCE", str(file))
    provenance.record("fused_adam", plugin="p", version="1", origin="cache")
    with file.open("ab") as more:
        more.write(b'{"name": "x"}\n\xff\n{"name": "fused_lamb", "pl')
    provenance.record("fused_lion", plugin="p", version="1", origin="cache")  # of a rank that is still there
    said = sdk("report", "--run", str(file))
    assert "fused_adam" in said and "fused_lion" in said
    assert [number for number in (1, 2, 3, 4) if f"line {number}, is cut off or no record" in said] == [2, 3, 4]


@pytest.mark.parametrize("text", ["", "root:x:0:0\n", "[1]\n"])
def test_a_file_without_records_is_an_error(text: str, tmp_path: Path, sdk: Callable[..., str]) -> None:
    file = tmp_path / "other"
    file.write_text(text, encoding="utf-8")
    assert "has no record of a run" in sdk("report", "--run", str(file), status=1)


def test_ranks_of_two_nodes_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(provenance.records())
    monkeypatch.setenv("LOCAL_RANK", "0")
    for rank in ("0", "2"):
        monkeypatch.setenv("RANK", rank)
        provenance.record("adam", plugin="p", version="1", origin="reference")
    assert [each.rank for each in provenance.records()[before:]] == [0, 2]


def test_records_are_kept_in_the_process() -> None:
    before = len(provenance.records())
    provenance.record("x", plugin="p", version="1", origin="reference", detail="why")
    assert provenance.records()[before].detail == "why"


def test_a_file_that_cannot_be_written_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_PLUGIN_PROVENANCE", str(tmp_path / "missing" / "run.jsonl"))
    before = len(provenance.records())
    with pytest.warns(RuntimeWarning, match=r"run\.jsonl cannot be written: .*No such file") as warned:
        for name in ("adam", "lamb"):
            provenance.record(name, plugin="p", version="1", origin="reference")
    assert len(warned) == 1
    assert [each.name for each in provenance.records()[before:]] == ["adam", "lamb"]
