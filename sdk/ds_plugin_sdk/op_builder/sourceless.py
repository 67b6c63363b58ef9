"""Builders that compile nothing: an op's reference implementation, one made of other ops, another's op, or none."""

from __future__ import annotations

import time
from typing import Any, ClassVar

from ds_plugin_sdk.errors import OpNotImplementedError
from ds_plugin_sdk.op_builder import op_table
from ds_plugin_sdk.op_builder.builder import OpBuilder, define_ops, warn_of_reference
from ds_plugin_sdk.settings import settings


class SourcelessOpBuilder(OpBuilder):
    """An op of which nothing is compiled for its builder. Any other builder that lists no sources lacks files."""

    def sources(self) -> list[str]:
        return []


class ReferenceOpBuilder(SourcelessOpBuilder):
    """An op that this plugin has no native code for: its reference implementation runs on any torch device."""

    def _load_library(self) -> Any:
        define_ops(self.NAME)
        why = "the plugin has no native kernel for this op"
        op = op_table.by_name(self.NAME)
        if op is not None and op.kernels:  # of the others no device has a kernel
            if not settings.fallback:
                raise OpNotImplementedError(
                    "an op has no native kernel for the accelerator's device",
                    op=self.NAME,
                    why="the plugin has none, and DS_PLUGIN_FALLBACK=0 forbids the reference implementation",
                    hint="unset DS_PLUGIN_FALLBACK; a vendor: add a builder of this NAME to the plugin",
                )
            warn_of_reference(self.library(), why)
        self._record("reference", why)
        return self._functions()


class CombinedOpBuilder(SourcelessOpBuilder):
    """An op that is several families at once, such as DeepSpeed's inference module: norms, softmax, attention and more.

    It has no sources of its own. Loading it loads each family, native where the device has a kernel.

    Attributes:
        PARTS: the builders of its families.
    """

    PARTS: ClassVar[tuple[type[OpBuilder], ...]] = ()

    def families(self) -> tuple[str, ...]:
        """The families this op is made of, modules of `ds_plugin_sdk.ops`."""
        op = op_table.by_name(self.NAME)
        return () if op is None else op.families

    def _load_library(self) -> Any:
        for part in self.PARTS:
            part().load(verbose=False)
        return self._functions()


class LentOpBuilder(SourcelessOpBuilder):
    """An op that the SDK has, but not native in all parts, and another has native code for: DeepSpeed itself.

    Which of the two it is, is decided at the first use: another's builder may have to ask the device.

    Attributes:
        LENT: the other's builder, used where it is compatible.
        OURS: the SDK's, used elsewhere.
    """

    LENT: ClassVar[type[Any]]
    OURS: ClassVar[type[OpBuilder]]

    def uses_lent(self) -> bool:
        """Whether the other's op can be had here."""
        try:
            return bool(self.LENT().is_compatible(verbose=False))
        except Exception:  # DeepSpeed's builders raise where CUDA's toolkit is missing
            return False

    def _load_library(self) -> Any:
        if not self.uses_lent():
            return self.OURS().load(verbose=False)
        start = time.perf_counter()
        module = self.LENT().load(verbose=False)
        self._record("lent", f"{self.LENT.__module__}.{self.LENT.__qualname__}", time.perf_counter() - start)
        return module

    def owner(self) -> str:
        return self.LENT.__module__.partition(".")[0] if self.uses_lent() else self.OURS().owner()


class NotImplementedBuilder(SourcelessOpBuilder):
    """An op that is not offered on this device. It has the op's name, so that DeepSpeed's reports can list it."""

    def is_compatible(self, verbose: bool = False) -> bool:
        # DeepSpeed's report asks this of every name, and its table says the answer.
        return self._incompatible("not offered on this device", verbose=False)

    def load(self, verbose: bool = True) -> Any:
        raise OpNotImplementedError(
            "this op is not offered on the current device",
            op=self.name,
            why="neither the current plugin nor the SDK implements it",
            hint="`sdk report` lists the ops that are offered and where each comes from",
        )


__all__ = [
    "CombinedOpBuilder",
    "LentOpBuilder",
    "NotImplementedBuilder",
    "ReferenceOpBuilder",
    "SourcelessOpBuilder",
]
