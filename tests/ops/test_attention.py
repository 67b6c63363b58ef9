"""Attention over a cache against float64: by our own loops and by torch's attention."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ds_plugin_sdk.errors import InvalidTensorError
from ds_plugin_sdk.ops.attention import cached_attention, cached_attention_int8, dequantize_rows, quantize_rows

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Results are means of values of size 1: what they are rounded to, and what the weights may lose. torch's attention
# rounds its weights, too.
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2**-8 * 3, torch.float16: 2**-11 * 3}
MASKS = ("none", "bool, flat", "bool", "added, for each head", "added, in the query's dtype")


@pytest.fixture(scope="module", autouse=True)
def kernels(native: Callable[..., None]) -> None:
    native("attention")


def formula(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    mask: Tensor | None,
    alibi: Tensor | None,
    window: int,
    causal: bool,
) -> Tensor:
    """One query, one head, one row at a time, in float64."""
    batch, heads, tokens, _ = query.shape
    total, group = keys.shape[2], heads // keys.shape[1]
    result = torch.zeros(query.shape, dtype=torch.float64)
    for b, h, t in product(range(batch), range(heads), range(tokens)):
        own = total - tokens + t
        scores = keys[b, h // group].double() @ query[b, h, t].double() * scale
        if alibi is not None:
            scores = scores + alibi[h].double() * torch.arange(total)
        position = torch.arange(total)
        if causal:
            scores[position > own] = -torch.inf
        if window:
            scores[position <= own - window] = -torch.inf
        if mask is not None:
            row = mask[b] if mask.dim() == 2 else mask.expand(batch, heads, tokens, -1)[b, h, t]
            row = row[:total]
            scores = scores.masked_fill(~row, -torch.inf) if row.dtype == torch.bool else scores + row.double()
        if bool((scores > -torch.inf).any()):
            result[b, h, t] = torch.softmax(scores, 0) @ values[b, h // group].double()
    return result


def make_mask(kind: str, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Tensor | None:
    batch, heads, tokens, total = shape
    if kind == "bool, flat":
        mask = torch.rand(batch, total) > 0.3
        mask[:, : total // 3] = False  # padding on the left: queries there have nothing to attend to
        return mask
    return {
        "none": None,
        "bool": torch.rand(batch, 1, tokens, total + 2) > 0.3,
        "added, for each head": torch.randn(1, heads, 1, total),
        "added, in the query's dtype": torch.randn(batch, 1, 1, total).to(dtype),
    }[kind]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 9])  # the last goes to torch
@pytest.mark.parametrize("past", [0, 4, 510, 600])  # more than one part of the positions; new ones in two of them
def test_equals_the_formula(past: int, tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(past + tokens)
    cases = list(product(MASKS, (False, True), (0, 3), (True, False), ((2, 2), (4, 2))))
    for number, (kind, with_alibi, window, causal, (heads, kv_heads)) in enumerate(cases):
        if number % 3 != past % 3 and past:
            continue
        head_dim = (16, 64, 40)[number % 3]
        batch = 1 + number % 2
        query = torch.randn(batch, tokens, heads, head_dim).to(dtype).transpose(1, 2)
        key, value = (torch.randn(batch, tokens, kv_heads, head_dim).to(dtype).transpose(1, 2) for _ in range(2))
        caches = [torch.randn(batch, kv_heads, past + tokens + 3, head_dim).to(dtype) for _ in range(2)]
        keys, values = (
            torch.cat([cache[:, :, :past], new, cache[:, :, past + tokens :]], 2)
            for cache, new in zip(caches, (key, value), strict=True)
        )
        total = past + tokens
        mask = make_mask(kind, (batch, heads, tokens, total), dtype)
        alibi = torch.rand(heads) * 0.1 if with_alibi else None
        options: dict[str, Any] = {"mask": mask, "alibi": alibi, "window": window, "causal": causal}
        actual = cached_attention(query, key, value, *caches, past, scale=0.2, **options)
        expected = formula(query, keys[:, :, :total], values[:, :, :total], 0.2, **options)
        size = float(values.double().abs().max())
        error = float((actual.double() - expected).abs().max())
        assert error <= TOLERANCE[dtype] * size, (kind, with_alibi, window, causal, heads, error)
        assert torch.equal(caches[0], keys)
        assert torch.equal(caches[1], values)
        assert actual.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_rows_move_by_half_a_step_at_most(dtype: torch.dtype) -> None:
    rows = (torch.randn(3, 5, 40) * torch.logspace(-3, 3, 5)[:, None]).to(dtype)
    rows[0, 0] = 0
    levels, steps = quantize_rows(rows)
    assert levels.dtype == torch.int8 and steps.dtype == torch.float32 and steps.shape == (3, 5, 1)
    exact = rows.double()
    torch.testing.assert_close(steps.double(), exact.abs().amax(-1, keepdim=True) / 127, rtol=1e-6, atol=0)
    assert ((levels.double() * steps - exact).abs() <= (0.5 + 127 * 2e-7) * steps).all()
    assert dequantize_rows(levels, steps, dtype).dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 9])  # the last goes to torch
@pytest.mark.parametrize("past", [0, 4, 510, 600])
def test_int8_equals_the_formula(past: int, tokens: int, dtype: torch.dtype) -> None:
    """Of what the cache stands for, which is what `quantize_rows` makes of keys and values, bit for bit."""
    torch.manual_seed(past + tokens)
    cases = list(product(MASKS, (False, True), (0, 3), (True, False), ((2, 2), (4, 2))))
    total = past + tokens
    for number, (kind, with_alibi, window, causal, (heads, kv_heads)) in enumerate(cases):
        if number % 5 != past % 5:
            continue
        head_dim, batch = (16, 64, 40)[number % 3], 1 + number % 2
        query = torch.randn(batch, tokens, heads, head_dim).to(dtype).transpose(1, 2)
        key, value = (torch.randn(batch, tokens, kv_heads, head_dim).to(dtype).transpose(1, 2) for _ in range(2))
        (keys, key_scales), (values, value_scales) = (
            quantize_rows(torch.randn(batch, kv_heads, total + 3, head_dim)) for _ in range(2)
        )
        wanted = [each.clone() for each in (keys, values, key_scales, value_scales)]
        wanted[0][:, :, past:total], wanted[2][:, :, past:total] = quantize_rows(key)
        wanted[1][:, :, past:total], wanted[3][:, :, past:total] = quantize_rows(value)
        mask = make_mask(kind, (batch, heads, tokens, total), dtype)
        alibi = torch.rand(heads) * 0.1 if with_alibi else None
        options: dict[str, Any] = {"mask": mask, "alibi": alibi, "window": window, "causal": causal}
        caches = (keys, values, key_scales, value_scales)
        actual = cached_attention_int8(query, key, value, *caches, past, scale=0.2, **options)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(caches, wanted, strict=True))
        held = [(wanted[i].double() * wanted[i + 2])[:, :, :total] for i in (0, 1)]
        expected = formula(query, *held, 0.2, **options)
        error = float((actual.double() - expected).abs().max())
        assert error <= TOLERANCE[dtype] * float(held[1].abs().max()), (kind, with_alibi, window, causal, heads, error)
        assert actual.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_an_int8_row_that_is_not_finite_is_nan(tokens: int, broken: float) -> None:
    query, key, value = (torch.randn(2, 2, tokens, 40) for _ in range(3))
    caches = [torch.zeros(2, 2, 9, 40, dtype=torch.int8) for _ in range(2)]
    scales = [torch.zeros(2, 2, 9, 1) for _ in range(2)]
    value[0, 1, 0, 33] = broken
    result = cached_attention_int8(query, key, value, *caches, *scales, 0)
    assert result[0, 1].isnan().all()
    assert not caches[1][0, 1, 0].any() and not scales[1][0, 1, 0].isfinite()
    result[0, 1] = 0
    assert result.isfinite().all()


def test_int8_without_new_keys_in_any_layout_and_by_any_number_of_threads() -> None:
    query = torch.randn(1, 2, 1, 64)
    (keys, key_scales), (values, value_scales) = (quantize_rows(torch.randn(1, 2, 1800, 64)) for _ in range(2))
    nothing = torch.zeros(1, 2, 0, 64)
    apart = [each.transpose(2, 3).contiguous().transpose(2, 3) for each in (keys, values)]
    scattered = [each.expand(1, 2, 1800, 3).contiguous()[..., 1:2] for each in (key_scales, value_scales)]
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(cached_attention_int8(query, nothing, nothing, *apart, *scattered, 1800))
    finally:
        torch.set_num_threads(threads)
    results.append(cached_attention_int8(query, nothing, nothing, keys, values, key_scales, value_scales, 1800))
    assert all(torch.equal(result, results[0]) for result in results)
    held = [levels.double() * scales for levels, scales in ((keys, key_scales), (values, value_scales))]
    expected = formula(query, *held, 0.125, None, None, 0, True)
    torch.testing.assert_close(results[0].double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_by_one_is_all_at_once(dtype: torch.dtype) -> None:
    query = torch.randn(2, 4, 12, 32).to(dtype)
    key, value = (torch.randn(2, 2, 12, 32).to(dtype) for _ in range(2))
    caches = [torch.zeros(2, 2, 12, 32, dtype=dtype) for _ in range(2)]
    steps = [
        cached_attention(query[:, :, t : t + 1], key[:, :, t : t + 1], value[:, :, t : t + 1], *caches, t)
        for t in range(12)
    ]
    whole = functional.scaled_dot_product_attention(
        query.double(), key.double(), value.double(), is_causal=True, enable_gqa=True
    )
    error = (torch.cat(steps, 2).double() - whole).abs().max()
    assert float(error) <= TOLERANCE[dtype] * float(value.abs().max())


@pytest.mark.parametrize("tokens", [1, 9])
def test_without_new_keys(tokens: int) -> None:
    query, keys, values = torch.randn(1, 2, tokens, 16), torch.randn(1, 2, 20, 16), torch.randn(1, 2, 20, 16)
    nothing = keys[:, :, :0]
    actual = cached_attention(query, nothing, nothing, keys, values, 20)
    torch.testing.assert_close(
        actual.double(), formula(query, keys, values, 0.25, None, None, 0, True), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("tokens", [1, 9])
def test_caches_in_any_layout(tokens: int) -> None:
    query, key, value = (torch.randn(1, 2, tokens, 16) for _ in range(3))
    plain = [torch.zeros(1, 2, 20, 16) for _ in range(2)]
    apart = [torch.zeros(1, 2, 16, 20).transpose(2, 3) for _ in range(2)]
    expected = cached_attention(query, key, value, *plain, 0)
    assert torch.equal(cached_attention(query, key, value, *apart, 0), expected)
    assert torch.equal(apart[0], plain[0])
    assert torch.equal(apart[1], plain[1])


@pytest.mark.parametrize("tokens", [1, 9])
def test_nan_spreads_to_its_own_row_only(tokens: int) -> None:
    query, key, value = (torch.randn(2, 2, tokens, 16) for _ in range(3))
    query[0, 1, 0] = torch.nan
    result = cached_attention(query, key, value, torch.zeros(2, 2, 9, 16), torch.zeros(2, 2, 9, 16), 0)
    assert result[0, 1, 0].isnan().all()
    result[0, 1, 0] = 0
    assert result.isfinite().all()


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_a_scale_that_is_not_positive(scale: float) -> None:
    """torch's own attention multiplies by it the minus infinity of a key that is not seen."""
    q, k, v = torch.randn(3, 1, 1, 9, 8)
    found = cached_attention(q, k, v, *torch.zeros(2, 1, 1, 9, 8), 0, scale=scale)
    scores = (scale * q.double() @ k.double().mT).masked_fill(~torch.ones(9, 9).tril().bool(), -torch.inf)
    torch.testing.assert_close(found.double(), scores.softmax(-1) @ v.double(), rtol=1e-5, atol=1e-5)


