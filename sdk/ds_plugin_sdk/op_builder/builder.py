"""`OpBuilder`: how an op's native code is found or compiled, and what its user gets from ``load()``.

A vendor's builder names sources and flags; everything else is here:

    class FusedAdamBuilder(CppOpBuilder):
        NAME = "fused_adam"

        def sources(self):
            return [self.kernel_path("csrc/adam.cpp")]

        def include_paths(self):
            return [self.kernel_include("csrc/include")]

``FusedAdamBuilder().load()`` takes the native code from the plugin's wheel, from the cache, or from the compiler, in
this order; without any of them it warns once and falls back to the reference implementation in plain torch. What
``load()`` returns has the functions that DeepSpeed calls on an op of that name.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import sys
import time
import warnings
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ds_plugin_sdk import provenance
from ds_plugin_sdk.errors import ArtifactError, BuildError, SdkError, SettingError
from ds_plugin_sdk.op_builder import op_table
from ds_plugin_sdk.paths import folder_of, kernels_root, sdk_root
from ds_plugin_sdk.settings import settings
from ds_plugin_sdk.thread_lock import ThreadLock

if TYPE_CHECKING:
    from ds_plugin_sdk.jit import Artifact, BuildSpec, Source

Library = ModuleType | ctypes.CDLL
Kind = Literal["torch_library", "python_module"]

_load_lock = ThreadLock()
_libraries: dict[tuple[str, str], tuple[OpBuilder, tuple[Artifact, Library] | BuildError]] = {}
_modules: dict[type[OpBuilder], Any] = {}
_prebuilt: dict[str, Path] = {}
_without_kernels: set[tuple[type[OpBuilder], str]] = set()


def add_prebuilt(plugin: str, folder: Path) -> None:
    """Let a plugin's folder of compiled ops serve every builder whose sources it was made from."""
    _prebuilt[plugin] = folder


