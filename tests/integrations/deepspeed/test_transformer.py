"""DeepSpeed's own DeepSpeedTransformerLayer, unmodified, on our ops: in a process of its own, as users have it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from deepspeed_support import Python

MODEL = """
import contextlib, functools, io, itertools, math, torch, deepspeed
from torch import nn
from torch.nn import functional as F
from deepspeed import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer

torch.set_num_threads(1)
NAMES = ('attn_qkvw', 'attn_qkvb', 'attn_ow', 'attn_ob', 'attn_nw', 'attn_nb',
         'inter_w', 'inter_b', 'output_w', 'output_b', 'norm_w', 'norm_b')
# DeepSpeed's options that save memory, and what they let it forget
SAVING = ('normalize_invertible', 'gelu_checkpoint', 'attn_dropout_checkpoint')

def layer(hidden=48, heads=4, inter=96, p=0.0, dtype=torch.float32, spread=0.1, **options):
    config = DeepSpeedTransformerConfig(
        batch_size=4, hidden_size=hidden, heads=heads, intermediate_size=inter, attn_dropout_ratio=p,
        hidden_dropout_ratio=p, num_hidden_layers=2, initializer_range=0.1, seed=7, local_rank=-1,
        fp16=dtype is torch.float16, **options)
    with contextlib.redirect_stdout(io.StringIO()):
        made = DeepSpeedTransformerLayer(config)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * spread)
    return made.to(dtype)

def copy_into(theirs, ours):
    '''The weights of DeepSpeed's layer in torch's nn.TransformerEncoderLayer.'''
    norms = ('norm_', 'attn_n') if ours.norm_first else ('attn_n', 'norm_')
    pairs = {'self_attn.in_proj_weight': 'attn_qkvw', 'self_attn.in_proj_bias': 'attn_qkvb',
             'self_attn.out_proj.weight': 'attn_ow', 'self_attn.out_proj.bias': 'attn_ob',
             'linear1.weight': 'inter_w', 'linear1.bias': 'inter_b',
             'linear2.weight': 'output_w', 'linear2.bias': 'output_b',
             'norm1.weight': f'{norms[0]}w', 'norm1.bias': f'{norms[0]}b',
             'norm2.weight': f'{norms[1]}w', 'norm2.bias': f'{norms[1]}b'}
    state = dict(theirs.named_parameters())
    ours.load_state_dict({key: state[name].detach() for key, name in pairs.items()})
    return pairs

def encoder(hidden, heads, inter, pre):
    return nn.TransformerEncoderLayer(
        hidden, heads, inter, dropout=0.0, activation=functools.partial(F.gelu, approximate='tanh'),
        layer_norm_eps=1e-12, batch_first=True, norm_first=pre)

def full_mask(mask, heads):
    batch, tokens = mask.shape[0], mask.shape[-1]
    return mask.expand(batch, heads, tokens, tokens).reshape(batch * heads, tokens, tokens)
"""

AGREES = (
    MODEL
    + """
TOLERANCE = {torch.float32: 5e-6, torch.float16: 5e-3, torch.bfloat16: 4e-2}
for pre, tokens, stochastic in itertools.product((False, True), (1, 16, 21), (False, True)):
    for saving in ((), *((option,) for option in SAVING), SAVING):
        for dtype in TOLERANCE:
            torch.manual_seed(0)
            theirs = layer(dtype=dtype, pre_layer_norm=pre, stochastic_mode=stochastic, **dict.fromkeys(saving, True))
            plain = encoder(48, 4, 96, pre).double()
            pairs = copy_into(theirs, plain)
            x, grad = (torch.randn(4, tokens, 48).to(dtype) for _ in range(2))
            mask = torch.where(torch.rand(4, 1, 1, tokens) < 0.2, -10000.0, 0.0).to(dtype)
            mask[..., 0] = 0
            x.requires_grad_()
            result = theirs(x, mask)
            result.backward(grad)
            exact = x.detach().double().requires_grad_()
            expected = plain(exact, src_mask=full_mask(mask.double(), 4))
            expected.backward(grad.double())
            named = dict(theirs.named_parameters())
            pairs = [(result, expected), (x.grad, exact.grad)] + [
                (named[pairs[key]].grad, parameter.grad) for key, parameter in plain.named_parameters()
                if key != 'self_attn.in_proj_bias']
            # A bias of the keys changes no softmax: its gradient is rounding alone.
            ours, wanted = named['attn_qkvb'].grad, plain.self_attn.in_proj_bias.grad
            if tokens > 1:
                pairs.append((torch.cat((ours[:48], ours[96:])), torch.cat((wanted[:48], wanted[96:]))))
            if tokens == 1:  # with one key, queries and keys change nothing
                pairs = [(a[-48:], b[-48:]) if a.shape == (144, 48) else (a, b) for a, b in pairs]
            error = max(((a.double() - b).norm() / b.norm()).item() for a, b in pairs)
            print(f'{pre} {tokens} {stochastic} {saving} {dtype} {error:.2g}')
            assert error < TOLERANCE[dtype], (pre, tokens, stochastic, saving, dtype, error)
            assert theirs.eval()(x, mask).sub(result).abs().max() == 0
