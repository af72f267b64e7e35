"""`python -m vlens_cli.driver.demo SRC.gguf FOLDER`: convert the demo model's GGUF to a safetensors folder.

A process of its own, started by `vlens_cli.models.demo`: torch and transformers stay out of the user's shell, and Ctrl-C
or a crash in here leaves that process able to clean up.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from vlens_cli.driver.hide import hide_broken_packages

SOURCE = "HuggingFaceTB/SmolLM2-135M-Instruct"


def convert(source: Path, folder: Path) -> None:
    """Write `source`, a GGUF file, as config, fp32 weights and tokenizer into the new folder `folder`."""
    hide_broken_packages()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # A plain mkdir: if the parent process died and its work folder was removed, this must fail, not come back.
    folder.mkdir()
    where = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
    _save_weights(model, folder / "model.safetensors")
    _save_config(model, folder)


def _save_weights(model: Any, path: Path) -> None:
    """`save_pretrained` refuses a model that was read from GGUF; the tied head is the embedding once more."""
    from safetensors.torch import save_file

    state = {name: value.contiguous() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    save_file(state, path, metadata={"format": "pt"})
    # safetensors writes 0600, whatever the user's umask is.
    umask = os.umask(0)
    os.umask(umask)
    path.chmod(0o666 & ~umask)


def _save_config(model: Any, folder: Path) -> None:
    """The weights are fp32 now, so nothing may say that they are quantized; GGUF has no class name, and a title that
    is no name."""
    del model.config.quantization_config
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    path = folder / "config.json"
    fields = json.loads(path.read_text(encoding="utf-8"))
    fields["_model_name_or_path"] = SOURCE
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