class OpBuilder:
    """One op's build. Subclass `CppOpBuilder`, `CUDAOpBuilder` or `SYCLOpBuilder`, or this class for a new toolchain.

    Attributes:
        NAME: the op's name in DeepSpeed, such as ``fused_adam``.
        BUILD_VAR: environment variable that puts the op into a wheel (1) or leaves it out (0).
        TOOLCHAIN: name of the compiler family, as registered with `ds_plugin_sdk.jit.register_toolchain`.
        KIND: ``torch_library`` registers kernels for the SDK's torch ops (`DS_KERNELS_IMPL`); ``python_module`` is a
            pybind11 module (`PYBIND11_MODULE(TORCH_EXTENSION_NAME, m)`) which ``load()`` returns itself.
        YIELDS: whether another's op, such as DeepSpeed's own, is the faster one where it is compatible.
        OWN: whether it is an op of the plugin's own, which the plugin's code loads; nobody else asks for its ``NAME``.
    """

    NAME: ClassVar[str] = ""
    BUILD_VAR: ClassVar[str] = ""
    TOOLCHAIN: ClassVar[str] = "cxx"
    KIND: ClassVar[Kind] = "torch_library"
    YIELDS: ClassVar[bool] = False
    OWN: ClassVar[bool] = False

    name: str = ""
    error_log: str | None = None

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.NAME
        self.error_log = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.name = cls.NAME  # for an __init__ that does not call this class's
        if cls.NAME and "BUILD_VAR" not in cls.__dict__:
            cls.BUILD_VAR = f"DS_BUILD_{cls.NAME.upper()}"

    def __repr__(self) -> str:
        return f"<{type(self).__module__}.{type(self).__qualname__} of op '{self.name}'>"

    # ------------------------------------------------------------------ what a vendor states
    def sources(self) -> list[str]:
        """Absolute paths of the source files."""
        raise NotImplementedError(f"{type(self).__name__}.sources() must list the op's source files")

    def include_paths(self) -> list[str]:
        """Absolute paths of folders with the op's headers; the SDK's own are always searched."""
        return []

    def cxx_args(self) -> list[str]:
        """Compiler arguments beyond the toolchain's. ``-march=native`` means this CPU on every architecture."""
        return []

    def nvcc_args(self) -> list[str]:
        """Arguments for nvcc beyond the toolchain's."""
        return []

    def extra_ldflags(self) -> list[str]:
        """Linker arguments."""
        return []

    def libraries_args(self) -> list[str]:
        """Names of libraries to link, without ``-l``."""
        return []

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether the op can be had here. False leaves the reason in `error_log`."""
        try:
            missing = [source for source in self._listed("sources") if not Path(source).is_file()]
        except Exception as error:  # the vendor's own code, and DeepSpeed's reports ask every builder
            return self._incompatible(f"its builder raises {type(error).__name__}: {error}", verbose)
        if missing:
            return self._incompatible(f"source files are missing: {', '.join(missing)}", verbose)
        return True

    def absolute_name(self) -> str:
        """Dotted name under which the op would be imported."""
        return f"{self._package()}.ops.{self.name}_op"

    # ------------------------------------------------------------------ where kernels are
    def kernel_root(self) -> Path:
        """Folder that `kernel_path` and `kernel_include` start from: the plugin's own package."""
        return folder_of(sys.modules[self._package()])

    def kernel_path(self, code_path: str) -> str:
        """Absolute path of a source file inside the plugin's package. Nothing is copied anywhere.

        Raises:
            SdkError: the path leads out of the package.
        """
        return str(self._inside(code_path))

    def kernel_include(self, code_path: str) -> str:
        """Absolute path of a header folder inside the plugin's package. Raises as `kernel_path`."""
        return str(self._inside(code_path))

    def _inside(self, code_path: str) -> Path:
        package, here = self.kernel_root(), folder_of(sys.modules[type(self).__module__])
        # Extensions written for DeepSpeed's own tree count from the builder's folder. Links are not followed: some
        # installers make a package's files links to files elsewhere.
        places = [Path(os.path.normpath(folder / code_path)) for folder in (package, here)]
        path = next((place for place in places if place.exists()), places[0])
        if Path(code_path).is_absolute():  # it may name the package by another way
            path = path.parent.resolve() / path.name
        if not path.is_relative_to(package):
            raise SdkError(
                "a kernel path leads out of its plugin",
                op=self.name,
                why=f"'{code_path}' is {path}, outside of {package}",
                hint="move the file into the plugin's package",
            )
        return path

    def _package(self) -> str:
        """The plugin's own package: the outermost one with an ``__init__.py``; others may share a namespace."""
        names = [*accumulate(type(self).__module__.split("."), "{}.{}".format)]
        return next((name for name in names if _is_own_package(sys.modules.get(name))), names[0])

    def owner(self) -> str:
        """Who provides the op: the name of the plugin's package, for messages and the cache."""
        return self._package().replace("_", "-").replace(".", "-")

    # ------------------------------------------------------------------ build
    def build_spec(self, portable: bool = False) -> BuildSpec:
        """The compiler's input.

        Args:
            portable: for every machine of this architecture rather than for this one (wheels).

        Raises:
            BuildError: the builder raises or gives no lists; or the SDK was imported from an archive, where no compiler
                finds its sources.
            SettingError: an environment variable cannot be understood.
        """
        if not kernels_root().is_dir():
            raise BuildError(
                "the SDK's kernel sources cannot be found",
                why=f"'{sdk_root()}' is no folder of an installed package: it may be in an archive",
                hint="install the SDK, or pack the program with shiv, which unpacks it",
            )
        try:
            return self._stated(portable)
        except (BuildError, SettingError):
            raise
        except Exception as error:  # the vendor's own code
            raise _builder_raises(type(self), error) from error

    def _stated(self, portable: bool) -> BuildSpec:
        """What the builder's methods say, as the compiler's input."""
        from ds_plugin_sdk.jit import BuildSpec

        package = self.kernel_root()
        sources = self.compile_units(portable)
        if not sources:
            raise BuildError(
                "an op's builder lists no sources",
                plugin=self.owner(),
                op=self.name,
                why=f"sources() of {type(self).__module__}.{type(self).__name__} is empty, in the package at {package}",
                hint="where the files are not there: name them as package data, which setuptools leaves out otherwise",
            )
        return BuildSpec(
            name=self.library(),
            owner=self.owner(),
            sources=sources,
            include_dirs=(*map(Path, self._listed("include_paths")), kernels_root() / "include"),
            cxx_args=tuple(self._listed("cxx_args")),
            nvcc_args=tuple(self._listed("nvcc_args")),
            link_args=(
                *self._listed("extra_ldflags"),
                *(f"-l{library}" for library in self._listed("libraries_args")),
            ),
            toolchain=self.TOOLCHAIN,
            kind=self.KIND,
            prebuilt_dirs=tuple(dict.fromkeys((package / "prebuilt", *_prebuilt.values()))),
            roots=tuple({"kernels": kernels_root(), "plugin": package, "sdk": sdk_root()}.items()),
            portable=portable,
        )

    def compile_units(self, portable: bool) -> tuple[Source, ...]:
        """The sources as the compiler sees them; one file may be compiled several times with other arguments."""
        from ds_plugin_sdk.jit import Source

        folders: dict[str, list[Path]] = {}  # of the files of one name: each has an object of its own
        units = []
        for path in map(Path, self._listed("sources")):
            of_name = folders.setdefault(path.name, [path.parent])
            if path.parent not in of_name:
                of_name.append(path.parent)
            place = of_name.index(path.parent)
            units.append(Source(path, tag=str(place) if place else ""))
        return tuple(units)

    def _listed(self, method: str) -> list[str]:
        """What a method of the vendor's lists. Python would take a text for a list of its letters."""
        given = getattr(self, method)()
        if isinstance(given, str | bytes) or not isinstance(given, Iterable):
            raise TypeError(f"{method}() gives {given!r}, and must give a list of texts")
        return [os.fspath(entry) for entry in given]

    def library(self) -> str:
        """The name of the op's library. Builders of one family share one: DeepSpeed asks for Adam under two names."""
        family = op_table.family_of(self.NAME)
        return self.name if self.KIND == "python_module" or family is None else family

    def has_reference(self) -> bool:
        """Whether the op has an implementation in plain torch, which serves where native code cannot be had."""
        return self.KIND == "torch_library" and op_table.family_of(self.NAME) is not None

    # ------------------------------------------------------------------ load
    def load(self, verbose: bool = True) -> Any:
        """The op: native where that can be had, else its reference implementation.

        Returns:
            An object with the functions DeepSpeed calls on an op of this name; for a pybind11 op the module itself.

        Raises:
            BuildError: no native code can be had, and there is no reference, or settings forbid it.
        """
        with _load_lock:
            cls = type(self)
            if cls not in _modules:
                _modules[cls] = self._load_python_module() if self.KIND == "python_module" else self._load_library()
            return _modules[cls]

    def jit_load(self, verbose: bool = True) -> Any:
        """DeepSpeed's name for `load` where nothing is prebuilt; here both are one."""
        return self.load(verbose)

    def _load_python_module(self) -> ModuleType:
        from ds_plugin_sdk import jit

        start = time.perf_counter()
        spec = self.build_spec()
        artifact, module = jit.obtain(spec)
        assert isinstance(module, ModuleType)
        self._record(artifact.origin, str(artifact.path), time.perf_counter() - start)
        return module

    def _load_library(self) -> Any:
        define_ops(self.NAME)
        start = time.perf_counter()
        outcome = self._library_of_process()
        if isinstance(outcome, BuildError):
            self._record("reference", str(outcome))
        else:
            self._record(outcome.origin, str(outcome.path), time.perf_counter() - start)
        return self._functions()

    def _functions(self) -> Any:
        """The functions that DeepSpeed calls on an op of this name; of another op, all the SDK's torch ops."""
        import torch

        return functions_of(self.NAME) or torch.ops.ds_plugin

    def _library_of_process(self) -> Artifact | BuildError:
        """The library, loaded; or why there is none, if the reference implementation may replace it. Tried once."""
        from ds_plugin_sdk import jit

        key = (self.owner(), self.library())
        if key not in _libraries:
            try:
                _libraries[key] = self, jit.obtain(self.build_spec())
            except BuildError as error:
                if not settings.fallback or op_table.family_of(self.NAME) is None:
                    raise
                _libraries[key] = self, error
                warn_of_reference(key[1], error)
        first, outcome = _libraries[key]
        if isinstance(outcome, BuildError):
            return outcome
        check_sources(first, self)
        artifact, library = outcome
        self._use_library(library)
        return artifact

    def _use_library(self, library: Library) -> None:
        """Take from the loaded library what it has beside torch ops. Each builder class of the library is asked."""

    def _record(self, origin: provenance.Origin, detail: str, seconds: float = 0.0) -> None:
        provenance.record(
            self.name, plugin=self.owner(), version=self._version(), origin=origin, seconds=seconds, detail=detail
        )

    def _version(self) -> str:
        return _distribution_version(self.owner())

    def _incompatible(self, reason: str, verbose: bool) -> bool:
        self.error_log = reason
        if verbose:
            warnings.warn(f"ds-plugin-sdk: op '{self.name}': {reason}", RuntimeWarning, stacklevel=3)
        return False


