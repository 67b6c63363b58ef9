"""Level ``distributed``: the collectives that DeepSpeed uses, by two ranks on the target's device and backend.

collectives    D1 to D5   values
order          D6         streams, groups, the life of a process group
failures       D7         a rank that dies, a rank that does not come
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable

from ds_plugin_sdk.conformance import programs
from ds_plugin_sdk.conformance.check import Clause, Parameters, check, expect
from ds_plugin_sdk.conformance.in_turn import InTurn, Task
from ds_plugin_sdk.conformance.runtime.support import indexed, needs_streams
from ds_plugin_sdk.conformance.target import Target

_SECONDS = 240.0

# A rank that does not come at all is waited for so long before the other counts as hanging.
_LATE_SECONDS = 60.0

# After these a rank gives up a collective: where all is well, and where another rank is not.
_PATIENCE, _SHORT_PATIENCE = 60.0, 5.0

_Cases = Callable[[Target], Iterable[Parameters]]

# The tasks of the program, with their cases.
_planned: dict[str, _Cases] = {}


def _once(target: Target) -> Iterable[Parameters]:
    return ({},)


def _declared(*more: str) -> _Cases:
    """A case for each declared dtype that training reduces, and for some more."""

    def cases(target: Target) -> Iterable[Parameters]:
        names = [str(dtype).removeprefix("torch.") for dtype in target.dtypes]
        return [{"dtype": name} for name in (*names, *more)]

    return cases


def _needs_two_ranks(target: Target) -> str | None:
    count = int(target.accelerator.device_count())
    return f"two ranks need two devices; the accelerator declares {count}" if indexed(target) and count < 2 else None


def _collective(
    task: str,
    number: str,
    text: str,
    reason: str,
    *,
    cases: _Cases = _once,
    needs: Callable[[Target], str | None] = lambda target: None,
) -> None:
    """Declare a check that runs one task of `ds_plugin_sdk.conformance.programs.collectives`."""
    _planned[task] = cases
    check(
        f"distributed.collectives.{task}",
        Clause(number, text, reason),
        cases=cases,
        needs=lambda target: _needs_two_ranks(target) or needs(target),
        timeout=2 * _SECONDS,
    )(functools.partial(_expect_done, task))


def _expect_done(task: str, target: Target, **parameters: str) -> None:
    _two_ranks.result(target, task, **parameters)


def _tasks(target: Target) -> list[Task]:
    left_out = {"on_a_side_stream"} if needs_streams(target) else set()
    return [(task, each) for task, cases in _planned.items() if task not in left_out for each in cases(target)]


_two_ranks = InTurn("collectives", _tasks, ranks=lambda target: 2, timeout=_SECONDS, arguments=[str(_PATIENCE)])


# ------------------------------------------------------------------------------------------------------ D1: reductions
_collective(
    "all_reduce",
    "D1.1",
    "`all_reduce` with SUM, MAX, MIN and PRODUCT gives every rank the result; MAX and MIN also in every declared dtype "
    "and in uint8.",
    "Gradients (SUM), norms, and overflow flags in bytes (MAX), steps of a schedule (MIN).",
    cases=lambda target: [
        *({"op": op} for op in ("SUM", "MAX", "MIN", "PRODUCT")),
        *({"op": op, **each} for op in ("MAX", "MIN") for each in _declared("uint8")(target)),
    ],
)
_collective(
    "all_reduce_average",
    "D1.2",
    "`all_reduce` and `reduce_scatter_tensor` with AVG give the mean, or raise where the backend has no AVG; they "
    "never give the sum.",
    "ZeRO averages gradients this way where it may, and DeepCompile its profiles.",
)
_collective(
    "all_reduce_dtype",
    "D1.3",
    "`all_reduce` takes every dtype that the accelerator declares, and int64, int32 and uint8.",
    "Gradients in the model's dtype, counters and overflow flags.",
    cases=_declared("int64", "int32", "uint8"),
)
_collective(
    "all_reduce_large",
    "D1.4",
    "`all_reduce` of millions of elements, of any number, is right in each of them.",
    "Buckets of gradients have 5e8 elements by default, and an odd rest.",
)
_collective(
    "all_reduce_empty",
    "D1.5",
    "Collectives of no elements return, and leave the group usable.",
    "A rank may own no elements of a small parameter.",
)
_collective(
    "asynchronous",
    "D1.6",
    "With `async_op=True` every collective that takes it gives a work handle; after `wait()` the result is there for "
    "the current stream, and once synchronized `is_completed()` is True. Handles are waited for in any order, "
    "and again.",
    "ZeRO starts several and waits later.",
)
_collective(
    "reduce",
    "D1.7",
    "`reduce` gives the root the sum.",
    "ZeRO-1 and 2 without reduce_scatter reduce each gradient to its owner.",
)
_collective(
    "reduce_scatter",
    "D1.8",
    "`reduce_scatter` of a list gives each rank its sum.",
    "ZeRO-3 on backends without the form on one tensor.",
)
_collective(
    "reduce_scatter_tensor",
    "D1.9",
    "`reduce_scatter_tensor` gives each rank its part of the sum, in every declared dtype; of a matrix its rows.",
    "How ZeRO-2 and 3 reduce gradients.",
    cases=_declared(),
)

_collective(
    "large",
    "D1.10",
    "Other collectives of millions of elements, of any number, are right in each of them.",
    "Parameters and buckets are larger than a transport's buffers.",
    cases=lambda target: (
        {"collective": name}
        for name in ("broadcast", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "send")
    ),
)

_collective(
    "integers",
    "D1.11",
    "int64 is exact beyond 32 bits and beyond what a float holds.",
    "DeepSpeed exchanges sizes, offsets and indices of samples.",
)

_collective(
    "parts",
    "D1.12",
    "Collectives take tensors that begin in the middle of an allocation, and write nothing beside them; `all_reduce` "
    "and `broadcast` take one of no dimensions, too.",
    "Gradients are slices of flat buffers; losses and norms are numbers.",
)

# --------------------------------------------------------------------------------- D2: broadcast, gather and scatter
_collective(
    "broadcast",
    "D2.1",
    "`broadcast` gives every rank the root's values, from any root, in every declared dtype, int64 and uint8.",
    "The engine broadcasts the model's parameters when it starts; inference broadcasts RNG states as bytes.",
    cases=_declared("int64", "uint8"),
)
_collective(
    "objects",
    "D2.2",
    "`broadcast_object_list` and `all_gather_object` bring Python objects, of any size and from any root.",
    "Checkpoint tags and configurations are agreed on this way.",
)
_collective("gather", "D2.3", "`gather` gives any root every rank's tensor, in order.", "Logging and evaluation.")
_collective("scatter", "D2.4", "`scatter` gives each rank its tensor of the root's list.", "Part of `deepspeed.comm`.")

# ------------------------------------------------------------------------------------------------------ D3: all gather
_collective(
    "all_gather",
    "D3.1",
    "`all_gather` gives every rank each rank's tensor, in order.",
    "Partitioned parameters and activations are assembled this way.",
)
_collective(
    "all_gather_into_tensor",
    "D3.2",
    "`all_gather_into_tensor` gives every rank all parts in one tensor, in order, in every declared dtype; of matrices "
    "one above the other.",
    "How ZeRO-3 fetches parameters, and ZeRO-1 and 2 the updated ones.",
    cases=_declared(),
)
_collective(
    "all_gather_in_place",
    "D3.3",
    "`all_gather_into_tensor` takes a part of its output as input.",
    "ZeRO-1 and 2 gather a flat buffer of which each rank has updated its part.",
)
_collective(
    "coalesced",
    "D3.4",
    "Several collectives inside torch's coalescing manager are all done when it is waited for; a backend that has no "
    "such thing raises when it is entered.",
    "ZeRO-3 fetches the parameters of a block this way.",
)

# ------------------------------------------------------------------------------------------------------ D4: all to all
_collective(
    "all_to_all_single",
    "D4.1",
    "`all_to_all_single` exchanges equal parts.",
    "Mixture of experts and sequence parallelism (Ulysses).",
)
_collective(
    "all_to_all_uneven",
    "D4.2",
    "`all_to_all_single` takes sizes for each rank, zero among them; of a matrix they count rows.",
    "Experts get as many tokens as chose them.",
)
_collective("all_to_all", "D4.3", "`all_to_all` exchanges the tensors of a list.", "Part of `deepspeed.comm`.")

# -------------------------------------------------------------------------------------------------- D5: point to point
_collective(
    "send_and_receive",
    "D5.1",
    "`send` and `recv` bring tensors in the order in which they were sent.",
    "Pipeline stages pass activations and gradients on.",
)
_collective(
    "both_ways",
    "D5.2",
    "`isend` and `irecv`, alone and through `batch_isend_irecv`, bring their tensors once waited for.",
    "Pipeline stages and ring attention exchange with both neighbours at once.",
)

# ----------------------------------------------------------------------------------------- D6: order, groups, life span
_ORDERED = (
    "all_reduce",
    "broadcast",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "batch_isend_irecv",
)

_collective(
    "barrier",
    "D6.1",
    "No rank leaves `barrier` before the last has entered it.",
    "One rank writes a checkpoint or compiles an op, the others wait.",
)
_collective(
    "ordered",
    "D6.2",
    "A collective sees what was submitted to the current stream before it, and what is submitted after it, or with "
    "`async_op=True` after `wait()`, sees its result.",
    "No wait stands between the backward pass and the reduction.",
    cases=lambda target: (
        {"collective": name, "by": by}
        for name in _ORDERED
        for by in ("the call", "wait")
        if (name, by) != ("batch_isend_irecv", "the call")  # it always gives what is to be waited for
    ),
)
_collective(
    "on_a_side_stream",
    "D6.3",
    "The same holds for a collective inside `stream(s)`, with `wait_stream` before and after.",
    "ZeRO's `overlap_comm`.",
    cases=lambda target: ({"collective": name} for name in _ORDERED),
    needs=needs_streams,
)
_collective(
    "input_reused",
    "D6.10",
    "The input of a collective may be written after the call, and with `async_op=True` dropped before `wait()`: other "
    "ranks get what it held.",
    "Buckets are filled again, and gradients freed, as soon as their reduction was submitted.",
    cases=lambda target: (
        {"collective": name, "how": how}
        for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "batch_isend_irecv")
        for how in ("written", "dropped")
        if (name, how) != ("batch_isend_irecv", "written")  # what is sent is to be left alone until it is waited for
    ),
)
_collective(
    "groups",
    "D6.4",
    "`new_group` makes groups of some ranks, also a second one of all; a collective concerns its group alone, "
    "and takes ranks as they are numbered among all.",
    "Data, tensor, expert and pipeline parallelism have groups of their own.",
)
_collective(
    "parallel_module",
    "D6.5",
    "`DistributedDataParallel` on the device gives the mean of the ranks' gradients.",
    "What users compare DeepSpeed with; it uses futures of works and bucket views.",
)
_collective(
    "device_kept",
    "D6.6",
    "A collective leaves the current device.",
    "What is allocated next belongs on this rank's device.",
)
_collective(
    "again",
    "D6.7",
    "After `destroy_process_group` a process group can be made again.",
    "Elastic training and notebooks do so.",
)


@check(
    "distributed.ranks.end",
    Clause(
        "D6.8",
        "A rank that ends without `destroy_process_group` ends with status 0.",
        reason="Most scripts never destroy it; the launcher takes any other status for a failure.",
    ),
    needs=_needs_two_ranks,
    timeout=2 * _SECONDS,
)
def end(target: Target) -> None:
    programs.run("collectives", target, *_alone(_PATIENCE, "ends_by_itself"), ranks=2, timeout=_SECONDS)


@check(
    "distributed.ranks.more",
    Clause(
        "D6.9",
        "Collectives of three ranks, or four, give what those of two do.",
        reason="A ring of two has no direction, and trees are whole for powers of two.",
    ),
    needs=lambda target: (
        f"three ranks need three devices; the accelerator declares {int(target.accelerator.device_count())}"
        if indexed(target) and int(target.accelerator.device_count()) < 3
        else None
    ),
    cases=lambda target: (
        {"ranks": str(ranks)}
        for ranks in (3, 4)
        if ranks == 3 or not indexed(target) or target.accelerator.device_count() > 3
    ),
    timeout=2 * _SECONDS,
)
def more(target: Target, ranks: str) -> None:
    programs.run("collectives", target, *_alone(_PATIENCE, "more_ranks"), ranks=int(ranks), timeout=_SECONDS)


# -------------------------------------------------------------------------------------------------------- D7: failures
def _alone(patience: float, task: str) -> tuple[str, str]:
    return str(patience), json.dumps([[task, {}]])


def _expect_error(target: Target, task: str) -> None:
    arguments = _alone(_SHORT_PATIENCE, task)
    code, results, output = programs.run_to_the_end(
        "collectives", target, *arguments, ranks=2, timeout=_LATE_SECONDS, until=0
    )[0]
    expect(
        code is not None,
        f"the surviving rank hangs: it was killed after {_LATE_SECONDS:g} s",
        why=f"its collectives have a timeout of {_SHORT_PATIENCE:g} s; it printed last:\n{output}",
    )
    failure = next((result for result in results if "failure" in result), {"failure": output, "own": code == 0})
    expect(not failure["own"], f"the surviving rank ended with status {code}: {failure['failure']}")


@check(
    "distributed.ranks.death",
    Clause(
        "D7.1",
        "Where a rank dies, a collective of another ends in an error within the group's timeout; it does not hang.",
        reason="The launcher then ends the job, and a scheduler can start it again.",
    ),
    needs=_needs_two_ranks,
    timeout=_SECONDS,
)
def death(target: Target) -> None:
    _expect_error(target, "a_rank_dies")


@check(
    "distributed.ranks.lateness",
    Clause(
        "D7.2",
        "Where a rank does not come, a collective of another ends in an error after the group's timeout.",
        reason="Two ranks that call different collectives end with an error instead of waiting for ever.",
    ),
    needs=_needs_two_ranks,
    timeout=_SECONDS,
)
def lateness(target: Target) -> None:
    _expect_error(target, "a_rank_is_late")
