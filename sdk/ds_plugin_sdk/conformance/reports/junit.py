"""JUnit's XML, as CI systems read it: one suite for each level."""

from __future__ import annotations

from xml.etree import ElementTree

from ds_plugin_sdk.conformance.outcome import LEVELS, Outcome, Report, explain

# What XML 1.0 cannot say.
_FORBIDDEN = {code: "?" for code in range(32) if chr(code) not in "\t\n\r"}

# What JUnit counts as skipped.
_EXCUSED = ("skipped", "expected failure", "DeepSpeed's limit")


def render(report: Report) -> str:
    """The document. Crashes and timeouts are errors, expected failures are skipped with their reason."""
    root = ElementTree.Element("testsuites", name=f"conformance of {report.target}", time=f"{report.seconds:.3f}")
    for level in LEVELS:
        outcomes = [outcome for outcome in report.outcomes if outcome.item.level == level]
        if outcomes:
            root.append(_suite(report.target, level, outcomes))
    if report.problems:
        root.append(_problems(report))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True)


def _suite(target: str, level: str, outcomes: list[Outcome]) -> ElementTree.Element:
    suite = ElementTree.Element("testsuite", name=f"{target}.{level}", attrib=_counts(outcomes), time=_time(outcomes))
    for outcome in outcomes:
        item = outcome.item
        case = ElementTree.SubElement(
            suite, "testcase", classname=f"{target}.{item.check}", name=item.id, time=f"{outcome.seconds:.3f}"
        )
        _end(case, outcome, target)
    return suite


def _end(case: ElementTree.Element, outcome: Outcome, target: str) -> None:
    failure = outcome.failure
    if outcome.verdict in _EXCUSED:
        ElementTree.SubElement(case, "skipped", message=_clean(f"{outcome.verdict}: {outcome.reason}"))
    elif outcome.failed:
        kind = "error" if outcome.verdict in ("crashed", "timed out") else "failure"
        message = failure.what if failure is not None else f"expected to fail: {outcome.reason}"
        element = ElementTree.SubElement(case, kind, message=_clean(message), type=outcome.verdict)
        element.text = _clean(explain(outcome, target))


def _problems(report: Report) -> ElementTree.Element:
    count = str(len(report.problems))
    suite = ElementTree.Element("testsuite", name="expectations", tests=count, failures=count, errors="0", skipped="0")
    for problem in report.problems:
        case = ElementTree.SubElement(suite, "testcase", classname="expectations", name=_clean(problem))
        ElementTree.SubElement(case, "failure", message=_clean(problem))
    return suite


def _counts(outcomes: list[Outcome]) -> dict[str, str]:
    verdicts = [outcome.verdict for outcome in outcomes]
    errors = sum(verdict in ("crashed", "timed out") for verdict in verdicts)
    failures = sum(outcome.failed for outcome in outcomes) - errors
    skipped = sum(verdict in _EXCUSED for verdict in verdicts)
    return {
        "tests": str(len(outcomes)),
        "failures": str(failures),
        "errors": str(errors),
        "skipped": str(skipped),
    }


def _time(outcomes: list[Outcome]) -> str:
    return f"{sum(outcome.seconds for outcome in outcomes):.3f}"


def _clean(text: str) -> str:
    return text.translate(_FORBIDDEN)
