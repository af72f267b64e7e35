"""Prompts from a column of a Parquet file, through pyarrow, a row group at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from vlens_cli.errors import PathError, PromptError, UsageError
from vlens_cli.query import Prompt

ROWS = 1024


def read(path: str, column: str | None, text: Callable[[str, str], Prompt], ids: Callable[[Any, str], Prompt],
         on_bad: Callable[[str, PromptError], None] | None) -> Iterator[tuple[Prompt, str]]:
    """Each row's prompt, made by `text` or `ids`, and where it stands; a column `id` goes along.

    Raises UsageError without pyarrow or for a column that is not there, PathError for a file that is no Parquet.
    """
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as fault:
        raise UsageError("Parquet files are read by pyarrow, which is not installed", code="no_pyarrow",
                         hint="pip install 'vlens_cli[parquet]'") from fault
    try:
        with ParquetFile(path) as file:
            names = file.schema_arrow.names
            column = column or next((name for name in ("text", "prompt", "tokens") if name in names), None)
            if column not in names:
                raise UsageError(f"{path} has no column {column}" if column else f"which column of {path} holds the prompts?",
                                 hint=f"--column, one of {', '.join(names)}", code="no_column")
            rows = _rows(file, column, "id" if "id" in names and column != "id" else None)
            yield from _prompts(rows, path, column, text, ids, on_bad)
    except (OSError, ArrowException) as fault:
        raise PathError(f"this file cannot be read as Parquet: {path}: {' '.join(str(fault).split())}") from fault


def _rows(file: Any, column: str, named: str | None) -> Iterator[tuple[Any, Any]]:
    for batch in file.iter_batches(batch_size=ROWS, columns=[column, *([named] if named else [])]):
        values = batch.column(column).to_pylist()
        yield from zip(values, batch.column(named).to_pylist() if named else [None] * len(values), strict=True)


def _prompts(rows: Iterator[tuple[Any, Any]], path: str, column: str, text: Callable[[str, str], Prompt],
             ids: Callable[[Any, str], Prompt], on_bad: Callable[[str, PromptError], None] | None
             ) -> Iterator[tuple[Prompt, str]]:
    for n, (value, name) in enumerate(rows, 1):
        where = f"{path}:{n}"
        try:
            if not isinstance(value, str | list):
                raise PromptError(f"{where}: {column} is neither a text nor a list of token ids")
            prompt = text(value, where) if isinstance(value, str) else ids(value, where)
            yield (prompt if type(name) not in (str, int) else prompt._replace(id=name)), where
        except PromptError as error:
            if on_bad is None:
                raise
            on_bad(where, error)
