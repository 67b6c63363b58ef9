"""Defects of ranges and graphs."""

from __future__ import annotations

from mutants.mutant import SIMULATED
from mutants.runtime.support import always, member, nothing

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
