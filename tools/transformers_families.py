"""Every language model of the installed transformers, tiny and with random weights, plain against accelerated.

``make transformers-families`` writes docs/transformers-families.md. A family is

- whole: decoder layers run on our ops; parts: attention, linear layers or norms do; left alone: nothing does;
- different: logits or tokens are not the plain model's. That must not be.

Models are compared in float64, where a rounding cannot send a token to another expert, by our ops' references; then in
float32 and bfloat16 by the native kernels, and in int8. A difference of tokens counts unless the two best were a tie.

``--compile`` compares what torch.compile makes of them instead, in float32, and writes no page.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import re
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers
    from transformers import cache_utils
    from transformers.models.auto import modeling_auto
    from transformers.utils import is_optimum_quanto_available

from ds_plugin_sdk.integrations.transformers import Accelerated, accelerate

PAGE = Path(__file__).resolve().parents[1] / "docs" / "transformers-families.md"
VOCABULARY, STEPS, SECONDS = 128, 6, 120  # of this process, not of the clock
MOST_PARAMETERS = 4_000_000

Kind = Literal["causal", "encoder-decoder", "encoder"]

# The families that issues named, and one of each kind of layer; `make test` runs these and some others by rotation.
ALWAYS = ("llama", "gpt2", "opt", "qwen3", "gemma2", "gpt_oss", "deepseek_v3", "mistral", "bert", "t5")

# Bounds: of the largest difference, in parts of the largest logit. RMS norms compute in float32 in all dtypes.
BOUNDS = {"float64": 1e-4, "float32": 5e-3}
INT8_BOUND = 0.35  # of the mean difference, in parts of the mean size: weights of 32 columns, tiny layers, no training


# ---------------------------------------------------------------------- tiny models
# A field's name -> its size. The first whose part is in the name counts.
_SIZES: tuple[tuple[tuple[str, ...], int], ...] = (
    (("vocab_size", "vocabulary_size"), VOCABULARY),
    (("num_key_value_heads", "num_kv_heads", "kv_heads", "n_head_kv", "num_key_value_groups"), 2),
    (("experts_per_tok", "moe_topk", "moe_top_k", "num_selected_experts", "topk_group", "top_k_experts", "moe_k"), 1),
    (("n_group", "num_expert_group"), 1),
    (("first_k_dense_replace", "first_num_dense_layers", "num_dense_layers", "n_shared_experts"), 1),
    (("expert_dim", "moe_intermediate", "expert_intermediate", "expert_hidden", "shared_expert"), 32),
    (("num_experts", "n_routed_experts", "num_local_experts", "n_experts"), 4),
    (("mamba_n_groups", "n_groups", "mamba_ngroups"), 1),
    (("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "linear_num"), 8),
    (("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 8),
    (("state_size", "d_state"), 8),
    (("num_heads", "attention_heads", "n_head", "num_attention_head", "encoder_attention_heads", "heads"), 4),
    (("global_head_dim", "head_dim", "d_kv", "kv_channels", "head_size"), 8),
    (("qk_rope", "qk_nope", "rotary_dim", "index_head_dim"), 8),
    (("v_head",), 4),
    (("index_topk", "index_n_heads"), 4),
    (("lora_rank", "rank"), 16),
    (("num_layers", "hidden_layers", "n_layer", "encoder_layers", "decoder_layers", "num_blocks"), 2),
    (("intermediate", "ffn", "d_ff", "n_inner", "ff_dim", "mlp_dim", "inner_dim", "feed_forward", "d_inner"), 64),
    (("sliding_window", "attention_window", "local_window", "window_size", "attention_chunk_size"), 5),
    (("embedding_size", "hidden_size", "d_model", "n_embd", "embed_dim", "emb_dim", "model_dim", "lru_width"), 32),
    (("max_position", "n_positions", "max_seq", "n_ctx"), 128),
)

# What else a family needs to be small or to be made at all.
_SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "ctrl": {"dff": 64},
    "codegen": {"rotary_dim": 4},
    "deepseek_v2": {"topk_method": "greedy", "num_experts_per_tok": 1},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 1},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gptj": {"rotary_dim": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 5},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "distilbert": {"dim": 32, "hidden_dim": 64},
    "esm": {"vocab_size": 128, "pad_token_id": 0, "mask_token_id": 1},
    "led": {"attention_window": 4},
    "longformer": {"attention_window": 4},
    "reformer": {"axial_pos_embds": False},
}


_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def _small(name: str, value: int) -> int:
    for parts, size in _SIZES:
        if any(part in name for part in parts):
            return min(value, size)
    return value


def shrunken(kind: type[transformers.PreTrainedConfig], family: str) -> transformers.PreTrainedConfig:
    """A tiny configuration: the default one, with its sizes made small by their names."""
    return kind(**{**_fields(kind(), kind), **_SPECIAL.get(family, {})})


def _fields(default: transformers.PreTrainedConfig, kind: type[transformers.PreTrainedConfig]) -> dict[str, Any]:
    given = set(getattr(kind, "__annotations__", {})) | set(kind.__init__.__code__.co_varnames)
    for base in kind.__mro__:
        given |= set(getattr(base, "__annotations__", {}))
    fields: dict[str, Any] = {}
    # One layer of each type.
    types = {name: list(dict.fromkeys(value)) for name, value in vars(default).items() if _are_types(name, value)}
    layers = max([2, *map(len, types.values())])
    for name, value in vars(default).items():
        if isinstance(value, transformers.PreTrainedConfig):
            fields[name] = type(value)(**_fields(value, type(value)))
        elif isinstance(value, bool) or name not in given or name.startswith("_"):
            continue
        elif name in types:
            fields[name] = (types[name] * layers)[:layers]
        elif name == "head_dim" and value is None:
            fields[name] = 8
        elif isinstance(value, int) and name.endswith("token_id"):
            fields[name] = min(value, 3)
        elif isinstance(value, int):
            small = min(value, layers) if name in _LAYERS else _small(name, value)
            if small != value:
                fields[name] = small
        elif isinstance(value, float) and any(part in name for part in ("dropout", "pdrop", "layerdrop")):
            fields[name] = 0.0
    if "kv_lora_rank" in given and "num_key_value_heads" in given:  # multi-head latent attention
        fields["num_key_value_heads"] = 4
    return fields


def _are_types(name: str, value: object) -> bool:
    return name.endswith("layer_types") and isinstance(value, list) and all(isinstance(each, str) for each in value)


@dataclass(frozen=True)
class Family:
    """A model type of transformers' automatic classes."""

    name: str
    kind: Kind
    model: str


