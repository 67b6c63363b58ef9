"""What to do about what compilers, linkers and the system say."""

from __future__ import annotations

import re

# Patterns of what is said, and what the reader can do.
_HINTS = (
    (
        r"Python\.h: No such file",
        "Python's headers are missing: install python3-dev (Debian), python3-devel (RHEL), or use a Python with them",
    ),
    (
        r"torch/.*\.h: No such file",
        "torch's headers are missing or older than 2.11: reinstall torch; a frozen program has none, and needs wheels "
        "of plugins with their ops inside",
    ),
    (
        r"unsupported GNU version|unsupported clang version",
        "the host compiler is too new for nvcc: name an older one with CXX, e.g. CXX=g++-13",
    ),
    (
        r"Unsupported gpu architecture|is not defined for option 'gpu-(architecture|code)'",
        "this nvcc does not know an architecture asked for: check TORCH_CUDA_ARCH_LIST against `nvcc --list-gpu-arch`",
    ),
    (
        r"bad value .* for .-m(arch|cpu)|unknown (target CPU|architecture)|invalid -march|not a recognized",
        "the compiler is too old for this CPU's name (g++ >= 12 or clang >= 14 know those of 2022): use a newer one",
    ),
    (
        r"unrecognized (command[- ]line )?option|unknown argument|unknown option",
        "the compiler does not know an argument: check CXX, CFLAGS, CXXFLAGS and LDFLAGS",
    ),
    (
        r"No space left on device|Disk quota exceeded",
        "the disk is full: free some space, or put the cache elsewhere with DS_PLUGIN_CACHE_DIR",
    ),
    (
        r"did not end within",
        "does it wait for a licence server, or a file system? Where it is only slow, raise DS_PLUGIN_LOCK_TIMEOUT",
    ),
    (r"Too many open files", "no more files may be open at once: see `ulimit -n`"),
    (r"File size limit exceeded|File too large", "a file may not be that large here: see `ulimit -f`"),
    (
        r"Killed|out of memory|virtual memory exhausted|Cannot allocate memory",
        "the compiler was killed, probably for want of memory: try MAX_JOBS=1",
    ),
    (r"Resource temporarily unavailable", "no more processes may be started: see `ulimit -u`, and try MAX_JOBS=1"),
    (
        r"undefined reference to .(std::|operator new|__cxa_|__gxx_personality)",
        "the C++ library is not linked: is CXX a C compiler? Name its C++ sibling, as in CXX=g++",
    ),
    (
        r"is not a member of 'std'|no (template|member) named '\w+' in namespace 'std'|"
        r"error: .*only available with .-std=",
        "the C++ library lacks what C++17 has: is there an older -std= in CFLAGS or CXXFLAGS, or an old compiler?",
    ),
    (
        r"undefined (reference to|symbol:) .?__(ubsan|gcov)",
        "what CXXFLAGS asks for by -fsanitize=undefined or --coverage, LDFLAGS must ask for too",
    ),
    (
        r"undefined (reference to|symbol:) .?__(asan|tsan|msan|lsan)",
        "leave -fsanitize= out of CXXFLAGS: Python would have to be started with that sanitizer's library",
    ),
    (r"undefined reference to .main'", "-pie in LDFLAGS makes programs, no libraries: leave it out"),
    (
        r"cannot find ['\"`\u2018](ld|gold|lld|mold|bfd)\b|invalid linker name",
        "the linker that -fuse-ld= names, in LDFLAGS or CXXFLAGS, is not there: install it, or leave that out",
    ),
    (
        r"undefined reference|cannot find -l",
        "a library is missing at the link: check LDFLAGS, and the builder's libraries_args and extra_ldflags",
    ),
)


def hint_for(said: str) -> str:
    """The first hint that suits; empty if none does."""
    return next((hint for pattern, hint in _HINTS if re.search(pattern, said)), "")


__all__ = ["hint_for"]
