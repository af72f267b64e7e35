"""`vlens config`: what is in force, and where it comes from."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from vlens_cli import env


def test_every_setting_and_where_it_comes_from(shell):
    (shell.folder / "vlens.toml").write_text('model = "org/name"\n')
    user = Path(os.environ["XDG_CONFIG_HOME"]) / "vlens" / "vlens.toml"
    user.parent.mkdir(parents=True)
    user.write_text('keep_alive = "2h"\nmodel = "other"\n')
    body = json.loads(shell.real("config", env={"VLENS_KEEP": "3"}).stdout)
    assert (body["schema_version"], body["command"]) == (1, "config")
    found = {one["variable"]: (one["value"], one["origin"]) for one in body["settings"]}
    assert set(found) == {each.name for each in env.VARIABLES}
    project = str((shell.folder / "vlens.toml").resolve())
    assert found["VLENS_MODEL"] == ("org/name", project) and found["VLENS_KEEP_ALIVE"] == ("2h", str(user))
    assert found["VLENS_KEEP"] == ("3", "VLENS_KEEP") and found["VLENS_DEBUG"] == ("0", "default")
    assert body["files"] == [{"of": "project", "path": project, "exists": True}, {"of": "user", "path": str(user), "exists": True}]
    table = shell.real("config", "--table").stdout
    assert "org/name" in table and f"user file: {user}" in table


def test_one_value_alone(shell):
    assert shell.real("config", "keep_alive").stdout == "15m\n"
    assert shell.real("config", "VLENS_MODEL", env={"VLENS_MODEL": "x"}).stdout == "x\n"
    done = shell.real("config", "keepalive")
    assert done.returncode == 2 and "there is no such setting: keepalive" in done.stderr and "keep_alive" in done.stderr


def test_a_project_file_that_is_wrong_stops_with_its_line(shell):
    (shell.folder / "vlens.toml").write_text("# ours\nmodle = 1\n")
    done = shell.real("config")
    assert done.returncode == 2 and "vlens.toml, line 2: unknown key modle" in done.stderr


def test_a_file_of_endless_brackets_is_refused(shell):
    (shell.folder / "vlens.toml").write_text("x=" + "[" * 100_000)
    done = shell.real("config")
    assert done.returncode == 2 and "vlens.toml, its brackets are too deep" in done.stderr


@pytest.mark.parametrize("line, said", [
    ('keep_alive = "soon"', "keep_alive is not a duration: soon"), ("keep_alive = -1", "keep_alive is not a duration: -1"),
    ('keep = "many"', "keep is not a number of engines: many"), ('model = ""', "model is empty"),
])  # fmt: skip
def test_a_value_that_is_wrong_stops_every_command_that_reads_the_file(shell, line, said, hook):
    (shell.folder / "vlens.toml").write_text(f"# ours\n{line}\n")
    for done in (shell.real("config"), shell.real("config", "cache"), shell.real("hooks"), shell.real("engine", "status"),
                 shell.fake("capture", "--hook", hook, "hello")):
        assert done.returncode == 2 and f"{shell.folder / 'vlens.toml'}, line 2: {said}\n" in done.stderr
        assert f"hint: {line.split()[0]} = " in done.stderr


@pytest.mark.parametrize("name", ["VLENS_KEEP_ALIVE", "VLENS_SLEEP"])
def test_a_variable_that_is_no_duration_is_named(shell, name):
    done = shell.real("config", env={name: "soon"})
    assert done.returncode == 2 and f"{name} is not a duration: soon" in done.stderr and f"hint: {name}=15m" in done.stderr
