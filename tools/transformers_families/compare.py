"""What is compared of a tiny model, plain against accelerated, and within which bounds.

Models are compared in float64, where a rounding cannot send a token to another expert, by our ops' references; then in
float32 and bfloat16 by the native kernels, and in int8. A difference of tokens counts unless the two best were a tie.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its dependencies warn of each other's releases
    import transformers
    from transformers import cache_utils
    from transformers.utils import is_optimum_quanto_available

from ds_plugin_sdk.integrations.transformers import Accelerated, accelerate
from transformers_families.models import VOCABULARY, Family, Kind, make

STEPS = 6  # of generation

# Bounds: of the largest difference, in parts of the largest logit. RMS norms compute in float32 in all dtypes.
BOUNDS = {"float64": 1e-4, "float32": 5e-3}
INT8_BOUND = 0.35  # of the mean difference, in parts of the mean size: weights of 32 columns, tiny layers, no training


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


# A word that a model masks has minus infinity or the dtype's least number for a logit.
_MASKED = 1e30


def _difference(plain: Any, ours: Any) -> float:
    """In parts of the largest logit; of what was generated, up to the first tie."""
    if isinstance(plain, torch.Tensor):
        real, ours_real = (each.abs() < _MASKED for each in (plain, ours))
        if not torch.equal(real, ours_real):
            return math.inf
        if not real.any():
            return 0.0
        return float((plain - ours)[real].abs().max()) / max(1.0, float(plain[real].abs().max()))
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
            why = short(error)
    else:
        return Verdict(family.name, family.kind, "not made", notes=[why])
    with accelerate(model) as handle:
        # What "parts" says already is left out.
        left = {why for why in handle.left.values() if "its code is not known as a whole" not in why}
        verdict = Verdict(family.name, family.kind, _ours(handle), left=sorted(left))
    for way, options in _ways(family).items():
        _compare(verdict, model, family, str(dtype).removeprefix("torch."), way, options)
    for seed in range(3):  # a rounding may send a token elsewhere: not with three seeds
        trial = Verdict(family.name, family.kind, "")
        single = make(family, seed, torch.float32)
        for way in ("logits", "padded"):
            _compare(trial, single, family, "float32", way, {})
        if not trial.verdict:
            trial.notes += [f"float32: as the plain model with seed {seed} only"] if seed else []
            break
    verdict.verdict = trial.verdict or verdict.verdict
    verdict.differences |= trial.differences
    verdict.notes += [note for note in trial.notes if note not in verdict.notes]
    compare_roughly(verdict, family)
    return verdict


def examine_compiled(family: Family) -> Verdict:
    """The same under torch.compile, where the model's own code is to run."""
    try:
        model = make(family, dtype=torch.float32)
    except Exception as error:
        return Verdict(family.name, family.kind, "not made", notes=[short(error)])
    with accelerate(model) as handle:
        verdict = Verdict(family.name, family.kind, _ours(handle))
    _compare(verdict, model, family, "float32", "compiled", {})
    return verdict


def _compare(verdict: Verdict, model: Any, family: Family, dtype: str, way: str, options: dict[str, Any]) -> None:
    try:
        plain = _run(model, family, way, options)
        again = _difference(plain, _run(model, family, way, options))
    except Exception as error:  # the plain model cannot, or not twice
        verdict.notes.append(f"{way}: {short(error)}")
        return
    if not again <= BOUNDS[dtype]:
        verdict.notes.append(f"{way}: the plain model differs from itself")
        return
    with accelerate(model):
        difference = _difference(plain, _run(model, family, way, options))
    verdict.differences[f"{dtype} {way}"] = difference
    if not difference <= BOUNDS[dtype]:
        verdict.verdict = "DIFFERENT"
        verdict.notes.append(f"{dtype} {way}: {difference:.2g}")


def compare_roughly(verdict: Verdict, family: Family) -> None:
    """bfloat16: no further from float32 than twice the plain model; int8: within its bound."""
    with contextlib.suppress(_PlainModelError):
        for seed in range(3):  # not every family shows where it sends its tokens
            error, bound, size = errors_in_bfloat16(family, seed)
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


def errors_in_bfloat16(family: Family, seed: int) -> tuple[float, float, float]:
    """Mean error of the accelerated and of the plain model against float32, and the mean size of logits.

    A rounding may send a token to another expert, in the plain model as often: then its logits are others altogether.
    The means are those of the tokens that go the same way in all three.
    """
    exact, routes = _plainly(make(family, seed, torch.float32), family)
    half = make(family, seed, torch.bfloat16)
    plain, plain_routes = _plainly(half, family, routes)
    with accelerate(half):
        ours, our_routes = _routed(half, family, routes)
    same = same_way(routes, plain_routes, len(exact)) & same_way(routes, our_routes, len(exact))
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


def same_way(routes: Routes, others: Routes, tokens: int) -> torch.Tensor:
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


def short(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {(lines or [''])[0][:90]}"
