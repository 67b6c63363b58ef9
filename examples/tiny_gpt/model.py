"""A small GPT over bytes: pre-norm blocks, causal attention, learned positions, output tied to the embedding."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model; the default has 3.3 million parameters."""

    vocabulary: int = 256
    context: int = 128
    layers: int = 4
    heads: int = 8
    width: int = 256


class Attention(nn.Module):
    """Causal multi-head self-attention: [batch, time, width] -> the same."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        heads = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    """Pre-norm transformer block: attention and a GELU MLP, each added to its input."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class TinyGPT(nn.Module):
    """Predicts the next byte at every position."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.bytes = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.apply(_init)
        # Each block adds twice to the residual stream; this keeps its variance at one whatever the depth (GPT-2).
        for block in self.blocks:
            for linear in (block.attention.out, block.down):
                nn.init.normal_(linear.weight, std=0.02 / math.sqrt(2 * config.layers))

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits [batch, time, 256] for int64 `tokens` [batch, time]; with `targets` the mean loss in nats."""
        x = self.bytes(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.bytes.weight)
        if targets is None:
            return logits
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def generate(model: nn.Module, prompt: Tensor, *, length: int, context: int, temperature: float, seed: int) -> Tensor:
    """Continue `prompt` (int64 [time]) by `length` bytes drawn from the model; the result includes the prompt."""
    draws = torch.Generator().manual_seed(seed)
    text = prompt
    for _ in range(length):
        logits = model(text[None, -context:])[0, -1]
        chances = torch.softmax(logits.float().cpu() / temperature, dim=-1)
        text = torch.cat([text, torch.multinomial(chances, 1, generator=draws).to(text.device)])
    return text


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
