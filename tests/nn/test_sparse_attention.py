"""Block-sparse attention against the whole matrix of scores in float64."""

from __future__ import annotations

import copy
import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_plugin_sdk.bench.timing import peak_bytes
from ds_plugin_sdk.errors import InvalidTensorError, SdkError
from ds_plugin_sdk.nn import (
    BigBirdSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparseSelfAttention,
    SparsityConfig,
    VariableSparsityConfig,
)
from ds_plugin_sdk.nn.sparse_attention import sparse_attention_reference

HEADS, LENGTH, WIDTH = 4, 192, 24
CONFIGS = {
    "fixed": FixedSparsityConfig(HEADS, attention="unidirectional"),
    "fixed per head": FixedSparsityConfig(HEADS, 16, True, num_different_global_patterns=4),
    "bigbird": BigBirdSparsityConfig(HEADS, 8),
    "variable per head": VariableSparsityConfig(
        HEADS, 8, True, num_random_blocks=2, local_window_blocks=[1, 2], global_block_indices=[5]
    ),
    "window": LocalSlidingWindowSparsityConfig(HEADS, 32),
    "dense": DenseSparsityConfig(HEADS),
}
# Largest error over all values below, which are of size 1: units of the dtype, and sums of up to 192 of them.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.01}


def inputs(dtype: torch.dtype, length: int = LENGTH, batch: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(batch, HEADS, length, WIDTH, generator=generator).to(dtype) for _ in range(4)]
    return [*(each.requires_grad_() for each in made[:3]), made[3]]


def masks(length: int = LENGTH) -> dict[str, torch.Tensor]:
    padding = torch.zeros(2, length)
    padding[1, length - 40 :] = float("-inf")
    causal = torch.ones(length, length).tril()
    causal[17] = 0  # a query without keys
    generator = torch.Generator().manual_seed(1)
    rpe = torch.randn(1, HEADS, length, length, generator=generator)
    return {"rpe": rpe, "key_padding_mask": padding, "attn_mask": causal}


def added(given: dict[str, torch.Tensor]) -> torch.Tensor:
    """The masks as one that is added: padding as it is, zeros of attn_mask as minus infinity."""
    causal = torch.zeros_like(given["attn_mask"]).masked_fill(given["attn_mask"] == 0, float("-inf"))
    return (given["rpe"] + given["key_padding_mask"][:, None, None] + causal).double()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_results_and_gradients_are_those_of_the_whole_matrix(
    config: SparsityConfig, masked: bool, dtype: torch.dtype
) -> None:
    attention = SparseSelfAttention(config, max_seq_length=LENGTH)
    *qkv, cotangent = inputs(dtype)
    given = masks() if masked else {}
    output = attention(*qkv, **{name: mask.to(dtype) for name, mask in given.items()})
    exact = [each.detach().double().requires_grad_() for each in qkv]
    rounded = {name: mask.to(dtype).double() for name, mask in given.items()}
    expected = sparse_attention_reference(
        *exact, attention.master_layout, config.block, added(rounded) if masked else None
    )
    assert output.dtype == dtype and output.shape == qkv[0].shape
    actual = [output, *torch.autograd.grad(output, qkv, cotangent)]
    wanted = [expected, *torch.autograd.grad(expected, exact, cotangent.double())]
    for got, want in zip((each.detach() for each in actual), (each.detach() for each in wanted), strict=True):
        assert want.abs().max() > 0.5
        torch.testing.assert_close(got.double(), want, rtol=0, atol=TOLERANCES[dtype] * float(want.abs().max()))


@pytest.mark.parametrize("rows", [{0}, {0, 1}, {3}, {2, 3}, {7}, set(range(8))])
def test_queries_without_any_block_have_zeros(rows: set[int]) -> None:
    """As layouts of one's own may have."""
    attention = SparseSelfAttention(FixedSparsityConfig(HEADS), max_seq_length=128)
    query, key, value, _ = (each.detach()[:, :, :128].requires_grad_() for each in inputs(torch.float32))
    for row in rows:
        attention.master_layout[:, row] = 0
    output = attention(query, key, value)
    expected = sparse_attention_reference(query, key, value, attention.master_layout, 16)
    torch.testing.assert_close(output, expected)
    gradients = (torch.autograd.grad(each.sum(), (query, key, value)) for each in (output, expected))
    for found, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(found, wanted)
    assert all(not output[:, :, 16 * row : 16 * (row + 1)].any() for row in rows)


