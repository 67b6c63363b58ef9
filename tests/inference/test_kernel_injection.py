"""``deepspeed.init_inference(replace_with_kernel_inject=True)`` on our ops, against the models of transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launchers import free_port

pytestmark = [pytest.mark.deepspeed, pytest.mark.compiler, pytest.mark.slow, pytest.mark.timeout(900)]

PROGRAM = Path(__file__).with_name("kernel_injection.py")

GENERATE = ("gpt2", "opt", "bloom", "gptj")
MODELS = (*GENERATE, "bert", "bert, gelu by erf")


def run_program(out: Path, path: str, **variables: str) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore", "DS_PLUGIN_FALLBACK": "0", **variables}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(out)],
        env=environment,
        cwd=out.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="session")
def report(old_transformers: str, kernel_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `kernel_injection.py` found, on the CPU plugin."""
    out = tmp_path_factory.mktemp("injection") / "report.json"
    return run_program(out, old_transformers, DS_PLUGIN_CACHE_DIR=str(kernel_cache), DS_ACCELERATOR="cpu")


@pytest.mark.parametrize("model", MODELS)
def test_logits_are_those_of_transformers(report: dict[str, Any], model: str) -> None:
    found = report["models"][model]
    # DeepSpeed's layers know one GELU, by tanh; it is up to 5e-4 away from that by erf, in each layer.
    allowed = 4e-3 if model == "bert, gelu by erf" else 2e-5
    assert found["error"] <= allowed < 0.001 * found["largest"]


@pytest.mark.parametrize("model", GENERATE)
def test_the_same_tokens_come_out(report: dict[str, Any], model: str) -> None:
    """A prompt of a batch that is padded on the left, and 32 tokens after it."""
    found = report["models"][model]
    assert found["tokens"] == found["expected_tokens"]
    assert all(len(row) == 44 for row in found["tokens"])


@pytest.mark.parametrize("model", MODELS)
def test_bfloat16_is_as_exact_as_that_of_transformers(report: dict[str, Any], model: str) -> None:
    found = report["models"][model]
    assert 0 < found["bfloat16_error"] <= 1.5 * found["bfloat16_error_of_transformers"]


@pytest.mark.parametrize("model", MODELS)
def test_our_ops_did_the_work(report: dict[str, Any], model: str) -> None:
    """An empty module would pass where DeepSpeed has fallbacks of its own."""
    found = report["models"][model]
    attention = "softmax_" if model == "bloom" else "cached_attention"
    bert = model.startswith("bert")
    norms = ("layer_norm", "post_layer_norm") if bert or model in ("gpt2", "opt", "bloom") else ("layer_norm",)
    for op in (attention, "residual_add_bias_", *norms):
        assert found["calls"][op] == found["layers"], op
    if not bert:
        assert found["decoded_calls"][attention] == 32 * found["layers"]


@pytest.mark.parametrize("call", ["llama", "llama, generate"])
def test_who_does_not_fit_is_shown_the_other_door(report: dict[str, Any], call: str) -> None:
    message = report["misfits"][call]
    assert message.startswith("OpError: DeepSpeed's kernel injection does not fit this model")
    assert "'llama'" in message and "4.43.4" in message and "ds_plugin_sdk.integrations.transformers" in message


@pytest.mark.parametrize(("model", "why"), [("gpt_neox", "attention and MLP in parallel"), ("distilbert", "normalize")])
def test_layers_that_compute_something_else_are_refused(report: dict[str, Any], model: str, why: str) -> None:
    """Those of DeepSpeed, which says nothing."""
    message = report["misfits"][model]
    assert message.startswith("OpError: DeepSpeed's kernel injection does not fit this model")
    assert why in message and "leave out replace_with_kernel_inject" in message


def test_a_sequence_goes_on_as_the_model_says(report: dict[str, Any]) -> None:
    found = report["continued"]
    expected, tokens = found.pop("tokens that were looked up")
    assert tokens == expected
    assert len(found) == 3 and all(error < 2e-5 for error in found.values()), found
    assert (
        "OpError: the keys and values handed over are not in the cache" in report["misfits"]["gpt2, an earlier cache"]
    )


HYBRID = """
import deepspeed, sys, torch
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM
sizes = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
if sys.argv[1] == "opt":
    model = OPTForCausalLM(OPTConfig(**sizes, word_embed_proj_dim=64, ffn_dim=64, max_position_embeddings=64))
else:
    model = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=64, num_key_value_heads=int(sys.argv[2])))
config = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
    "hybrid_engine": {"enabled": True, "max_out_tokens": 32},
}
deepspeed.init_distributed("gloo")
engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
tokens = torch.randint(64, (2, 8))
engine.train()
engine.backward(engine(tokens, labels=tokens).loss)
engine.step()
engine.eval()
for call in (engine, engine.generate):
    try:
        call(tokens)
    except Exception as error:
        print("raised", type(error).__name__, str(error).replace(chr(10), " "))
"""


@pytest.mark.usefixtures("compiled_once")
@pytest.mark.parametrize(("model", "kv_heads"), [("opt", 4), ("llama", 4), ("llama", 2), ("llama", 1)])
def test_the_hybrid_engine_trains_and_says_why_it_does_not_generate(model: str, kv_heads: int) -> None:
    """With the installed transformers, which is newer. DeepSpeed says nothing of heads that share keys and values."""
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    environment = {**os.environ, **rank, "DS_ACCELERATOR": "cpu"}
    program = [sys.executable, "-W", "ignore", "-c", HYBRID, model, str(kv_heads)]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    raised = [line for line in done.stdout.splitlines() if line.startswith("raised")]
    assert len(raised) == 2, done.stdout
    for line in raised:
        assert line.startswith("raised OpError DeepSpeed's kernel injection does not fit this model")
        assert f"'{model}' are written for transformers up to 4.43.4" in line and "leave out hybrid_engine" in line


INJECTED = """
import deepspeed, torch
from transformers import OPTConfig, OPTForCausalLM
sizes = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
model = OPTForCausalLM(OPTConfig(**sizes, word_embed_proj_dim=64, ffn_dim=256, max_position_embeddings=64))
engine = deepspeed.init_inference(model, dtype=torch.float32, replace_with_kernel_inject=True)
tokens = torch.randint(64, (2, 8))
for call in (engine, engine.generate, engine.module, engine.module.generate):
    try:
        call(tokens)
    except Exception as error:
        print("raised", type(error).__name__, str(error).replace(chr(10), " "))
"""


@pytest.mark.usefixtures("compiled_once")
def test_the_model_of_an_engine_says_the_same() -> None:
    """With the installed transformers. Many programs call ``engine.module``."""
    program = [sys.executable, "-W", "ignore", "-c", INJECTED]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    raised = [line for line in done.stdout.splitlines() if line.startswith("raised")]
    assert len(raised) == 4, done.stdout
    for line in raised:
        assert line.startswith("raised OpError DeepSpeed's kernel injection does not fit this model"), line
        assert "'opt' are written for transformers up to 4.43.4" in line, line
        assert "leave out replace_with_kernel_inject" in line, line