def _is_own_package(module: ModuleType | None) -> bool:
    """Whether it is a package with an ``__init__.py``: one without has no file, and may lie in several folders."""
    return hasattr(module, "__path__") and getattr(module, "__file__", None) is not None


def check_sources(first: OpBuilder, second: OpBuilder) -> None:
    """See that two builders of one library, which is made once, list the same sources.

    Raises:
        BuildError: they do not.
    """
    if type(first) is type(second):
        return
    listed = [builder._listed("sources") for builder in (first, second)]
    if sorted(listed[0]) != sorted(listed[1]):
        names = (type(builder).__name__ for builder in (first, second))
        told = (f"{name}: {', '.join(sources) or 'none'}" for name, sources in zip(names, listed, strict=True))
        raise BuildError(
            f"two builders make one library, {second.library()!r}, of different sources",
            plugin=second.owner(),
            op=second.name,
            why="; ".join(told),
            hint="list all sources in both, or let library() of one return another name, such as its NAME",
        )


def without_kernels(builder: OpBuilder, device_type: str) -> None:
    """Say, once, that what a builder has loaded has no kernel for a device, so that the reference implementation runs.

    Raises:
        ArtifactError: `DS_PLUGIN_FALLBACK=0` forbids that.
    """
    import torch

    _, outcome = _libraries.get((builder.owner(), builder.library()), (builder, None))
    op, told = op_table.by_name(builder.NAME), (type(builder), device_type)
    if isinstance(outcome, BuildError) or op is None or op.torch:
        return
    key = str(torch._C._dispatch_key_for_device(device_type))
    error = ArtifactError(
        f"a library registers no kernel for device '{device_type}'",
        plugin=builder.owner(),
        op=builder.name,
        why=f"{type(builder).__name__} loads a Python module" if outcome is None else str(outcome[0].path),
        hint=f'register them: DS_KERNELS_IMPL({key}, m) {{ m.impl("<op>", ...); }}',
    )
    if not settings.fallback:
        raise error
    if told not in _without_kernels:
        _without_kernels.add(told)
        warn_of_reference(builder.library(), error)
        if outcome is not None:  # a Python module serves those who ask for it
            builder._record("reference", str(error))


