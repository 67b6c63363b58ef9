"""`sdk check`: what is bound to CUDA is found, by whatever name; the rest is left alone; advice is of what exists."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ds_plugin_sdk import TorchAccelerator, source_check
from ds_plugin_sdk.errors import SourceError
from ds_plugin_sdk.source_check import check_source

Run = Callable[..., str]


def found(text: str) -> list[str]:
    return [finding.code for finding in check_source(text, "train.py")]


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        ("torch.cuda.synchronize()", ["torch.cuda.synchronize"]),
        ("import torch as t\nt.cuda.synchronize()", ["torch.cuda.synchronize"]),
        ("import torch.cuda as c\nc.memory.empty_cache()", ["torch.cuda.memory.empty_cache"]),
        ("from torch import cuda\ncuda.device_count()", ["torch.cuda.device_count"]),
        (
            "from torch.cuda import amp, Stream as S\nS()\namp.autocast()",
            ["torch.cuda.Stream", "torch.cuda.amp.autocast"],
        ),
        ("from torch.cuda.amp import autocast\nwith autocast(): pass", ["torch.cuda.amp.autocast"]),
        ("from torch.cuda import *", ["from torch.cuda import *"]),
        ("hasattr(torch.cuda, name)", ["torch.cuda"]),
        ("torch.cuda.default_generators[0]", ["torch.cuda.default_generators"]),
        ("model.cuda(0)", ["model.cuda(0)"]),
        ("a.cuda().cuda()", ["a.cuda().cuda()", "a.cuda()"]),
        ("a = b.is_cuda", ["b.is_cuda"]),
        ("a.pin_memory()", ["a.pin_memory()"]),
        ("f(device='cuda:1')", ["'cuda:1'"]),
        ("device = f'cuda:{rank}'", ["f'cuda:{rank}'"]),
        ("device = 'cuda:' + str(rank)", ["'cuda:'"]),
        ("device = 'cuda:{}'.format(rank)", ["'cuda:{}'"]),
        ("device = 'cuda:%d' % rank", ["'cuda:%d'"]),
        ("def f(device='cuda'): pass", ["'cuda'"]),
        ("a.device.type == 'cuda'", ["a.device.type == 'cuda'"]),
        ("init_process_group(backend='nccl')", ["'nccl'"]),
        ("os.environ['CUDA_VISIBLE_DEVICES']", ["'CUDA_VISIBLE_DEVICES'"]),
        ("os.environ.get('CUDA_VISIBLE_DEVICES')", ["'CUDA_VISIBLE_DEVICES'"]),
        ("options = {'device': 'cuda', 'size': 3}", ["'cuda'"]),
        ("set_default_tensor_type('torch.cuda.FloatTensor')", ["'torch.cuda.FloatTensor'"]),
        ("d = 'cuda' if torch.cuda.is_available() else 'cpu'", ["'cuda' if torch.cuda.is_available() else 'cpu'"]),
        (
            "d = torch.device('cuda:0') if torch.cuda.is_available() else torch.device('cpu')",
            ["torch.device('cuda:0') if torch.cuda.is_available() else torch.devi..."],
        ),
    ],
)
def test_what_is_bound_to_cuda_is_found(text: str, codes: list[str]) -> None:
    source = text if "import" in text else f"import torch\n{text}"
    assert found(source) == codes


@pytest.mark.parametrize(
    "text",
    [
        "torch.accelerator.synchronize()",
        "get_accelerator().pin_memory(a)",
        "self.accelerator.pin_memory(a)",
        "add_argument(choices=['cpu', 'cuda'])",
        "a.device.type in ('cuda', 'xpu')",
        "{'cuda': None}[device.type]",
        "{'cuda': 'nccl', 'xpu': 'xccl'}[device.type]",
        "states['cuda'] = 1",
        "table.get('cuda', {})",
        "getattr(torch.version, 'cuda', None)",
        "DataLoader(data, pin_memory=True)",
        "torch.backends.cuda.matmul.allow_tf32 = True",
        '"""On cuda and nccl."""',
        "cuda.synchronize()",
        "from .torch import cuda\ncuda.synchronize()",
        "'page\f'\n\ftorch.cuda.synchronize()  # ignore-cuda",
        "torch.cuda.synchronize()  # ignore-cuda",
        "torch.cuda.synchronize()  #ignore-cuda",
    ],
)
def test_what_is_not_bound_to_cuda_is_left_alone(text: str) -> None:
    assert found(f"import torch\n{text}") == []


def test_a_finding_says_where_what_it_means_and_what_to_write() -> None:
    (finding,) = check_source("import torch\n\nx = 1; torch.cuda.manual_seed(3)\n", "train.py")
    assert (finding.file, finding.line, finding.column) == ("train.py", 3, 8)
    assert finding.meaning == "does nothing without CUDA"
    assert finding.instead.startswith(
        "get_accelerator().manual_seed(seed), or without DeepSpeed torch.manual_seed(seed)"
    )


def test_an_unknown_name_of_torch_cuda_has_advice_too() -> None:
    (finding,) = check_source("import torch\ntorch.cuda.jiterator\n", "train.py")
    assert finding.instead == "torch.get_device_module(get_accelerator().device_name()), where the device has it"


EVERY_ADVICE = [
    *source_check._TORCH_CUDA.values(),
    *source_check._METHODS.values(),
    *source_check._STRINGS.values(),
    *(value for value in vars(source_check).values() if isinstance(value, source_check.Advice)),
]


def test_advice_is_for_members_that_exist() -> None:
    text = " ".join(advice.instead for advice in EVERY_ADVICE)
    members = set(re.findall(r"get_accelerator\(\)\.(\w+)", text))
    assert len(members) > 30
    assert not [name for name in members if not hasattr(TorchAccelerator, name)]
    functions = set(re.findall(r"torch\.accelerator\.(\w+)", text))
    assert len(functions) > 10
    assert not [name for name in functions if not hasattr(torch.accelerator, name)]


def test_what_the_advice_says_of_torch_without_cuda_is_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("the advice is of machines without CUDA, and torch has it here")
    assert torch.cuda.device_count() == torch.cuda.memory_allocated() == torch.cuda.max_memory_allocated() == 0
    assert not torch.cuda.is_available() and not torch.cuda.is_bf16_supported()
    torch.cuda.manual_seed_all(1)
    torch.cuda.empty_cache()
    for raises in (torch.cuda.synchronize, torch.cuda.current_device, torch.cuda.current_stream, torch.ones(1).cuda):
        with pytest.raises((AssertionError, RuntimeError)):
            raises()


def test_the_command_prints_findings_and_fails(sdk: Run, tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    source = tmp_path / "pkg" / "train.py"
    source.write_text("import torch\nx.cuda()\n", encoding="utf-8")
    (tmp_path / "pkg" / "clean.py").write_text("import torch\n", encoding="utf-8")
    text = sdk("check", str(tmp_path), status=1)
    assert text == (
        f"{source}:2:1: x.cuda()  # raises without CUDA\n"
        "  -> .to(get_accelerator().current_device_name())\n"
        "Places bound to CUDA: 1, in 1 of 2 files.\n"
    )
    assert sdk("check", str(tmp_path / "pkg" / "clean.py")) == "Places bound to CUDA: 0, in 0 of 1 files.\n"


def test_the_command_prints_json(sdk: Run, tmp_path: Path) -> None:
    source = tmp_path / "train.py"
    source.write_text("import torch\nx.cuda()\n", encoding="utf-8")
    (finding,) = json.loads(sdk("check", "--json", str(source), status=1))
    assert finding == {
        "file": str(source),
        "line": 2,
        "column": 1,
        "code": "x.cuda()",
        "meaning": "raises without CUDA",
        "instead": ".to(get_accelerator().current_device_name())",
    }


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"def f(:\n", "train.py:1: invalid syntax"),
        (b"# coding: iso-8859-15\n'\xa4'", None),
        (b"'\xff'", "train.py: "),
        (b"a\0b", "train.py"),
        (b"+".join([b"1"] * 3000), "train.py: "),
    ],
    ids=["no Python", "another encoding", "no text", "a null character", "too deep"],
)
def test_a_file_that_cannot_be_read_is_an_error(content: bytes, why: str | None, tmp_path: Path) -> None:
    source = tmp_path / "train.py"
    source.write_bytes(content)
    if why is None:
        assert source_check.check_files([source]) == []
        return
    with pytest.raises(SourceError, match=re.escape(why)):
        source_check.check_files([source])


def test_a_file_of_a_folder_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("print 'as Python 2 has it'\n", encoding="utf-8")
    (tmp_path / "b.py").write_text("import torch\ntorch.cuda.synchronize()\n", encoding="utf-8")
    unread, found = source_check.check_files([tmp_path])
    assert unread.file.endswith("a.py") and unread.meaning.startswith("cannot be checked: ")
    assert found.code == "torch.cuda.synchronize"


def test_what_is_called_as_a_file_and_is_none_is_passed_over(tmp_path: Path) -> None:
    """A folder, and the link by which an editor locks a file."""
    (tmp_path / "folder.py").mkdir()
    (tmp_path / ".#train.py").symlink_to("user@host.1234")
    (tmp_path / "train.py").write_text("import torch\ntorch.cuda.synchronize()\n", encoding="utf-8")
    (finding,) = source_check.check_files([tmp_path])
    assert finding.code == "torch.cuda.synchronize"


def test_a_path_that_does_not_exist_is_an_error(sdk: Run, tmp_path: Path) -> None:
    said = sdk("check", str(tmp_path / "gone.py"), status=1)
    assert "does not exist" in said and "-> name Python files" in said


def test_the_examples_are_not_bound_to_cuda() -> None:
    examples = Path(__file__).resolve().parents[1] / "examples"
    assert source_check.check_files([examples]) == []
