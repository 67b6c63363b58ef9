"""Which GPUs CUDA code is compiled for, and which run it."""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Iterable, Sequence

from ds_plugin_sdk import nvml
from ds_plugin_sdk.errors import ToolchainError
from ds_plugin_sdk.jit.compiler import Compiler, answer_to
from ds_plugin_sdk.settings import settings

_OLDEST_GPU = (7, 0)  # that has __grid_constant__


def cuda_archs(portable: bool, nvcc: Compiler | None = None) -> str | None:
    """The architectures to compile for: ``TORCH_CUDA_ARCH_LIST``, else, or where it is ``native``, this machine's GPUs.

    Args:
        portable: for other machines too. Then, and where no GPU is seen, the answer is None without the variable.
        nvcc: what compiles. GPUs that are newer than it get PTX, and those that it has dropped are left to the others.
    """
    given = settings.cuda_arch_list
    if portable or (given and given.strip() != "native"):
        return given
    found = capabilities()
    known = _known(nvcc) if nvcc is not None and found else ()
    words = {_arch_for(capability, known) for capability in found if not known or capability >= known[0]}
    return " ".join(sorted(words or {_text(capability) for capability in found}, key=_number)) or None


@functools.cache
def capabilities() -> tuple[tuple[int, int], ...]:
    """Those of the GPUs that this process sees. One that is too old for the kernels keeps no other from having them."""
    try:
        gpus = nvml.visible(nvml.ask().gpus, settings.cuda_visible_devices)
    except nvml.NvmlError:
        return ()
    found = {gpu.capability for gpu in gpus}
    return tuple(sorted({each for each in found if each >= _OLDEST_GPU} or found))


@functools.cache
def _known(nvcc: Compiler) -> tuple[tuple[int, int], ...]:
    """The capabilities that nvcc compiles for, the lowest first; none if it does not say."""
    try:
        answer = answer_to(nvcc.command, "--list-gpu-arch")
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(sorted((int(major), int(minor)) for major, minor in re.findall(r"compute_(\d+)(\d)\b", answer.stdout)))


def _arch_for(capability: tuple[int, int], known: tuple[tuple[int, int], ...]) -> str:
    """Itself; what nvcc does not know runs code of an earlier release of its generation, or the newest PTX below it."""
    if not known or capability in known:
        return _text(capability)
    earlier = max(each for each in known if each < capability)
    return _text(earlier) if earlier[0] == capability[0] else f"{_text(earlier)}+PTX"


def _text(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def _number(arch: str) -> float:
    return float(arch.removesuffix("+PTX"))


def runs_on(archs: Iterable[str], capability: tuple[int, int]) -> bool:
    """Whether a GPU runs what nvcc made with these arguments, as `gencode` has them.

    Machine code runs on its own generation, from its own release on, and PTX on all later GPUs; that of an architecture
    with an ``a`` on this one alone, with an ``f`` on its generation.
    """
    for arch in archs:
        found = re.fullmatch(r"-gencode=arch=compute_\w+,code=(sm|compute)_(\d+)(\d)([af]?)", arch)
        if found is None:  # -arch=all-major: all generations, and PTX
            return True
        made, same_generation = (int(found[2]), int(found[3])), int(found[2]) == capability[0]
        later = made <= capability and (same_generation or (found[1] == "compute" and not found[4]))
        if made == capability or (later and found[4] != "a"):
            return True
    return False


# TORCH_CUDA_ARCH_LIST also takes NVIDIA's names of generations.
_CUDA_GENERATIONS = {
    "Maxwell+Tegra": "5.3",
    "Maxwell": "5.0;5.2+PTX",
    "Pascal": "6.0;6.1+PTX",
    "Volta+Tegra": "7.2",
    "Volta": "7.0+PTX",
    "Turing": "7.5+PTX",
    "Ampere+Tegra": "8.7",
    "Ampere": "8.0;8.6+PTX",
    "Ada": "8.9+PTX",
    "Hopper": "9.0+PTX",
    "Blackwell+Tegra": "11.0",
    "Blackwell": "10.0;12.0+PTX",
}


def gencode(nvcc_args: Sequence[str], arch_list: str | None, nvcc: str) -> list[str]:
    """nvcc's arguments for the architectures to compile for.

    Args:
        nvcc_args: the builder's arguments; if they choose architectures themselves, nothing is added.
        arch_list: ``TORCH_CUDA_ARCH_LIST``: numbers (``8.0``, ``9.0a``), ``+PTX`` suffixes and names, separated by
            spaces, commas or semicolons. None or empty: one binary for each major generation that nvcc knows, from
            7.0 on, and PTX for those to come.
        nvcc: its version.

    Raises:
        ToolchainError: an element is neither a number nor a name we know.
    """
    if any(re.match(r"-(-generate-code|gencode|arch|-gpu-architecture)\b", arg) for arg in nvcc_args):
        return []
    if not (arch_list or "").strip():
        release = tuple(map(int, re.findall(r"\d+", nvcc)[:2]))
        if not release or release >= (13,):
            return ["-arch=all-major"]
        # CUDA 12's all-major begins at 5.0, where kernels of ours do not compile.
        arch_list = "7.0 8.0 9.0+PTX" if release < (12, 8) else "7.0 8.0 9.0 10.0 12.0+PTX"
    words = " ".join(_CUDA_GENERATIONS.get(word, word) for word in re.split(r"[\s,;]+", arch_list or "") if word)
    flags: list[str] = []
    for word in re.split(r"[\s;]+", words):
        found = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", word)
        if found is None:
            known = ", ".join(_CUDA_GENERATIONS)
            raise ToolchainError(
                f"TORCH_CUDA_ARCH_LIST={arch_list!r} cannot be used",
                why=f"{word!r} is no architecture",
                hint=f"write numbers as in '8.0;9.0a+PTX', or names: {known}",
            )
        arch = found[1] + found[2] + found[3]
        flags.append(f"-gencode=arch=compute_{arch},code=sm_{arch}")
        if found[4]:
            flags.append(f"-gencode=arch=compute_{arch},code=compute_{arch}")
    return list(dict.fromkeys(flags))
