"""The demo's text: the split, the windows and the entropy it is measured against."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A folder that looks like a standard library: 200 files, and some that must not be read."""
    for number in range(200):
        file = tmp_path / f"package{number % 7}" / f"module{number}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"x = {number}\n" * (1 + number % 5))
    for skipped in ("site-packages/other.py", "test/test_it.py", "package1/tests/data.py", "package1/notes.txt"):
        file = tmp_path / skipped
        file.parent.mkdir(exist_ok=True)
        file.write_text("never read\n")
    return tmp_path


def test_split_is_deterministic_disjoint_and_complete(data: ModuleType, library: Path) -> None:
    files = data.source_files(library)
    held_out = {path for path in files if data.is_held_out(path)}
    train = {path for path in files if not data.is_held_out(path)}

    assert len(files) == len(set(files)) == 200
    assert held_out | train == set(files)
    assert 0.05 < len(held_out) / len(files) < 0.2
    # The hash is of the path alone, so it is the same on every machine: these are written down.
    assert data.is_held_out(Path("argparse.py")) is False
    assert data.is_held_out(Path("tempfile.py")) is True


def test_load_reads_every_file_once(data: ModuleType, library: Path) -> None:
    first, second = data.load(library), data.load(library)
    assert torch.equal(first.train, second.train)
    assert torch.equal(first.held_out, second.held_out)

    texts = [bytes(text.tolist()) for text in (first.train, first.held_out)]
    lines = [line for text in texts for line in text.splitlines() if line]
    assert sorted(lines) == sorted(f"x = {n}".encode() for n in range(200) for _ in range(1 + n % 5))
    # No number is in both: a file is either learned from or tested on.
    assert set(texts[0].splitlines()) & set(texts[1].splitlines()) <= {b""}


def test_too_little_text_is_rejected(data: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("pass\n")
    with pytest.raises(FileNotFoundError, match="too few"):
        data.load(tmp_path)


def test_standard_library_is_enough_text(data: ModuleType) -> None:
    corpus = data.load()
    assert len(corpus.train) > 5_000_000
    assert len(corpus.held_out) > 300_000


def test_windows_are_pieces_of_the_text(data: ModuleType) -> None:
    text = torch.arange(50, dtype=torch.uint8)
    for windows in (
        data.random_windows(text, 20, 8, torch.Generator().manual_seed(0)),
        data.even_windows(text, 20, 8),
    ):
        assert windows.shape == (20, 9)
        assert windows.dtype == torch.int64
        assert torch.equal(windows - windows[:, :1], torch.arange(9).expand(20, 9))
    even = data.even_windows(text, 20, 8)
    assert even[0, 0] == 0
    assert even[-1, -1] == 49


def test_unigram_bits_of_known_distributions(data: ModuleType) -> None:
    uniform = torch.arange(256, dtype=torch.uint8).repeat(4)
    assert data.unigram_bits(uniform, uniform) == pytest.approx(8.0, abs=1e-12)

    # Text is all 'a'; training saw 'a' 700 times in 744 bytes, plus one count of each of 256 values: q = 701 / 1000.
    train = torch.tensor([97] * 700 + [98] * 44, dtype=torch.uint8)
    text = torch.tensor([97] * 10, dtype=torch.uint8)
    assert data.unigram_bits(text, train) == pytest.approx(-math.log2(701 / 1000), abs=1e-12)
