"""The house rules that no type checker knows: arrows between packages, and who may touch what."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SDK = ROOT / "sdk" / "ds_plugin_sdk"
SOURCES = [
    *SDK.rglob("*.py"),
    *(file for file in (ROOT / "plugins").rglob("*.py") if "xyz_template" not in file.parts),
]

# A package may import those of lower rank, and itself. What is not listed here is a facade over everything.
RANK = {
    "errors": 0,
    "paths": 0,
    "nvml": 0,
    "settings": 1,
    "provenance": 2,
    "ops": 2,
    "jit": 2,
    "op_builder": 3,
    "accelerator": 4,
    "torch_accelerator": 5,
    "ported_accelerator": 5,
    "registry": 6,
    "prebuild": 7,
    "privateuse1": 7,
    "simulator": 8,
    "report": 7,
    "scaffold": 9,
    "optim": 7,
    "nn": 7,
    "comm": 7,
    "integrations": 8,
    "conformance": 9,
    "bench": 10,
    "cli": 11,
}


# Uses DeepSpeed as a user's training script does, by its public interface, to see whether a device trains.
TRAINING_SCRIPT = SDK / "conformance" / "programs" / "train.py"


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything a file imports, wherever the import stands."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.lineno, node.module
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def part(dotted: str) -> str | None:
    names = dotted.split(".")
    return names[1] if names[0] == "ds_plugin_sdk" and len(names) > 1 and names[1] in RANK else None


def test_arrows_go_downwards() -> None:
    wrong = [
        f"{file.relative_to(ROOT)}:{line} imports {dotted}"
        for file in SDK.rglob("*.py")
        if (here := part("ds_plugin_sdk." + file.relative_to(SDK).parts[0].removesuffix(".py"))) is not None
        for line, dotted in imports(file)
        if (there := part(dotted)) is not None and there != here and RANK[there] >= RANK[here]
    ]
    assert not wrong, "\n".join(wrong)


def test_every_part_of_the_sdk_has_a_rank() -> None:
    parts = {path.stem for path in SDK.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert parts - {"__init__"} <= set(RANK)


def test_only_one_folder_knows_deepspeed() -> None:
    """Its internals, that is: benchmarks, the front ends and the training programs of conformance are its users."""
    knows = SDK / "integrations" / "deepspeed"
    users = {"bench", "programs", "front_ends"}
    wrong = [
        f"{file.relative_to(ROOT)}:{line}"
        for file in SOURCES
        if users.isdisjoint(file.parts) and not file.is_relative_to(knows)
        for line, dotted in imports(file)
        if dotted.split(".")[0] == "deepspeed"
    ]
    assert not wrong, "\n".join(wrong)


def attributes(file: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each ``module.attribute`` that a file uses."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield node.lineno, f"{node.value.id}.{node.attr}"


@pytest.mark.parametrize(
    ("forbidden", "allowed"),
    [
        # hatch_build.py runs in build environments that have no SDK yet.
        ({"os.environ", "os.getenv", "os.putenv"}, {"settings.py", "hatch_build.py"}),
        # Which of torch's attention kernels a GPU can run, only torch.cuda says.
        ({"torch.cuda"}, {"_torch_attention.py"}),
        ({"os.system", "os.popen", "pickle.load", "pickle.loads"}, set()),
    ],
    ids=["environment", "torch.cuda", "shell and pickles"],
)
def test_only_one_place_uses(forbidden: set[str], allowed: set[str]) -> None:
    wrong = [
        f"{file.relative_to(ROOT)}:{line} uses {text}"
        for file in SOURCES
        if file.name not in allowed and "cuda" not in file.relative_to(ROOT).parts[:2]
        for line, text in attributes(file)
        if text in forbidden
    ]
    assert not wrong, "\n".join(wrong)


def test_importing_the_sdk_imports_the_standard_library_alone_and_touches_no_file(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "import ds_plugin_sdk\n"
        "packages = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(packages - sys.stdlib_module_names))\n"
    )
    environment = {
        "HOME": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PYTHONPATH": str(ROOT / "sdk"),
    }
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['ds_plugin_sdk']"
    assert not list(tmp_path.iterdir())


def test_public_names_resolve() -> None:
    import ds_plugin_sdk

    for name in ds_plugin_sdk.__all__:
        assert getattr(ds_plugin_sdk, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        ds_plugin_sdk.nonsense  # noqa: B018  # the access is the test


def test_a_suppression_states_its_reason() -> None:
    """On the same line, after the code that it silences."""
    suppression = re.compile(r"# (?:noqa|type: ignore)\b")
    reasoned = re.compile(r"# (?:noqa: [A-Z0-9, ]+|type: ignore\[[a-z, -]+\])  # \S")
    wrong = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in (*SOURCES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py"))
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if suppression.search(line) and not reasoned.search(line) and "re.compile" not in line
    ]
    assert not wrong, "\n".join(wrong)
