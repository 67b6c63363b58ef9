"""Copies of an accelerated model, in memory, in another process or saved, are plain models."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import logits, make

from counted_calls import CountedCalls

with warnings.catch_warnings():
    # transformers' own dependencies warn of each other's releases.
    warnings.simplefilter("ignore")

from ds_plugin_sdk.integrations.transformers import accelerate

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("kernels")]


def _in_another_process(pickled: bytes, results: Any) -> None:
    model = pickle.loads(pickled)
    results.put((model.config._attn_implementation, logits(model).tolist()))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_a_plain_model(copied: Callable[[Any], Any]) -> None:
    model = make("llama")
    expected = logits(model)
    with accelerate(model):
        other = copied(model)
        assert model.config._attn_implementation == "ds_plugin"
    assert type(other.config._attn_implementation) is str and other.config._attn_implementation == "sdpa"
    with CountedCalls() as counted:
        torch.testing.assert_close(logits(other), expected)
    assert not counted.calls


def test_a_new_process_gets_a_plain_model() -> None:
    model = make("llama")
    expected = logits(model)
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with accelerate(model):
        process = context.Process(target=_in_another_process, args=(pickle.dumps(model), results))
    process.start()
    attention, found = results.get()
    process.join()
    assert attention == "sdpa"
    torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-4, atol=1e-4)


def test_a_saved_model_names_torchs_attention(tmp_path: Path) -> None:
    model = make("llama")
    with accelerate(model):
        model.save_pretrained(tmp_path)
        torch.save(model, tmp_path / "model.pt")
    assert "ds_plugin" not in (tmp_path / "config.json").read_text(encoding="utf-8")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert loaded.config._attn_implementation == "sdpa"
