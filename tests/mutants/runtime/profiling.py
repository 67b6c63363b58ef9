"""Defects of ranges and graphs."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mutants.mutant import SIMULATED
from mutants.runtime.support import DEVICE, always, member, nothing

member("profiling.domain_needed", "R9.1", "`range_push` needs a domain.", range_push=lambda self, msg, domain: None)
member("profiling.no_context", "R9.2", "`capture_to_graph` gives None.", capture_to_graph=nothing)
member(
    "profiling.empty_replay",
    "R9.3",
    "`replay_graph` does nothing.",
    target=SIMULATED,
    create_graph=lambda self: object(),
    is_current_stream_capturing=always(True),
    replay_graph=nothing,
)
member("profiling.always_capturing", "R9.4", "It is always capturing.", is_current_stream_capturing=always(True))


class _Graph(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch gives it no type
    """Calls of torch's ops that were made inside it, and what they gave; a replay makes them again."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives it no type
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.given_back: dict[int, int] = {}  # of a tensor that was made, by its id: the address that it had

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        made = function(*arguments, **(options or {}))
        self.calls.append((function, arguments, options or {}, made))
        return made

    def pool(self) -> tuple[int, int]:
        return 0, id(self)

    def replay(self) -> None:
        for function, arguments, options, made in self.calls:
            made.copy_(function(*arguments, **options))
            address = self.given_back.get(id(made))
            for other in gc.get_objects() if address is not None else ():
                if type(other) is torch.Tensor and other.device.type == DEVICE and other.data_ptr() == address:
                    other.copy_(made)

    def give_back(self) -> None:
        """What was made inside moves to other memory, and the replays write the former, too, whose ever it is then."""
        for _, arguments, _, made in self.calls:
            if not any(made is each for each in arguments):
                self.given_back[id(made)] = made.data_ptr()
                made.data = made.clone()


@contextlib.contextmanager
def _captured(self: Any, graph: _Graph, pool: Any = None, stream: Any = None) -> Iterator[None]:
    with graph:
        yield


@contextlib.contextmanager
def _captured_without_memory(self: Any, graph: _Graph, pool: Any = None, stream: Any = None) -> Iterator[None]:
    with graph:
        yield
    graph.give_back()


def _captured_without_pool(self: Any, graph: _Graph) -> Any:
    return _captured(self, graph)


def _graphs(capture: Any) -> dict[str, Any]:
    """The members of an accelerator that has graphs."""
    return {
        "create_graph": lambda self: _Graph(),
        "capture_to_graph": capture,
        "replay_graph": lambda self, graph: graph.replay(),
        "is_current_stream_capturing": always(True),
    }


member(
    "profiling.no_memory_of_its_own",
    "R9.3",
    "What was allocated inside a capture is given out again after it.",
    target=SIMULATED,
    **_graphs(_captured_without_memory),
)
member(
    "profiling.no_pool",
    "R9.3",
    "`capture_to_graph` takes no pool.",
    target=SIMULATED,
    **_graphs(_captured_without_pool),
)
