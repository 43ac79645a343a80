"""Reads the records of data files: JSON Lines, JSON, CSV, Parquet, Arrow and folders of them."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

BYTE_ORDER_MARK = "\ufeff"
SEPARATORS = {".csv": ",", ".tsv": "\t"}
COLUMNAR = {".parquet": "parquet", ".arrow": "arrow", ".feather": "arrow"}
"""Kinds of file that the datasets library reads, by suffix."""
SAVED = ("dataset_dict.json", "state.json")
"""One of these is in a folder that its `save_to_disk` wrote."""

Record = tuple[dict[str, Any], str]
"""A record, and its place for messages."""


def records_of(path: Path, setting: str, form: str) -> Iterator[Record]:
    """The records of a file, as its suffix says; any other is JSON Lines, whose blank lines are
    skipped. `form` says what one must be.

    Raises ValueError naming `setting`, the file and the first bad line's or row's number.
    """
    what = f"{setting}={path}"
    if path.suffix in COLUMNAR and path.is_file():
        rows = _columnar(path, what)
    elif path.suffix in SEPARATORS:
        rows = _separated(_text(path, what), SEPARATORS[path.suffix], what)
    else:
        text = _text(path, what)
        array = _array(text, what, form) if path.suffix == ".json" else None
        rows = _lines(text, what, form) if array is None else iter(array)
    if (first := next(rows, None)) is None:
        raise ValueError(f"{what}: the file is empty; {form}")
    yield first
    yield from rows


def split_of(source: str, setting: str, split: str, subset: str | None) -> Iterator[Record]:
    """The records of a split of a Hugging Face data set, or of a folder with one or with its files.
    A folder of a single set, saved without splits, has each. Raises ValueError naming `setting`."""
    import datasets

    files: list[str] = []
    try:
        if any((Path(source) / name).is_file() for name in SAVED):
            rows = datasets.load_from_disk(source)
            rows = rows[split] if isinstance(rows, dict) else rows
        else:
            if Path(source).is_dir():
                made = datasets.load_dataset_builder(source, subset)
                # The library would guess the types of the columns, and read 007 as 7.
                if made.name == "csv":
                    files = made.config.data_files[split]
            rows = None if files else datasets.load_dataset(source, subset, split=split)
    except Exception as error:  # the library raises dozens of types
        raise ValueError(
            f"{setting}={source!r}: its split {split!r} did not load ({error}); check the name, "
            "the splits (task.params.train_split, eval_split) and the network, or give a file in "
            "task.path"
        ) from error
    for file in files:
        yield from records_of(Path(file), setting, "give it rows")
    yield from _rows(rows or (), f"{setting}={source}, {split}")


def has_no_splits(folder: Path) -> bool:
    """Returns whether a single data set was saved there."""
    return (folder / "state.json").is_file()


def text_of(record: dict[str, Any], key: str, place: str, *, may_be_empty: bool = False) -> str:
    """The text at `key`. Raises ValueError if it is missing, is empty or is no Unicode text."""
    text = record.get(key)
    if not isinstance(text, str) or not (may_be_empty or text.strip()):
        empty = "a string" if may_be_empty else "a non-empty string"
        raise ValueError(f'{place}: "{key}" must be {empty}')
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f'{place}: "{key}" has half of a surrogate pair, {text[error.start]!r} at character '
            f"{error.start}, which no tokenizer takes; remove it, or write the whole character"
        ) from error
    return text


def _text(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ValueError(f"{what}: there is no such file; give the path of one") from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{what}: not a text file in UTF-8 ({error}); write it in UTF-8, or give a Parquet or "
            "Arrow file its suffix"
        ) from error
    except OSError as error:
        raise ValueError(f"{what}: not a readable file: {error}; correct the path") from error


def _lines(text: str, what: str, form: str) -> Iterator[Record]:
    # Not splitlines: a string of JSON may hold other separators, such as U+2028, as they are.
    for number, marked in enumerate(text.split("\n"), start=1):
        if (line := marked.removeprefix(BYTE_ORDER_MARK)).strip():
            place = f"{what}, line {number}"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:  # too many digits, or nested too deeply
                why = str(error)
                if isinstance(error, json.JSONDecodeError):
                    why = f"{error.msg} at column {error.colno}"
                raise ValueError(f"{place}: not JSON: {why}; {form}") from error
            yield _object(record, place, form), place


def _array(text: str, what: str, form: str) -> list[Record] | None:
    """The records of one JSON value: a list, or an object with a list in `data`. None for another
    text, which may be JSON Lines."""
    try:
        given = json.loads(text.removeprefix(BYTE_ORDER_MARK))
    except (ValueError, RecursionError):
        return None
    if isinstance(given, dict) and isinstance(given.get("data"), list):
        given = given["data"]
    if not isinstance(given, list):
        return None
    places = ((one, f"{what}, row {number}") for number, one in enumerate(given))
    return [(_object(one, place, form), place) for one, place in places]


def _object(record: object, place: str, form: str) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise ValueError(f"{place}: not an object; {form}")
    return record


def _separated(text: str, separator: str, what: str) -> Iterator[Record]:
    """The rows below the line of names. All values are text: 007 stays 007."""
    csv.field_size_limit(2**31 - 1)
    file = io.StringIO(text.removeprefix(BYTE_ORDER_MARK), newline="")
    rows = csv.reader(file, delimiter=separator, strict=True)
    try:
        names = next(rows, [])
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(
                f"{what}: {names.count(twice[0])} columns are named {twice[0]!r}; "
                "rename all but one"
            )
        for row in filter(None, rows):
            place = f"{what}, line {rows.line_num}"
            if len(row) != len(names):
                raise ValueError(
                    f"{place}: {len(row)} values for the {len(names)} columns {', '.join(names)}; "
                    "put a value that has a separator in it into quotes"
                )
            # Most writers of TSV quote nothing: such a mark has swallowed what follows it.
            if separator == "\t" and any(set(value) & set("\t\r\n") for value in row):
                raise ValueError(
                    f"{place}: a value that begins with a quotation mark goes on past a tab or the "
                    "end of its line; double its marks and put it into quotes, or give a CSV file"
                )
            yield dict(zip(names, row, strict=True)), place
    except csv.Error as error:
        raise ValueError(f"{what}, line {rows.line_num}: not CSV: {error}") from error


def _columnar(path: Path, what: str) -> Iterator[Record]:
    import datasets

    kind = COLUMNAR[path.suffix]
    try:
        # Streaming, as else the library would write a copy below the home folder.
        rows = datasets.load_dataset(kind, data_files=str(path), split="train", streaming=True)
        yield from _rows(rows, f"{what}, row")
    except Exception as error:  # the library raises dozens of types
        raise ValueError(
            f"{what}: no {kind.capitalize()} file that can be read ({error}); write it anew, or "
            "give a JSONL file"
        ) from error


def _rows(rows: Any, what: str) -> Iterator[Record]:
    """The rows of a data set of the datasets library."""
    features = getattr(rows, "features", None)
    is_narrow = re.search("float(16|32)", str(features))
    for number, row in enumerate(rows):
        yield dict(_as_written(row, features) if is_narrow else row), f"{what} {number}"


def _as_written(value: Any, feature: Any) -> Any:
    """`value` with the narrow floats as they are written: 0.1, which is 0.10000000149011612 if its
    32 bits become Python's 64."""
    if isinstance(value, dict) and isinstance(feature, dict):
        return {name: _as_written(one, feature[name]) for name, one in value.items()}
    if isinstance(value, list):
        return [_as_written(one, getattr(feature, "feature", None)) for one in value]
    dtype = getattr(feature, "dtype", None)
    is_narrow = isinstance(value, float) and dtype in ("float16", "float32")
    return float(str(np.dtype(dtype).type(value))) if is_narrow else value
