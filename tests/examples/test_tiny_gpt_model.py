"""The demo's model is causal, starts out knowing nothing, and can learn."""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch


@pytest.fixture
def gpt(model: ModuleType) -> torch.nn.Module:
    torch.manual_seed(0)
    return model.TinyGPT(model.GPTConfig(context=16, layers=2, heads=2, width=32)).double()


def test_a_later_byte_does_not_change_earlier_logits(gpt: torch.nn.Module) -> None:
    tokens = torch.randint(256, (2, 16))
    logits = gpt(tokens)
    for position in (1, 7, 15):
        changed = tokens.clone()
        changed[:, position] = (changed[:, position] + 1) % 256
        others = gpt(changed)
        torch.testing.assert_close(others[:, :position], logits[:, :position], rtol=0, atol=1e-12)
        assert (others[:, position:] - logits[:, position:]).abs().amax(dim=-1).min() > 1e-6


def test_position_matters(gpt: torch.nn.Module) -> None:
    logits = gpt(torch.full((1, 16), 65))
    assert (logits[0, 1:] - logits[0, :-1]).abs().amax(dim=-1).min() > 1e-6


def test_loss_is_the_mean_cross_entropy_in_nats(gpt: torch.nn.Module) -> None:
    tokens, targets = torch.randint(256, (2, 16)), torch.randint(256, (2, 16))
    chances = torch.softmax(gpt(tokens), dim=-1).gather(-1, targets[..., None])
    torch.testing.assert_close(gpt(tokens, targets), -chances.log().mean())
    assert gpt(tokens, targets).item() == pytest.approx(math.log(256), rel=0.05)  # untrained: a guess


def test_learns_a_repeated_text(gpt: torch.nn.Module) -> None:
    tokens = torch.tensor([list(b"import this now!")])
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        gpt(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
    assert gpt(tokens[:, :-1], tokens[:, 1:]) < 0.05


def test_generation_keeps_the_prompt_and_repeats_with_its_seed(model: ModuleType, gpt: torch.nn.Module) -> None:
    prompt = torch.tensor(list(b"def "))
    texts = [model.generate(gpt, prompt, length=20, context=16, temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])
    assert torch.equal(texts[0][:4], prompt)
    assert len(texts[0]) == 24