def test_gradcheck() -> None:
    config = FixedSparsityConfig(2, 4, num_local_blocks=2)
    attention = SparseSelfAttention(config, max_seq_length=16)
    generator = torch.Generator().manual_seed(0)
    qkv = [torch.randn(1, 2, 16, 3, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(3)]
    assert torch.autograd.gradcheck(attention, qkv)


def test_blocks_that_are_left_out_are_not_looked_at() -> None:
    """A NaN there does not show, as it would if scores were computed and masked."""
    attention = SparseSelfAttention(LocalSlidingWindowSparsityConfig(HEADS, 32), max_seq_length=LENGTH)
    q, k, v, cotangent = inputs(torch.float32)
    with torch.no_grad():
        k[:, :, :32] = float("nan")
        v[:, :, :32] = float("nan")
    output = attention(q, k, v)
    assert output[:, :, :64].isnan().all()  # the blocks whose window reaches there
    assert output[:, :, 96:].isfinite().all()
    (dq,) = torch.autograd.grad(output, [q], cotangent)
    assert dq[:, :, 96:].isfinite().all()


def _both(attention: SparseSelfAttention, qkv: list[torch.Tensor], cotangent: torch.Tensor) -> None:
    torch.autograd.grad(attention(*qkv), qkv, cotangent)


def test_memory_does_not_grow_with_the_square_of_the_length() -> None:
    """Bytes that torch allocates, less those it frees, at the highest: forward and backward at 512 and 2048 tokens."""
    peaks = []
    for length in (512, 2048):
        attention = SparseSelfAttention(BigBirdSparsityConfig(HEADS, 16), max_seq_length=length)
        *qkv, cotangent = inputs(torch.float32, length, batch=1)
        attention._plan(length, torch.device("cpu"))
        peaks.append(peak_bytes(functools.partial(_both, attention, qkv, cotangent)))
    assert 0 < peaks[1] < 6 * peaks[0], peaks
    assert peaks[1] < HEADS * 2048 * 2048 * 4, peaks  # what all scores would take


def test_key_may_come_transposed_and_masks_in_other_forms() -> None:
    attention = SparseSelfAttention(CONFIGS["bigbird"], max_seq_length=LENGTH)
    q, k, v, _ = (each.detach() for each in inputs(torch.float32))
    given = masks()
    expected = attention(q, k, v, **given)
    forms: dict[str, Any] = {
        "rpe": given["rpe"].expand(2, -1, -1, -1),
        "key_padding_mask": given["key_padding_mask"][:, None, None, :],
        "attn_mask": given["attn_mask"][None, None].bool(),
    }
    torch.testing.assert_close(attention(q, k.transpose(2, 3), v, **forms), expected, rtol=0, atol=0)


def test_modes_of_masks() -> None:
    """Zeros hide a key under ``mul``; numbers are added under ``add``."""
    q, k, v, _ = (each.detach() for each in inputs(torch.float32))
    keep = torch.ones(2, LENGTH)
    keep[:, 100:] = 0
    drop = torch.zeros(2, LENGTH).masked_fill(keep == 0, float("-inf"))
    multiply = SparseSelfAttention(DenseSparsityConfig(HEADS), key_padding_mask_mode="mul", max_seq_length=LENGTH)
    add = SparseSelfAttention(DenseSparsityConfig(HEADS), attn_mask_mode="add", max_seq_length=LENGTH)
    expected = multiply(q, k, v, key_padding_mask=keep)
    torch.testing.assert_close(add(q, k, v, key_padding_mask=drop), expected)
    torch.testing.assert_close(add(q, k, v, attn_mask=drop[:1].expand(LENGTH, -1)), expected)
    torch.testing.assert_close(
        expected[:, :, :1], torch.softmax(q[:, :, :1] @ k[:, :, :100].mT * WIDTH**-0.5, -1) @ v[:, :, :100]
    )


def test_short_sequences_use_the_corner_of_the_layout_and_a_loaded_one_counts() -> None:
    attention = SparseSelfAttention(CONFIGS["fixed"], max_seq_length=LENGTH)
    q, k, v, _ = (each.detach()[:, :, :96] for each in inputs(torch.float32))
    corner = attention.master_layout[:, :6, :6]
    torch.testing.assert_close(attention(q, k, v), sparse_attention_reference(q, k, v, corner, 16))
    other = SparseSelfAttention(DenseSparsityConfig(HEADS), max_seq_length=LENGTH)
    attention.load_state_dict(other.state_dict())
    torch.testing.assert_close(attention(q, k, v), other(q, k, v))


def test_a_layout_that_takes_the_others_place_counts() -> None:
    """Loaded with ``assign=True``, or given to a copy: its version says nothing of the former one's."""
    config = FixedSparsityConfig(HEADS, attention="unidirectional")
    attention = SparseSelfAttention(config, max_seq_length=LENGTH)
    other = SparseSelfAttention(DenseSparsityConfig(HEADS), max_seq_length=LENGTH)
    query, key, value, _ = (each.detach() for each in inputs(torch.float64))
    attention(query, key, value)
    expected = other(query, key, value)
    attention.load_state_dict(other.state_dict(), assign=True)
    assert torch.equal(attention(query, key, value), expected)
    attention.master_layout = SparseSelfAttention(config, max_seq_length=LENGTH).master_layout
    attention.master_layout.copy_(attention.master_layout.clone())
    attention(query, key, value)
    twin = copy.deepcopy(attention)
    twin.master_layout.copy_(other.master_layout)
    assert torch.equal(twin(query, key, value), expected)


def test_a_plan_lies_where_it_is_used() -> None:
    """A step that copied it there would wait for the device, part by part."""
    attention = SparseSelfAttention(CONFIGS["bigbird"])
    for device in (torch.device("meta"), torch.device("cpu")):
        plan = attention._plan(512, device)
        tensors = [each for part in plan for each in (part.keys, part.seen) if torch.is_tensor(each)]
        assert len(tensors) > 1 and all(each.device == device for each in tensors)
        assert attention._plan(512, device) is plan


def test_training_may_follow_inference() -> None:
    attention = SparseSelfAttention(CONFIGS["bigbird"], max_seq_length=LENGTH)
    query, key, value, _ = inputs(torch.float32)
    with torch.inference_mode():
        expected = attention(query, key, value)
    output = attention(query, key, value)
    output.sum().backward()
    torch.testing.assert_close(output.detach(), expected)


def test_what_does_not_fit_is_rejected() -> None:
    attention = SparseSelfAttention(CONFIGS["fixed"], max_seq_length=64)
    q = torch.zeros(1, HEADS, 64, 8)
    wrong: list[tuple[str, list[torch.Tensor], dict[str, torch.Tensor]]] = [
        ("query has shape", [q[:, :2]] * 3, {}),
        ("key has shape", [q, q[..., :4], q], {}),
        ("value has shape", [q, q, q.double()], {}),
        ("the sequence has 63 tokens", [q[:, :, :63]] * 3, {}),
        ("the sequence has 80 tokens", [torch.zeros(1, HEADS, 80, 8)] * 3, {}),
        ("key_padding_mask has shape", [q] * 3, {"key_padding_mask": torch.zeros(1, 63)}),
        ("attn_mask has shape", [q] * 3, {"attn_mask": torch.zeros(64, 63)}),
        ("rpe has shape", [q] * 3, {"rpe": torch.zeros(3, 64, 64)}),
        ("requires a gradient", [q] * 3, {"rpe": torch.zeros(64, 64, requires_grad=True)}),
    ]
    for message, tensors, given in wrong:
        with pytest.raises(InvalidTensorError, match=message):
            attention(*tensors, **given)
    with pytest.raises(ValueError, match="attn_mask_mode is 'or'"):
        SparseSelfAttention(CONFIGS["fixed"], attn_mask_mode="or")  # type: ignore[arg-type]  # wrong on purpose


RANK = """
import random, sys
import torch
import torch.distributed as dist
from ds_plugin_sdk.nn import BigBirdSparsityConfig, SparseSelfAttention

rank, store = int(sys.argv[1]), sys.argv[2]
random.seed(rank)
attention = SparseSelfAttention(BigBirdSparsityConfig(1, num_random_blocks=3), max_seq_length=320)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
own = attention.master_layout.clone()
x = torch.randn(1, 1, 320, 8, generator=torch.Generator().manual_seed(0))
output = attention(x, x, x)
print(int(torch.equal(own, attention.master_layout)), attention.master_layout.flatten().tolist(), output.sum().item())
"""


def test_all_ranks_take_the_layout_of_the_first(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", RANK]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    first, second = (rank.communicate(timeout=240)[0].strip() for rank in ranks)
    assert first[0] == "1" and second[0] == "0", "the seeds gave one layout; the test needs two"
    assert first[1:] == second[1:]


def test_a_mask_of_booleans_or_integers_is_not_added() -> None:
    """transformers' attention_mask of ones and zeros: added, it would hide nothing."""
    attention, (q, k, v, _) = SparseSelfAttention(CONFIGS["dense"], max_seq_length=LENGTH), inputs(torch.float32)
    for dtype in (torch.bool, torch.int64):
        with pytest.raises(InvalidTensorError, match=f"mode 'add' is {str(dtype)[6:]}.*mode 'mul' hides"):
            attention(q, k, v, key_padding_mask=torch.ones(2, LENGTH, dtype=dtype))


def test_a_module_of_inference_mode_attends() -> None:
    with torch.inference_mode():
        attention = SparseSelfAttention(CONFIGS["fixed"], max_seq_length=LENGTH)
    other = SparseSelfAttention(CONFIGS["fixed"], max_seq_length=LENGTH)
    q, k, v, _ = inputs(torch.float32)
    assert torch.equal(attention(q, k, v), other(q, k, v))


def test_nothing_and_the_meta_device() -> None:
    attention = SparseSelfAttention(CONFIGS["fixed"], max_seq_length=LENGTH)
    assert attention(*inputs(torch.float32, length=0)[:3]).shape == (2, HEADS, 0, WIDTH)
    q, k, v = (each.to("meta") for each in inputs(torch.float32)[:3])
    assert attention.to("meta")(q, k, v).shape == q.shape


def test_a_module_of_the_meta_device_gets_its_layout_by_reset_parameters() -> None:
    """As FSDP and others make large models: nothing is computed until each module's storage is there."""
    attention, (q, k, v, _) = SparseSelfAttention(CONFIGS["fixed"], max_seq_length=LENGTH), inputs(torch.float32)
    expected = attention(q, k, v)
    attention.to("meta")
    assert "some of" in repr(attention)
    attention.to_empty(device="cpu")
    attention.master_layout.fill_(7)  # what the memory held before
    attention.reset_parameters()
    assert torch.equal(attention(q, k, v), expected)


def test_the_default_device_changes_nothing() -> None:
    attention, (q, k, v, _) = SparseSelfAttention(CONFIGS["bigbird"], max_seq_length=LENGTH), inputs(torch.float32)
    expected = attention(q, k, v)
    with torch.device("meta"):
        again = SparseSelfAttention(CONFIGS["bigbird"], max_seq_length=LENGTH)
        assert again.master_layout.device.type == "cpu"
        again.master_layout = attention.master_layout
        torch.testing.assert_close(again(q, k, v), expected)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch.func's own
def test_torch_func_is_an_error_that_says_so() -> None:
    attention = SparseSelfAttention(CONFIGS["window"], max_seq_length=LENGTH)
    *qkv, cotangent = inputs(torch.float32)
    with pytest.raises(SdkError, match=r"no torch\.func"):
        torch.func.vmap(attention)(*(each[None] for each in qkv))
    with pytest.raises(SdkError, match=r"no torch\.func"):
        torch.autograd.grad(attention(*qkv), qkv, cotangent.expand(2, *cotangent.shape), is_grads_batched=True)
