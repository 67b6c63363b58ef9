"""Conventions that no type checker knows: the direction of imports, and which module may use what."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import architecture
from ds_plugin_sdk.op_builder import op_table

ROOT = Path(__file__).resolve().parents[1]
SDK = ROOT / "sdk" / "ds_plugin_sdk"
SOURCES = [
    *SDK.rglob("*.py"),
    *(file for file in (ROOT / "plugins").rglob("*.py") if "xyz_template" not in file.parts),
]

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything a file imports, wherever the import stands."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.lineno, node.module
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def section(title: str) -> str:
    """A section of docs/architecture.md."""
    return PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]


def order() -> dict[str, int]:
    """The line of docs/architecture.md on which each part stands in the order of imports."""
    lines = [line for line in section("Order").splitlines() if line.startswith("    ")]
    return {name: row for row, line in enumerate(lines) for name in line.strip().split(", ")}


def test_the_page_has_every_part_in_its_order() -> None:
    assert sorted(order()) == architecture.parts()


def test_a_part_imports_those_above_it_in_the_order_alone() -> None:
    rank = order()
    wrong = [
        f"{name} imports {target}"
        for name in architecture.modules()
        for target in architecture.module_graph()[name]
        if (here := architecture.part_of(name)) != (there := architecture.part_of(target))
        and here is not None
        and there is not None
        and rank[there] >= rank[here]
    ]
    assert not wrong, "\n".join(wrong)


def test_no_module_is_in_a_circle_of_imports() -> None:
    assert architecture.circles(architecture.module_graph()) == []


def test_a_circle_of_imports_is_found() -> None:
    assert architecture.circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]


def test_the_picture_is_that_of_the_code() -> None:
    drawn = architecture.draw(architecture.part_graph())
    assert architecture.PICTURE.read_text(encoding="utf-8") == drawn, "run `make architecture`"


def test_the_page_names_files_that_exist() -> None:
    """From the repository's root or inside the SDK; ``<family>`` stands for any, here for those of inference."""
    inference = op_table.by_builder("InferenceBuilder").families
    named = re.findall(r"`([\w<>./]+/[\w<>./]*)`", PAGE)
    assert len(named) > 25 and len(inference) > 5
    missing = [
        path
        for name in named
        for path in sorted({name.replace("<family>", family) for family in inference})
        if not (ROOT / path).exists() and not (SDK / path).exists()
    ]
    assert not missing, "\n".join(missing)


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


def test_deepspeeds_front_ends_are_imported_by_conformance_alone() -> None:
    """They are test subjects; what needs one of DeepSpeed's classes imports DeepSpeed."""
    wrong = [
        f"{file.relative_to(ROOT)}:{line} imports {dotted}"
        for file in SOURCES
        if not file.is_relative_to(SDK / "conformance")
        for line, dotted in imports(file)
        if dotted.startswith("ds_plugin_sdk.conformance.front_ends")
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


def test_importing_the_ops_imports_nothing_heavy() -> None:
    program = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import ds_plugin_sdk.comm, ds_plugin_sdk.nn, ds_plugin_sdk.optim\n"
        "new = set(sys.modules) - before\n"
        "packages = {name.partition('.')[0] for name in new} - sys.stdlib_module_names\n"
        "print(sorted(packages), [name for name in new if name.startswith('torch')])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['ds_plugin_sdk'] []"


def test_public_names_resolve() -> None:
    import ds_plugin_sdk

    for name in ds_plugin_sdk.__all__:
        assert getattr(ds_plugin_sdk, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        ds_plugin_sdk.nonsense  # noqa: B018  # the access is the test


def test_a_suppression_states_its_reason() -> None:
    """On the same line, after the code that it silences."""
    suppression = re.compile(r"# (?:noqa|type: ignore)\b|mark\.filterwarnings\(")
    reasoned = re.compile(r"(?:# (?:noqa: [A-Z0-9, ]+|type: ignore\[[a-z, -]+\])|filterwarnings\(.+\),?)  # \S")
    wrong = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in (*SOURCES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "tools").rglob("*.py"))
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if suppression.search(line) and not reasoned.search(line) and "re.compile" not in line
    ]
    assert not wrong, "\n".join(wrong)
