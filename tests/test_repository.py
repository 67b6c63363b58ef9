"""What the repository says of itself, where two places say it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import ds_plugin_sdk

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = ROOT / "plugins" / "xyz_template"
PACKAGES = {
    "ds-plugin-sdk": ROOT / "sdk" / "ds_plugin_sdk",
    "ds-plugin-cpu": ROOT / "plugins" / "cpu" / "ds_plugin_cpu",
    "ds-plugin-cuda": ROOT / "plugins" / "cuda" / "ds_plugin_cuda",
}
PLUGINS = [name for name in PACKAGES if name != "ds-plugin-sdk"]
PYTHONS = ["3.10", "3.11", "3.12", "3.13", "3.14"]


def project(name: str) -> dict[str, Any]:
    folder = ROOT if name == "ds-plugin-sdk" else PACKAGES[name].parent
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_make_help_lists_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = [target for line in re.findall(r"(?m)^\.PHONY: (.+)$", makefile) for target in line.split()]
    listed = re.findall(r"(?m)^\t@echo 'make ([a-z-]+) ", makefile)
    # The rows of `make test-matrix` stand in its recipe's last line.
    assert sorted(listed) == sorted(set(targets) - {"help", "$(MATRIX)"})


# --- Versions: the rules are RELEASING.md's ------------------------------------------------------------------------


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_has_the_version_of_the_sdk(name: str) -> None:
    assert project(name)["version"] == ds_plugin_sdk.__version__
    source = (PACKAGES[name] / "__init__.py").read_text(encoding="utf-8")
    assert f'__version__ = "{ds_plugin_sdk.__version__}"' in source


def test_the_template_and_the_citation_have_the_version_of_the_sdk() -> None:
    template = json.loads((TEMPLATE / "cookiecutter.json").read_text(encoding="utf-8"))
    assert template["sdk_version"] == ds_plugin_sdk.__version__
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == ds_plugin_sdk.__version__
    assert citation["license"] == project("ds-plugin-sdk")["license"]


@pytest.mark.parametrize("name", PLUGINS)
def test_our_plugins_accept_the_minor_version_that_they_are_released_with(name: str) -> None:
    major, minor = (int(number) for number in ds_plugin_sdk.__version__.split(".")[:2])
    assert f"ds-plugin-sdk>={major}.{minor},<{major}.{minor + 1}" in project(name)["dependencies"]


def test_manifests_name_the_interface_that_the_sdk_offers() -> None:
    """Ours, the template's, and those that the documentation shows."""
    files = [
        *(PACKAGES[name] / "__init__.py" for name in PLUGINS),
        *TEMPLATE.rglob("__init__.py"),
        ROOT / "README.md",
        *(ROOT / "docs").glob("*.md"),
    ]
    stated = [
        (file.name, (int(major), int(minor)))
        for file in files
        for major, minor in re.findall(r"sdk_api=\((\d+), (\d+)\)", file.read_text(encoding="utf-8"))
    ]
    assert len(stated) >= 4
    assert not [manifest for manifest in stated if manifest[1] != ds_plugin_sdk.SDK_API]


# --- What hosting reads -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_index_shows_where_the_project_lives(name: str) -> None:
    urls = project(name)["urls"]
    assert {"Homepage", "Documentation", "Repository", "Issues", "Changelog"} == set(urls)
    for url in urls.values():
        rest = url.removeprefix("https://github.com/ds-plugin-sdk/ds-plugin-sdk")
        assert rest != url, url
        path = re.sub(r"^/(?:blob|tree)/main/", "", rest)
        assert rest in {"", "/issues"} or (ROOT / path).exists(), url


def test_the_pythons_are_the_same_everywhere() -> None:
    classifiers = project("ds-plugin-sdk")["classifiers"]
    assert [line.rpartition(" ")[2] for line in classifiers if ":: Python :: 3." in line] == PYTHONS
    assert workflow("ci.yml")["jobs"]["test"]["strategy"]["matrix"]["python"] == PYTHONS
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme.count(f"Python {PYTHONS[0]} to {PYTHONS[-1]}") == 2, "the badge and the requirements"


@pytest.mark.parametrize(
    "form", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda form: form.stem
)
def test_an_issue_form_asks_for_the_report(form: Path) -> None:
    stated = yaml.safe_load(form.read_text(encoding="utf-8"))
    if form.stem == "config":
        assert stated["contact_links"]
        return
    assert {"name", "description", "body"} <= set(stated)
    fields = [field["attributes"]["label"] for field in stated["body"]]
    assert "Output of `sdk report`" in fields
    assert len({field["id"] for field in stated["body"]}) == len(fields)


def test_pre_commit_runs_what_make_lint_runs() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    local = [hook["entry"].split()[0] for repo in hooks if repo["repo"] == "local" for hook in repo["hooks"]]
    assert local == [".venv/bin/ruff", ".venv/bin/ruff", ".venv/bin/mypy"]


# --- Workflows --------------------------------------------------------------------------------------------------------

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def workflow(name: str) -> dict[Any, Any]:
    return yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text(encoding="utf-8"))


def steps(name: str) -> Iterator[dict[str, Any]]:
    for job in workflow(name)["jobs"].values():
        yield from job.get("steps", [])


def test_there_are_workflows() -> None:
    assert [file.name for file in WORKFLOWS] == ["ci.yml", "docs.yml", "nightly.yml", "release.yml", "wheels.yml"]


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_a_workflow_may_read_and_no_more_unless_a_job_says_so(file: Path) -> None:
    stated = workflow(file.name)
    assert stated["permissions"] == {"contents": "read"}
    more = {name: job["permissions"] for name, job in stated["jobs"].items() if "permissions" in job}
    # Trusted publishing exchanges the job's identity for an upload token; Pages ask for it too.
    expected = {
        "docs.yml": {"deploy": {"pages": "write", "id-token": "write"}},
        "release.yml": {"publish": {"id-token": "write"}},
    }
    assert more == expected.get(file.name, {})


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_a_workflow_pins_its_actions_and_runs_targets_that_exist(file: Path) -> None:
    for step in steps(file.name):
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+)", step["uses"]), step
    targets = re.findall(r"(?m)^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(encoding="utf-8"))
    # An expression in a command would be pasted into the shell as it is: values come by the environment.
    for command in (step["run"] for step in steps(file.name) if "run" in step):
        assert "${{" not in command
        for line in command.splitlines():
            if line.startswith("make "):
                assert line.split()[-1] in targets, line


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_a_job_needs_jobs_that_exist_and_ends_in_time(file: Path) -> None:
    jobs = workflow(file.name)["jobs"]
    for name, job in jobs.items():
        needs = job.get("needs", [])
        assert set([needs] if isinstance(needs, str) else needs) <= set(jobs), name
        assert "timeout-minutes" in job or "uses" in job, name
        if "uses" in job:
            called = workflow(Path(job["uses"]).name)
            assert "workflow_call" in called[True]  # YAML reads the key `on` as a truth value


def test_workflows_that_a_newer_push_makes_useless_are_cancelled_but_no_release() -> None:
    groups = {file.name: workflow(file.name)["concurrency"] for file in WORKFLOWS}
    assert all(
        "github.event_name == 'pull_request'" in groups[name]["cancel-in-progress"]
        for name in ("ci.yml", "docs.yml", "wheels.yml")
    )
    assert groups["release.yml"]["cancel-in-progress"] is False
