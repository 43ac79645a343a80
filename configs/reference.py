"""Writes docs/configuration.md from the schema and the YAML files: `python -m configs.reference`.

The page is never edited by hand; a test compares it with the output of this module.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

from configs.introspection import (
    Setting,
    all_sections,
    all_settings,
    enum_docs,
    named_settings,
    section_doc,
)
from configs.load import GROUPS, options

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"

INTRODUCTION = """\
# Configuration

Every setting of a run, its type and its default. `make docs` generates this page from
`configs/schema.py`, `configs/rollout_schema.py`, `configs/algorithm_schema.py` and the files of the
functions' families beside it; edit those instead.

    make launch ARGS="buffer.max_staleness=4 rollout.num_engines=2"   # settings by name
    make launch ARGS="weight_sync=in_place"                           # a file of a group
    make launch EXPERIMENT=gsm8k-smoke                                # a file of configs/experiment
    make launch EXPERIMENT=../mine.yaml                               # a file of your own
    make dry-run ARGS="trainer.num_ranks=4"                           # see what that would start

The command line, with the files that it chooses (`trainer=gpu`), overrides the experiment, which
overrides the files that it chooses, which override the defaults below. If you choose another
`task.kind`, or another `task.name` of a library,
the files' settings of their own task are dropped. Unknown names and wrong types are rejected with
the nearest valid name. The type column includes the bounds; times are in seconds, and a count is at
most 10^9. Values are written as YAML, and text literally; quote what the shell would interpret:
`ARGS="task.prompt_pattern='([0-9]+)'"`. `make tune ARGS="rollout.oversampling=1.5"` changes
settings marked **live** in a running job. Relative paths are relative to the current folder.

## An experiment of your own

`EXPERIMENT` is also the path of a YAML file anywhere (with a `/`, or ending in `.yaml`). It may be
built on an experiment of `configs/experiment/` and choose other files of the groups below:

```yaml
defaults:
  - quickstart                # all that it sets; leave it out to begin with the defaults below
  - override /task: chain_sum # instead of its task. `null`: no file, `task:` below says all
  - override /algorithm: gspo
  - _self_                    # what follows wins
trainer:
  num_steps: 100
```

What the other experiment sets by itself, as `rollout.eval_every`, wins over files that yours
chooses: write below what is to be another. A task of another `task.kind` than that of its file, or
of another `task.name` of a library, needs its own `override /task`: settings that it would keep are
refused. The name in `experiment:`, otherwise that of the file, begins the name of the run.

Every run leaves such a file in its folder. It chooses no files and holds what differs from the
defaults below, without the passwords of addresses.

    make launch EXPERIMENT=runs/NAME/experiment.yaml                  # the same again
"""


def reference_markdown() -> str:
    """The whole page."""
    return "\n".join([INTRODUCTION, *_group_tables(), *_section_tables(), *_choice_tables()])


def _group_tables() -> Iterator[str]:
    yield "## Files to choose from\n"
    yield "| choose | to get |\n|---|---|"
    for group in ("experiment", *(name for name in GROUPS if name != "experiment")):
        for option, sentence in options(group).items():
            chosen = f"EXPERIMENT={option}" if group == "experiment" else f"{group}={option}"
            yield f"| `{chosen}` | {_cell(sentence)} |"
    yield ""


def _section_tables() -> Iterator[str]:
    by_section = {
        name: [s for s in all_settings() if s.name.rpartition(".")[0] == name]
        for name in all_sections()
    }
    for name, settings in {**by_section, **named_settings()}.items():
        section = settings[0].section
        yield f"## {name}\n"
        if doc := section_doc(section):
            yield _flow(doc) + "\n"
        yield "| setting | type | default | meaning |\n|---|---|---|---|"
        yield from map(_row, settings)
        yield ""


def _row(setting: Setting) -> str:
    meaning = _cell(setting.doc)
    if setting.kinds:
        meaning = f"{', '.join(setting.kinds)}: {meaning[0].lower()}{meaning[1:]}"
    if setting.is_live:
        meaning += " **Live.**"
    return (
        f"| `{setting.name}` | {_cell(setting.expected)} | `{_value(setting.default)}` "
        f"| {meaning.strip()} |"
    )


def _choice_tables() -> Iterator[str]:
    yield "## What the choices mean\n"
    seen: set[object] = set()
    every = (*all_settings(), *(s for of in named_settings().values() for s in of))
    for setting in every:
        choices = setting.annotation
        if not (isinstance(choices, type) and issubclass(choices, Enum)) or choices in seen:
            continue
        seen.add(choices)
        if doc := enum_docs(choices):
            users = [f"`{s.name}`" for s in every if s.annotation is choices]
            yield f"- {', '.join(users)}: {doc}"


def _value(value: object) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)


def _cell(text: str) -> str:
    return _flow(text).replace("|", "\\|")


def _flow(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    PAGE.write_text(reference_markdown())
    print(f"wrote {PAGE}")
