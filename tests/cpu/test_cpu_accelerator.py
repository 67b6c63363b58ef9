"""The CPU as a device: right types, real memory, a fair share of the cores."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ds_plugin_cpu import accelerator, collectives, memory, plugin, report, threads, topology
from ds_plugin_cpu.accelerator import CPU_Accelerator
from ds_plugin_sdk.errors import SettingError
from ds_plugin_sdk.settings import LOCAL_WORLD_SIZE_VARIABLES, SLURM_STEP_TASKS_PER_NODE, settings


@pytest.fixture(scope="module")
def cpu() -> CPU_Accelerator:
    return CPU_Accelerator()


def test_the_manifest_says_available() -> None:
    probe = plugin.probe()
    assert probe.state == "available"
    assert probe.devices >= 1


def test_the_current_device_is_one_that_torch_takes(cpu: CPU_Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's second inference engine makes its tensors there; torch takes no number for the CPU."""
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert torch.empty(0, device=cpu.current_device()).device == torch.device("cpu")
    assert cpu.default_generator(cpu.current_device()) is torch.default_generator
    assert cpu.current_device_name() == "cpu"


def test_types_are_booleans_and_match_the_list(cpu: CPU_Accelerator) -> None:
    assert cpu.is_bf16_supported() is True
    assert cpu.is_fp16_supported() is torch.ops.mkldnn._is_mkldnn_fp16_supported()
    assert cpu.supported_dtypes()[0] is torch.float32


@pytest.fixture
def without_float16(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A CPU that does not compute in float16."""
    monkeypatch.setattr(accelerator, "_computes_in_float16", lambda: False)
    accelerator._warn_of_float16.cache_clear()
    yield
    accelerator._warn_of_float16.cache_clear()


def test_float16_is_offered_where_the_user_wants_it_though_slow(
    without_float16: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert CPU_Accelerator().is_fp16_supported() is False
    monkeypatch.setenv("DS_PLUGIN_CPU_FLOAT16", "1")
    with pytest.warns(RuntimeWarning, match=r"does not compute in float16.*nine times as long as in float32"):
        offering = CPU_Accelerator()
    CPU_Accelerator()  # a second warning would be an error
    assert offering.is_fp16_supported() is True
    assert torch.float16 in offering.supported_dtypes()


def test_a_cpu_that_computes_in_float16_needs_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "_computes_in_float16", lambda: True)
    monkeypatch.setenv("DS_PLUGIN_CPU_FLOAT16", "1")
    assert CPU_Accelerator().is_fp16_supported() is True  # a warning would be an error


def test_compiled_code_asks_it_without_a_warning(cpu: CPU_Accelerator) -> None:
    """As DeepSpeed's Muon does; a warning would be an error."""
    compiled = torch.compile(lambda x: x if cpu.is_fp16_supported() or cpu.is_bf16_supported() else -x, backend="eager")
    assert torch.equal(compiled(torch.ones(2)), torch.ones(2))
    torch._dynamo.reset()


def test_it_is_synchronous(cpu: CPU_Accelerator) -> None:
    assert cpu.is_synchronized_device()
    assert cpu.Stream is None
    assert cpu.device() == torch.device("cpu")
    assert cpu.on_accelerator(torch.ones(1))


def test_allocated_memory_grows_with_a_tensor_and_the_peak_resets(cpu: CPU_Accelerator) -> None:
    size = 200 * 2**20
    cpu.empty_cache()  # else the tensor takes blocks that earlier tests left resident
    cpu.reset_peak_memory_stats()
    before = cpu.memory_allocated()
    tensor = torch.ones(size, dtype=torch.uint8)
    allocated = cpu.memory_allocated()
    assert allocated - before > 0.9 * size
    assert cpu.max_memory_allocated() >= allocated
    del tensor
    cpu.empty_cache()
    cpu.reset_peak_memory_stats()
    assert cpu.max_memory_allocated() - before < 0.5 * size


def test_memory_of_the_machine(cpu: CPU_Accelerator) -> None:
    assert 0 < cpu.available_memory() <= cpu.total_memory()
    assert cpu.total_memory() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("member", "group", "limit", "used", "files"),
    [
        ("0::/\n", "", "memory.max", "memory.current", "inactive_file"),  # in a container
        ("0::/slurm/job_7/step_0\n", "slurm/job_7", "memory.max", "memory.current", "inactive_file"),
        (
            "9:memory:/slurm/job_7\n0::/\n",
            "memory/slurm/job_7",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ],
)
def test_a_job_has_the_memory_of_its_control_group(
    member: str, group: str, limit: str, used: str, files: str, tmp_path: Path
) -> None:
    """A job that has read a data set has its pages: the kernel gives them up for whoever allocates."""
    own, groups = tmp_path / "own", tmp_path / "groups"
    own.write_text(member, encoding="utf-8")
    (groups / group).mkdir(parents=True)
    assert memory.total(groups, own) == pytest.approx(
        os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), rel=0.01
    )
    contents = {limit: "80000000\n", used: "79000000\n", "memory.stat": f"anon 9000000\n{files} 70000000\n"}
    for name, text in contents.items():
        (groups / group / name).write_text(text, encoding="ascii")
    assert (memory.total(groups, own), memory.available(groups, own)) == (80_000_000, 71_000_000)
    (groups / group / "memory.stat").unlink()
    assert memory.available(groups, own) == 1_000_000


