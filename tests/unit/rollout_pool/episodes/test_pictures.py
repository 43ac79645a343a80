"""Pictures in conversations: from a line of a data file to the tokens of a prompt."""

from __future__ import annotations

import json

import pytest
from transformers import AutoTokenizer

from buffer.types import SamplingParams
from configs.choices import TaskKind
from configs.rollout_schema import RolloutConfig, TaskConfig
from host.pictures import MARK
from rollout_pool.episodes.conversation import Message, opening
from rollout_pool.episodes.environment import Observation, SingleTurn, Step
from rollout_pool.episodes.episode import EpisodeFailed, EpisodeRequest
from rollout_pool.episodes.renderer import chat_format
from rollout_pool.episodes.runner import EpisodeRunner
from rollout_pool.tasks.registry import build_task
from rollout_pool.tasks.task import Prompt
from rollout_pool.worker.prompt_filter import PromptFilter
from tests.support.pictures import picture
from tests.support.rollout import write


@pytest.fixture(scope="module")
def tokenizer(seeing_model):
    return AutoTokenizer.from_pretrained(seeing_model)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for name, file in (("a.png", picture(1)), ("b.jpg", picture(2, 16, 32, "JPEG"))):
        (folder / name).write_bytes(file)
    return folder


def written(tokenizer, tokens):
    return tokenizer.decode(tokens).replace("<|image_pad|>", "#")


def write_questions(path, contents):
    lines = [
        json.dumps({"question": [{"role": "user", "content": one}], "answer": "a"})
        for one in contents
    ]
    path.write_text("\n".join(lines))


def test_each_picture_has_its_places_where_the_question_shows_it(
    tmp_path, files, processor, tokenizer
):
    image, text = ({"type": "image", "image": f"{files}/a.png"}, {"type": "text", "text": " or "})
    other = {"type": "image_url", "image_url": {"url": f"file://{files}/b.jpg"}}
    questions = [[image, text, other], "no picture", [{"type": "text", "text": "none"}]]
    write_questions(tmp_path / "data.jsonl", questions)
    config = TaskConfig(
        kind=TaskKind.questions, path=str(tmp_path / "data.jsonl"), eval_size=1, chat_template=True
    )
    task, chat = build_task(config), chat_format(tokenizer, config, processor)
    prompts = {task.example(i).text: task.example(i) for i in range(2)}
    shown = prompts[f"{MARK} or {MARK}"]
    assert shown.pictures == (f"{files}/a.png", f"{files}/b.jpg")
    assert prompts["no picture"].pictures == ()
    tokens = chat.first_prompt(opening(shown.text, None, shown.pictures))
    assert written(tokenizer, tokens) == (
        f"user: <|vision_start|>{'#' * 15}<|vision_end|> or "
        f"<|vision_start|>{'#' * 8}<|vision_end|>\nassistant: "
    )
    again = chat.next_prompt(
        tokens, [65, tokenizer.eos_token_id], opening(f"and {MARK}?", None, (f"{files}/b.jpg",))
    )
    assert again[: len(tokens)] == tokens
    assert written(tokenizer, again[len(tokens) :]).endswith(
        f"user: and <|vision_start|>{'#' * 8}<|vision_end|>?\nassistant: "
    )


def test_marks_that_a_text_spells_are_no_places(processor, tokenizer):
    chat = chat_format(tokenizer, TaskConfig(chat_template=True), processor)
    tokens = chat.first_prompt([Message(role="user", content=f"<|image_pad|>{MARK}")])
    assert not {*tokens} & {*processor.tokens.unsampled}


def test_pictures_that_cannot_be_shown_are_refused(files, processor, tokenizer):
    message = Message(role="user", content=f"{MARK}?", pictures=(f"{files}/a.png",))
    with pytest.raises(ValueError, match=r"the model takes none; set model.path to .*qwen3_vl"):
        chat_format(tokenizer, TaskConfig(chat_template=True)).first_prompt([message])
    with pytest.raises(ValueError, match=r"task.chat_template=false: only a chat template knows"):
        chat_format(tokenizer, TaskConfig(chat_template=False), processor).first_prompt([message])
    unmarked = Message(role="user", content="?", pictures=(f"{files}/a.png",))
    with pytest.raises(ValueError, match=r"^a message of the user with 1 pictures has 0 marks"):
        chat_format(tokenizer, TaskConfig(chat_template=True), processor).first_prompt([unmarked])