from ds_plugin_sdk import provenance
print('origins', sorted({(record.name, record.origin) for record in provenance.records()}))
"""
)

DROPOUT = (
    MODEL
    + """
for pre, stochastic in itertools.product((False, True), (False, True)):
    results = []
    for saving, again in (((), False), (SAVING, False), ((), True)):
        torch.manual_seed(0)
        theirs = layer(p=0.1, pre_layer_norm=pre, stochastic_mode=stochastic, **dict.fromkeys(saving, True))
        x = torch.randn(4, 32, 48, requires_grad=True)
        mask = torch.zeros(4, 1, 1, 32)
        checkpoint = functools.partial(torch.utils.checkpoint.checkpoint, theirs, use_reentrant=False)
        result = checkpoint(x, mask) if again else theirs(x, mask)
        result.square().sum().backward()
        results.append([result.detach(), x.grad, *(p.grad for p in theirs.parameters())])
        assert not torch.equal(theirs.eval()(x, mask), result), 'nothing was dropped'
    plain, saved, again = results
    assert torch.equal(plain[0], saved[0])
    for a, b in zip(plain[1:], saved[1:]):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    for a, b in zip(plain, again):  # computed again under checkpointing: the same elements are dropped
        assert torch.equal(a, b)

# What is allocated in the forward pass and not freed by its end.
def kept(**options):
    torch.manual_seed(0)
    theirs = layer(p=0.1, **options)
    x, mask = torch.randn(4, 64, 48, requires_grad=True), torch.zeros(4, 1, 1, 64)
    theirs(x, mask)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        result = theirs(x, mask)
    return sum(event.self_cpu_memory_usage for event in profile.key_averages())

hidden, inter, scores = 4 * 64 * 48 * 4, 4 * 64 * 96 * 4, 4 * 4 * 64 * 64 * 4
for pre in (False, True):
    everything = kept(pre_layer_norm=pre)
    saved = {option: everything - kept(pre_layer_norm=pre, **{option: True}) for option in SAVING}
    print('saved', pre, everything, saved)
    assert saved == {'attn_dropout_checkpoint': scores, 'gelu_checkpoint': inter,
                     'normalize_invertible': hidden if pre else 2 * hidden}, (saved, hidden, inter, scores)
"""
)

AUTOCAST = (
    MODEL
    + """
TOLERANCE = {torch.float16: 5e-3, torch.bfloat16: 4e-2}
for pre, tokens, saving, dtype in itertools.product((False, True), (16, 21), ((), SAVING), TOLERANCE):
    torch.manual_seed(0)
    theirs = layer(pre_layer_norm=pre, **dict.fromkeys(saving, True))
    plain = encoder(48, 4, 96, pre).double()
    pairs = copy_into(theirs, plain)
    x, grad = torch.randn(4, tokens, 48, requires_grad=True), torch.randn(4, tokens, 48)
    mask = torch.where(torch.rand(4, 1, 1, tokens) < 0.2, -10000.0, 0.0)
    mask[..., 0] = 0
    with torch.autocast('cpu', dtype=dtype):
        result = theirs(x, mask)
    assert result.dtype == dtype
    result.float().backward(grad)
    exact = x.detach().double().requires_grad_()
    expected = plain(exact, src_mask=full_mask(mask.double(), 4))
    expected.backward(grad.double())
    named = dict(theirs.named_parameters())
    assert {p.grad.dtype for p in (x, *named.values())} == {torch.float32}
    pairs = [(result, expected), (x.grad, exact.grad)] + [
        (named[pairs[key]].grad, parameter.grad) for key, parameter in plain.named_parameters()
        if key != 'self_attn.in_proj_bias']
    error = max(((a.double() - b).norm() / b.norm()).item() for a, b in pairs)
    print(f'{pre} {tokens} {saving} {dtype} {error:.2g}')
    assert error < TOLERANCE[dtype], (pre, tokens, saving, dtype, error)
"""
)

BERT = (
    MODEL
    + """
VOCABULARY, HIDDEN, HEADS, INTER, TOKENS, BATCH, STEPS = 16, 32, 4, 64, 24, 8, 100