def made(builder: type[OpBuilder]) -> OpBuilder:
    """A builder of this class.

    Raises:
        BuildError: its ``__init__`` raises.
    """
    try:
        return builder()
    except Exception as error:  # the vendor's own code
        raise _builder_raises(builder, error) from error


def _builder_raises(builder: type[OpBuilder], error: Exception) -> BuildError:
    return BuildError(
        "an op's builder raises",
        plugin=builder.__module__.partition(".")[0].replace("_", "-"),
        op=builder.NAME,
        why=f"{builder.__module__}.{builder.__name__}: {type(error).__name__}: {error}",
        hint=error.hint if isinstance(error, SdkError) else "",
    )


def warn_of_reference(op: str, why: object) -> None:
    """Warn the caller of ``load()`` that an op is its reference implementation, and why."""
    warnings.warn(
        f"ds-plugin-sdk: op '{op}' falls back to its reference implementation in plain torch, which is slower: {why}",
        RuntimeWarning,
        stacklevel=6,
    )


def builders_of(base: type[OpBuilder], ops: Iterable[op_table.Op]) -> dict[str, type[OpBuilder]]:
    """A builder class for each op, by the name that DeepSpeed asks for.

    Builders that differ in their op alone need no text: a module of builders updates its ``globals()`` with them.

    Args:
        base: what they derive from; it finds sources by `NAME`.
        ops: rows of `op_table.OPS`.
    """
    return {op.builder: derived(base, op) for op in ops}


def derived(base: type[OpBuilder], op: op_table.Op) -> type[OpBuilder]:
    """A builder class that differs from `base` in its op alone."""
    bases = (_FPQuantizerMembers, base) if op.name == "fp_quantizer" else (base,)
    return type(op.builder, bases, {"NAME": op.name, "__module__": base.__module__, "__doc__": base.__doc__})


class _FPQuantizerMembers:
    """What programs ask DeepSpeed's `FPQuantizerBuilder` itself, without loading the op."""

    @staticmethod
    def get_default_quant_dtype() -> Any:
        """The torch dtype of what is stored."""
        import torch

        return torch.uint8

    @staticmethod
    def get_quant_range(q_bits: int | None = None) -> float:
        """The largest number of so many bits; of 8, with 3 of them in the mantissa.

        Raises:
            SdkError: there is no format of so many.
        """
        from ds_plugin_sdk.ops.fp_quantizer import FORMATS

        for (bits, _), form in FORMATS.items():
            if bits == q_bits:
                return form.largest
        known = ", ".join(str(bits) for bits in sorted({bits for bits, _ in FORMATS}))
        raise SdkError(f"there is no format of {q_bits} bits", op="fp_quantizer", why=f"expected one of {known}")


@functools.cache
def _distribution_version(distribution: str) -> str:
    import importlib.metadata

    try:
        metadata = importlib.metadata.metadata(distribution)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return "unknown"
    found: list[str] = metadata.get_all("Version", ["unknown"])  # a folder may have no METADATA
    return found[0]


def define_ops(name: str) -> None:
    """Make sure that the torch ops of an op's family exist, with their reference implementations."""
    family = op_table.family_of(name)
    if family is not None:
        importlib.import_module(f"ds_plugin_sdk.ops.{family}")


def functions_of(name: str) -> ModuleType | None:
    """The module with the functions that DeepSpeed calls on an op, or None for one that it does not ask for."""
    op = op_table.by_name(name)
    return None if op is None or op.functions is None else importlib.import_module(op.functions)


__all__ = [
    "OpBuilder",
    "add_prebuilt",
    "builders_of",
    "check_sources",
    "define_ops",
    "derived",
    "functions_of",
    "made",
    "warn_of_reference",
    "without_kernels",
]
