"""The pytest plugin, in miniature projects: options, marks, expectations, crashes."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from ds_plugin_sdk.conformance import pytest_plugin

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.slow

ONLY = ["-k", "misfit"]


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", *arguments, timeout=280)


def test_it_does_nothing_in_the_pytest_of_others() -> None:
    """Every pytest of an environment loads it; before 7.2 a Config had no `args_source`."""
    old: Any = SimpleNamespace(getoption=lambda name: None, getini=lambda name: "")
    pytest_plugin.pytest_configure(old)


def test_each_case_is_an_item_and_a_crash_costs_one(pytester: pytest.Pytester) -> None:
    result = run(pytester, "-v", "--ds-conformance", "misfit:Misfit", *ONLY, "-rs")
    result.assert_outcomes(passed=6, failed=11, skipped=1, deselected=len_of_rest(result))
    result.stdout.fnmatch_lines(
        [
            "ds-conformance: misfit:Misfit, levels: all",
            "conformance::runtime.misfit.passes PASSED*",
            "conformance::runtime.misfit.differs FAILED*",
            "conformance::runtime.misfit.crashes/two/float32 FAILED*",
            "conformance::runtime.misfit.skipped SKIPPED*",
            "conformance::runtime.misfit.counts PASSED*",
            "failed: runtime.misfit.differs",
            "*found    devices: 1",
            "crashed: runtime.misfit.crashes/one",
            "*found    the process ended by signal SIGSEGV",
            "timed out: runtime.misfit.hangs",
            "SKIPPED*the accelerator declares that it is a misfit",
        ]
    )
    result.stdout.no_fnmatch_line("*pytest_plugin.py*Error*")
    result.stdout.re_match_lines([rf"collecting \.\.\. collected {18 + len_of_rest(result)} items / "])


def len_of_rest(result: pytest.RunResult) -> int:
    return result.parseoutcomes().get("deselected", 0)


def test_expectations_are_pytest_s_expected_failures(pytester: pytest.Pytester) -> None:
    pytester.makefile(
        ".toml",
        conformance='[[expected_failure]]\ncheck = "runtime.misfit.crashes/*"\nreason = "MIS-7"\n'
        '[[expected_failure]]\ncheck = "runtime.misfit.counts"\nreason = "MIS-8"\n',
    )
    file = ("--ds-conformance-expectations", "conformance.toml")
    wanted = ["-k", "misfit.crashes or misfit.counts", "-rx"]
    result = run(pytester, "--ds-conformance", "misfit:Misfit", *file, *wanted)
    result.assert_outcomes(xfailed=2, failed=1, deselected=len_of_rest(result))
    result.stdout.fnmatch_lines(["unexpected pass: runtime.misfit.counts", "*expected MIS-8", "XFAIL*MIS-7"])


def test_an_expectation_for_no_case_is_wrong_use(pytester: pytest.Pytester) -> None:
    pytester.makefile(".toml", conformance='[[expected_failure]]\ncheck = "gone"\nreason = "MIS-9"\n')
    result = run(pytester, "--ds-conformance", "misfit:Misfit", "--ds-conformance-expectations", "conformance.toml")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*no case is called 'gone'*"])


def test_the_ini_file_adds_the_suite_where_no_files_are_named(pytester: pytest.Pytester) -> None:
    pytester.makeini(
        "[pytest]\naddopts = --strict-config --strict-markers\n"
        "ds_conformance = misfit:Misfit\nds_conformance_levels = runtime"
    )
    pytester.makepyfile(test_own="def test_passes(): pass")
    with_suite = run(pytester, "-v", "-m", "conformance_runtime", "-k", "misfit.passes")
    with_suite.assert_outcomes(passed=1, deselected=len_of_rest(with_suite))
    with_suite.stdout.no_fnmatch_line("*conformance::ops*")
    run(pytester, "test_own.py").assert_outcomes(passed=1)
    marked = run(pytester, "-m", "conformance_training", "--ds-conformance-level", "runtime")
    assert marked.ret == pytest.ExitCode.NO_TESTS_COLLECTED


def test_a_device_that_is_absent_is_a_skip_for_the_ini_file_and_an_error_on_demand(pytester: pytest.Pytester) -> None:
    info = pytester.mkdir("ds_plugin_gone-1.0.dist-info")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ds-plugin-gone\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("[ds_plugin_sdk.plugins]\ngone = ds_plugin_gone:plugin\n", encoding="utf-8")
    pytester.makepyfile(
        ds_plugin_gone="from ds_plugin_sdk import Plugin, Probe\n"
        "plugin = Plugin('gone', (1, 0), 'nowhere:Gone', probe=lambda: Probe.absent('no /dev/gone'))"
    )
    pytester.makeini("[pytest]\nds_conformance = gone\npythonpath = .")
    result = run(pytester, "-v", "-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["conformance::device SKIPPED*", "SKIPPED*absent: no /dev/gone"])
    result = run(pytester, "--ds-conformance", "gone")
    assert result.ret == pytest.ExitCode.USAGE_ERROR


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--ds-conformance", "nope"], "*there is no such plugin*"),
        (["--ds-conformance", "misfit:Misfit", "--ds-conformance-level", "kernel"], "*no conformance level 'kernel'*"),
    ],
)
def test_wrong_use_is_said_in_one_line(pytester: pytest.Pytester, arguments: list[str], says: str) -> None:
    result = run(pytester, *arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([says])


def test_without_a_plugin_named_it_costs_nothing(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        f"""
        import sys
        def test_nothing_is_imported():
            heavy = {{"torch", "ds_plugin_sdk.conformance.run", "ds_plugin_sdk.conformance.outcome"}}
            assert not heavy & set(sys.modules), {sys.version_info.major}
        """
    )
    result = run(pytester, "--markers")
    result.stdout.no_fnmatch_line("*conformance_runtime*")
    run(pytester).assert_outcomes(passed=1)
