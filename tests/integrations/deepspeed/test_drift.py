"""The SDK's contract against DeepSpeed's: the installed one, those of the past, and one that does not exist yet."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from deepspeed_support import Python

from ds_plugin_sdk.accelerator import DeepSpeedAccelerator

RELEASES: dict[str, list[str]] = json.loads(
    (Path(__file__).parent / "abstract_members.json").read_text(encoding="utf-8")
)

CONTRACT = """
import json
from ds_plugin_sdk.integrations.deepspeed import drift
print(json.dumps(drift.contract().to_dict()))
"""

# One word a builder, of those that DeepSpeed 0.19.8 binds.
NOT_OFFERED = """
    DeepCompile FlashAttention GDS InferenceCutlass RaggedOps RaggedUtils
"""


@pytest.mark.parametrize("release", RELEASES)
def test_the_sdk_has_all_that_a_release_made_abstract(release: str) -> None:
    """One class then constructs on every release. The names come from the releases' source distributions."""
    assert len(RELEASES[release]) > 60
    assert not [name for name in RELEASES[release] if not hasattr(DeepSpeedAccelerator, name)]


@pytest.mark.deepspeed
def test_the_difference_to_deepspeed_0_19_8(python: Python) -> None:
    done = python(CONTRACT + "print('\\n'.join(' | '.join(row) for row in drift.contract().rows()))")
    first, *rows = done.stdout.splitlines()
    contract = json.loads(first)
    if contract["deepspeed_version"] != "0.19.8":
        pytest.fail(f"DeepSpeed {contract['deepspeed_version']}: look at `sdk contract`, then renew this snapshot")

    def of(kind: str) -> dict[str, str]:
        return {each["name"]: each["consequence"] for each in contract["differences"] if each["kind"] == kind}

    taken_over = "DeepSpeed's default is taken over"
    assert of("only DeepSpeed") == dict.fromkeys(
        (
            "_pin_fresh",
            "_require_host_device",
            "_shape_numel",
            "pin_memory_alignment",
            "register_host_memory",
            "unregister_host_memory",
        ),
        taken_over,
    )
    assert set(of("only the SDK")) == {"amp", "exported_envs", "op_builders", "op_info", "visible_devices_env"}
    assert of("signature") == {}
    abstract_here = {each["name"] for each in contract["differences"] if each["ours"] == "abstract"}
    assert abstract_here == set()
    assert set(of("builder")) == {f"{name}Builder" for name in NOT_OFFERED.split()}
    assert rows[-1] == "51 members | abstractness | abstract in DeepSpeed; the SDK has a default"
    assert len(rows) == 1 + len(contract["differences"]) - len(of("abstractness"))


FUTURE = """
    @abc.abstractmethod
    def warp_size(self, device_index=None):
        ...

    @property
    @abc.abstractmethod
    def Graph(self):
        ...

    @abc.abstractmethod
    def manual_seed(self, seed, stream):
        ...

    def nap(self, seconds=1):
        return f"{self._name} sleeps {seconds} s"

    sleeps_well = True
"""


@pytest.fixture
def future_deepspeed(tmp_path: Path) -> Path:
    """A folder with the installed DeepSpeed but for its accelerator contract, which has grown."""
    spec = importlib.util.find_spec("deepspeed")
    assert spec is not None and spec.origin is not None
    root, copy = Path(spec.origin).parent, tmp_path / "future" / "deepspeed"
    for original, folder in ((root, copy), (root / "accelerator", copy / "accelerator")):
        folder.mkdir(parents=True)
        for entry in original.iterdir():
            if entry.name not in ("accelerator", "abstract_accelerator.py", "__pycache__"):
                (folder / entry.name).symlink_to(entry)
    head = "class DeepSpeedAccelerator(ABC):\n"
    text = (root / "accelerator" / "abstract_accelerator.py").read_text(encoding="utf-8")
    assert text.count(head) == 1
    text = text.replace("    @abc.abstractmethod\n    def manual_seed(self, seed):\n        ...\n", "")
    (copy / "accelerator" / "abstract_accelerator.py").write_text(text.replace(head, head + FUTURE), encoding="utf-8")
    return copy.parent


@pytest.mark.deepspeed
def test_a_deepspeed_that_asks_for_more(future_deepspeed: Path, zap: Path, python: Python) -> None:
    """New defaults are there; new abstract members raise when they are used, and no earlier."""
    with (zap / "zap_accelerators.py").open("a", encoding="utf-8") as file:
        file.write("\nclass Newer(Zap):\n    def warp_size(self, device_index=None):\n        return 32\n")
    done = python(
        """
import deepspeed, zap_accelerators
from deepspeed.accelerator import get_accelerator
from ds_plugin_sdk.errors import PluginVersionError

accelerator = get_accelerator()
assert type(accelerator) is zap_accelerators.Zap
assert accelerator.nap(2) == "meta sleeps 2 s"
assert accelerator.sleeps_well
for use in (lambda: accelerator.warp_size(0), lambda: accelerator.Graph):
    try:
        use()
    except PluginVersionError as error:
        print(str(error).replace("\\n", " "))
    else:
        raise SystemExit("no error")
assert zap_accelerators.Newer().warp_size() == 32
"""
        + CONTRACT,
        PYTHONPATH=f"{future_deepspeed}:{zap}",
    )
    warp, graph, contract = done.stdout.splitlines()
    assert warp == (
        "DeepSpeed asks for warp_size, which the accelerator does not have (plugin 'meta'): "
        "warp_size(self, device_index=None) is newer than this SDK, and Zap does not define it"
        "   -> define warp_size in Zap, upgrade ds-plugin-sdk, or use an older DeepSpeed"
    )
    assert graph.startswith(
        "DeepSpeed asks for Graph, which the accelerator does not have (plugin 'meta'): Graph (prop"
    )
    found = {each["name"]: each for each in json.loads(contract)["differences"]}
    assert (found["warp_size"]["kind"], found["warp_size"]["theirs"]) == ("only DeepSpeed", "abstract")
    assert (found["nap"]["kind"], found["nap"]["theirs"]) == ("only DeepSpeed", "default")
    assert (found["manual_seed"]["kind"], found["manual_seed"]["consequence"]) == (
        "signature",
        "DeepSpeed has manual_seed(self, seed, stream), the SDK manual_seed(self, seed)",
    )
