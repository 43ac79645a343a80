"""The worked agent of docs/openai.md, as a user would copy it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from configs.load import load_config
from configs.schema import Config
from tests.support.repository import ROOT

PAGE = ROOT / "docs" / "openai.md"


def langchain_example(folder: Path) -> Config:
    """Writes its file below `folder`; the settings of its launch."""
    text = PAGE.read_text()
    [code] = re.findall(r"```python\n# agents/sums\.py\n(.*?)```", text, re.DOTALL)
    [command] = re.findall(r'^    make launch ARGS="(.*agents/sums\.py.*)"$', text, re.MULTILINE)
    file = folder / "sums.py"
    file.write_text(code)
    return load_config(shlex.split(command.replace("agents/sums.py", str(file))))