def test_random_numbers_are_restored(cpu: CPU_Accelerator) -> None:
    cpu.manual_seed(5)
    assert cpu.initial_seed() == 5
    state = cpu.get_rng_state()
    first = torch.rand(3)
    cpu.set_rng_state(state)
    assert torch.equal(first, torch.rand(3))


def test_pinning_is_free_of_copies(cpu: CPU_Accelerator) -> None:
    tensor = torch.arange(6).reshape(2, 3)
    assert cpu.pin_memory(tensor).data_ptr() == tensor.data_ptr()
    assert cpu.pin_memory(tensor, make_copy=False, match_shape=False).shape == (6,)
    assert cpu.pin_empty(2, 3, dtype=torch.int8).shape == (2, 3)
    assert cpu.pin_empty_like(tensor, dtype=torch.int8).dtype is torch.int8
    with pytest.raises(ValueError, match="must be cpu"):
        cpu.pin_empty(2, dtype=torch.int8, device="meta")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """``installed(module, distribution)``: a package whose import fails the test, with metadata of version 2.8."""
    collectives.warn_of_ipex.cache_clear()
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(module: str, distribution: str) -> None:
        (tmp_path / f"{module}.py").write_text("raise RuntimeError('imported')", encoding="utf-8")
        info = tmp_path / f"{module}-2.8.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 2.8.0\n", "utf-8")

    yield install
    collectives.warn_of_ipex.cache_clear()


def test_oneccl_is_no_backend_because_a_package_is_there(installed: Callable[[str, str], None]) -> None:
    installed("oneccl_bindings_for_pytorch", "oneccl-bindings-for-pytorch")
    assert CPU_Accelerator().communication_backend_name() == "gloo"
    assert ("collectives of the CPU", f"gloo ({collectives.choose()[1]})") in report.lines()
    assert "2.8.0 is installed, but has registered no backend" in collectives.choose()[1]


def test_a_registered_oneccl_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed.Backend, "backend_list", ["gloo", "ccl"])
    assert CPU_Accelerator().communication_backend_name() == "ccl"


def test_ipex_has_no_part_and_one_warning_says_so(installed: Callable[[str, str], None]) -> None:
    installed("intel_extension_for_pytorch", "intel-extension-for-pytorch")
    with pytest.warns(RuntimeWarning, match=r"intel-extension-for-pytorch 2.8.0 is installed and not used: it ended"):
        CPU_Accelerator()
    CPU_Accelerator()  # a second warning would be an error
    assert "IPEX" in dict(report.lines())


