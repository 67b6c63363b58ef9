"""The parent's side of `sdk fuzz`: cases in turn, in a worker that may crash or hang, and what fails made smaller."""

from __future__ import annotations

import itertools
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from ds_plugin_sdk.conformance import op_info
from ds_plugin_sdk.conformance.fuzz import Found, Fuzzed
from ds_plugin_sdk.conformance.ops.support import name_of
from ds_plugin_sdk.conformance.process import START_TIMEOUT, Worker, WorkerError
from ds_plugin_sdk.errors import ConformanceError

TIMEOUT = 60.0

# How a device's kernel rejects what only it can see, such as an index that is out of range.
_ASSERTED = re.compile("Assertion .* failed|device-side assert")

# So many failures of one op are reported; then it is left alone.
_ENOUGH = 3


@dataclass
class Tally:
    """What came of all cases.

    Attributes:
        calls: by op.
        rejected: of these, by kernel and reference alike.
        failures: cases that failed, made smaller, with what came of them.
    """

    calls: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[Fuzzed, Found]] = field(default_factory=list)


class Fuzzer:
    """Runs cases on a target. A context manager, for it holds a process.

    Args:
        target: name of an installed plugin, or ``module:attribute``, as `Target.find` takes it.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self._worker: Worker | None = None

    def __enter__(self) -> Fuzzer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._retire()

    def run(self, case: Fuzzed) -> Found:
        """What comes of a case; a crash or a hang is a failure, too.

        Raises:
            ConformanceError: the target cannot be had, or there is no such op.
        """
        if self._worker is None:
            self._start((case.op,))
        try:
            found = Found(**self._ask({"do": "fuzz", "case": case.id}, TIMEOUT))
        except WorkerError as error:
            self._retire()
            found = Found(f"{error.what}\n{error.output}", "", 0, False)
        if not _ASSERTED.search(found.failure):
            return found
        # The process is lost, or its device is: what a kernel finds there it cannot raise.
        self._retire()
        self._start((case.op,))
        return Found("", "", 0, True) if self._ask({"do": "fuzz reference", "case": case.id}, TIMEOUT) else found

    def shrink(self, case: Fuzzed, found: Found) -> tuple[Fuzzed, Found]:
        """A simpler case that fails, too: smaller sizes, then fewer edits."""
        for simpler in case.smaller(found.edits):
            again = self.run(simpler)
            if again.failure:
                return self.shrink(simpler, again)
        return case, found

    def campaign(
        self,
        seconds: float,
        seed: int = 0,
        *,
        ops: Sequence[str] = (),
        dtypes: Sequence[str] = (),
        tell: Callable[[Fuzzed, Found], None],
    ) -> Tally:
        """Run cases of every op and dtype in turn until the time is over.

        Args:
            seconds: how long; every op and dtype has at least one case.
            seed: of the first case; the next ones count on.
            ops: only these.
            dtypes: these, instead of those that the target declares.
            tell: called with each failure, made smaller.

        Raises:
            ConformanceError: the target cannot be had, or no op is left.
        """
        if unknown := {*ops} - {op.name for op in op_info.infos()}:
            raise ConformanceError(
                f"there is no op {min(unknown)!r} to fuzz",
                why="it is none of the SDK's ops; a plugin's own have no reference to be held against",
                hint="sdk conformance NAME --op tries a plugin's own; sdk conformance NAME --list has ops and dtypes",
            )
        if unknown := {*dtypes} - {name_of(dtype) for op in op_info.infos() for dtype in op.dtypes}:
            raise ConformanceError(
                f"there is no op of dtype {min(unknown)!r} to fuzz",
                hint="sdk conformance NAME --list has ops and dtypes",
            )
        known = self._start(ops)
        chosen = [
            (op.name, dtype)
            for op in op_info.infos()
            for dtype in map(name_of, op.dtypes)
            if dtype in (dtypes or known) and op.name in (ops or (op.name,))
        ]
        if not chosen:
            raise ConformanceError("no op is left to try", hint="sdk conformance NAME --list has ops and dtypes")
        tally, end = Tally(), time.monotonic() + seconds
        failed: Counter[str] = Counter()
        for number in itertools.count(seed):
            for op, dtype in chosen:
                if failed[op] >= _ENOUGH:
                    continue
                case = Fuzzed(op, dtype, number)
                found = self.run(case)
                tally.calls[op] += 1
                tally.rejected[op] += found.rejected
                if found.failure:
                    failed[op] += 1
                    tally.failures.append(self.shrink(case, found))
                    tell(*tally.failures[-1])
                if number > seed and time.monotonic() > end:
                    return tally
            if all(failed[op] >= _ENOUGH for op, _ in chosen):
                return tally
        return tally

    def _start(self, ops: Sequence[str]) -> list[str]:
        """Have a worker with the kernels of these ops, of all if there are none; gives the dtypes of the target."""
        self._worker = self._worker or Worker(self._target)
        return list(self._ask({"do": "start fuzz", "ops": list(ops)}, START_TIMEOUT))

    def _ask(self, request: dict[str, Any], timeout: float) -> Any:
        assert self._worker is not None
        answer = self._worker.ask(request, timeout)
        if isinstance(answer, dict) and "error" in answer:
            raise ConformanceError(answer["error"]["what"], why=answer["error"]["why"], hint=answer["error"]["hint"])
        return answer

    def _retire(self) -> None:
        if self._worker is not None:
            self._worker.close()
        self._worker = None
