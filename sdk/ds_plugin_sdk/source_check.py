"""Lines of Python sources that are bound to CUDA, by their syntax alone: nothing is imported or run.

    torch.cuda.NAME          however torch.cuda was imported
    x.cuda(), x.is_cuda, x.pin_memory()
    "cuda", "cuda:0", "nccl", "CUDA_VISIBLE_DEVICES", "torch.cuda.FloatTensor"

A list that names other devices beside "cuda" is a choice among devices, and no finding. Nor is a line that has
DeepSpeed's own mark for such lines, ``# ignore-cuda``.
"""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ds_plugin_sdk.errors import SourceError

_IGNORED = re.compile(r"#\s*ignore-cuda\b")

# Names of devices and collectives: a list or table with one of them beside "cuda" or "nccl" offers a choice.
_OTHERS = {
    "cpu",
    "rocm",
    "mps",
    "xpu",
    "npu",
    "hpu",
    "mlu",
    "musa",
    "sdaa",
    "tpu",
    "gloo",
    "mpi",
    "ccl",
    "xccl",
    "hccl",
    "ucc",
}


class Advice(NamedTuple):
    """What a line means where the device is not CUDA, and what to write in its place."""

    meaning: str
    instead: str


@dataclass(frozen=True)
class Finding:
    """One place in a source. `line` and `column` count from 1."""

    file: str
    line: int
    column: int
    code: str
    meaning: str
    instead: str


_RAISES = "raises without CUDA"
_SILENT = "does nothing without CUDA"
_ZERO = "is 0 without CUDA"
_NO_PART = Advice(_RAISES, "torch.get_device_module(get_accelerator().device_name()), where the device has it")

# The text before each expression of torch's own that can be written without DeepSpeed.
_OR = ", or without DeepSpeed "