def test_without_ipex_nothing_is_said(installed: Callable[[str, str], None]) -> None:
    CPU_Accelerator()
    assert "IPEX" not in dict(report.lines())


@pytest.mark.parametrize(
    ("text", "cores"), [("0-3,8,10-11", {0, 1, 2, 3, 8, 10, 11}), ("5", {5}), ("", set()), ("\n", set())]
)
def test_core_lists(text: str, cores: set[int]) -> None:
    assert topology.parse_core_list(text) == cores


def play_numa(folder: Path, *nodes: str) -> None:
    """The kernel's files of a machine with these nodes."""
    for number, cores in enumerate(nodes):
        (folder / f"node{number}").mkdir()
        (folder / f"node{number}" / "cpulist").write_text(cores + "\n", encoding="ascii")


def test_numa_nodes_without_cores_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "usable_cores", lambda: frozenset(range(8)))
    play_numa(tmp_path, "0-3", "4-7", "")
    assert topology.numa_nodes(tmp_path) == [{0, 1, 2, 3}, {4, 5, 6, 7}]
    assert topology.numa_nodes(tmp_path / "none") == [set(range(8))]


@pytest.mark.parametrize(
    ("mask", "ranks", "threads"),
    [
        ("0-255", 2, 128),  # two sockets with two threads a core
        ("0-31,128-159", 1, 64),  # a launcher that binds to half of the first
        ("60-67", 2, 8),  # four of each
    ],
)
def test_without_a_launcher_a_rank_belongs_on_each_numa_node(
    mask: str, ranks: int, threads: int, no_launcher: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores = topology.parse_core_list(mask)
    monkeypatch.setattr(topology, "usable_cores", lambda: cores)
    monkeypatch.setattr(topology, "job_cores", lambda: 256)
    play_numa(tmp_path, *(f"{first}-{first + 63},{first + 128}-{first + 191}" for first in (0, 64)))
    assert topology.device_count(tmp_path) == ranks
    monkeypatch.setenv("LOCAL_SIZE", "2")  # as DeepSpeed's launcher then says
    assert topology.device_count(tmp_path) == 2
    assert topology.fair_threads() == min(threads, len(cores))


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (*LOCAL_WORLD_SIZE_VARIABLES, SLURM_STEP_TASKS_PER_NODE, "SLURM_NODEID"):
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize("variable", LOCAL_WORLD_SIZE_VARIABLES)
def test_every_launcher_says_how_many_ranks(variable: str, no_launcher: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "7")
    assert topology.device_count() == 7


@pytest.mark.parametrize(
    ("tasks", "node", "ranks"),
    [
        ("4", "0", 4),
        ("2(x3),5", "2", 2),
        ("2(x3),5", "3", 5),
        ("1", "0", None),  # a shell, or another launcher
        ("2", "3", None),
    ],
)
def test_slurm_says_how_many_ranks_each_node_of_a_step_has(
    tasks: str, node: str, ranks: int | None, no_launcher: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", tasks)
    monkeypatch.setenv("SLURM_NODEID", node)
    assert settings.local_world_size() == ranks
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")  # what a launcher inside the step says is nearer
    assert settings.local_world_size() == 3


def test_a_batch_script_of_slurms_is_one_process(no_launcher: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        monkeypatch.setenv(variable, "4")
    assert settings.local_world_size() is None


def test_tasks_that_slurm_does_not_write_are_an_error(no_launcher: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "2x3")
    with pytest.raises(SettingError, match=r"SLURM_STEP_TASKS_PER_NODE='2x3' cannot be used"):
        settings.local_world_size()


@pytest.mark.parametrize(
    ("cores", "job", "ranks", "share"),
    [
        (8, 8, None, 8),  # no launcher: all of them
        (8, 8, 2, 4),  # unbound ranks share
        (4, 8, 2, 4),  # bound ranks own their mask
        (32, 64, 8, 8),  # bound to a socket, which other ranks have too: Open MPI's default
        (8, 8, 3, 2),
        (2, 2, 4, 1),  # more ranks than cores
    ],
)
def test_ranks_share_the_cores_of_their_job(
    cores: int, job: int, ranks: int | None, share: int, no_launcher: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topology, "usable_cores", lambda: frozenset(range(cores)))
    monkeypatch.setattr(topology, "job_cores", lambda: job)
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert topology.fair_threads() == share


@pytest.mark.parametrize(
    ("member", "file"),
    [
        ("0::/slurm/job_7/step_0/user\n", "slurm/job_7/cpuset.cpus.effective"),
        ("5:cpu,cpuacct:/a\n4:cpuset:/slurm/job_7\n0::/\n", "cpuset/slurm/job_7/cpuset.effective_cpus"),
        ("4:cpuset:/docker/9f\n", "cpuset/cpuset.effective_cpus"),  # in a container, which sees its group as the root
    ],
)
def test_a_job_has_the_cores_of_its_control_group(member: str, file: str, tmp_path: Path) -> None:
    own, groups = tmp_path / "own", tmp_path / "groups"
    own.write_text(member, encoding="utf-8")
    assert topology.job_cores(groups, own) == os.cpu_count()
    (groups / file).parent.mkdir(parents=True)
    (groups / file).write_text("8-15,40-47\n", encoding="ascii")
    assert topology.job_cores(groups, own) == 16


@pytest.mark.parametrize(
    ("member", "files", "cores"),
    [
        ("0::/\n", {"cpu.max": "400000 100000\n"}, 4),  # docker run --cpus 4
        ("0::/\n", {"cpu.max": "250000 100000\n"}, 3),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 8),
        ("0::/\n", {"cpu.max": "1600000 100000\n"}, 8),  # more than there are
        ("0::/kubepods/pod1/9f\n", {"kubepods/pod1/cpu.max": "200000 100000\n"}, 2),  # of the group around it
        ("0::/a/b\n", {"a/cpu.max": "500000 100000\n", "a/b/cpu.max": "300000 100000\n"}, 3),
        (
            "5:cpu,cpuacct:/docker/9f\n0::/\n",
            {"cpu,cpuacct/cpu.cfs_quota_us": "600000\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"},
            6,
        ),
        (
            "5:cpu,cpuacct:/\n",
            {"cpu,cpuacct/cpu.cfs_quota_us": "-1\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"},
            8,
        ),
    ],
)
def test_a_jobs_quota_of_cpu_time_is_as_good_as_cores(
    member: str, files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    own, groups = tmp_path / "own", tmp_path / "groups"
    own.write_text(member, encoding="utf-8")
    for name, text in files.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(text, encoding="ascii")
    assert topology.job_cores(groups, own) == cores


def test_without_control_groups_a_job_has_the_machine(tmp_path: Path) -> None:
    assert topology.job_cores(tmp_path, tmp_path / "none") == os.cpu_count()


def test_the_user_decides_about_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert threads.choose()[1] == "OMP_NUM_THREADS"
    monkeypatch.setenv("DS_PLUGIN_CPU_THREADS", "5")
    assert threads.choose() == (5, "DS_PLUGIN_CPU_THREADS")


_ONE_THREAD = """
import torch
torch.set_num_threads(1)
import deepspeed
assert type(deepspeed.get_accelerator()).__module__ == "ds_plugin_cpu.accelerator"
print(torch.get_num_threads())
"""


def test_threads_that_were_set_before_stay(no_launcher: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand, by MKL_NUM_THREADS, or by a DataLoader in its workers: a share that is smaller still counts."""
    before = torch.get_num_threads()
    monkeypatch.setattr(threads, "fair_threads", lambda: before + 1)
    threads.apply()
    assert torch.get_num_threads() == before
    assert threads.choose() == (before, "torch, with fewer than a fair share")
    monkeypatch.setattr(threads, "fair_threads", lambda: before)
    assert threads.choose() == (before, "a fair share of the cores")


@pytest.mark.deepspeed
@pytest.mark.skipif(len(topology.usable_cores()) < 2, reason="one thread is a fair share of one core")
def test_importing_deepspeed_leaves_one_thread_one(no_launcher: None) -> None:
    done = subprocess.run([sys.executable, "-c", _ONE_THREAD], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "1"


FAULTS = """
import resource, torch
from ds_plugin_cpu import memory
print(memory.keep_large_blocks())
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        torch.ones(16 * 2**20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
# Freed blocks of a size that alignment makes too short for the next tensor of it first have to merge.
for _ in range(5):
    faults()
print(faults())
before = memory.resident()
block = torch.ones(64 * 2**20)
del block
held = memory.resident()
memory.release()
print(held - memory.resident())
"""


def run_faults(keep: str) -> tuple[int, int, int]:
    environment = {**os.environ, "DS_PLUGIN_CPU_KEEP_MEMORY": keep}
    done = subprocess.run([sys.executable, "-c", FAULTS], env=environment, capture_output=True, text=True, check=True)
    kept, faults, released = map(int, done.stdout.split())
    return kept, faults, released


def test_large_blocks_are_kept_without_page_faults_and_given_back_on_request() -> None:
    kept, faults, released = run_faults("1")
    assert 0 < kept < 2**31
    assert faults < 1000  # 5 tensors of 64 MiB are 81920 pages of 4 KiB
    assert released > 200 * 2**20  # of 256 MiB


def test_keeping_blocks_can_be_switched_off() -> None:
    kept, faults, _ = run_faults("0")
    assert kept == 0
    # Pages may be 2 MiB large: then 5 x 64 MiB are 160 faults.
    assert faults >= 160


# How much memory is in mappings for which huge pages were asked: whether the system had them is a matter of chance.
HUGE_PAGES = """
import os, re, torch
from pathlib import Path
from ds_plugin_cpu.accelerator import CPU_Accelerator
CPU_Accelerator()
def asked():
    mappings = re.findall(r"^Rss: *([0-9]+) kB$.*?^VmFlags:(.*?)$", Path("/proc/self/smaps").read_text(), re.M | re.S)
    return sum(int(size) for size, flags in mappings if "hg" in flags.split()) // 1024
before = asked()
block = torch.ones(64 * 2**20)
print(os.environ.get("THP_MEM_ALLOC_ENABLE"), asked() - before)
"""


@pytest.mark.parametrize(
    ("settings", "asked", "mebibytes"),
    [
        ({}, "1", range(250, 264)),
        ({"THP_MEM_ALLOC_ENABLE": "0"}, "0", range(1)),
        ({"DS_PLUGIN_CPU_KEEP_MEMORY": "0"}, "None", range(1)),
    ],
    ids=["as it comes", "torch's variable", "the plugin's setting"],
)
def test_huge_pages_are_asked_for_large_tensors_unless_the_user_says_otherwise(
    settings: dict[str, str], asked: str, mebibytes: range
) -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("the kernel has no huge pages")
    environment = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"} | settings
    done = subprocess.run(
        [sys.executable, "-c", HUGE_PAGES], env=environment, capture_output=True, text=True, check=True
    )
    found, huge = done.stdout.split()
    assert found == asked
    assert int(huge) in mebibytes


def test_a_kernel_without_huge_pages_is_not_asked_for_them() -> None:
    """torch would warn with each process's first large tensor."""
    program = f"from ds_plugin_cpu import memory\nmemory._HUGE_PAGES_OF_KERNEL = memory.Path('/none')\n{HUGE_PAGES}"
    environment = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == "None"


def test_memory_is_measured_in_bytes() -> None:
    assert 10 * 2**20 < memory.resident() <= memory.peak() < memory.total()