class Bert(nn.Module):
    '''Embeddings, layers, and a guess at the tokens that were masked out.'''

    def __init__(self, layers, run):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(TOKENS, HIDDEN)
        self.norm, self.layers = nn.LayerNorm(HIDDEN), nn.ModuleList(layers)
        self.head = nn.Linear(HIDDEN, VOCABULARY)
        self.run = run

    def forward(self, tokens, mask):
        x = self.norm(self.words(tokens) + self.places.weight)
        for each in self.layers:
            x = self.run(each, x, mask)
        return self.head(x)

def batches():
    '''Sentences of one word; their padding is masked, and every fourth word hidden.'''
    generator = torch.Generator().manual_seed(11)
    for _ in range(STEPS):
        words = torch.randint(1, VOCABULARY, (BATCH, 1), generator=generator).expand(BATCH, TOKENS)
        hidden = torch.rand(words.shape, generator=generator) < 0.25
        length = torch.randint(TOKENS // 2, TOKENS + 1, (BATCH, 1), generator=generator)
        present = torch.arange(TOKENS) < length
        mask = torch.where(present, 0.0, -10000.0).view(BATCH, 1, 1, TOKENS)
        yield words.masked_fill(hidden, 0), words.masked_fill(~(hidden & present), -100), mask

def losses(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    found = []
    for tokens, wanted, mask in batches():
        loss = F.cross_entropy(model(tokens, mask).view(-1, VOCABULARY), wanted.view(-1), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return torch.tensor(found)

for pre in (False, True):
    torch.manual_seed(0)
    options = dict.fromkeys(SAVING, not pre)
    theirs = [layer(HIDDEN, HEADS, INTER, pre_layer_norm=pre, spread=0, **options) for _ in range(2)]
    plain = [encoder(HIDDEN, HEADS, INTER, pre) for _ in theirs]
    for a, b in zip(theirs, plain):
        copy_into(a, b)
    torch.manual_seed(1)
    ours = losses(Bert(theirs, lambda each, x, mask: each(x, mask)))
    torch.manual_seed(1)
    expected = losses(Bert(plain, lambda each, x, mask: each(x, src_mask=full_mask(mask, HEADS))))
    apart = ((ours - expected).abs() / expected).max().item()
    print(f'pre {pre}: from {ours[0]:.4f} to {ours[-10:].mean():.4f}, apart {apart:.2e}')
    assert ours[-10:].mean() < 0.6 * ours[0], 'nothing was learned'
    assert apart < 1e-4, apart
"""
)


@pytest.fixture
def ours(python: Python, kernel_cache: Path) -> Python:
    """A process that has the native kernels, or fails."""

    def run(program: str, **variables: str | None) -> object:
        return python(program, DS_PLUGIN_FALLBACK="0", DS_PLUGIN_CACHE_DIR=str(kernel_cache), **variables)

    return run


@pytest.mark.deepspeed
@pytest.mark.compiler
def test_deepspeeds_layers_agree_with_torch_in_float64(ours: Python) -> None:
    """Result and gradients, by norm: 5e-6 in float32, 5e-3 in float16, 4e-2 in bfloat16."""
    done = ours(AGREES)
    origins = dict(re.findall(r"\('(\w*transformer)', '(\w+)'\)", done.stdout))
    assert set(origins) == {"transformer", "stochastic_transformer"}
    assert set(origins.values()) <= {"compiled", "cache"}


@pytest.mark.deepspeed
@pytest.mark.compiler
def test_deepspeeds_layers_run_under_autocast(ours: Python) -> None:
    """Float32 weights, result and gradients by norm against float64: 5e-3 in float16, 4e-2 in bfloat16."""
    assert ours(AUTOCAST).stdout.count("torch.bfloat16") == 8


@pytest.mark.deepspeed
@pytest.mark.compiler
def test_dropout_is_repeated_and_options_save_memory(ours: Python) -> None:
    ours(DROPOUT)


@pytest.mark.deepspeed
@pytest.mark.compiler
def test_a_small_bert_trains_as_in_plain_torch(ours: Python) -> None:
    """100 steps of AdamW in float32: losses within 1e-4 of each other, norms after and before."""
    done = ours(BERT)
    assert done.stdout.count("apart") == 2


@pytest.mark.deepspeed
def test_a_layer_runs_by_reference(python: Python) -> None:
    program = MODEL + "x = torch.randn(2, 16, 48, requires_grad=True)\n"
    program += "layer(p=0.1)(x, torch.zeros(2, 1, 1, 16)).sum().backward()\nprint(x.grad.isfinite().all())"
    assert python(program, DS_PLUGIN_COMPILE="0").stdout.strip().endswith("tensor(True)")
