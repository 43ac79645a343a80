"""Text that a model wrote, made fit for a terminal and a log."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import TextIO, cast

from configs.environment import LOG_DIR_VARIABLE, PROCESS_VARIABLE
from host.printable import PrintableStream, printable

CLIPBOARD = "\x1b]52;c;ZXZpbA==\x07"


def test_printable_leaves_no_control_character_but_line_ends_and_tabs() -> None:
    every = "".join(map(chr, range(0x3000))) + "\ud800\udfff\U0001f600"
    shown = printable(every)
    assert len(shown) == len(every)
    left = {c for c in shown if unicodedata.category(c) in ("Cc", "Cs")}
    assert left == {"\n", "\t"}
    assert not set("\u202e\u2066\u200f\u2028\x9b\x1b\x7f") & set(shown)
    assert shown.endswith("\U0001f600") and printable("Größe: 3\n\t✓") == "Größe: 3\n\t✓"


def test_printable_stream_passes_lines_and_no_escape_on() -> None:
    out = io.StringIO()
    print(f"step 1{CLIPBOARD}", file=cast("TextIO", PrintableStream(out)))
    assert out.getvalue() == "step 1␛]52;c;ZXZpbA==␇\n"


def test_worker_writes_no_escape_to_its_log(tmp_path: Path) -> None:
    code = (
        "import logging; from controller.watch.supervise import enter_process as e; e();"
        f"print({CLIPBOARD!r}); logging.warning('the model said %s', {CLIPBOARD!r})"
    )
    names = {PROCESS_VARIABLE: "rollout-0", LOG_DIR_VARIABLE: str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, **names})
    log = (tmp_path / "rollout-0.log").read_text()
    assert log.count("␛]52") == 2 and "\x1b" not in log
