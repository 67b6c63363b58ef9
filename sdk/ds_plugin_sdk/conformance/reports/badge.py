"""A badge for a README: a small SVG that says how many cases hold."""

from __future__ import annotations

from html import escape

from ds_plugin_sdk.conformance.outcome import BROKEN, HOLDS, NOTHING_RUN, Report

_LABEL = "DeepSpeed conformance"
_COLOURS = {HOLDS: "#116329", BROKEN: "#b42318", NOTHING_RUN: "#57606a"}
_LETTER = 6.5  # pixels of a letter, about: the text is stretched to its place

_SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="20" role="img" aria-label="{label}: {message}">
<title>{label}: {message}</title>
<rect width="{width}" height="20" rx="3" fill="#40464d"/>
<path d="M{left} 0h{right}v20h-{right}z" fill="{colour}"/>
<g fill="#fff" font-family="Verdana,sans-serif" font-size="11" text-anchor="middle">
<text x="{label_at}" y="14" textLength="{label_width}">{label}</text>
<text x="{message_at}" y="14" textLength="{message_width}">{message}</text>
</g></svg>
"""


def render(report: Report) -> str:
    """The SVG: green where all that was checked holds, red where something does not, grey where nothing was checked."""
    message = _message(report)
    label_width, message_width = (round(_LETTER * len(text)) for text in (_LABEL, message))
    left, right = label_width + 12, message_width + 12
    return _SVG.format(
        label=escape(_LABEL),
        message=escape(message),
        colour=_COLOURS[report.status],
        width=left + right,
        left=left,
        right=right,
        label_width=label_width,
        message_width=message_width,
        label_at=left / 2,
        message_at=left + right / 2,
    )


def _message(report: Report) -> str:
    counts = report.counts
    passed = counts.get("passed", 0)
    failed, excused = len(report.failures), counts.get("expected failure", 0)
    words = [f"{passed} passed", f"{failed} failed" if failed else "", f"{excused} excused" if excused else ""]
    return ", ".join(filter(None, words)) if report.status != NOTHING_RUN else "nothing checked"