def test_no_batch_and_no_tokens() -> None:
    cache = torch.zeros(0, 2, 4, 8)
    query = torch.zeros(0, 2, 1, 8)
    assert cached_attention(query, query, query, cache, cache.clone(), 0).shape == query.shape
    cache, query = torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 0, 8)
    assert cached_attention(query, query, query, cache, cache.clone(), 2).shape == query.shape


def test_the_same_for_any_number_of_threads() -> None:
    query, key, value = (torch.randn(1, 2, 1, 64) for _ in range(3))
    caches = [torch.randn(1, 2, 2000, 64) for _ in range(2)]
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(cached_attention(query, key, value, *caches, 1800))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(1, 3, 1, 8)}, "divisor"),
        ({"query": torch.zeros(1, 2, 8)}, "query"),
        ({"value": torch.zeros(1, 2, 1, 9)}, "value"),
        ({"key_cache": torch.zeros(1, 2, 4, 9)}, "key_cache"),
        ({"value_cache": torch.zeros(1, 2, 5, 8)}, "value_cache"),
        ({"past": 4}, "room"),
        ({"past": -1}, "past"),
        ({"window": -1}, "window"),
        ({"mask": torch.zeros(1, 2, dtype=torch.bool)}, "mask"),
        ({"mask": torch.zeros(1, 1, 1, 3, dtype=torch.int32)}, "mask"),
        ({"alibi": torch.zeros(3)}, "alibi"),
    ],
)
def test_raises_and_writes_nothing(change: dict[str, Any], message: str, dtype: torch.dtype) -> None:
    arguments: dict[str, Any] = {name: torch.ones(1, 2, 1, 8) for name in ("query", "key", "value")}
    arguments |= {"key_cache": torch.zeros(1, 2, 4, 8), "value_cache": torch.zeros(1, 2, 4, 8), "past": 2, **change}
    for name, value in arguments.items():
        if isinstance(value, Tensor) and value.dtype == torch.float32 and name != "alibi":
            arguments[name] = value.to(dtype)
    with pytest.raises(InvalidTensorError, match=message):
        cached_attention(**arguments)
    assert not arguments["key_cache"].any()
    assert not arguments["value_cache"].any()


