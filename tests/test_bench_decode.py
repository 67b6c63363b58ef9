"""`sdk bench decode`: the model that llama.cpp gets is that of transformers, and who is not installed says so."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_plugin_sdk.bench import contexts, decode, gguf_model
from ds_plugin_sdk.bench.timing import LateError, at_most

transformers = pytest.importorskip("transformers", reason="the models are transformers'")


SHAPES = ("gpt2", "llama", "phi3", "gemma3")


def tiny(shape: str, **more: int) -> Any:
    """A model of some hundred thousand parameters in bfloat16, with biases and norms that are no zeros and ones."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    config: Any
    if shape == "gpt2":
        config = transformers.GPT2Config(vocab_size=320, n_embd=256, n_layer=2, n_head=4, n_positions=64)
    elif shape == "phi3":
        config = transformers.Phi3Config(**sizes, pad_token_id=0)
    elif shape == "gemma3":  # every sixth layer has no window
        heads = {"head_dim": 128, "query_pre_attn_scalar": 128, "num_hidden_layers": 6, "sliding_window": 8}
        config = transformers.Gemma3TextConfig(**{**sizes, **heads})
    else:
        config = transformers.LlamaConfig(**{**sizes, **more})
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def tensors(file: Path) -> dict[str, Tensor]:
    """What a file of matrices in bfloat16 and vectors in float32 has."""
    gguf = pytest.importorskip("gguf", reason="gguf, which reads and writes the files, is not installed")
    found = {}
    for each in gguf.GGUFReader(file).tensors:
        data = torch.from_numpy(each.data.copy())
        found[each.name] = data.view(torch.bfloat16) if data.dtype == torch.uint8 else data
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_a_file_has_every_weight_once(tmp_path: Path, shape: str) -> None:
    pytest.importorskip("gguf", reason="gguf, which reads and writes the files, is not installed")
    model = tiny(shape)
    gguf_model.write(model, tmp_path / "model.gguf")
    found = tensors(tmp_path / "model.gguf")
    parameters = dict(model.named_parameters())
    assert len(found) == len(parameters)
    assert sum(each.numel() for each in found.values()) == sum(each.numel() for each in parameters.values())
    assert {each.dtype for each in found.values()} == {torch.bfloat16, torch.float32}
    if shape == "gemma3":
        norm = parameters["model.layers.1.input_layernorm.weight"].float() + 1
        assert torch.equal(found["blk.1.attn_norm.weight"], norm)
    elif shape == "phi3":
        assert torch.equal(found["blk.1.attn_qkv.weight"], parameters["model.layers.1.self_attn.qkv_proj.weight"])
    elif shape == "gpt2":
        weights = parameters["transformer.h.1.mlp.c_fc.weight"]  # of the shape [inputs, outputs]
        assert torch.equal(found["blk.1.ffn_up.weight"], weights.t())
        assert torch.equal(found["blk.1.attn_norm.bias"], parameters["transformer.h.1.ln_1.bias"].float())
    else:
        assert torch.equal(found["blk.1.attn_v.weight"], parameters["model.layers.1.self_attn.v_proj.weight"])
        assert torch.equal(found["output.weight"], parameters["lm_head.weight"])


def test_queries_and_keys_turned_as_llama_cpp_does_have_the_scores_of_transformers(tmp_path: Path) -> None:
    """llama.cpp turns channel 2 i with 2 i + 1, transformers i with i + half a head."""
    pytest.importorskip("gguf", reason="gguf, which reads and writes the files, is not installed")
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    model = tiny("llama")
    gguf_model.write(model, tmp_path / "model.gguf")
    found = tensors(tmp_path / "model.gguf")
    attention, size, tokens = model.model.layers[1].self_attn, 64, 7
    hidden = torch.randn(tokens, 256, dtype=torch.float64)
    angles = torch.arange(tokens)[:, None] / model.config.rope_parameters["rope_theta"] ** (
        torch.arange(0, size, 2, dtype=torch.float64) / size
    )

    def projected(weights: Tensor) -> Tensor:
        return (hidden @ weights.double().t()).unflatten(-1, (-1, size)).transpose(0, 1)

    def turned(states: Tensor) -> Tensor:
        pairs = torch.view_as_complex(states.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)

    query, key = (turned(projected(found[f"blk.1.attn_{each}.weight"])) for each in "qk")
    states = (projected(attention.q_proj.weight)[None], projected(attention.k_proj.weight)[None])
    halves = torch.cat([angles, angles], -1)[None]
    with torch.no_grad():
        theirs = apply_rotary_pos_emb(*states, halves.cos(), halves.sin())
    for ours, expected in zip((query, key), theirs, strict=True):
        torch.testing.assert_close(ours @ ours.mT, (expected @ expected.mT)[0])
    scores = query @ key.repeat_interleave(2, 0).mT
    torch.testing.assert_close(scores, (theirs[0] @ theirs[1].repeat_interleave(2, 1).mT)[0])


# Of the norm of the logits, 1.4 to 3 times what is seen. llama.cpp rounds inputs of products to bfloat16, or to 8 bits
# where weights have 8 or 4. Without the order of channels that it expects, the error is 0.6 to 0.95.
TOLERANCES = {None: 0.02, "Q8_0": 0.06, "Q4_0": 0.5}


