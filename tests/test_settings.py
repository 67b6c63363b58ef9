"""Environment variables: typed, read at each access, rejected with their meaning."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ds_plugin_sdk.errors import SettingError
from ds_plugin_sdk.settings import (
    LOCAL_WORLD_SIZE_VARIABLES,
    SLURM_STEP_TASKS_PER_NODE,
    Settings,
    child_environment,
    export,
    settings,
    visible_devices,
)

ROOT = Path(__file__).resolve().parents[1]


def test_values_are_read_at_each_access(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DS_PLUGIN_LOCK_TIMEOUT", raising=False)
    assert settings.lock_timeout == 600
    monkeypatch.setenv("DS_PLUGIN_LOCK_TIMEOUT", "5")
    assert settings.lock_timeout == 5


@pytest.mark.parametrize(("text", "value"), [("1", True), ("on", True), ("TRUE", True), ("0", False), ("no", False)])
def test_flags(text: str, value: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_PLUGIN_COMPILE", text)
    assert settings.compile is value


@pytest.mark.parametrize(
    ("variable", "text", "name"),
    [
        ("DS_PLUGIN_COMPILE", "maybe", "compile"),
        ("DS_PLUGIN_LOCK_TIMEOUT", "soon", "lock_timeout"),
        ("MAX_JOBS", "-1", "max_jobs"),
        ("DS_SIMULATOR_DEVICES", "128", "simulator_devices"),
        ("DS_SIMULATOR_MEMORY_MB", str(2**44), "simulator_memory_mb"),
        ("DS_SIMULATOR_DELAY_US", "-5", "simulator_delay_us"),
        ("CXX", 'g++ "', "cxx"),
        ("CXXFLAGS", "-DNAME='a", "cxxflags"),
        ("DS_PLUGIN_CACHE_DIR", "~nobody-of-that-name/x", "cache_dir"),
    ],
)
def test_a_bad_value_is_an_error_that_explains_the_variable(
    variable: str, text: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(SettingError, match=re.escape(f"{variable}={text!r} cannot be used")) as error:
        getattr(settings, name)
    assert getattr(Settings, name).doc in str(error.value)


@pytest.mark.parametrize("text", ["", " "])
def test_a_variable_that_is_set_to_nothing_is_unset(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As templates of containers and jobs write those that nobody has filled in."""
    every = [setting for _, setting in settings if setting is not Settings.cuda_visible_devices]
    ranks = [*LOCAL_WORLD_SIZE_VARIABLES, SLURM_STEP_TASKS_PER_NODE, "SLURM_NODEID", "DS_BUILD_CPU_ADAM"]
    for variable in (*ranks, *(setting.variable for setting in every)):
        monkeypatch.setenv(variable, text)
    assert [setting.variable for setting in every if setting.read() != setting.default] == []
    assert settings.local_world_size() is None
    assert settings.build_op("DS_BUILD_CPU_ADAM") is None
    export({"DS_ACCELERATOR": "zap"})
    assert settings.accelerator == "zap"


@pytest.mark.parametrize(
    ("listed", "count"), [(None, 2), ("", 0), ("1", 1), ("0,1", 2), ("1, 0", 2), ("0,0", 1), ("7", 0), ("0,x,1", 1)]
)
def test_devices_that_are_hidden_are_not_counted(
    listed: str | None, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ZAP_VISIBLE_DEVICES", raising=False)
    if listed is not None:
        monkeypatch.setenv("ZAP_VISIBLE_DEVICES", listed)
    assert visible_devices("ZAP_VISIBLE_DEVICES", 2) == count


def test_words_are_split_as_a_shell_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXXFLAGS", """-O1 -DNAME='"a b"' -I/some\\ folder""")
    assert settings.cxxflags == ("-O1", '-DNAME="a b"', "-I/some folder")


def test_a_file_of_words_stands_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As to GCC."""
    monkeypatch.chdir(tmp_path)
    words = r"""-DNAME='a b' "-DW=a\$b" '-DV=\"1\"' -I/a\ b"""
    (tmp_path / "more.txt").write_text(f"{words}\n-O1\n", encoding="utf-8")
    (tmp_path / "flags.txt").write_text("@more.txt -g", encoding="utf-8")
    monkeypatch.setenv("CXXFLAGS", "-Wall @flags.txt @nowhere")
    of_file = ("-DNAME=a b", "-DW=a$b", '-DV="1"', "-I/a b", "-O1")
    assert settings.cxxflags == ("-Wall", *of_file, "-g", "@nowhere")
    (tmp_path / "flags.txt").write_bytes(b"\x7fELF\0")
    assert settings.cxxflags == ("-Wall", "@flags.txt", "@nowhere"), "no text"
    (tmp_path / "flags.txt").write_text("@more.txt", encoding="utf-8")
    (tmp_path / "more.txt").write_text("@flags.txt", encoding="utf-8")
    with pytest.raises(SettingError, match="name each other more than 10 deep"):
        _ = settings.cxxflags


def test_no_visible_devices_is_not_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert settings.cuda_visible_devices == ""


def test_no_jobs_are_as_many_as_there_are_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_JOBS", "0")
    assert settings.max_jobs is None


def test_build_variables_override_each_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DS_BUILD_CPU_ADAM", raising=False)
    assert settings.build_op("DS_BUILD_CPU_ADAM") is None
    monkeypatch.setenv("DS_BUILD_CPU_ADAM", "0")
    assert settings.build_op("DS_BUILD_CPU_ADAM") is False


def test_a_child_gets_the_environment_and_the_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_PLUGIN_COMPILE", "0")
    environment = child_environment(DS_PLUGIN_COMPILE="1")
    assert environment["DS_PLUGIN_COMPILE"] == "1"
    assert environment["PATH"]


def test_every_setting_is_documented() -> None:
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    missing = [setting.variable for _, setting in settings if f"`{setting.variable}` | {setting.doc} |" not in page]
    assert not missing