def test_torch_checks_the_op() -> None:
    query, key, cache = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 1, 8), torch.zeros(1, 2, 4, 8)
    mask = torch.ones(1, 3, dtype=torch.bool)
    torch.library.opcheck(
        torch.ops.ds_plugin.cached_attention.default,
        (query, key, key.clone(), cache, cache.clone(), 2, 0.3, mask, torch.ones(4), 2, True),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key_cache": torch.zeros(1, 2, 4, 8)}, "key_cache"),
        ({"value_cache": torch.zeros(1, 2, 4, 9, dtype=torch.int8)}, "value_cache"),
        ({"key_scales": torch.zeros(1, 2, 4)}, "key_scales"),
        ({"key_scales": torch.zeros(1, 2, 5, 1)}, "key_scales"),
        ({"value_scales": torch.zeros(1, 2, 4, 1, dtype=torch.float16)}, "value_scales"),
        ({"value_scales": torch.zeros(1, 2, 1, 1).expand(1, 2, 4, 1)}, "share memory"),
        ({"past": 4}, "room"),
    ],
)
def test_int8_raises_and_writes_nothing(change: dict[str, Any], message: str, dtype: torch.dtype) -> None:
    arguments: dict[str, Any] = {name: torch.ones(1, 2, 1, 8, dtype=dtype) for name in ("query", "key", "value")}
    caches = {f"{name}_cache": torch.zeros(1, 2, 4, 8, dtype=torch.int8) for name in ("key", "value")}
    scales = {f"{name}_scales": torch.zeros(1, 2, 4, 1) for name in ("key", "value")}
    arguments |= {**caches, **scales, "past": 2, **change}
    with pytest.raises(InvalidTensorError, match=message):
        cached_attention_int8(**arguments)
    assert not any(arguments[name].any() for name in (*caches, *scales))


def test_torch_checks_the_int8_op() -> None:
    query, key = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 1, 8)
    caches = [torch.zeros(1, 2, 4, 8, dtype=torch.int8) for _ in range(2)]
    scales = [torch.zeros(1, 2, 4, 1) for _ in range(2)]
    torch.library.opcheck(
        torch.ops.ds_plugin.cached_attention_int8.default,
        (query, key, key.clone(), *caches, *scales, 2, 0.3, None, torch.ones(4), 2, True),
    )
