"""Compares the result in a completion with the right one mathematically, by math-verify."""

from __future__ import annotations

FINAL = "####"
"""Precedes GSM8K's final results."""
BOX = "\\boxed{"


def is_same_number(final: str, completion: str) -> bool:
    """Returns whether the last result in `completion` is mathematically equal to `final`.

    A result after the mark #### takes precedence over other numbers.
    """
    from math_verify import parse, verify

    _, mark, behind = completion.rpartition(FINAL)
    given = parse(behind.strip().split("\n")[0] if mark else completion)
    return bool(given) and bool(verify(parse(final.replace(",", "")), given))


def is_equal(final: str, completion: str) -> bool:
    """Returns whether the last box in `completion`, or else its last result, equals `final`."""
    from math_verify import parse, verify

    boxed = last_box(completion)
    if boxed is not None and "".join(boxed.split()) == "".join(final.split()):
        return True  # also for words, such as a name
    given = parse(completion if boxed is None else f"{BOX}{boxed}}}")
    return bool(given) and bool(verify(parse(f"{BOX}{final}}}"), given))


def is_equal_result(answer: str, completion: str) -> bool:
    """The same for an answer that may be worked out."""
    return is_equal(result_of(answer), completion)


def result_of(answer: str) -> str:
    """Returns what its last box has, or else what is behind ####, or else all; perhaps ""."""
    boxed = last_box(answer)
    return answer.rpartition(FINAL)[2].strip() if boxed is None else boxed


def last_box(text: str) -> str | None:
    """The content of the last complete box of `text`, with nested braces; None without one."""
    start = text.rfind(BOX)
    while start >= 0:
        depth = 1
        for place in range(start + len(BOX), len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                return text[start + len(BOX) : place].strip()
        start = text.rfind(BOX, 0, start)
    return None