def families() -> list[Family]:
    """All of them, a causal model's sort first where it has several."""
    found: dict[str, Family] = {}
    sources: tuple[tuple[Kind, Any], ...] = (
        ("causal", modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        ("encoder-decoder", modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
        ("encoder", modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    )
    for kind, names in sources:
        for name, model in names.items():
            found.setdefault(f"{kind} {name}", Family(name, kind, model))
    # Encoder-decoders are among the causal ones by their decoders, and among the masked ones as themselves.
    both = {family.name for family in found.values() if family.kind == "encoder-decoder"}
    return [family for family in found.values() if family.kind != "encoder" or family.name not in both]


def make(family: Family, seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    """A tiny model with random weights that are so large that all parts matter.

    Raises:
        Exception: whatever the family raises that cannot be made so.
    """
    config = shrunken(transformers.CONFIG_MAPPING[family.name], family.name)
    if family.kind == "causal" and hasattr(config, "is_decoder"):
        config.is_decoder = True
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in _class(family)(config).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"{count / 1e6:.0f} million parameters")
    torch.manual_seed(seed)
    model = _class(family)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point():
                continue
            if parameter.dim() > 1:
                parameter.normal_(0, 0.7 / math.sqrt(max(parameter.shape[-1], 16)))
            elif not parameter.any():
                parameter.normal_(0, 0.2)
            elif (parameter == 1).all():
                parameter.add_(0.1 * torch.randn_like(parameter))
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the other has no float64
    if family.kind == "encoder-decoder":
        model.config.decoder_start_token_id = model.generation_config.decoder_start_token_id = 1
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        model.generation_config.forced_bos_token_id = model.generation_config.forced_eos_token_id = None
    return model.to(dtype)


def _class(family: Family) -> Any:
    return getattr(transformers, family.model)


# ---------------------------------------------------------------------- comparing
@dataclass
class Verdict:
    """What came of a family; `differences` by what was compared, in parts of the largest logit."""

    family: str
    kind: Kind
    verdict: str
    left: list[str] = field(default_factory=list)
    differences: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    release: str = transformers.__version__

    @property
    def largest(self) -> float:
        return max(self.differences.values(), default=0.0)


def _tokens(rows: int = 2, count: int = 9) -> torch.Tensor:
    return torch.randint(4, VOCABULARY, (rows, count), generator=torch.Generator().manual_seed(1))


def _inputs(family: Family, padded: bool) -> dict[str, torch.Tensor]:
    ids = _tokens()
    inputs = {"input_ids": ids}
    if padded:
        mask = torch.ones_like(ids)
        mask[1, :4] = 0
        if family.kind != "causal":
            mask = mask.flip(1)
        inputs["attention_mask"] = mask
    return inputs


@torch.no_grad()
def _logits(model: Any, family: Family, padded: bool) -> torch.Tensor:
    inputs = _inputs(family, padded)
    if family.kind == "encoder-decoder":
        logits = model(**inputs, decoder_input_ids=_tokens(count=5)).logits
    else:
        logits = model(**inputs).logits
        if padded:
            logits = logits[inputs["attention_mask"].bool()[:, -logits.shape[1] :]]
    return logits.double()


def _ways(family: Family) -> dict[str, dict[str, Any]]:
    """What is compared: name -> options of generate, or nothing for logits."""
    if family.kind == "encoder":
        return {"logits": {}, "padded": {}}
    ways: dict[str, dict[str, Any]] = {
        "logits": {},
        "padded": {},
        "dynamic": {"cache_implementation": "dynamic"},
        "static": {"cache_implementation": "static"},
        "beams": {"num_beams": 2},
        "assisted": {"prompt_lookup_num_tokens": 2},
    }
    if cache := quantized():
        ways["quantized"] = {"cache_implementation": "quantized", "cache_config": cache}
    return ways


def quantized() -> dict[str, Any] | None:
    """A quantized cache of transformers whose backend is there; None if none is.

    hqq's is not compared: it searches for scales step by step, and a rounding decides where that ends.
    """
    if hasattr(cache_utils, "Fp8QuantizedLayer"):  # not in the oldest releases
        return {"backend": "fp8"}
    if is_optimum_quanto_available():
        return {"backend": "quanto", "nbits": 4, "q_group_size": 8, "residual_length": 2}
    return None


def _run(model: Any, family: Family, way: str, options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    if way in ("logits", "padded"):
        return _logits(model, family, way == "padded")
    if way == "compiled":
        return _compiled(model, family)
    greedy = {"max_new_tokens": STEPS, "min_new_tokens": STEPS, "do_sample": False, "return_dict_in_generate": True}
    rows = 1 if way == "assisted" else 2
    made = model.generate(_tokens(rows), output_logits=True, **greedy, **options)
    return made.sequences, torch.stack(made.logits).double()


@torch.no_grad()
def _compiled(model: Any, family: Family) -> torch.Tensor:
    """Logits of the compiled model, and those of a step with the cache that the model itself has filled."""
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    found = [_logits(compiled, family, padded=False).flatten()]
    if family.kind == "causal":
        cache = getattr(model(_tokens(), use_cache=True), "past_key_values", None)
        if cache is not None:
            step = compiled(_tokens(count=1), past_key_values=cache, use_cache=True)
            found += [step.logits.double().flatten(), model(_tokens(count=1), past_key_values=cache).logits.flatten()]
    return torch.cat(found)


def _difference(plain: Any, ours: Any) -> float:
    """In parts of the largest logit; of what was generated, up to the first tie."""
    if isinstance(plain, torch.Tensor):
        scale = max(1.0, float(plain.abs().max()))
        both = plain.isfinite() | ours.isfinite()
        return float((plain - ours)[both].abs().nan_to_num(math.inf).max()) / scale if both.any() else 0.0
    (tokens, logits), (our_tokens, our_logits) = plain, ours
    if logits.shape != our_logits.shape:
        return math.inf
    steps = len(logits)
    prompt = tokens.shape[1] - steps
    largest = 0.0
    for step in range(steps):
        largest = max(largest, _difference(logits[step], our_logits[step]))
        if not torch.equal(tokens[:, : prompt + step + 1], our_tokens[:, : prompt + step + 1]):
            best = logits[step].topk(2).values
            return (
                largest
                if float((best[:, 0] - best[:, 1]).min()) < 1e-3 * max(1.0, float(best.abs().max()))
                else math.inf
            )
    return largest


def _ours(handle: Accelerated) -> str:
    if handle.layers:
        return "whole"
    return "parts" if handle.attention or handle.linear or handle.norms else "left alone"


def examine(family: Family) -> Verdict:
    """Make a family's tiny model and compare; never raises for what the family cannot do."""
    for dtype in (torch.float64, torch.float32):  # a few cannot in float64
        try:
            model = make(family, dtype=dtype)
            if not _logits(model, family, padded=False).isfinite().any():
                raise ValueError("no finite logits")
            break
        except Exception as error:
            why = _short(error)
    else:
        return Verdict(family.name, family.kind, "not made", notes=[why])
    with accelerate(model) as handle:
        verdict = Verdict(family.name, family.kind, _ours(handle), left=sorted(set(handle.left.values())))
    for way, options in _ways(family).items():
        _compare(verdict, model, family, str(dtype).removeprefix("torch."), way, options)
    for seed in range(3):  # a rounding may send a token elsewhere: not with three seeds
        trial = Verdict(family.name, family.kind, "")
        single = make(family, seed, torch.float32)
        for way in ("logits", "padded"):
            _compare(trial, single, family, "float32", way, {})
        if not trial.verdict:
            break
    verdict.verdict = trial.verdict or verdict.verdict
    verdict.differences |= trial.differences
    verdict.notes += [note for note in trial.notes if note not in verdict.notes]
    _compare_roughly(verdict, family)
    return verdict


def examine_compiled(family: Family) -> Verdict:
    """The same under torch.compile, where the model's own code is to run."""
    try:
        model = make(family, dtype=torch.float32)
    except Exception as error:
        return Verdict(family.name, family.kind, "not made", notes=[_short(error)])
    with accelerate(model) as handle:
        verdict = Verdict(family.name, family.kind, _ours(handle))
    _compare(verdict, model, family, "float32", "compiled", {})
    return verdict


def _compare(verdict: Verdict, model: Any, family: Family, dtype: str, way: str, options: dict[str, Any]) -> None:
    try:
        plain = _run(model, family, way, options)
        again = _difference(plain, _run(model, family, way, options))
    except Exception as error:  # the plain model cannot, or not twice
        verdict.notes.append(f"{way}: {_short(error)}")
        return
    if again > BOUNDS[dtype]:
        verdict.notes.append(f"{way}: the plain model differs from itself")
        return
    with accelerate(model):
        difference = _difference(plain, _run(model, family, way, options))
    verdict.differences[f"{dtype} {way}"] = difference
    if difference > BOUNDS[dtype]:
        verdict.verdict = "DIFFERENT"
        verdict.notes.append(f"{dtype} {way}: {difference:.2g}")


def _compare_roughly(verdict: Verdict, family: Family) -> None:
    """bfloat16: no further from float32 than twice the plain model; int8: within its bound."""
    with contextlib.suppress(_PlainModelError):
        for seed in range(3):  # not every family shows where it sends its tokens
            error, bound, size = _errors_in_bfloat16(family, seed)
            if error <= 2 * bound + 1e-2 * size:
                verdict.notes += [f"bfloat16: as the plain model with seed {seed} only"] if seed else []
                break
        else:
            verdict.verdict = "DIFFERENT"
            verdict.notes.append(f"bfloat16: {error:.2g} from float32, the plain model {bound:.2g}")
    with contextlib.suppress(_PlainModelError):
        single = make(family, dtype=torch.float32)
        exact = _plainly(single, family)[0]
        with accelerate(single, weights="int8"):
            error = float((_routed(single, family)[0] - exact).abs().mean()) / float(exact.abs().mean())
        verdict.notes.append(f"int8: {error:.2g}")
        if not error <= INT8_BOUND:
            verdict.verdict = "DIFFERENT"


def _errors_in_bfloat16(family: Family, seed: int) -> tuple[float, float, float]:
    """Mean error of the accelerated and of the plain model against float32, and the mean size of logits.

    A rounding may send a token to another expert, in the plain model as often: then its logits are others altogether.
    The means are those of the tokens that go the same way in all three.
    """
    exact, routes = _plainly(make(family, seed, torch.float32), family)
    half = make(family, seed, torch.bfloat16)
    plain, plain_routes = _plainly(half, family, routes)
    with accelerate(half):
        ours, our_routes = _routed(half, family, routes)
    same = _same_way(routes, plain_routes, len(exact)) & _same_way(routes, our_routes, len(exact))
    if not same.any():
        same = ~same
    error, bound = (float((logits - exact)[same].abs().mean()) for logits in (ours, plain))
    return error, bound, float(exact.abs().mean())


# What routers put out: module's name -> the whole numbers in its output, experts' indices ``[..., experts_per_token]``.
Routes = dict[str, list[torch.Tensor]]


def _routed(model: Any, family: Family, routers: Container[str] = ()) -> tuple[torch.Tensor, Routes]:
    """Logits ``[tokens, vocabulary]``, and where tokens were sent by those of `routers` that put out indices."""
    routes: Routes = {}

    def note(name: str, module: Any, args: Any, output: Any) -> None:
        parts = output if isinstance(output, tuple) else (output,)
        indices = [part for part in parts if isinstance(part, torch.Tensor) and part.dtype == torch.int64]
        if indices:
            routes[name] = indices

    modules = {name: module for name, module in model.named_modules() if name in routers}
    hooks = [module.register_forward_hook(functools.partial(note, name)) for name, module in modules.items()]
    try:
        logits = _logits(model, family, padded=False)
    finally:
        for hook in hooks:
            hook.remove()
    return logits.reshape(-1, logits.shape[-1]), routes


def _same_way(routes: Routes, others: Routes, tokens: int) -> torch.Tensor:
    """``[tokens]``: whether a token goes to the same experts."""
    same = torch.ones(tokens, dtype=torch.bool)
    for name in routes.keys() & others.keys():
        for one, other in zip(routes[name], others[name], strict=True):
            if one.shape == other.shape and math.prod(one.shape[:-1]) == tokens:
                same &= (one.sort(-1).values == other.sort(-1).values).reshape(tokens, -1).all(-1)
    return same


class _PlainModelError(Exception):
    pass


def _plainly(model: Any, family: Family, routers: Container[str] | None = None) -> tuple[torch.Tensor, Routes]:
    every = [name for name, _ in model.named_modules()]
    try:
        return _routed(model, family, every if routers is None else routers)
    except Exception as error:
        raise _PlainModelError from error


def _short(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {(lines or [''])[0][:90]}"


# ---------------------------------------------------------------------- all of them
@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"more than {SECONDS} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def table(every: list[Verdict]) -> str:
    """The page: counts of each release of transformers, and of the installed one what was found."""
    verdicts = [verdict for verdict in every if verdict.release == transformers.__version__]
    cache = quantized()
    made = [verdict for verdict in verdicts if verdict.verdict != "not made"]
    lines = [
        "# transformers' families, plain against accelerated",
        "",
        f"Written by `make transformers-families`, with transformers {transformers.__version__}, torch "
        f"{torch.__version__}: every language model that can be made tiny with random weights, without a network. What "
        "is compared, and within which bounds: `tools/transformers_families.py`. Quantized caches: "
        + (f"those of the backend {cache['backend']}." if cache else "not compared, no backend is installed."),
        "",
        "| " + " | ".join(["transformers", "families", "made", "whole", "parts", "left alone", "different"]) + " |",
        "|---|---|---|---|---|---|---|",
        *_counts(every),
        "",
        "*Whole*: decoder layers run on our ops. *Parts*: attention, linear layers or norms do. *Left alone*: nothing "
        "does. The difference is the largest of all comparisons, in parts of the largest logit. int8: mean error over "
        "mean size of logits; tiny random layers have no slack.",
        "",
        "| family | kind | verdict | largest difference | int8 | what was left, and why; what the plain model cannot |",
        "|---|---|---|---|---|---|",
    ]
    for verdict in sorted(made, key=lambda found: (found.kind, found.family)):
        int8 = next((note[6:] for note in verdict.notes if note.startswith("int8: ")), "")
        notes = [*verdict.left, *(note for note in verdict.notes if not note.startswith("int8: "))]
        text = "; ".join(note.replace("|", "/").replace("\n", " ") for note in notes)
        lines.append(
            f"| {verdict.family} | {verdict.kind} | {verdict.verdict} | {verdict.largest:.1e} | {int8} | {text} |"
        )
    lines += ["", "## Not made", "", "| family | kind | why |", "|---|---|---|"]
    for verdict in sorted(verdicts, key=lambda found: (found.kind, found.family)):
        if verdict.verdict == "not made":
            lines.append(f"| {verdict.family} | {verdict.kind} | {verdict.notes[0].replace('|', '/')} |")
    return "\n".join(lines) + "\n"


def _counts(every: list[Verdict]) -> Iterator[str]:
    for release in sorted({verdict.release for verdict in every}, key=_numbers, reverse=True):
        counts = Counter(verdict.verdict for verdict in every if verdict.release == release)
        found = [counts[name] for name in ("whole", "parts", "left alone", "DIFFERENT")]
        yield "| " + " | ".join(map(str, [release, counts.total(), sum(found), *found])) + " |"


def _numbers(release: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", release)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="families; all, and the page, if none")
    parser.add_argument("--compile", action="store_true", help="what torch.compile makes of them; no page")
    parser.add_argument(
        "--results", type=Path, help="a file of results, one a line, to go on with; of several releases"
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # the models are tiny: threads would only wait for each other
    transformers.logging.set_verbosity_error()
    done = {}
    if options.results is not None and options.results.exists():
        for line in options.results.read_text().splitlines():
            verdict = Verdict(**json.loads(line))
            done[verdict.release, verdict.family, verdict.kind] = verdict
    for family in families():
        key = transformers.__version__, family.name, family.kind
        if (options.names and family.name not in options.names) or key in done:
            continue
        try:
            with _time_limit():
                verdict = examine_compiled(family) if options.compile else examine(family)
        except TimeoutError as error:
            verdict = Verdict(family.name, family.kind, "not made", notes=[_short(error)])
        except Exception as error:  # ours
            verdict = Verdict(family.name, family.kind, "DIFFERENT", notes=[_short(error)])
        done[key] = verdict
        line = f"{verdict.kind:16}{verdict.family:24}{verdict.verdict:12}{verdict.largest:9.1e}"
        print(line, verdict.notes, flush=True)
        if options.results is not None:
            with options.results.open("a") as file:
                file.write(json.dumps(asdict(verdict)) + "\n")
    if not options.names and not options.compile:
        PAGE.write_text(table(list(done.values())), encoding="utf-8")
    sys.exit(any(verdict.verdict == "DIFFERENT" for verdict in done.values()))


if __name__ == "__main__":
    main()
