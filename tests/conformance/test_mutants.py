"""The hunt: what counts as killed, what as survived, and that no clause is without a mutant."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_plugin_sdk.conformance import check, suite
from mutants import all_mutants
from mutants.hunt import Hunt, hunt, idle, keep, kept


@pytest.fixture(scope="module")
def hunts() -> dict[str, Hunt]:
    """The mutants that the misfit brings, hunted; here they are declared by importing it, as in a worker."""
    suite.checks()  # all of the SDK's are declared
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "_checks", {})  # the misfit's are for workers: other tests look at all that there are
        import misfit  # noqa: F401  # imported to declare its mutants

    mine = [mutant for mutant in all_mutants() if mutant.name.startswith("misfit.")]
    return {each.mutant.name.removeprefix("misfit."): each for each in hunt(mine, 2, lambda each: None)}


@pytest.mark.slow
def test_a_mutant_is_killed_by_the_check_of_its_clause(hunts: dict[str, Hunt]) -> None:
    found = hunts["found"]
    assert found.killed
    assert found.check == "runtime.misfit.counts"
    assert found.killer is not None and found.killer.failure is not None
    assert found.killer.failure.what == "devices: 3"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("unseen", "runtime.misfit.passes passed"),
        ("proves_nothing", "runtime.misfit.differs fails without it too: devices: 1"),
        ("without_a_case", "clause R98.1 has no case for it"),
    ],
)
def test_a_survivor_says_why(hunts: dict[str, Hunt], name: str, why: str) -> None:
    assert not hunts[name].killed
    assert hunts[name].survived == why


@pytest.mark.slow
def test_what_a_hunt_kept_is_not_tried_again(hunts: dict[str, Hunt], tmp_path: Path) -> None:
    """Survivors are, and whether a killer passes without the defect is asked again."""
    file, mutants = tmp_path / "ends", [each.mutant for each in hunts.values()]
    for each in hunts.values():
        keep(each, file)
    ended = kept(file, mutants)
    assert set(ended) == {"misfit.found", "misfit.proves_nothing"}
    tried: list[str] = []
    again = hunt(mutants, 1, lambda each: tried.append(each.mutant.name), ended)
    assert sorted(tried) == ["misfit.unseen", "misfit.without_a_case"]
    assert {each.mutant.name: (each.killed, each.survived) for each in again} == {
        each.mutant.name: (each.killed, each.survived) for each in hunts.values()
    }


def test_there_is_nothing_before_the_first_hunt(tmp_path: Path) -> None:
    assert kept(tmp_path / "absent", all_mutants()) == {}


@pytest.mark.slow
def test_a_check_that_kills_none_is_named(hunts: dict[str, Hunt]) -> None:
    names = ["runtime.misfit.counts", "runtime.misfit.differs", "runtime.misfit.passes"]
    assert idle(names, list(hunts.values())) == ["runtime.misfit.differs", "runtime.misfit.passes"]


def test_every_clause_has_a_mutant_and_every_mutant_a_clause() -> None:
    """That each is killed is for `make mutants` to show, which takes minutes."""
    own = "misfit"
    mutants = [mutant for mutant in all_mutants() if not mutant.name.startswith(own)]
    clauses = {check.clause.number: check for check in suite.checks() if own not in check.name}
    assert {mutant.clause for mutant in mutants} == set(clauses)
    assert all(mutant.level == clauses[mutant.clause].level for mutant in mutants)
    assert len(mutants) >= 80
