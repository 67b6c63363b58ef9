"""`sdk bench perplexity`: what quantized weights do to a model of the user's own."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import pytest
import torch
from torch.nn import functional

with warnings.catch_warnings():
    # transformers' own dependencies warn of each other's releases.
    warnings.simplefilter("ignore")
    import transformers

from ds_plugin_sdk.bench import perplexity
from ds_plugin_sdk.errors import SdkError

TEXT = "The perplexity of a text is the exponential of the mean loss of its tokens.\n" * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GPT-2 that has learned nothing, of bytes."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=264, n_positions=32, n_embd=64, n_layer=1, n_head=2, initializer_range=0.5
    )
    config.use_cache = False  # as trainers leave it behind
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    transformers.ByT5Tokenizer(extra_ids=0).save_pretrained(folder)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_text(TEXT, encoding="utf-8")
    return path


def test_it_is_the_exponential_of_the_mean_loss(folder: Path, text: Path) -> None:
    rows = {row.implementation: row for row in perplexity.run(folder, text, "float32", most=2)}
    model = transformers.GPT2LMHeadModel.from_pretrained(folder).double()
    windows = (torch.tensor(list(TEXT.encode())) + 3)[:64].view(2, 32)  # as many tokens as there are positions
    with torch.no_grad():
        loss = functional.cross_entropy(model(windows).logits[:, :-1].flatten(0, 1), windows[:, 1:].flatten()).item()
    plain = rows[perplexity.PLAIN]
    assert (plain.tokens, plain.times_plain) == (62, 1)
    assert plain.loss == pytest.approx(loss, rel=1e-5) and plain.perplexity == pytest.approx(math.exp(loss), rel=1e-4)
    assert rows["ours"].loss == pytest.approx(loss, rel=1e-4)
    errors = [abs(rows[name].loss - loss) for name in ("ours", "ours, int8", "ours, int4")]
    assert errors[0] < errors[1] < errors[2] < 0.2 * loss  # each reads other weights
    assert errors[0] < abs(rows[perplexity.CACHE].loss - loss) < 0.01 * loss


def test_a_model_without_whole_layers_has_no_row_of_an_int8_cache(folder: Path, text: Path, tmp_path: Path) -> None:
    config = transformers.BloomConfig(vocab_size=264, hidden_size=16, n_layer=1, n_head=2)
    transformers.BloomForCausalLM(config).save_pretrained(tmp_path / "model")
    transformers.ByT5Tokenizer(extra_ids=0).save_pretrained(tmp_path / "model")
    rows = perplexity.run(tmp_path / "model", text, "float32", length=16, most=1)
    assert [row.implementation for row in rows] == [perplexity.PLAIN, "ours", "ours, int8", "ours, int4"]


def test_what_cannot_be_compared_is_an_error(folder: Path, text: Path, tmp_path: Path) -> None:
    with pytest.raises(SdkError, match="no language model can be loaded"):
        perplexity.run(tmp_path, text)
    with pytest.raises(SdkError, match="cannot be read"):
        perplexity.run(folder, tmp_path / "missing")
    text.write_text("short", encoding="utf-8")
    with pytest.raises(SdkError, match="it has 5 tokens, a window 32"):
        perplexity.run(folder, text)
