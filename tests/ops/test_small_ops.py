"""Random-LTD, spatial and utils ops beyond what the suite checks of every op."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from ds_plugin_sdk.errors import InvalidTensorError
from ds_plugin_sdk.ops import random_ltd, spatial, utils


@pytest.fixture(scope="module", autouse=True)
def small_kernels(native: Callable[..., None]) -> None:
    """The native kernels, and nothing else."""
    native("random_ltd", "spatial")


@pytest.fixture
def four_threads() -> Iterator[None]:
    """torch's threads as on a machine with four cores, whatever this one has."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def ops(implementation: str) -> object:
    return torch.ops.ds_plugin if implementation == "kernel" else torch.ops.ds_plugin_reference


def int32(*rows: list[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)


# ---- random-LTD ------------------------------------------------------------------------------------------------------
def test_rows_are_sorted_in_place(implementation: str) -> None:
    indices = int32([3, 0, 2], [9, 9, 1])
    view = indices.t()[:1]  # a row with gaps: 3, 9
    ops(implementation).token_sort_(indices, 10)
    assert indices.tolist() == [[0, 2, 3], [1, 9, 9]]
    ops(implementation).token_sort_(indices.t(), 10)
    assert view.tolist() == [[0, 1]]
    assert random_ltd.token_sort_(indices, 10) is indices


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_tokens_there_and_back(dtype: torch.dtype, implementation: str) -> None:
    x = torch.arange(2 * 4 * 3).reshape(2, 4, 3).to(dtype)
    indices = int32([0, 2], [1, 3])
    taken = ops(implementation).token_gather(x, indices, True)
    assert torch.equal(taken, torch.stack([x[0, [0, 2]], x[1, [1, 3]]]))
    flipped = ops(implementation).token_gather(x.transpose(0, 1), indices, False)
    assert torch.equal(flipped, taken.transpose(0, 1)) and flipped.is_contiguous()
    target = torch.zeros_like(x)
    ops(implementation).token_scatter_(target, taken, indices, True)
    assert torch.equal(target[0, [0, 2]], x[0, [0, 2]]) and not target[0, [1, 3]].any()


def test_gradients_of_a_token_taken_twice_are_added() -> None:
    x = torch.zeros(1, 3, 2, requires_grad=True)
    random_ltd.token_gather(x, int32([1, 1])).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [[[0, 0], [2, 2], [0, 0]]]


@pytest.mark.parametrize("batch_first", [True, False])
def test_the_last_of_equal_indices_wins(batch_first: bool, implementation: str) -> None:
    indices = int32([5, 2, 5, 0, 2], [1, 1, 1, 4, 1])
    part = torch.arange(2 * 5 * 3.0).reshape(2, 5, 3)
    want = torch.full((2, 6, 3), -1.0)
    for row in range(2):
        for i, token in enumerate(indices[row].tolist()):
            want[row, token] = part[row, i]
    target = torch.full((2, 6, 3), -1.0)
    arguments = (target, part) if batch_first else (target.transpose(0, 1), part.transpose(0, 1))
    ops(implementation).token_scatter_(*arguments, indices, batch_first)
    assert torch.equal(target, want)


def test_the_last_of_equal_indices_wins_whole(four_threads: None, implementation: str) -> None:
    """Also where threads share the work: no token is put together from two."""
    channels, copies = 10_000, 64
    part = torch.arange(float(copies)).reshape(1, copies, 1).expand(1, copies, channels).contiguous()
    for _ in range(50):
        target = torch.full((1, 3, channels), -1.0)
        ops(implementation).token_scatter_(target, part, int32([1] * copies), True)
        assert target[0, 1].unique().tolist() == [copies - 1]
        assert (target[0, [0, 2]] == -1).all()


def test_the_rest_of_a_view_stays(implementation: str) -> None:
    base = torch.zeros(2, 4, 6)
    ops(implementation).token_scatter_(base[..., ::2], torch.ones(2, 1, 3), int32([3], [0]), True)
    assert base.sum() == 6 and base[..., 1::2].sum() == 0 and base[0, 3, ::2].sum() == 3


def test_each_layer_has_masks_of_its_own(implementation: str) -> None:
    mask = torch.arange(9.0).reshape(1, 1, 3, 3)
    indices = torch.stack([int32([0, 2]), int32([1, 2])])
    masks = ops(implementation).mask_gather_bert(mask, indices)
    assert masks.tolist() == [[[[[0, 2], [6, 8]]]], [[[[4, 5], [7, 8]]]]]


@pytest.mark.parametrize("bad", [-1, 5])
def test_indices_that_are_no_tokens_are_rejected(bad: int, implementation: str) -> None:
    indices, x = int32([0, bad]), torch.zeros(1, 5, 4)
    for call in (
        lambda: ops(implementation).token_sort_(indices, 5),
        lambda: ops(implementation).token_gather(x, indices, True),
        lambda: ops(implementation).token_scatter_(x, torch.ones(1, 2, 4), indices, True),
        lambda: ops(implementation).mask_gather_bert(torch.zeros(1, 1, 5, 5), indices[None]),
    ):
        with pytest.raises((InvalidTensorError, RuntimeError), match="indices has an entry that is no token"):
            call()
    assert indices.tolist() == [[0, bad]] and not x.any()


def rejected_cases() -> dict[str, tuple[str, tuple[object, ...], str]]:
    x, part, indices = torch.zeros(2, 5, 4), torch.zeros(2, 3, 4), int32([0, 1, 2], [0, 1, 2])
    return {
        "int64 indices": ("token_gather", (x, indices.long(), True), "indices have another dtype"),
        "sequences": ("token_gather", (x[:1], indices, True), "indices has 2 rows.*one for each sequence"),
        "no batch": ("token_gather", (x[0], indices, True), "activations has 2 dimensions.*expected 3"),
        "one row": ("token_gather", (x, indices[0], True), "indices has 1 dimensions.*expected 2"),
        "dtypes": ("token_scatter_", (x, part.half(), indices, True), "layer_activations have another dtype"),
        "lengths": ("token_scatter_", (x, part[:, :2], indices, True), r"layer_activations has shape \[2, 2, 4\]"),
        "one memory": ("token_scatter_", (part, part, indices, True), "share memory"),
        "expanded": ("token_scatter_", (x[:1].expand(2, 5, 4), part, indices, True), "elements that share memory"),
        "no mask": ("mask_gather_bert", (x, indices[None]), r"mask has shape \[2, 5, 4\]"),
        "longer mask": ("mask_gather_gpt", (torch.zeros(1, 1, 3, 3), 4), "reserved is 4.*at most 3"),
    }


@pytest.mark.parametrize("case", rejected_cases())
def test_what_does_not_fit_is_rejected_in_the_same_words(case: str, implementation: str) -> None:
    name, arguments, message = rejected_cases()[case]
    with pytest.raises((InvalidTensorError, RuntimeError), match=message):
        getattr(ops(implementation), name)(*arguments)
    if not name.startswith("mask"):
        with pytest.raises(InvalidTensorError, match=message):
            getattr(random_ltd, name)(*arguments)


# ---- spatial ---------------------------------------------------------------------------------------------------------
def test_images_come_out_channels_last(implementation: str) -> None:
    x = torch.randn(2, 5, 3, 4)
    for layout in (x, x.contiguous(memory_format=torch.channels_last)):
        out = ops(implementation).nhwc_bias_add(layout, torch.arange(5.0))
        assert torch.equal(out, x + torch.arange(5.0).view(1, 5, 1, 1))
        assert out.is_contiguous(memory_format=torch.channels_last)


def test_sums_are_rounded_once(implementation: str) -> None:
    """256 + 1 + 1 is 258 in bfloat16; adding one at a time stays at 256."""
    x, one = torch.full((1, 1, 3), 256.0).bfloat16(), torch.ones(3).bfloat16()
    out = ops(implementation).nhwc_bias_add_add(x, one, torch.ones(1, 1, 3).bfloat16())
    assert out.tolist() == [[[258.0] * 3]]


def test_shapes_that_are_no_activations_are_rejected() -> None:
    with pytest.raises(InvalidTensorError, match=r"expected .*batch, channels, height, width"):
        spatial.nhwc_bias_add(torch.zeros(3, 4), torch.zeros(4))
    with pytest.raises(InvalidTensorError, match="bias has shape"):
        spatial.nhwc_bias_add(torch.zeros(2, 3, 4, 5), torch.zeros(5))


# ---- utils -----------------------------------------------------------------------------------------------------------
def test_flat_buffers_there_and_back() -> None:
    tensors = [torch.arange(6.0).reshape(2, 3), torch.tensor(6.0), torch.zeros(0), torch.arange(8.0)[::2]]
    flat = utils.flatten(tensors)
    assert flat.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 2, 4, 6]
    views = utils.unflatten(flat, tensors)
    assert all(torch.equal(a, b) for a, b in zip(views, tensors, strict=True))
    views[0].fill_(9)
    assert flat[:6].tolist() == [9] * 6
    with pytest.raises(InvalidTensorError, match=r"flat has shape \[10\].*\[11\]"):
        utils.unflatten(flat[:10], tensors)
    with pytest.raises(InvalidTensorError, match="tensors is empty"):
        utils.flatten([])


def test_bytes_are_the_tensor_s_own_memory() -> None:
    x = torch.tensor([[1.0, 2.0]], requires_grad=True)
    data = utils.cast_to_byte_tensor(x)
    assert data.dtype == torch.uint8 and data.shape == (8,) and data.data_ptr() == x.data_ptr()
    assert not data.requires_grad
    assert bytes(data.tolist()) == x.detach().numpy().tobytes()
    many = utils.cast_to_byte_tensor([x, torch.zeros(3, dtype=torch.int64), torch.zeros(0)])
    assert isinstance(many, list) and [t.numel() for t in many] == [8, 24, 0]
    one = torch.ones(1, dtype=torch.bool)
    assert utils.cast_to_byte_tensor(one) is one
    assert utils.cast_to_byte_tensor(torch.tensor(1.5)).shape == (4,)
    with pytest.raises(InvalidTensorError, match="has gaps"):
        utils.cast_to_byte_tensor(torch.zeros(4, 4)[:, ::2])