class Asking:
    """A model that says nothing, and notes what it was asked."""

    def __init__(self, eos):
        self.asked, self.eos = [], eos

    async def complete(self, sample, clock=None):
        self.asked.append(sample)
        write(sample, [self.eos], 1)
        sample.finish_reason = "stop"

    def interrupt(self, sample):
        raise AssertionError


class Redraws:
    """Shows other pictures at the same path, and at last none."""

    def __init__(self, path, *drawn):
        self.path, self.drawn = path, [*drawn]

    async def reset(self):
        return self.show()

    async def step(self, completion):
        return Step(observation=self.show())

    async def close(self):
        pass

    def show(self):
        if self.drawn:
            self.path.write_bytes(self.drawn.pop(0))
        else:
            self.path.unlink()
        return Observation.user(f"{MARK}?", pictures=(str(self.path),))


async def test_each_turn_has_the_pictures_as_they_were_when_they_came(
    tmp_path, processor, tokenizer
):
    config = TaskConfig(chat_template=True, max_turns=8)
    model, chat = Asking(tokenizer.eos_token_id), chat_format(tokenizer, config, processor)
    runner = EpisodeRunner(model, chat, config, RolloutConfig())
    first, second = picture(1), picture(2)
    request = EpisodeRequest(session="s", sampling=SamplingParams())
    env = Redraws(tmp_path / "a.png", first, second)
    episode = await runner.run(env, request)
    assert [sample.pictures for sample in model.asked] == [(first,), (first, second)]
    assert (episode.end, episode.num_turns) == ("env_error", 2)
    assert "a.png' cannot be read" in episode.error
    assert episode.branches[0].pictures == (first, second)
    assert not any(message.files for message in episode.messages)
    gone = EpisodeRequest(session="t", sampling=SamplingParams())
    question = SingleTurn(f"{MARK}?", pictures=(str(tmp_path / "a.png"),))
    with pytest.raises(EpisodeFailed, match=r"a\.png' cannot be read"):
        await runner.run(question, gone)
    prompt = Prompt(index=0, is_held_out=False, text=f"{MARK}?", pictures=(f"{tmp_path}/a.png",))
    assert PromptFilter(chat, config, RolloutConfig()).accepts(prompt), "its episodes fail"


def test_fields_that_a_table_has_filled_with_null_are_no_part_of_a_part(tmp_path, files):
    file, empty = f"{files}/a.png", {"text": None, "image": None, "image_url": None}
    parts = [
        empty | {"type": "image", "image": file},
        empty | {"type": "image_url", "image_url": {"url": f"file://{file}", "detail": None}},
        empty | {"type": "text", "text": "?"},
    ]
    write_questions(tmp_path / "data.jsonl", [parts, parts])
    config = TaskConfig(
        kind=TaskKind.questions, path=str(tmp_path / "data.jsonl"), eval_size=1, chat_template=True
    )
    [prompt] = build_task(config).eval_prompts()
    assert (prompt.text, prompt.pictures) == (f"{MARK}{MARK}?", (file, file))


def test_data_with_a_bad_picture_are_refused_with_their_line(tmp_path):
    parts = [{"type": "image", "image": "none.png"}]
    line = {"question": [{"role": "user", "content": parts}], "answer": "a"}
    (tmp_path / "data.jsonl").write_text(json.dumps(line))
    config = TaskConfig(
        kind=TaskKind.questions, path=str(tmp_path / "data.jsonl"), eval_size=1, chat_template=True
    )
    with pytest.raises(ValueError, match=r"data.jsonl, line 1: .*none.png' cannot be read"):
        build_task(config)
