"""DeepSpeed's own front ends over the ops."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from ds_plugin_sdk.conformance.check import Clause, NonconformanceError, Parameters, check, expect
from ds_plugin_sdk.conformance.front_ends import FRONT_ENDS
from ds_plugin_sdk.conformance.target import Target


def each_front_end(target: Target) -> Iterator[Parameters]:
    """Every front end."""
    return ({"front_end": front_end.name} for front_end in FRONT_ENDS)


@check(
    "ops.front_end",
    Clause(
        "O7.1",
        "DeepSpeed's own front end of an op constructs and runs on the device, and gives what its formula gives.",
        reason="DeepSpeed's users call the op through it alone; it relies on names, order of arguments and "
        "what is written in place.",
    ),
    cases=each_front_end,
    isolated=True,
    timeout=180,
)
def front_end(target: Target, front_end: str) -> None:
    try:
        importlib.import_module("deepspeed")
    except ImportError as missing:
        raise NonconformanceError(
            "DeepSpeed cannot be imported", why=str(missing), hint="pip install 'ds-plugin-sdk[deepspeed]'"
        ) from missing
    found = next(each for each in FRONT_ENDS if each.name == front_end)
    for result in found.run(target.device):
        actual = result.actual.detach().cpu().double()
        expect(
            actual.shape == result.expected.shape,
            f"{front_end}: {result.what} has shape {list(actual.shape)}",
            why=f"expected {list(result.expected.shape)}",
        )
        error = (actual - result.expected).abs().nan_to_num(float("inf"))
        if error.numel() and float(error.max()) > result.tolerance:
            i = int(error.argmax())
            raise NonconformanceError(
                f"{front_end}: element {i} of {result.what} is {actual.flatten()[i].item():.9g}, "
                f"its formula gives {result.expected.flatten()[i].item():.9g}",
                why=f"allowed is an error of {result.tolerance:.2g}",
                hint=f"the op is that of {found.builder}",
            )
