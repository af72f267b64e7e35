"""Text -> token ids, once, by the model's own tokenizer; and back to what each id stands for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from vlens_cli.driver.boot import TOO_LONG_HINT, translated
from vlens_cli.driver.hide import hide_broken_packages
from vlens_cli.errors import PromptError
from vlens_cli.query import BOS_NOTE, Prompt

NO_TOKENIZER_HINT = "give token ids: --tokens 1,2,3"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "tekken.json")
# Of a text's beginning, for each token that may be fed: a token of a language has about four.
CHARACTERS = 16
# Tokens that one character, or a row of broken ones, is looked for in.
LONGEST_GROUP = 16
# Classes that are nothing but their tokenizer.json.
GENERAL_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")


@dataclass(frozen=True)
class Fed:
    """One prompt as it is fed: `ids`; per token its decoded `texts` and raw `pieces` (None without a tokenizer);
    the `text` that was tokenized (a chat template filled in), or None where ids were given."""

    ids: tuple[int, ...]
    texts: tuple[str | None, ...]
    pieces: tuple[str | None, ...]
    text: str | None
    notes: tuple[str, ...] = ()


class Tokens:
    """The tokenizer of one model folder; a folder without one still names the ids it is given. `most` tokens may be fed."""

    def __init__(self, folder: str, most: int | None = None) -> None:
        self._folder = folder
        self._most = most
        self._loaded: Any = None
        # What each id decodes to: at most a vocabulary, and a long prompt repeats itself.
        self._texts: dict[int, str] = {}

    def feed(self, prompt: Prompt, bos: bool | None, shown: bool = True) -> Fed:
        """Tokenize one prompt. `bos`: add it, leave it out, or (None) follow the tokenizer's own rule. Without `shown`,
        `texts` and `pieces` are left out: looking each token up takes longer than tokenizing.

        Raises PromptError for an empty prompt or a model without a tokenizer or chat template.
        """
        if prompt.tokens is not None:
            ids = list(prompt.tokens)
            return self._fed(ids, None, self._has_files and self._double_bos(ids), shown)
        if not prompt.text:
            raise PromptError("the prompt is empty")
        text = self._templated(prompt) if prompt.chat else prompt.text
        ids = self._encode(text, prompt.chat, bos)
        if not ids:
            raise PromptError("the prompt has no tokens", hint="--bos feeds the beginning-of-sequence token alone")
        return self._fed(ids, text, self._double_bos(ids) or self._missing_bos(ids, bos), shown)

    def text_of(self, token: int) -> str | None:
        """What one id decodes to; None without a tokenizer."""
        if not self._has_files:
            return None
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self.tokenizer.decode([token], **_EXACT)
        return text

    def decode(self, ids: Sequence[int]) -> str | None:
        """The text of several ids; None without a tokenizer."""
        return self._decode(ids) if self._has_files else None

    def ended(self, ids: Sequence[int]) -> int | None:
        """The place of the first id that ends a text, by the model's generation config; None where there is none."""
        return next((n for n, one in enumerate(ids) if one in self._ends), None)

    @cached_property
    def _ends(self) -> frozenset[int]:
        for name in ("generation_config.json", "config.json"):
            try:
                found = json.loads((Path(self._folder) / name).read_text(encoding="utf-8")).get("eos_token_id")
            except (OSError, ValueError, AttributeError):
                continue
            if found is not None:
                return frozenset(found if isinstance(found, list) else [found])
        return frozenset()

    def spans(self, fed: Fed, text: str) -> list[tuple[int, int]]:
        """Token ranges [start, stop) that cover each occurrence of `text` in the fed tokens, in order."""
        whole, starts, ends = self._places(fed.ids)
        found, at = [], whole.find(text)
        while at >= 0 and text:
            end = at + len(text)
            covered = [n for n in range(len(fed.ids)) if starts[n] < end and ends[n] > at]
            found.append((covered[0], covered[-1] + 1))
            at = whole.find(text, at + 1)
        return found

    @lru_cache(maxsize=64)  # noqa: B019 (it lives as long as the session)
    def _places(self, ids: tuple[int, ...]) -> tuple[str, list[int], list[int]]:
        """The decoded text, and where in it each token begins and ends.

        A character of several bytes may be spread over tokens: until its last byte it decodes to U+FFFD. It begins in
        the first of them, and each of them reaches to its end. Tokens are decoded in groups that end with a whole
        character; where the groups do not add up to the text (a tokenizer that looks further back), from the start.
        """
        whole = self._decode(ids)
        starts, ends, begun = [], [], 0
        for group in self._groups(ids):
            for n in range(1, len(group) + 1):
                before, text = self._decode(group[: n - 1]), self._decode(group[:n])
                starts.append(begun + len(before.rstrip("\ufffd")))
                ends.append(begun + (len(text) if n == len(group) else len(text.rstrip("\ufffd")) + 1))
            begun += len(self._decode(group))
        if begun == len(whole):
            return whole, starts, ends
        texts = [self._decode(ids[:n]).rstrip("\ufffd") for n in range(len(ids))]
        starts = [len(text) for text in texts]
        return whole, starts, [max(n + 1, m) for n, m in zip(starts, [*starts[1:], len(whole)], strict=True)]

    def _groups(self, ids: tuple[int, ...]) -> list[tuple[int, ...]]:
        groups, begun = [], 0
        for n in range(1, len(ids) + 1):
            if n == len(ids) or n - begun >= LONGEST_GROUP or not self._decode(ids[begun:n]).endswith("\ufffd"):
                groups.append(ids[begun:n])
                begun = n
        return groups

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), **_EXACT) if ids else ""

    @property
    def tokenizer(self) -> Any:
        """transformers' tokenizer of the folder. Raises PromptError where it has none."""
        if self._loaded is None:
            if not self._has_files:
                raise PromptError(f"this model has no tokenizer, so it takes no text: {self._folder}",
                                  hint=NO_TOKENIZER_HINT, code="no_tokenizer")
            with translated():
                self._loaded = self._load()
        return self._loaded

    def _load(self) -> Any:
        """The tokenizer, by the way that needs no torch where its class is the general one: a prompt that is refused
        should be refused before seconds of imports."""
        named = _tokenizer_class(Path(self._folder))
        if named in GENERAL_CLASSES and (Path(self._folder) / "tokenizer.json").is_file():
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(self._folder)
        hide_broken_packages()
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._folder)

    @cached_property
    def _has_files(self) -> bool:
        return any((Path(self._folder) / name).is_file() for name in TOKENIZER_FILES)

    def _templated(self, prompt: Prompt) -> str:
        if not getattr(self.tokenizer, "chat_template", None):
            raise PromptError("this model has no chat template", hint="leave out --chat", code="no_chat_template")
        system = [{"role": "system", "content": prompt.system}] if prompt.system is not None else []
        messages = [*system, {"role": "user", "content": prompt.text}]
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def _encode(self, text: str, chat: bool, bos: bool | None) -> list[int]:
        """A chat template writes its own special tokens; elsewhere the tokenizer's rule holds, then `bos`."""
        self._check_length(text)
        ids = list(self.tokenizer(text, add_special_tokens=not chat)["input_ids"])
        first = self.tokenizer.bos_token_id
        if bos is True and first is None:
            raise PromptError("this tokenizer has no BOS token", hint="leave out --bos", code="no_bos")
        if bos is True and ids[:1] != [first]:
            return [first, *ids]
        # A BOS that was typed stays; the one that the tokenizer or the template put before the text goes.
        if bos is False and first is not None and ids[:1] == [first]:
            plain = ids[1:] if chat else list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
            return ids[1:] if ids[1 : len(plain) + 1] == plain else ids
        return ids

    def _check_length(self, text: str) -> None:
        """Refuse a text by its beginning where that alone is far too long: a line of megabytes takes minutes to tokenize.
        Raises PromptError."""
        read = CHARACTERS * (self._most or len(text))
        while read < len(text):
            n = len(self.tokenizer(text[:read], add_special_tokens=False)["input_ids"])
            # Twice as many: at the cut there may be some that the whole text does not have.
            if n > 2 * self._most:
                raise PromptError(f"a prompt of {len(text):,} characters, {n:,} tokens in the first {read:,}, is longer than "
                                  f"this engine takes: {self._most}", hint=TOO_LONG_HINT, code="prompt_too_long")
            read *= 4

    def _double_bos(self, ids: list[int]) -> tuple[str, ...]:
        first = self.tokenizer.bos_token_id
        doubled = first is not None and ids[:2] == [first, first]
        return (f"the prompt begins with two BOS tokens ({self.tokenizer.bos_token!r})",) if doubled else ()

    def _missing_bos(self, ids: list[int], bos: bool | None) -> tuple[str, ...]:
        first = self.tokenizer.bos_token_id
        differs = bos is None and first is not None and ids[0] != first
        return (
            BOS_NOTE,
        ) if differs else ()

    def _fed(self, ids: list[int], text: str | None, notes: tuple[str, ...] | bool, shown: bool) -> Fed:
        if not shown:
            return Fed(tuple(ids), (), (), text, notes or ())
        if not self._has_files:
            return Fed(tuple(ids), (None,) * len(ids), (None,) * len(ids), text)
        texts = tuple(map(self.text_of, ids))
        pieces = tuple(self.tokenizer.convert_ids_to_tokens(ids))
        return Fed(tuple(ids), texts, pieces, text, notes or ())


# What was fed, not a tidied sentence.
_EXACT = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}


def _tokenizer_class(folder: Path) -> str | None:
    try:
        return json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("tokenizer_class")
    except (OSError, ValueError, AttributeError):
        return None