# After `torch.cuda.`: the longest name that is here decides.
_TORCH_CUDA = {
    "": Advice("is CUDA's module", f"get_accelerator(){_OR}torch.accelerator"),
    "is_available": Advice(
        "is False on any other device", f"get_accelerator().is_available(){_OR}torch.accelerator.is_available()"
    ),
    "device_count": Advice(_ZERO, f"get_accelerator().device_count(){_OR}torch.accelerator.device_count()"),
    "current_device": Advice(
        _RAISES,
        "get_accelerator().current_device_name() where a device is wanted, .current_device() where a number is"
        f"{_OR}torch.accelerator.current_device_index()",
    ),
    "set_device": Advice(_RAISES, f"get_accelerator().set_device(index){_OR}torch.accelerator.set_device_index(index)"),
    "device": Advice(_SILENT, f"get_accelerator().device(index){_OR}torch.accelerator.device_index(index)"),
    "synchronize": Advice(_RAISES, f"get_accelerator().synchronize(){_OR}torch.accelerator.synchronize()"),
    "Stream": Advice(_RAISES, f"get_accelerator().Stream(){_OR}torch.Stream()"),
    "Event": Advice(_RAISES, f"get_accelerator().Event(){_OR}torch.Event()"),
    "stream": Advice(_SILENT, f"get_accelerator().stream(stream){_OR}with the stream itself: with stream:"),
    "current_stream": Advice(_RAISES, f"get_accelerator().current_stream(){_OR}torch.accelerator.current_stream()"),
    "default_stream": Advice(_RAISES, "get_accelerator().default_stream()"),
    "set_stream": Advice(_RAISES, f"with get_accelerator().stream(stream):{_OR}torch.accelerator.set_stream(stream)"),
    "manual_seed": Advice(
        _SILENT, f"get_accelerator().manual_seed(seed){_OR}torch.manual_seed(seed), which seeds all devices"
    ),
    "manual_seed_all": Advice(
        _SILENT, f"get_accelerator().manual_seed_all(seed){_OR}torch.manual_seed(seed), which seeds all devices"
    ),
    "initial_seed": Advice(_RAISES, "get_accelerator().initial_seed()"),
    "default_generators": Advice(_RAISES, "get_accelerator().default_generator(index)"),
    "get_rng_state": Advice(_RAISES, "get_accelerator().get_rng_state(index)"),
    "set_rng_state": Advice(_RAISES, "get_accelerator().set_rng_state(state, index)"),
    "empty_cache": Advice(_SILENT, f"get_accelerator().empty_cache(){_OR}torch.accelerator.empty_cache()"),
    "memory_stats": Advice(
        "is empty without CUDA", f"get_accelerator().memory_stats(){_OR}torch.accelerator.memory_stats()"
    ),
    "memory_allocated": Advice(_ZERO, f"get_accelerator().memory_allocated(){_OR}torch.accelerator.memory_allocated()"),
    "max_memory_allocated": Advice(
        _ZERO, f"get_accelerator().max_memory_allocated(){_OR}torch.accelerator.max_memory_allocated()"
    ),
    "memory_reserved": Advice(_ZERO, f"get_accelerator().memory_reserved(){_OR}torch.accelerator.memory_reserved()"),
    "max_memory_reserved": Advice(
        _ZERO, f"get_accelerator().max_memory_reserved(){_OR}torch.accelerator.max_memory_reserved()"
    ),
    "memory_cached": Advice(_ZERO, "get_accelerator().memory_reserved()"),
    "max_memory_cached": Advice(_ZERO, "get_accelerator().max_memory_reserved()"),
    "reset_peak_memory_stats": Advice(
        _RAISES, f"get_accelerator().reset_peak_memory_stats(){_OR}torch.accelerator.reset_peak_memory_stats()"
    ),
    "reset_max_memory_allocated": Advice(_RAISES, "get_accelerator().reset_max_memory_allocated()"),
    "reset_max_memory_cached": Advice(_RAISES, "get_accelerator().reset_max_memory_cached()"),
    "mem_get_info": Advice(
        _RAISES,
        "get_accelerator().available_memory(index) and .total_memory(index)"
        f"{_OR}torch.accelerator.get_memory_info(index)",
    ),
    "get_device_properties": Advice(
        _RAISES, "get_accelerator().total_memory(index) for the memory; other properties are the vendor's"
    ),
    "get_device_capability": Advice(
        _RAISES, "get_accelerator().supported_dtypes(), .is_bf16_supported(): ask for what is needed, not for a version"
    ),
    "is_bf16_supported": Advice("is False without CUDA", "get_accelerator().is_bf16_supported()"),
    "amp.autocast": Advice(_SILENT, "torch.autocast(get_accelerator().device_name())"),
    "amp.GradScaler": Advice(_SILENT, "torch.amp.GradScaler(get_accelerator().device_name())"),
    "amp": Advice(_SILENT, "torch.amp, with get_accelerator().device_name() as device_type"),
    "nvtx.range_push": Advice(_RAISES, "get_accelerator().range_push(text)"),
    "nvtx.range_pop": Advice(_RAISES, "get_accelerator().range_pop()"),
    "CUDAGraph": Advice(_RAISES, "get_accelerator().create_graph()"),
    "graph": Advice(_RAISES, "get_accelerator().capture_to_graph(graph)"),
    "is_current_stream_capturing": Advice("is False without CUDA", "get_accelerator().is_current_stream_capturing()"),
    "nccl": Advice(_RAISES, "torch.distributed, with get_accelerator().communication_backend_name()"),
    **{
        f"{dtype}Tensor": Advice(_RAISES, f"get_accelerator().{dtype}Tensor(values)")
        for dtype in ("BFloat16", "Byte", "Double", "Float", "Half", "Int", "Long")
    },
}

_METHODS = {
    "cuda": Advice(_RAISES, ".to(get_accelerator().current_device_name())"),
    "pin_memory": Advice(
        "pins for torch's own accelerator, and raises where torch has none", "get_accelerator().pin_memory(tensor)"
    ),
}
_IS_CUDA = Advice("is False on any other device", "get_accelerator().on_accelerator(tensor)")
_DEVICE = Advice(
    "names a device that is not there", "get_accelerator().device_name(), or device_name(index) for one of several"
)
_COMPARED = Advice(
    "asks for CUDA by its name: another device goes the other way",
    "get_accelerator().device_name(), or ask for what is needed, as is_bf16_supported()",
)
_IDIOM = Advice(
    "is the CPU on any other device",
    f"get_accelerator().current_device_name(){_OR}torch.accelerator.current_accelerator()",
)
_STRINGS = {
    "nccl": Advice("is a collective of NVIDIA's GPUs", "get_accelerator().communication_backend_name()"),
    "CUDA_VISIBLE_DEVICES": Advice(
        "hides no other devices", "get_accelerator().visible_devices_envs(), the names of the variables"
    ),
}


