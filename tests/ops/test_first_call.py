"""An op called directly, with nothing loaded by hand: its first call loads the kernels of its family."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ds_plugin_sdk import op_builder, registry
from ds_plugin_sdk.errors import CompileForbiddenError
from ds_plugin_sdk.op_builder import op_table
from ds_plugin_sdk.ops import _first_call, _library
from ds_plugin_sdk.settings import child_environment


# ---- in new processes, with real kernels ---------------------------------------------------------------------------
def printed(program: str, **environment: str) -> Any:
    """What Python in a new process prints last, read as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=child_environment(**environment),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


EVERY_OP = """
import json, torch
from ds_plugin_sdk import provenance
from ds_plugin_sdk.conformance import op_info

def has_kernel(op):
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"ds_plugin::{op}", "CPU")

rows = []
for info in op_info.infos():
    before = has_kernel(info.name)
    info.function(**next(iter(info.samples(op_info.Make.seeded(info.dtypes[0])))).arguments)
    rows.append((info.family, info.name, before, has_kernel(info.name)))
print(json.dumps({"ops": rows, "origins": [(r.name, r.origin) for r in provenance.records()]}))
"""


@pytest.mark.compiler
@pytest.mark.timeout(900)  # every family is compiled
@pytest.mark.usefixtures("compiled_once")
def test_the_first_call_of_a_family_loads_its_kernels() -> None:
    found = printed(EVERY_OP)
    families = [family for family, *_ in found["ops"]]
    native = {op.family for op in op_table.OPS if op.kernels} - {"all_reduce"}  # which tests/test_comm.py calls
    assert native < set(families)
    first = [row for i, row in enumerate(found["ops"]) if row[0] not in families[:i]]
    assert not any(before for _, _, before, _ in first)
    with_kernel = {family for family, _, _, after in found["ops"] if after}
    assert with_kernel == native
    origins = {op_table.family_of(name): origin for name, origin in found["origins"]}
    assert len(origins) == len(found["origins"]), "a family was loaded twice"
    assert {family for family, origin in origins.items() if origin in ("cache", "compiled")} == native
    assert {family for family, origin in origins.items() if origin == "reference"} == set(families) - native


TORCH_OPS = """
import json, torch
from ds_plugin_sdk import provenance
from ds_plugin_sdk.ops import all_reduce, norm, transformer

x = torch.randn(4, 8)
y = torch.ops.ds_plugin.rms_norm(x, torch.ones(8), 1e-6)
assert torch.allclose(y, torch.nn.functional.rms_norm(x, (8,), eps=1e-6), atol=1e-6)

h, b = torch.randn(4, 8, requires_grad=True), torch.randn(8, requires_grad=True)
torch.ops.ds_plugin.fused_bias_gelu(h, b, True).sum().backward()
found, h.grad = h.grad, None
torch.nn.functional.gelu(h + b, approximate="tanh").sum().backward()
assert torch.allclose(found, h.grad, atol=1e-5)

assert torch.ops.ds_plugin.all_reduce_(torch.empty(0), torch.zeros(1 << 10, dtype=torch.uint8), 0, 2, 0, 0.0) == 0
print(json.dumps([(r.name, r.origin in ("cache", "compiled")) for r in provenance.records()]))
"""


@pytest.mark.compiler
@pytest.mark.usefixtures("compiled_once")
def test_calls_as_torch_ops_load_kernels_too_with_gradients_from_the_first_on() -> None:
    found = [(op_table.family_of(name), native) for name, native in printed(TORCH_OPS)]
    assert found == [("norm", True), ("transformer", True), ("all_reduce", True)]


COMPILED = """
import json, torch
from ds_plugin_sdk import registry, provenance
from ds_plugin_sdk.ops.norm import rms_norm

loads, load = [], registry.load_kernels
registry.load_kernels = lambda *key: (loads.append(key), load(*key))

def double(x, w):
    return rms_norm(x, w) * 2

x, w = torch.randn(4, 8), torch.ones(8)
rms_norm(x.to("meta"), w.to("meta"))
rms_norm(x.double(), w.double())
torch.ops.ds_plugin_reference.rms_norm(x, w, 1e-6)
traced = torch.compile(double, backend="aot_eager", fullgraph=True)
torch._dynamo.export(double)(x, w)
assert loads == [], loads
for _ in range(3):
    y = traced(x, w)
assert torch.equal(y, double(x, w))
print(json.dumps([loads, [r.origin in ("cache", "compiled") for r in provenance.records()]]))
"""


@pytest.mark.compiler
@pytest.mark.usefixtures("compiled_once")
def test_tracing_and_the_reference_load_nothing_and_running_loads_once() -> None:
    assert printed(COMPILED) == [[["norm", "cpu"]], [True]]


FALLING_BACK = """
import json, torch, warnings
from ds_plugin_sdk import provenance
from ds_plugin_sdk.ops.norm import layer_norm, rms_norm

x, w = torch.randn(4, 8), torch.ones(8)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(3):
        y = rms_norm(x, w)
        layer_norm(x, w, w)
assert torch.equal(y, torch.ops.ds_plugin_reference.rms_norm(x, w, 1e-6))
messages = [str(warning.message) for warning in caught]
print(json.dumps([[message.partition(" in plain")[0] for message in messages],
                  [(r.name, r.origin, "DS_PLUGIN_COMPILE=0" in r.detail) for r in provenance.records()]]))
"""


