"""Tasks that a program does in turn, for checks that ask for one each: starting ranks takes longer than most tasks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ds_plugin_sdk.conformance import programs
from ds_plugin_sdk.conformance.check import NonconformanceError
from ds_plugin_sdk.conformance.target import Target

# A task's name and its parameters.
Task = tuple[str, Mapping[str, Any]]


class InTurn:
    """The tasks of one program.

    The program gives ``{"done": ...}`` after each task on each rank, and ends at the first that fails. Those that come
    after it are done in another run.

    Args:
        program: its name.
        tasks: all that a target is to do.
        ranks: how many processes do them together on a target.
        timeout: seconds for a run.
        arguments: the program's arguments before the tasks.
    """

    def __init__(
        self,
        program: str,
        tasks: Callable[[Target], Sequence[Task]],
        *,
        ranks: Callable[[Target], int],
        timeout: float,
        arguments: Sequence[str] = (),
    ) -> None:
        self._program, self._tasks, self._ranks = program, tasks, ranks
        self._timeout, self._arguments = timeout, arguments
        self._results: dict[str, dict[str, Any]] = {}

    def result(self, target: Target, name: str, **parameters: Any) -> list[Any]:
        """What each rank gave for a task.

        Raises:
            NonconformanceError: the task failed.
        """
        results = self._results.setdefault(target.name, {})
        wanted = _key((name, parameters))
        while wanted not in results:
            results.update(self._run(target, self._next(target, wanted, results)))
        given = results[wanted]
        if isinstance(given, NonconformanceError):
            raise given
        return list(given)

    def _next(self, target: Target, wanted: str, results: Mapping[str, Any]) -> list[Task]:
        tasks = [task for task in self._tasks(target) if _key(task) not in results]
        assert wanted in map(_key, tasks), f"{wanted} is not planned"
        return [task for task in tasks if _key(task) == wanted] if target.one_task_a_run else tasks

    def _run(self, target: Target, tasks: Sequence[Task]) -> dict[str, Any]:
        outcomes = programs.run_to_the_end(
            self._program,
            target,
            *self._arguments,
            json.dumps([[name, dict(parameters)] for name, parameters in tasks]),
            ranks=self._ranks(target),
            timeout=self._timeout,
        )
        done = [[result["done"] for result in results if "done" in result] for _, results, _ in outcomes]
        count = min(map(len, done))
        found: dict[str, Any] = {_key(task): [rank[i] for rank in done] for i, task in enumerate(tasks[:count])}
        if count < len(tasks):
            failure = programs.failure_of(outcomes, self._timeout)
            found[_key(tasks[count])] = failure or NonconformanceError(f"the program ended before {tasks[count][0]}")
        return found


def _key(task: Task) -> str:
    return json.dumps([task[0], dict(task[1])], sort_keys=True)