def check_files(paths: Sequence[Path]) -> list[Finding]:
    """What is bound to CUDA in files, and in the `.py` files of folders, in order.

    A file in a folder that is not Python of this version is a finding too: it hides no others.

    Raises:
        SourceError: a path does not exist, or a file that it names is not Python.
    """
    return [finding for file in python_files(paths) for finding in _check_file(file, named=file in paths)]


def _check_file(file: Path, named: bool) -> list[Finding]:
    try:
        return check_source(read_source(file), str(file))
    except SourceError as error:
        if named:
            raise
        return [Finding(str(file), 1, 1, "(the file)", f"cannot be checked: {error.why}", "check it where it is run")]


def python_files(paths: Sequence[Path]) -> list[Path]:
    """The files themselves, and all `.py` files below the folders."""
    for path in paths:
        if not path.exists():
            raise SourceError(
                "a source cannot be checked", why=f"{path} does not exist", hint="name Python files, or folders of them"
            )
    return [file for path in paths for file in _below(path)]


def _below(path: Path) -> list[Path]:
    """Folders may be called x.py, too, and editors make links of such names that lead nowhere."""
    return sorted(filter(Path.is_file, path.rglob("*.py"))) if path.is_dir() else [path]


def read_source(file: Path) -> str:
    """A file's text, in the encoding that it states."""
    try:
        with tokenize.open(file) as stream:
            return stream.read()
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        hint = "check files of Python that this user can read, in the encoding that they state"
        raise SourceError("a source cannot be checked", why=f"{file}: {error}", hint=hint) from error


def check_source(text: str, file: str) -> list[Finding]:
    """What is bound to CUDA in one source."""
    try:
        found = _Reader(ast.parse(text)).found
    except SyntaxError as error:
        hint = "check Python files of the version that runs this command"
        raise SourceError("a source cannot be checked", why=f"{file}:{error.lineno}: {error.msg}", hint=hint) from error
    except (ValueError, RecursionError) as error:  # a null character, a sum of a thousand terms
        raise SourceError("a source cannot be checked", why=f"{file}: {error}") from error
    lines = text.split("\n")  # as Python counts them: a page break ends no line
    return [
        Finding(file, node.lineno, node.col_offset + 1, _shown(code), advice.meaning, advice.instead)
        for node, code, advice in sorted(found, key=lambda found: (found[0].lineno, found[0].col_offset))
        if not any(_IGNORED.search(line) for line in lines[node.lineno - 1 : node.end_lineno])
    ]


def _shown(code: str) -> str:
    first = code.splitlines()[0]
    return first if first == code and len(code) <= 70 else f"{first[:67]}..."


Found = tuple[ast.expr | ast.stmt, str, Advice]


