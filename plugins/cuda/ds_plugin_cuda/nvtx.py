"""Named ranges in NVIDIA's profilers, each in a domain if it names one.

torch knows ranges of the default domain only. Domains are called through the NVTX library that pip installs with torch,
which torch itself does not load. Where it cannot be found, their ranges go to the default domain, with the domain in
front of the name.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

_default: Any = torch.cuda.nvtx  # untyped
_LIBRARIES = ("libnvtx3interop.so.1", "libnvToolsExt.so.1")
_VERSION, _MESSAGE_ASCII = 3, 1


class _Attributes(ctypes.Structure):
    """``nvtxEventAttributes_t``, version 3."""

    _fields_ = (
        ("version", ctypes.c_uint16),
        ("size", ctypes.c_uint16),
        ("category", ctypes.c_uint32),
        ("color_type", ctypes.c_int32),
        ("color", ctypes.c_uint32),
        ("payload_type", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("payload", ctypes.c_uint64),
        ("message_type", ctypes.c_int32),
        ("message", ctypes.c_char_p),
    )


class Domain:
    """A domain and the categories in it."""

    def __init__(self, library: Any, name: str) -> None:
        self._library = library
        self._handle = ctypes.c_void_p(library.nvtxDomainCreateA(name.encode()))
        self._categories: dict[str, int] = {}

    def push(self, message: str, category: str | None) -> int:
        """Open a range; its depth, counted from 0."""
        number = 0 if category is None else self._category(category)
        attributes = _Attributes(version=_VERSION, size=ctypes.sizeof(_Attributes), category=number)
        attributes.message_type, attributes.message = _MESSAGE_ASCII, message.encode()
        return int(self._library.nvtxDomainRangePushEx(self._handle, ctypes.byref(attributes)))

    def pop(self) -> int:
        """Close the innermost range; its depth."""
        return int(self._library.nvtxDomainRangePop(self._handle))

    def _category(self, name: str) -> int:
        if name not in self._categories:
            number = self._categories[name] = len(self._categories) + 1
            self._library.nvtxDomainNameCategoryA(self._handle, ctypes.c_uint32(number), name.encode())
        return self._categories[name]


def push(message: str, domain: str | None, category: str | None) -> int:
    """Open a range of a domain, None being the default one, which has no categories."""
    if domain is None:
        return int(_default.range_push(message))
    found = _domain(domain)
    return int(_default.range_push(f"{domain}: {message}")) if found is None else found.push(message, category)


def pop(domain: str | None) -> int:
    """Close the innermost range of a domain."""
    found = None if domain is None else _domain(domain)
    return int(_default.range_pop()) if found is None else found.pop()


@functools.cache
def _domain(name: str) -> Domain | None:
    library = _library()
    return None if library is None else Domain(library, name)


@functools.cache
def _library() -> Any:
    for name in _candidates():
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        library.nvtxDomainCreateA.restype = ctypes.c_void_p
        return library
    return None


def _candidates() -> Iterator[str]:
    """Where the library may be: loaded already or known to the loader, or in pip's nvidia packages."""
    yield from _LIBRARIES
    packages = importlib.util.find_spec("nvidia")
    for folder in (packages.submodule_search_locations or ()) if packages else ():
        for name in _LIBRARIES:
            yield from map(str, sorted(Path(folder).glob(f"*/lib/{name}"), reverse=True))  # the newest CUDA first
