"""What models must do on a device: train, move, be saved, compiled; device_checks.py runs them with the others."""

from __future__ import annotations

import copy
import io
import math

import torch
from torch import nn

NAME = "zap"


class Small(nn.Module):
    """Convolution, recurrence, attention: what takes a way of its own through the device."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 8, 3, padding=1)
        self.back = nn.ConvTranspose1d(8, 8, 3, padding=1)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.gru = nn.GRU(8, 8, batch_first=True)
        self.attention = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.embedding = nn.Embedding(10, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.back(torch.relu(self.conv(x))).transpose(1, 2) + self.embedding(tokens)
        hidden = self.gru(self.lstm(hidden)[0])[0]
        return self.head(self.attention(hidden))


def _train(device: str, steps: int = 4) -> list[float]:
    torch.manual_seed(0)
    model = Small().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, tokens = torch.randn(2, 3, 5), torch.randint(0, 10, (2, 5))
    x, tokens = x.to(device), tokens.to(device)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x, tokens).flatten(0, 1), (tokens % 4).flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def training_equals_the_cpu() -> None:
    """The CPU's kernels, but fused on the host where they are decomposed on the device: rounding differs."""
    host, there = _train("cpu"), _train(NAME)
    assert there[-1] < there[0]
    for step, (expected, loss) in enumerate(zip(host, there, strict=True)):
        assert math.isclose(loss, expected, rel_tol=2e-5), (step, expected, loss)


def data_moves_between_the_host_and_the_device() -> None:
    """Of what an optimizer, or a program, holds: it must not be left behind."""
    model = Small()
    parameters = list(model.parameters())
    for device in (f"{NAME}:1", "cpu", NAME):
        model.to(device)
        assert [each is kept for each, kept in zip(model.parameters(), parameters, strict=True)] == [True] * len(
            parameters
        )
        assert all(each.device.type == device.partition(":")[0] for each in parameters)
    tensor = torch.ones(6, device=NAME)
    part = tensor[2:]
    part.data = torch.arange(3.0)
    assert part.device.type == "cpu" and part.tolist() == [0, 1, 2] and tensor.tolist() == [1] * 6
    part.data = tensor[4:]
    tensor.fill_(5)
    assert part.device.type == NAME and part.tolist() == [5, 5]


def an_optimizer_may_be_made_before_the_model_moves() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = model.weight.detach().clone()
    model.to(NAME)
    model(torch.ones(2, 3, device=NAME)).sum().backward()
    optimizer.step()
    assert torch.allclose(model.weight.cpu(), before - 1)


def a_sparse_tensor_is_not_the_data_of_a_dense_one() -> None:
    tensor = torch.ones(2, device=NAME)
    try:
        tensor.data = torch.ones(2).to_sparse()
    except RuntimeError as error:
        assert "incompatible tensor type" in str(error)
    else:
        raise AssertionError("it took a sparse tensor's data")


def autocast_computes_in_bfloat16() -> None:
    layer, x = nn.Linear(8, 8).to(NAME), torch.randn(2, 8, device=NAME)
    with torch.autocast(NAME, dtype=torch.bfloat16):
        y = layer(x)
        assert y.dtype == torch.bfloat16
        assert torch.softmax(y, -1).dtype == torch.float32
        assert torch.softmax(y, -1, dtype=torch.float16).dtype == torch.float16
        assert nn.functional.mse_loss(y, x).dtype == torch.float32
        assert torch.cat([y, x]).dtype == torch.float32
        assert (y + 1).dtype == torch.bfloat16
        assert torch.is_autocast_enabled(NAME)
        loss = y.float().sum()
    loss.backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32
    expected = x.cpu().to(torch.bfloat16) @ layer.weight.detach().cpu().to(torch.bfloat16).t()
    assert torch.allclose(y.cpu().float(), (expected + layer.bias.detach().cpu().to(torch.bfloat16)).float(), atol=0.05)


def torch_saves_and_loads() -> None:
    layer = nn.Linear(3, 2).to(f"{NAME}:1")
    file = io.BytesIO()
    torch.save({"model": layer.state_dict(), "rng": torch.zap.get_rng_state()}, file)
    file.seek(0)
    loaded = torch.load(file)
    assert loaded["model"]["weight"].device == torch.device(NAME, 1)
    assert torch.equal(loaded["model"]["weight"].cpu(), layer.weight.detach().cpu())
    file.seek(0)
    assert torch.load(file, map_location="cpu")["model"]["weight"].device.type == "cpu"
    file.seek(0)
    assert torch.load(file, map_location=NAME)["model"]["weight"].device == torch.device(NAME, 0)
    twin = copy.deepcopy(layer)
    assert twin.weight.device == layer.weight.device
    assert twin.weight.data_ptr() != layer.weight.data_ptr()


def torch_compile_traces_the_device() -> None:
    layer, x = nn.Linear(4, 4).to(NAME), torch.randn(2, 4, device=NAME)
    for backend in ("eager", "aot_eager"):
        compiled = torch.compile(lambda value: torch.relu(layer(value)) * 2, backend=backend)
        assert torch.equal(compiled(x).cpu(), (torch.relu(layer(x)) * 2).cpu())