class _Reader(ast.NodeVisitor):
    """Visits a tree once; a node that is a finding is not looked into for smaller ones."""

    def __init__(self, tree: ast.Module) -> None:
        self.found: list[Found] = []
        self._names = dict(_imported(tree))
        self.visit(tree)

    def _add(self, node: ast.expr | ast.stmt, advice: Advice, code: str | None = None) -> None:
        self.found.append((node, code or ast.unparse(node), advice))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Names are findings where they are used; a `*` hides where that is."""
        if node.module == "torch.cuda" and any(alias.name == "*" for alias in node.names):
            self._add(node, _TORCH_CUDA[""])

    def visit_IfExp(self, node: ast.IfExp) -> None:
        """`"cuda" if torch.cuda.is_available() else "cpu"`, also with torch.device around the names, is one finding."""
        names = {text for part in (node.body, node.orelse) for text in _strings(part)}
        if self._dotted(getattr(node.test, "func", node.test)) == "torch.cuda.is_available" and _is_device(names):
            self._add(node, _IDIOM)
        else:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func
        if (
            isinstance(function, ast.Attribute)
            and function.attr in _METHODS
            and self._dotted(function) is None
            and not _asks_the_accelerator(function.value)
        ):
            self._add(node, _METHODS[function.attr])
            function = function.value
        self.visit(function)
        names = _is_lookup(node.func)  # of an entry or an attribute, not of a device
        for argument in (*node.args, *node.keywords):
            if not (names and _names_device(argument)):
                self.visit(argument)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        """An entry of a table by device."""
        self.visit(node.value)
        if not _names_device(node.slice):
            self.visit(node.slice)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        dotted = self._dotted(node)
        if dotted is not None:
            self._add(node, _advice(dotted), dotted)
        elif node.attr == "is_cuda" and isinstance(node.ctx, ast.Load):
            self._add(node, _IS_CUDA)
        else:
            self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        dotted = self._dotted(node)
        if dotted is not None and isinstance(node.ctx, ast.Load):
            self._add(node, _advice(dotted), dotted)

    def visit_Compare(self, node: ast.Compare) -> None:
        if any(_names_device(side) for side in (node.left, *node.comparators)):
            self._add(node, _COMPARED)
        else:
            self.generic_visit(node)

    def visit_List(self, node: ast.List | ast.Tuple | ast.Set) -> None:
        if _OTHERS.isdisjoint(text for element in node.elts for text in _strings(element)):
            self.generic_visit(node)

    visit_Tuple = visit_Set = visit_List  # noqa: N815  # ast's names

    def visit_Dict(self, node: ast.Dict) -> None:
        """Keys name entries; what stands beside other devices' is a choice."""
        texts = {part.value for part in (*node.keys, *node.values) if isinstance(part, ast.Constant)}
        for value in node.values:
            if _OTHERS.isdisjoint(texts) or not isinstance(value, ast.Constant):
                self.visit(value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        first = node.values[0] if node.values else None
        if isinstance(first, ast.Constant) and first.value == "cuda:":
            self._add(node, _DEVICE)
        else:
            self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if not isinstance(node.value, str):
            return
        if _is_device([node.value]):
            self._add(node, _DEVICE)
        elif node.value in _STRINGS:
            self._add(node, _STRINGS[node.value])
        elif re.fullmatch(r"torch\.cuda\.\w+", node.value):
            self._add(node, _advice(node.value))

    def _dotted(self, node: ast.expr) -> str | None:
        """`torch.cuda...` as it is called there, by whatever names it was imported; None for anything else."""
        names: list[str] = []
        while isinstance(node, ast.Attribute):
            names.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self._names:
            return None
        dotted = ".".join((self._names[node.id], *reversed(names)))
        return dotted if f"{dotted}.".startswith("torch.cuda.") else None


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The names by which a module knows torch and its parts, each with what it stands for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "torch":
                    yield (alias.asname, alias.name) if alias.asname else ("torch", "torch")
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and f"{node.module}.".startswith("torch."):
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)


def _advice(dotted: str) -> Advice:
    name = dotted.removeprefix("torch.cuda").removeprefix(".")
    while name and name not in _TORCH_CUDA:
        name = name.rpartition(".")[0]
    return _TORCH_CUDA[name] if name or dotted == "torch.cuda" else _NO_PART


def _asks_the_accelerator(node: ast.expr) -> bool:
    """`get_accelerator().pin_memory(x)`, or the same of a name for it."""
    return "accelerator" in ast.unparse(node).lower()


def _is_lookup(function: ast.expr) -> bool:
    """`table.get("cuda")`, `getattr(torch.version, "cuda")`."""
    names = ("get", "pop", "setdefault")
    return (isinstance(function, ast.Attribute) and function.attr in names) or (
        isinstance(function, ast.Name) and function.id in ("getattr", "hasattr")
    )


def _names_device(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and _is_device([node.value])


def _strings(node: ast.expr) -> list[str]:
    return [part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)]


def _is_device(texts: Sequence[str] | set[str]) -> bool:
    return any(re.fullmatch(r"cuda(:(\d+|%[dis]|\{\w*\})?)?", text) for text in texts)  # also to be completed