def test_where_nothing_may_be_compiled_the_reference_serves_with_one_warning() -> None:
    messages, records = printed(FALLING_BACK, DS_PLUGIN_COMPILE="0")
    assert messages == ["ds-plugin-sdk: op 'norm' falls back to its reference implementation"]
    assert records == [["norm", "reference", True]]


FORBIDDEN = """
import json, torch
from ds_plugin_sdk.errors import BuildError
from ds_plugin_sdk.ops.norm import rms_norm

errors = []
for _ in range(2):
    try:
        rms_norm(torch.randn(4, 8), torch.ones(8))
    except BuildError as error:
        errors.append([type(error).__name__, error.op])
exact = rms_norm(torch.randn(4, 8).double(), torch.ones(8).double())
print(json.dumps([errors, str(exact.dtype)]))
"""


def test_where_the_reference_is_forbidden_every_call_is_an_error_but_for_float64() -> None:
    errors, dtype = printed(FORBIDDEN, DS_PLUGIN_COMPILE="0", DS_PLUGIN_FALLBACK="0")
    assert errors == [[CompileForbiddenError.__name__, "norm"]] * 2
    assert dtype == "torch.float64"


TWO_DEVICES = """
import json, torch
from ds_plugin_sdk import provenance, simulator
from ds_plugin_sdk.ops.norm import rms_norm

simulator.install("zap", memory_mb=64)
x, w = torch.randn(4, 8), torch.ones(8)
on_zap = [rms_norm(x.to("zap"), w.to("zap")).cpu() for _ in range(3)]
torch.testing.assert_close(on_zap[-1], rms_norm(x, w))
print(json.dumps([(r.name, r.origin == "reference") for r in provenance.records() if r.name == "norm"]))
"""


@pytest.mark.compiler
@pytest.mark.usefixtures("compiled_once")
def test_a_device_without_kernels_has_the_reference_and_the_cpu_beside_it_its_kernels() -> None:
    assert printed(TWO_DEVICES) == [["norm", True], ["norm", False]]


# ---- in this process, with a kernel that a fake load registers -----------------------------------------------------
class Loads:
    """`registry.load_kernels` of a test: it registers a kernel that adds 10; the reference implementation adds 1."""

    def __init__(self, library: Any) -> None:
        self.library = library
        self.calls: list[tuple[str, str]] = []
        self.has_kernel = True

    def __call__(self, family: str, device_type: str) -> None:
        self.calls.append((family, device_type))
        if self.has_kernel:
            self.library.impl("add", lambda input: input + 10, "CPU")


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loads]:
    """The op ``ds_plugin_test::add``, of a family of its own, whose kernels this loads."""
    with torch.library._scoped_library("ds_plugin_test", "FRAGMENT") as library:
        monkeypatch.setattr(_library, "_libraries", {"ds_plugin_test": library})
        monkeypatch.setattr(_library, "_defined", set())
        _first_call._asked.pop("zap", None)
        loads = Loads(library)
        monkeypatch.setattr(registry, "load_kernels", loads)
        _library.register(
            "add(Tensor input) -> Tensor",
            lambda input: input + 1,
            fake=torch.empty_like,
            family="zap",
        )
        yield loads


def add(input: Tensor | None = None) -> float:
    return float(torch.ops.ds_plugin_test.add(torch.zeros(()) if input is None else input))


def test_the_first_call_has_the_kernel_already(loads: Loads) -> None:
    assert [add(), add()] == [10.0, 10.0]
    assert loads.calls == [("zap", "cpu")]


def test_where_there_is_no_kernel_it_is_asked_for_once(loads: Loads) -> None:
    loads.has_kernel = False
    assert [add(), add()] == [1.0, 1.0]
    assert loads.calls == [("zap", "cpu")]


def test_a_load_that_fails_is_tried_again(loads: Loads, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(loads.library, "impl", None)
        for _ in range(2):
            with pytest.raises(TypeError, match="not callable"):
                add()
    assert add() == 10.0
    assert len(loads.calls) == 3


def test_a_call_within_the_load_takes_the_reference(loads: Loads, monkeypatch: pytest.MonkeyPatch) -> None:
    within = []

    def load(family: str, device_type: str) -> None:
        within.append(add())
        loads(family, device_type)

    monkeypatch.setattr(registry, "load_kernels", load)
    assert add() == 10.0
    assert within == [1.0]


def test_other_threads_wait_for_the_kernel(loads: Loads, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, found = threading.Event(), threading.Event(), []

    def load(family: str, device_type: str) -> None:
        begun.set()
        assert go_on.wait(60)
        loads(family, device_type)

    monkeypatch.setattr(registry, "load_kernels", load)
    threads = [threading.Thread(target=lambda: found.append(add())) for _ in range(4)]
    threads[0].start()
    assert begun.wait(60)
    for thread in threads[1:]:
        thread.start()
    threads[1].join(0.1)
    assert found == []
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert found == [10.0] * 4
    assert len(loads.calls) == 1


def test_fake_tensors_load_nothing(loads: Loads) -> None:
    with FakeTensorMode() as mode:
        torch.ops.ds_plugin_test.add(mode.from_tensor(torch.zeros(3)))
    torch.ops.ds_plugin_test.add(torch.zeros(3, device="meta"))
    assert loads.calls == []


def test_a_device_that_gets_other_builders_is_asked_again(loads: Loads) -> None:
    loads.has_kernel = False
    assert add() == 1.0
    loads.has_kernel = True
    op_builder.use_package("zap", "zap_plugin.op_builder")
    assert add() == 1.0
    op_builder.use_package("cpu", "zap_plugin.op_builder")
    try:
        assert add() == 10.0
    finally:
        op_builder.use_package("cpu", None)
