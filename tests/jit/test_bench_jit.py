"""The benchmark measures what it says: one compilation, and a warm load that compiles nothing."""

from __future__ import annotations

import pytest

from ds_plugin_sdk.bench import jit
from ds_plugin_sdk.settings import child_environment


@pytest.mark.compiler
@pytest.mark.slow
def test_rows() -> None:
    cold, together, warm = jit.run(deepspeed=False, repeats=1, processes=2, warm_repeats=1)
    assert (cold.compilations, together.compilations, warm.compilations) == (1, 1, 0)
    assert together.ratio == pytest.approx(together.seconds / cold.seconds)
    assert 0 < warm.seconds < cold.seconds


def test_a_process_that_fails_is_told() -> None:
    with pytest.raises(RuntimeError, match="on purpose"):
        jit._start("raise SystemExit('on purpose')", child_environment())
