"""random_ltd, spatial_inference and utils in unmodified DeepSpeed: every front end that uses them, on the CPU."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from deepspeed_support import Python

from ds_plugin_sdk.integrations.deepspeed.modules import random_ltd, spatial_inference, utils

# DeepSpeed's functions and their number of positional arguments.
FUNCTIONS = {
    random_ltd: {"token_sort_": 2, "token_gather": 3, "token_scatter_": 4, "mask_gather_bert": 2, "mask_gather_gpt": 2},
    spatial_inference: {"nhwc_bias_add": 2, "nhwc_bias_add_add": 3, "nhwc_bias_add_bias_add": 4},
    utils: {"cast_to_byte_tensor": 1, "flatten": 1, "unflatten": 2},
}


@pytest.mark.parametrize("module", FUNCTIONS, ids=lambda module: module.__name__.rpartition(".")[2])
def test_a_module_has_deepspeeds_functions(module: object) -> None:
    for function, positionals in FUNCTIONS[module].items():
        inspect.signature(getattr(module, function)).bind(*range(positionals))


ORIGINS = """
from ds_plugin_sdk import provenance
print('origins', sorted({(record.name, record.origin) for record in provenance.records()}))
"""

RANDOM_LTD = (
    """
import types, torch
from deepspeed.ops.random_ltd import GatherTokens, ScatterTokens, bert_sample_tokens, gpt_sample_tokens
from deepspeed.runtime.data_pipeline.constants import *
from deepspeed.runtime.data_pipeline.data_routing.basic_layer import RandomLayerTokenDrop

torch.manual_seed(0)
BATCH, SEQ, KEPT, HIDDEN, LAYERS = 3, 24, 10, 16, 2
mask = torch.randn(BATCH, 1, SEQ, SEQ)

# What a step samples: sorted, different tokens, and the masks that belong to them.
for sample, expected in ((gpt_sample_tokens, 'gpt'), (bert_sample_tokens, 'bert')):
    indices, masks = sample(KEPT, SEQ, BATCH, LAYERS, 'cpu', mask)
    assert indices.shape == (LAYERS, BATCH, KEPT) and indices.dtype == torch.int32
    assert (indices.diff(dim=-1) > 0).all() and indices.min() >= 0 and indices.max() < SEQ
    if expected == 'gpt':
        assert torch.equal(masks, mask[:, :, :KEPT, :KEPT])
    for layer in range(LAYERS):
        for b in range(BATCH):
            rows = indices[layer, b].long()
            if expected == 'bert':
                assert torch.equal(masks[layer][b, 0], mask[b, 0][rows][:, rows])

class Block(torch.nn.Module):
    def __init__(self, batch_first):
        super().__init__()
        self.norm, self.mix = torch.nn.LayerNorm(HIDDEN), torch.nn.Linear(HIDDEN, HIDDEN)
        self.batch_first = batch_first

    def forward(self, x, mask=None):
        tokens = 1 if self.batch_first else 0
        assert x.shape[tokens] in (KEPT, SEQ)
        if mask is not None:
            assert mask.shape[-1] == x.shape[tokens]
        return x + torch.tanh(self.mix(self.norm(x))) * x.mean(dim=tokens, keepdim=True)

class Scheduler:
    random_ltd_layer_num = LAYERS

    def __init__(self):
        self.state = {RANDOM_LTD_MAX_VALUE: SEQ}

    def get_current_seq(self):
        return KEPT

def by_hand(blocks, x, chosen, batch_first):
    # The same layers on the chosen tokens, in plain torch.
    for block, rows in zip(blocks, chosen):
        x = x if batch_first else x.transpose(0, 1)
        index = rows.long()[..., None].expand(-1, -1, HIDDEN)
        part = x.gather(1, index)
        part = part if batch_first else part.transpose(0, 1)
        out = block(part)
        out = out if batch_first else out.transpose(0, 1)
        x = x.scatter(1, index, out)
        x = x if batch_first else x.transpose(0, 1)
    return x

