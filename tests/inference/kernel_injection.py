"""A program: inject DeepSpeed's layers into small models, and write what came of it as JSON to the file it is given.

It needs the transformers that DeepSpeed's layers are written for, so the tests run it in a process with those in its
path.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import transformers

from counted_calls import CountedCalls

NEW_TOKENS = 32
PADDING = (0, 3, 7, 1)  # of the rows of a batch, on the left
SMALL = {"vocab_size": 211, "initializer_range": 0.2}


def models() -> dict[str, Any]:
    torch.manual_seed(0)
    t = transformers
    gpt = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128}
    opt = {"ffn_dim": 256, "max_position_embeddings": 128, "word_embed_proj_dim": 64, "init_std": 0.2}
    usual = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    bert = {**usual, "intermediate_size": 256, "max_position_embeddings": 128}
    return {
        "gpt2": t.GPT2LMHeadModel(t.GPT2Config(**SMALL, **gpt)),
        "opt": t.OPTForCausalLM(t.OPTConfig(vocab_size=211, **usual, **opt)),
        "bloom": t.BloomForCausalLM(t.BloomConfig(**SMALL, hidden_size=64, n_layer=3, n_head=4)),
        "gptj": t.GPTJForCausalLM(t.GPTJConfig(**SMALL, **gpt, rotary_dim=8)),
        "bert": t.BertForMaskedLM(t.BertConfig(**SMALL, **bert, hidden_act="gelu_new")),
        "bert, gelu by erf": t.BertForMaskedLM(t.BertConfig(**SMALL, **bert, hidden_act="gelu")),
    }


def batch() -> dict[str, torch.Tensor]:
    ids, mask = torch.randint(5, 200, (len(PADDING), 12)), torch.ones(len(PADDING), 12, dtype=torch.int64)
    for row, padding in enumerate(PADDING):
        ids[row, :padding], mask[row, :padding] = 1, 0
    return {"input_ids": ids, "attention_mask": mask}


def inject(model: Any, dtype: torch.dtype) -> Any:
    return deepspeed.init_inference(copy.deepcopy(model), dtype=dtype, replace_with_kernel_inject=True)


def largest_error(actual: Any, expected: Any, mask: torch.Tensor) -> float:
    return float((actual.logits.float() - expected.logits.float())[mask.bool()].abs().max())


def run(model: Any, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    mask = inputs["attention_mask"]
    expected = model(**inputs)
    result: dict[str, Any] = {"largest": float(expected.logits.abs().max())}
    engine, calls = inject(model, torch.float32), CountedCalls()
    with calls:
        result["error"] = largest_error(engine(**inputs), expected, mask)
    result["calls"] = calls.calls
    result["layers"] = model.config.num_hidden_layers
    if model.can_generate():
        options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 1, "eos_token_id": None}
        with (again := CountedCalls()):
            tokens = engine.generate(**inputs, **options)
        result["decoded_calls"] = again.calls
        result["tokens"], result["expected_tokens"] = tokens.tolist(), model.generate(**inputs, **options).tolist()
    low = copy.deepcopy(model).bfloat16()
    result["bfloat16_error_of_transformers"] = largest_error(low(**inputs), expected, mask)
    result["bfloat16_error"] = largest_error(inject(model, torch.bfloat16)(**inputs), expected, mask)
    return result


def misfits() -> dict[str, str]:
    """What users of models are told that the layers do not fit."""
    t, sizes = transformers, {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    llama = llama_model()
    neox = t.GPTNeoXConfig(**SMALL, **sizes, intermediate_size=256, use_parallel_residual=False)
    distil = t.DistilBertConfig(**SMALL, dim=64, n_layers=2, n_heads=4, hidden_dim=256)
    ids = torch.randint(5, 200, (2, 7))
    calls = {
        "llama": lambda: inject(llama, torch.float32)(ids),
        "llama, generate": lambda: inject(llama, torch.float32).generate(input_ids=ids, max_new_tokens=4),
        "gpt_neox": lambda: inject(t.GPTNeoXForCausalLM(neox).eval(), torch.float32)(ids),
        "distilbert": lambda: inject(t.DistilBertForMaskedLM(distil).eval(), torch.float32)(ids),
        "gpt2, an earlier cache": lambda: go_on_with_the_first_of_two(inject(models()["gpt2"].eval(), torch.float32)),
    }
    return {name: said_by(call) for name, call in calls.items()}


def said_by(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing: it fits"


def llama_model() -> Any:
    config = transformers.LlamaConfig(
        **SMALL, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    return transformers.LlamaForCausalLM(config).eval()


def go_on_with_the_first_of_two(engine: Any) -> Any:
    first, _ = (engine(input_ids=torch.randint(5, 200, (2, 6)), use_cache=True) for _ in range(2))
    return engine(input_ids=torch.randint(5, 200, (2, 1)), past_key_values=first.past_key_values)


def continued() -> dict[str, Any]:
    """What differs between a model with injected layers and without, where it is called in other ways."""
    result: dict[str, Any] = {}
    llama = llama_model()
    ids = batch()["input_ids"]
    expected = llama(input_ids=ids, use_cache=False).logits
    found = inject(llama, torch.float32)(input_ids=ids, use_cache=False).logits
    result["llama without a cache"] = float((found - expected).abs().max())
    gpt2 = models()["gpt2"].eval()
    engine = inject(gpt2, torch.float32)
    repeated = {"input_ids": torch.randint(5, 200, (1, 6)).repeat(1, 2)}
    repeated["attention_mask"] = torch.ones_like(repeated["input_ids"])
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 1, "prompt_lookup_num_tokens": 3}
    result["tokens that were looked up"] = [model.generate(**repeated, **options).tolist() for model in (gpt2, engine)]
    states = [model(input_ids=ids, output_hidden_states=True).hidden_states for model in (gpt2, engine)]
    result["hidden states"] = float((torch.stack(states[0]) - torch.stack(states[1])).abs().max())
    result["a prompt in two parts"] = float((in_two_parts(gpt2, ids) - in_two_parts(engine, ids)).abs().max())
    return result


def in_two_parts(model: Any, ids: torch.Tensor) -> torch.Tensor:
    first = model(input_ids=ids[:, :7], use_cache=True)
    mask = torch.ones_like(ids)
    logits: torch.Tensor = model(
        input_ids=ids[:, 7:], attention_mask=mask, past_key_values=first.past_key_values
    ).logits
    return logits


@torch.no_grad()
def main(out: str) -> None:
    results = {name: run(model.eval(), batch()) for name, model in models().items()}
    Path(out).write_text(
        json.dumps({"models": results, "misfits": misfits(), "continued": continued()}), encoding="utf-8"
    )


if __name__ == "__main__":
    main(sys.argv[1])