@pytest.mark.parametrize("type", TOLERANCES)
@pytest.mark.parametrize("shape", SHAPES)
def test_llama_cpp_computes_what_transformers_computes(
    tmp_path: Path, shape: str, type: gguf_model.Type | None
) -> None:
    """Logits after a prompt and after each token that follows, in a second sequence too, against float64."""
    for name, package in (("gguf", "gguf"), ("llama_cpp", "llama-cpp-python")):
        pytest.importorskip(name, reason=f"{package}, which runs the model, is not installed")
    model = tiny(shape)
    file = tmp_path / "model.gguf"
    gguf_model.write(model, file)
    file = file if type is None else gguf_model.quantize(file, type)
    tokens = torch.randint(320, (1, 20))
    with torch.no_grad():
        expected = model.double()(tokens).logits[0]
    ids = tokens[0].tolist()
    with gguf_model.loaded(file, 20) as generation:
        for _ in range(2):
            generation.restart()
            found = [generation.logits(ids[:16]).clone()]
            found += [generation.logits([each]).clone() for each in ids[16:]]
            for ours, theirs in zip(found, expected[15:], strict=True):
                assert (ours - theirs).norm() < TOLERANCES[type] * theirs.norm()


def test_a_file_that_is_no_model_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python, which loads the file, is not installed")
    (tmp_path / "model.gguf").write_bytes(b"no model")
    with (
        pytest.raises(RuntimeError, match=r"llama\.cpp cannot load .*model\.gguf"),
        gguf_model.loaded(tmp_path / "model.gguf", 8),
    ):
        pass


@pytest.mark.parametrize("missing", ["gguf", "llama_cpp"])
def test_llama_cpp_has_rows_that_say_what_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missing: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    if missing == "gguf":
        monkeypatch.setitem(sys.modules, "llama_cpp", ModuleType("llama_cpp"))
    with contextlib.ExitStack() as kept:
        speeds, absent = decode._in_rounds(decode._llama_cpp(None, tmp_path, kept), 1, lambda: 1.0)
    assert not speeds
    assert list(absent) == ["llama.cpp, bfloat16", "llama.cpp, Q8_0", "llama.cpp, Q4_0"]
    assert all(missing in each for each in absent.values())
    assert not list(tmp_path.iterdir())


def test_a_process_of_llama_cpp_that_fails_says_why(tmp_path: Path) -> None:
    """It has no model to load, or nothing to load it with."""
    with (
        decode._process(tmp_path / "model.gguf") as process,
        pytest.raises(RuntimeError, match=r"its process ended with status 1; it had said: .*(cannot load|llama_cpp)"),
    ):
        process.measure()


def test_a_process_that_nobody_waits_for_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It would compute beside what is measured next."""
    program = tmp_path / "slow"
    program.write_text("#!/bin/sh\nexec sleep 600\n", encoding="utf-8")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    with decode._process(tmp_path / "model.gguf") as process:
        with pytest.raises(LateError), at_most(0.2, "its answer"):
            process.measure()
        assert process._process.wait(timeout=10) != 0


@pytest.mark.compiler
def test_what_is_kept_ready_is_measured_again_and_again(
    monkeypatch: pytest.MonkeyPatch, native: Callable[..., None]
) -> None:
    """llama.cpp too, where it is installed."""
    native("linear", "attention", "norm", "rotary", "decoder_layer")
    llama_cpp = all(map(importlib.util.find_spec, ("gguf", "llama_cpp")))
    monkeypatch.setattr(decode, "model_of", lambda shape: tiny(shape, vocab_size=1024, max_position_embeddings=256))
    rows = decode.run("llama", compiled=False, ctranslate2=False, rounds=2, llama_cpp=llama_cpp)
    assert [row.implementation for row in rows if row.not_compared] == []
    assert len(rows) == (8 if llama_cpp else 5)
    for row in rows:
        assert row.decode_tokens_per_second is not None and row.decode_tokens_per_second > 0
        assert row.read_fraction is not None and row.read_fraction > 0


def test_a_step_reads_each_matrix_by_the_bits_of_its_implementation() -> None:
    model = tiny("llama")
    head = model.lm_head.weight.numel()
    others = sum(each.weight.numel() for each in model.modules() if isinstance(each, torch.nn.Linear)) - head
    assert decode._bytes_read(model, "llama.cpp, bfloat16") == 2 * (others + head)
    assert decode._bytes_read(model, "llama.cpp, Q8_0") == others + head
    assert decode._bytes_read(model, "llama.cpp, Q4_0") == others / 2 + head * 3 / 4
    assert decode._bytes_read(model, "ours, int4") == others / 2 + head


@pytest.mark.compiler
def test_batches_and_contexts_are_measured_for_every_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contexts, "model_of", lambda shape, positions: tiny(shape))
    told: list[str] = []
    rows = list(contexts.run([1, 2], [8, 16], told.append))
    places = [(1, 8), (2, 8), (1, 16)]
    assert [(row.batch, row.context) for row in rows[:: len(rows) // 3]] == places
    assert len(rows) == len(told) == 3 * len({row.implementation for row in rows})
    assert {row.times for row in rows if row.implementation == contexts.PLAIN} == {1}
    assert all(row.decode_tokens_per_second > 0 for row in rows)
