"""How long models of the sizes that are published take, plain and accelerated, side by side; weights are random.

    python tools/published_sizes.py [--dtype bfloat16] [--weights int8] [--threads 1] [--seconds 6] [NAME...]

Models that make tokens make 24 of 16; the others run once. A row has the medians of the processor time of both, which
take turns, and how many times as fast ours is. Layers are alike, so a deep model has fewer of them here.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # transformers' own dependencies warn of each other's releases
    import transformers

from ds_plugin_sdk.integrations.transformers import accelerate

_NEW_TOKENS = 24


class Case(NamedTuple):
    """A model of one published size."""

    model: str
    config: str
    sizes: dict[str, Any]
    inputs: Callable[[], dict[str, Tensor]]
    generates: bool = False


def _tokens(batch: int, tokens: int) -> Callable[[], dict[str, Tensor]]:
    return lambda: {"input_ids": torch.randint(5, 30000, (batch, tokens))}


def _image() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(1, 3, 224, 224)}


def _bart(width: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    sizes = {"layers": layers, "ffn_dim": 4 * width, "attention_heads": heads}
    sides = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sizes.items()}
    return {"d_model": width, **sides, **more}


_MINILM = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
_LLAMA = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536}
_GEMMA = {"hidden_size": 640, "num_attention_heads": 4, "num_key_value_heads": 1, "intermediate_size": 2048}
_MOE = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 1408}
_EXPERTS = {"moe_intermediate_size": 352, "shared_expert_intermediate_size": 1408, "num_experts": 16}
_WHISPER = _bart(384, 4, 6)
_MARIAN = _bart(512, 6, 8, vocab_size=58101, decoder_start_token_id=1, pad_token_id=2)

CASES = {
    "MiniLM": Case("BertModel", "BertConfig", _MINILM, _tokens(1, 16)),
    "MiniLM, 32 texts": Case("BertModel", "BertConfig", _MINILM, _tokens(32, 32)),
    "BERT base": Case("BertForSequenceClassification", "BertConfig", {}, _tokens(1, 32)),
    "DistilBERT": Case("DistilBertForSequenceClassification", "DistilBertConfig", {}, _tokens(1, 32)),
    "RoBERTa base, 8 texts": Case("RobertaForSequenceClassification", "RobertaConfig", {}, _tokens(8, 64)),
    "MPNet, 8 texts": Case("MPNetModel", "MPNetConfig", {}, _tokens(8, 32)),
    "DeBERTa": Case("DebertaV2Model", "DebertaV2Config", {**_MINILM, "relative_attention": True}, _tokens(1, 32)),
    "ModernBERT": Case("ModernBertModel", "ModernBertConfig", {"num_hidden_layers": 8}, _tokens(1, 64)),
    "CLIP's text, 4 texts": Case("CLIPTextModel", "CLIPTextConfig", {}, _tokens(4, 16)),
    "ViT base": Case("ViTModel", "ViTConfig", {}, _image),
    "DINOv2 small": Case("Dinov2Model", "Dinov2Config", {"hidden_size": 384, "num_attention_heads": 6}, _image),
    "wav2vec 2, 1 s": Case("Wav2Vec2Model", "Wav2Vec2Config", {}, lambda: {"input_values": torch.randn(1, 16000)}),
    "DistilGPT-2": Case("GPT2LMHeadModel", "GPT2Config", {"n_layer": 6}, _tokens(1, 16), True),
    "OPT 125m": Case("OPTForCausalLM", "OPTConfig", {}, _tokens(1, 16), True),
    "Pythia 70m": Case(
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        {"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8, "intermediate_size": 2048},
        _tokens(1, 16),
        True,
    ),
    "SmolLM": Case(
        "LlamaForCausalLM",
        "LlamaConfig",
        {**_LLAMA, "num_hidden_layers": 10, "vocab_size": 49152, "tie_word_embeddings": True},
        _tokens(1, 16),
        True,
    ),
    "Gemma 3 270m": Case(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**_GEMMA, "num_hidden_layers": 6, "head_dim": 256, "vocab_size": 65536},
        _tokens(1, 16),
        True,
    ),
    "Mamba 130m": Case("MambaForCausalLM", "MambaConfig", {"num_hidden_layers": 8}, _tokens(1, 16), True),
    "Qwen 2's experts": Case(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {**_MOE, **_EXPERTS, "num_hidden_layers": 4, "vocab_size": 32000},
        _tokens(1, 16),
        True,
    ),
    "T5 small": Case("T5ForConditionalGeneration", "T5Config", {"decoder_start_token_id": 0}, _tokens(1, 32), True),
    "BART base": Case("BartForConditionalGeneration", "BartConfig", _bart(768, 6, 12), _tokens(1, 32), True),
    "Marian": Case("MarianMTModel", "MarianConfig", _MARIAN, _tokens(1, 20), True),
    "Whisper tiny": Case(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        _WHISPER,
        lambda: {"input_features": torch.randn(1, 80, 3000)},
        True,
    ),
}


def measure(case: Case, dtype: torch.dtype, weights: Any, seconds: float) -> tuple[float, float]:
    """Medians of seconds, of the plain model and of ours."""
    torch.manual_seed(0)
    config = getattr(transformers, case.config)(**case.sizes)
    plain = getattr(transformers, case.model)(config).eval().to(dtype)
    ours = copy.deepcopy(plain)
    accelerate(ours, weights)
    inputs = {name: value.to(dtype) if value.is_floating_point() else value for name, value in case.inputs().items()}
    length = {"max_new_tokens": _NEW_TOKENS, "min_new_tokens": _NEW_TOKENS, "do_sample": False}
    taken: dict[int, list[float]] = {id(plain): [], id(ours): []}

    def run(model: Any) -> None:
        begin = time.process_time()
        with torch.inference_mode():
            model.generate(**inputs, **length) if case.generates else model(**inputs)
        taken[id(model)].append(time.process_time() - begin)

    end = time.monotonic() + seconds
    while time.monotonic() < end or len(taken[id(ours)]) < 7:
        for model in (plain, ours, ours, plain):
            run(model)
    skipped = 2  # what is set up by the first calls
    return statistics.median(taken[id(plain)][skipped:]), statistics.median(taken[id(ours)][skipped:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--weights", choices=["int8", "int4"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=6, help="for each model")
    args = parser.parse_args()
    unknown = set(args.names) - CASES.keys()
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: expected some of {', '.join(CASES)}")
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    print("| model | plain ms | ours ms | times as fast |")
    print("|---|---|---|---|")
    for name in args.names or CASES:
        plain, ours = measure(CASES[name], getattr(torch, args.dtype), args.weights, args.seconds)
        print(f"| {name} | {plain * 1e3:.1f} | {ours * 1e3:.1f} | {plain / ours:.2f} |", flush=True)


if __name__ == "__main__":
    main()
