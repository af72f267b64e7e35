"""The variables: defaults, readers, and a config file that is refused with its line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vlens_cli import env
from vlens_cli.errors import PathError, UsageError


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A home of its own, and none of the variables."""
    for name in [each.name for each in env.VARIABLES] + ["XDG_CACHE_HOME", "XDG_CONFIG_HOME"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def write_config(home: Path, text: str | bytes) -> Path:
    path = home / ".config" / "vlens" / "vlens.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_every_variable_that_the_code_reads_is_in_the_table() -> None:
    source = Path(env.__file__).parent
    # Not click's own _VLENS_COMPLETE.
    read = {name for path in source.rglob("*.py") for name in re.findall(r"(?<!_)VLENS_[A-Z]+", path.read_text())}
    assert read <= {each.name for each in env.VARIABLES}


def test_table_has_no_holes() -> None:
    assert len({each.name for each in env.VARIABLES}) == len(env.VARIABLES)
    assert all(each.name.startswith("VLENS_") and each.default and each.meaning for each in env.VARIABLES)


def test_demo_when_nothing_is_set() -> None:
    assert env.default_model() == ("demo", "default")


def test_config_file_names_the_model(bare: Path) -> None:
    path = write_config(bare, 'model = "org/name"\n')
    assert env.default_model() == ("org/name", str(path))


def test_variable_beats_config_file(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_config(bare, "not toml at all")
    monkeypatch.setenv("VLENS_MODEL", "other")
    assert env.default_model() == ("other", "VLENS_MODEL")


def test_empty_variable_is_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for each in env.VARIABLES:
        monkeypatch.setenv(each.name, "")
    assert env.default_model() == ("demo", "default")
    assert not env.engine_log()


def test_relative_path_in_config_starts_at_the_config(bare: Path) -> None:
    path = write_config(bare, 'model = "./tiny"\n')
    assert Path(env.default_model()[0]) == path.parent / "tiny"


def test_named_config_file(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = bare / "my config.toml"
    path.write_text("model = 'a'\n")
    monkeypatch.setenv("VLENS_CONFIG", "~/my config.toml")
    assert env.default_model() == ("a", str(path))


def test_named_config_file_must_exist(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLENS_CONFIG", str(bare / "none.toml"))
    with pytest.raises(PathError, match=r"no such config file: .*/none\.toml"):
        env.default_model()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("# one\nmodel = demo\n", "line 2: Invalid value"),
        ('model = "demo', "last line: "),
        ('model = "demo"\nmodel = "x"\n', "line 2: Cannot overwrite a value"),
        ('\nmodle = "demo"\n', "line 2: unknown key modle"),
        ('model = "demo"\n\n[extra]\nx = 1\n', "line 3: unknown key extra"),
        ("model = 3\n", "line 1: model is not a text in quotes"),
        (b"model = '\xff'\n", "line 1: it is not UTF-8 text"),
    ],
)
def test_broken_config_names_file_and_line(bare: Path, text: str | bytes, said: str) -> None:
    path = write_config(bare, text)
    with pytest.raises(PathError) as caught:
        env.default_model()
    assert f"{path}, {said}" in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.hint and caught.value.code == "bad_config"


def test_config_that_is_a_folder(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLENS_CONFIG", str(bare))
    with pytest.raises(PathError, match="Is a directory"):
        env.default_model()


def test_folders_follow_home_xdg_and_variable(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert env.cache_folder() == bare / ".cache/vlens"
    assert env.config_file() == bare / ".config/vlens/vlens.toml"
    monkeypatch.setenv("XDG_CACHE_HOME", str(bare / "xdg"))
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative/is/ignored")
    assert env.cache_folder() == bare / "xdg/vlens"
    assert env.config_file() == bare / ".config/vlens/vlens.toml"
    monkeypatch.setenv("VLENS_CACHE", "~/here")
    assert env.cache_folder() == bare / "here"


def test_relative_cache_becomes_absolute(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(bare)
    monkeypatch.setenv("VLENS_CACHE", "here/./there/../x")
    assert env.cache_folder() == bare / "here/x"


def test_unknown_user_is_a_path_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLENS_CACHE", "~nobody-of-that-name/x")
    with pytest.raises(PathError, match="no home folder"):
        env.cache_folder()


@pytest.mark.parametrize(("value", "on"), [("1", True), ("0", False), ("yes", True)])
def test_switches(monkeypatch: pytest.MonkeyPatch, value: str, on: bool) -> None:
    monkeypatch.setenv("VLENS_LOG", value)
    assert env.engine_log() is on and not env.debug()
    monkeypatch.setenv("VLENS_DEBUG", value)
    assert env.debug() is on


def test_settings_show_what_is_in_force(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLENS_MODEL", "x")
    rows = {each.variable.name: (each.value, each.is_set) for each in env.settings()}
    assert rows == {"VLENS_MODEL": ("x", True), "VLENS_CACHE": (str(bare / ".cache/vlens"), False),
                    "VLENS_CONFIG": (str(bare / ".config/vlens/vlens.toml"), False), "VLENS_LOG": ("0", False),
                    "VLENS_RUNTIME": ("", False), "VLENS_KEEP_ALIVE": ("15m", False), "VLENS_KEEP": ("1", False),
                    "VLENS_SLEEP": ("5m", False),
                    "VLENS_DEBUG": ("0", False)}


@pytest.mark.parametrize(("text", "seconds"), [("2", 2), ("90s", 90), ("1.5m", 90), ("2h", 7200), ("0", 0),
                                               ("forever", None)])
def test_durations(text: str, seconds: float | None) -> None:
    assert env.seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "-1", "1d", "1 h"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not a duration"):
        env.seconds(text)


@pytest.mark.parametrize("text", ["0", "many", "-1"])
def test_what_is_no_count_of_engines_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("VLENS_KEEP", text)
    with pytest.raises(UsageError, match="VLENS_KEEP"):
        env.keep()


# Files: the project's before the user's


def test_the_nearest_project_file_comes_before_the_users(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = write_config(bare, 'model = "user"\nkeep_alive = "1h"\n')
    inner = bare / "project" / "a" / "b"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    assert env.default_model() == ("user", str(user))
    project = bare / "project" / "vlens.toml"
    project.write_text('model = "./weights"\nkeep = 2\n')
    assert env.default_model() == (str(project.parent / "weights"), str(project))
    assert (env.keep(), env.keep_alive_text()) == (2, "1h")
    origins = {one.variable.key: one.origin for one in env.settings() if one.is_set}
    assert origins == {"model": str(project), "keep": str(project), "keep_alive": str(user)}
    (inner / "vlens.toml").write_text("")
    assert env.default_model() == ("user", str(user))
    monkeypatch.setenv("VLENS_MODEL", "variable")
    assert env.default_model() == ("variable", "VLENS_MODEL")


def test_a_named_file_is_the_only_one(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_config(bare, 'keep = 3\n')
    monkeypatch.chdir(bare)
    (bare / "vlens.toml").write_text("keep = 2\n")
    (bare / "named.toml").write_text("")
    assert env.keep() == 2
    monkeypatch.setenv("VLENS_CONFIG", str(bare / "named.toml"))
    assert env.keep() == 1 and env.project_file() is None


@pytest.mark.parametrize("key", ["cache", "runtime"])
def test_a_project_does_not_choose_where_the_users_files_lie(bare: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.chdir(bare)
    (bare / "vlens.toml").write_text(f'{key} = "/somewhere"\n')
    with pytest.raises(PathError, match=f"line 1: {key} is for the user's own file"):
        env.settings()
    (bare / "vlens.toml").unlink()
    write_config(bare, f'{key} = "/somewhere"\n')
    assert {one.variable.key: one.value for one in env.settings()}[key] == "/somewhere"


def test_a_project_file_of_another_user_does_not_count(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(bare)
    (bare / "vlens.toml").write_text('model = "theirs"\n')
    monkeypatch.setattr("os.getuid", lambda: 12345)
    seen = Path.stat
    monkeypatch.setattr(Path, "stat", lambda self, **more: type("Stat", (), {
        "st_uid": 54321, "st_mode": seen(self, **more).st_mode})() if self.name == "vlens.toml" else seen(self, **more))
    assert env.project_file() is None


def test_a_file_from_windows(bare: Path) -> None:
    write_config(bare, b'\xef\xbb\xbfmodel = "demo"\r\nkeep = 2\r\n')
    assert env.default_model()[0] == "demo" and env.keep() == 2


@pytest.mark.parametrize(("text", "said"), [("keep = 1.5\n", "keep is not a text"), ("keep = true\n", "keep is not a text"),
                                            ("model = 3\n", "model is not a text")])
def test_values_of_another_kind(bare: Path, text: str, said: str) -> None:
    write_config(bare, text)
    with pytest.raises(PathError, match=said):
        env.keep()


def test_a_count_in_a_file_that_is_none_names_the_file(bare: Path) -> None:
    path = write_config(bare, "keep = 0\n")
    with pytest.raises(UsageError, match=f"{path}, line 1: keep is not a number of engines: 0"):
        env.keep()
