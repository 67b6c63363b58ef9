"""Builds and loads a kernel of the device as a vendor's op builder does, and launches it on a stream."""

from __future__ import annotations

from pathlib import Path

import torch

from ds_plugin_sdk import jit, privateuse1, simulator

simulator.install("zap", memory_mb=64)
spec = jit.BuildSpec(
    name="axpy",
    owner="ds-plugin-test",
    sources=(jit.Source(Path(__file__).with_name("axpy.cpp")),),
    include_dirs=(Path(privateuse1.include_dir()),),
)
jit.obtain(spec)

x, y = torch.ones(1000, device="zap:1"), torch.arange(1000.0, device="zap:1")
torch.zap.synchronize(1)
stream = torch.zap.Stream(1)
with simulator.delay(100_000):
    with torch.zap.stream(stream):
        torch.ops.privateuse1_test.axpy_(x, y, 2.0)
    assert not stream.query(), "the kernel is on the stream"
    stream.synchronize()
assert torch.equal(x.cpu(), 1 + 2 * torch.arange(1000.0))

torch.ops.privateuse1_test.axpy_(x, torch.ones(1000), 1.0)  # a host tensor, which nothing rejects
try:
    torch.zap.synchronize(1)
except RuntimeError as error:
    assert "'axpy_' failed on device 1" in str(error), error
    assert "not device memory" in str(error), error
else:
    raise AssertionError("a kernel that uses host memory must fail")
