"""A program: inject DeepSpeed's layers into small models, and write what came of it as JSON to the file it is given.

It needs the transformers that DeepSpeed's layers are written for, so the tests run it in a process with those in its
path.
"""

from __future__ import annotations

import copy
import json
import sys
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


def misfit() -> str:
    """What a user of a model is told that the layers do not fit."""
    config = transformers.LlamaConfig(
        vocab_size=211, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    try:
        inject(transformers.LlamaForCausalLM(config).eval(), torch.float32)(torch.randint(5, 200, (2, 7)))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing: it fits"


@torch.no_grad()
def main(out: str) -> None:
    results = {name: run(model.eval(), batch()) for name, model in models().items()}
    Path(out).write_text(json.dumps({"models": results, "misfit": misfit()}), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
