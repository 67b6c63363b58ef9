"""The loss of a vocabulary that is divided among ranks, against the loss of the whole one: real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from launchers import launch

PROGRAM = """
import torch
from torch import distributed
from ds_plugin_sdk.errors import InvalidTensorError
from ds_plugin_sdk import torch_threads
from ds_plugin_sdk.nn import linear_cross_entropy
from ds_plugin_sdk.ops import linear_cross_entropy as ops

torch_threads.wait_at_exit()
distributed.init_process_group("gloo")
rank, ranks, group = distributed.get_rank(), distributed.get_world_size(), distributed.group.WORLD
ops._LOGITS, ops._ROWS = 5 * 40, 1  # several chunks
ROWS, HIDDEN, COLUMNS = 37, 24, 101
SIZES = {1: [101], 2: [60, 41], 3: [60, 0, 41]}[ranks]

def made(dtype):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((ROWS, HIDDEN), (COLUMNS, HIDDEN))]
    tensors.append(torch.randn(COLUMNS, generator=generator, dtype=torch.float64))
    target = torch.randint(0, COLUMNS, (ROWS,), generator=generator)
    target[5:9] = -100
    return [(each / 2).to(dtype) for each in tensors], target

def part(tensor):
    return tensor.split(SIZES)[rank].clone()

OPTIONS = [{}, {"reduction": "sum"}, {"label_smoothing": 0.1}, {"z_loss": 1e-2}, {"softcap": 3.0}, {"ignore_index": 3},
    {"reduction": "sum", "label_smoothing": 0.2, "z_loss": 1e-3, "softcap": 30.0}]
for dtype, rtol in ((torch.float64, 1e-10), (torch.float32, 1e-5), (torch.bfloat16, 2**-6)):
    for options in OPTIONS:
        (input, weight, bias), target = made(dtype)
        target = target.clamp(min=0) if "ignore_index" in options else target
        leaves = [input.requires_grad_(), part(weight).requires_grad_(), part(bias).requires_grad_()]
        loss = linear_cross_entropy(leaves[0], leaves[1], target, linear_bias=leaves[2], group=group, **options)
        (3 * loss).backward()
        whole = [each.detach().double().requires_grad_() for each in (input, weight, bias)]
        expected = linear_cross_entropy(whole[0], whole[1], target, linear_bias=whole[2], **options)
        (3 * expected).backward()
        torch.testing.assert_close(loss.double(), expected, rtol=rtol, atol=0)
        wanted = [whole[0].grad, part(whole[1].grad), part(whole[2].grad)]
        for leaf, gradient in zip(leaves, wanted, strict=True):
            assert leaf.grad.dtype == dtype
            atol = rtol * float(gradient.abs().max()) if gradient.numel() else 0
            torch.testing.assert_close(leaf.grad.double(), gradient, rtol=rtol, atol=atol)
        with torch.no_grad():
            alone = linear_cross_entropy(leaves[0], leaves[1], target, linear_bias=leaves[2], group=group, **options)
        torch.testing.assert_close(alone, loss.detach(), rtol=1e-6, atol=0)

# Words that fill up the vocabulary are hidden by a bias of -inf.
(input, weight, bias), target = made(torch.float32)
target, bias[90:] = target.clamp(max=80), -torch.inf
masked = linear_cross_entropy(input, part(weight), target, linear_bias=part(bias), group=group)
torch.testing.assert_close(masked, linear_cross_entropy(input, weight, target, linear_bias=bias))

# All rows are ignored; and targets that are no column, on all ranks.
(input, weight, _), target = made(torch.float32)
none = linear_cross_entropy(input, part(weight), torch.full_like(target, -100), group=group, reduction="sum")
assert none == 0
for wrong, message in ((COLUMNS, "target has an entry 101"), (-1, "target has an entry -1")):
    target[3] = wrong
    try:
        linear_cross_entropy(input, part(weight), target, group=group)
    except InvalidTensorError as error:
        assert message in str(error), error
    else:
        raise AssertionError(message)

# One rank has other rows: all are told, none waits.
if ranks > 1:
    try:
        linear_cross_entropy(input[rank:], part(weight), target[rank:], group=group)
    except InvalidTensorError as error:
        assert "the ranks differ" in str(error), error
    else:
        raise AssertionError("rows")
distributed.barrier()
distributed.destroy_process_group()
print("ok")
"""


@pytest.mark.compiler
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.usefixtures("compiled_once")
def test_it_is_the_loss_of_the_whole_vocabulary(ranks: int, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    assert launch("torchrun", ranks, program).count("ok") == ranks