for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 0.05), (torch.float64, 1e-14)):
    for kind, order in (('decoder', 'batch_seq_dim'), ('decoder', 'seq_batch_dim'), ('encoder', 'batch_seq_dim')):
        batch_first = order == 'batch_seq_dim'
        blocks = [Block(batch_first).to(dtype) for _ in range(LAYERS)]
        layers, scheduler = [RandomLayerTokenDrop(block) for block in blocks], Scheduler()
        for number, layer in enumerate(layers):
            config = {RANDOM_LTD_MODEL_MASK_NAME: 'mask', RANDOM_LTD_MICRO_BATCH_SIZE: BATCH,
                      RANDOM_LTD_HIDDEN_STATE_ORDER: order, RANDOM_LTD_MODEL_TYPE: kind}
            layer.init_config(config, scheduler, number)
        shape = (BATCH, SEQ, HIDDEN) if batch_first else (SEQ, BATCH, HIDDEN)
        x = torch.randn(shape).to(dtype).requires_grad_()
        out = x
        for layer in layers:
            out = layer(out, mask=mask)
        weight = torch.randn(shape).to(dtype)
        (out * weight).sum().backward()
        got = [out.detach(), x.grad, *(p.grad for block in blocks for p in block.parameters())]

        exact_blocks = [Block(batch_first).double() for _ in range(LAYERS)]
        for exact, block in zip(exact_blocks, blocks):
            exact.load_state_dict({name: value.double() for name, value in block.state_dict().items()})
        exact_x = x.detach().double().requires_grad_()
        expected = by_hand(exact_blocks, exact_x, scheduler.state[RANDOM_LTD_SAMPLE_INDEX], batch_first)
        (expected * weight.double()).sum().backward()
        want = [expected.detach(), exact_x.grad, *(p.grad for block in exact_blocks for p in block.parameters())]
        for a, b in zip(got, want, strict=True):
            error = ((a.double() - b).abs().max() / b.abs().max()).item()
            print(f'RandomLayerTokenDrop | {kind}, {order} | {dtype} | {error:.1e}')
            assert error < tolerance, (dtype, kind, order, error)
"""
    + ORIGINS
)

SPATIAL = (
    """
import torch, deepspeed
from deepspeed.ops.transformer.inference.bias_add import nhwc_bias_add

torch.manual_seed(0)
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for shape in ((2, 33, 5, 7), (2, 19, 33)):
        x, other = (torch.rand(shape).to(dtype) + 0.5 for _ in range(2))
        x = x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x
        bias, other_bias = (torch.rand(33).to(dtype) for _ in range(2))
        wide = lambda b: b.double().view(-1, 1, 1) if len(shape) == 4 else b.double()
        whole = x.double() + wide(bias)
        for extra, expected in (((), whole), ((other,), whole + other.double()),
                                ((other, other_bias), whole + other.double() + wide(other_bias))):
            got = nhwc_bias_add(x, bias, *extra)
            assert got.dtype == dtype and got.stride() == x.stride()
            assert ((got.double() - expected).abs() <= expected * (torch.finfo(dtype).eps * 0.51 + 2e-7)).all()
"""
    + ORIGINS
)

FAST_FILE_WRITER = (
    """
import mmap, os, torch
from deepspeed.io import FastFileWriter, FastFileWriterConfig

class Handle:
    '''What FastFileWriter asks of an asynchronous file handle, by plain writes.'''
    pending = 0

    def get_alignment(self):
        return 4096

    def async_pwrite(self, tensor, fd, offset):
        assert os.pwrite(fd, memoryview(tensor.numpy()), offset) == tensor.numel()
        self.pending += 1
        return 0

    def wait(self):
        done, self.pending = self.pending, 0
        return done

buffer = torch.frombuffer(mmap.mmap(-1, 4 * 4096), dtype=torch.uint8)  # O_DIRECT wants whole pages
tensors = {'a': torch.randn(5000), 'b': torch.arange(7), 'c': torch.ones(3, 3).bfloat16()}
for double in (True, False):
    writer = FastFileWriter('saved.pt', FastFileWriterConfig(Handle(), buffer, double_buffer=double))
    torch.save(tensors, writer, _use_new_zipfile_serialization=False)
    writer.close()
    loaded = torch.load('saved.pt')
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    del writer

# The storages themselves, as bytes: what casts tensors.
writer = FastFileWriter('storages', FastFileWriterConfig(Handle(), buffer))
storages = [(t.untyped_storage(), t.dtype) for t in tensors.values()]
written = writer.save_torch_storage_object_list(storages, save_size=True)
writer.close()
data = open('storages', 'rb').read()
expected = b''.join(t.numel().to_bytes(8, 'little') + t.view(-1).view(torch.uint8).numpy().tobytes()
                    for t in tensors.values())
assert written == len(expected) and data == expected
"""
    + ORIGINS
)


def origins(output: str) -> dict[str, str]:
    return dict(re.findall(r"\('(\w+)', '(\w+)'\)", output.splitlines()[-1]))


@pytest.mark.deepspeed
@pytest.mark.parametrize("origin", [pytest.param("compiled", marks=pytest.mark.compiler), "reference"])
@pytest.mark.parametrize(("op", "program"), [("random_ltd", RANDOM_LTD), ("spatial_inference", SPATIAL)])
def test_front_ends(op: str, program: str, origin: str, python: Python, kernel_cache: Path) -> None:
    switch = {"compiled": "1", "reference": "0"}[origin]
    # Not compiling leaves the reference only where the cache has nothing: the test's own.
    cache = {"DS_PLUGIN_CACHE_DIR": str(kernel_cache)} if origin == "compiled" else {}
    done = python(program, DS_PLUGIN_COMPILE=switch, **cache)
    assert origins(done.stdout)[op] in ({"compiled", "cache"} if origin == "compiled" else {"reference"})


@pytest.mark.deepspeed
def test_fast_file_writer(python: Python) -> None:
    """Zero-copy views need no native code."""
    assert origins(python(FAST_FILE_WRITER).stdout)["utils"] == "reference"
