"""The processes that compile grammars and follow the completions that have them, one a grammar:
`python -m rollout_pool.sampling.grammar_process <descriptor of the starter's socket>`.

    worker ── a socket a grammar ──► starter: imports, makes the tokenizer
       │                                │ forks
       └── calls and replies ─────►  one process a grammar

A grammar may come from a request, and compiling it, or finding the next token, may take minutes and
gigabytes inside a library that cannot be interrupted and holds the GIL. So it happens in a process
of its own, which the kernel kills at a limit of processor time or memory.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Collection, Sequence
from typing import Any

import msgspec
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from msgspec import Struct
from numpy.typing import NDArray

from processes.die_with_parent import die_with_parent

_STACK_BYTES = 2**29
"""llguidance calls itself for each rule within a rule; with the usual stack it dies of some
thousands. Reserved, but not used by other grammars."""
_LIMITS = LLParserLimits(step_max_items=20_000, max_lexer_states=50_000, max_grammar_size=100_000)
"""Below the library's own: far above what schemas need, and soon reached by what grows."""


class NotAllowed(ValueError):
    """A grammar cannot be compiled, or a completion cannot go on; the message says why."""


class Setup(Struct, kw_only=True, frozen=True):
    """The first line that the starter reads: its tokenizer, and the limits of grammars.py."""

    tokenizer: str
    """The text that the tokenizers library writes."""
    num_embeddings: int
    end_tokens: list[int]
    compile_s: float
    """Processor time to compile a grammar."""
    step_s: float
    """Processor time of any later request."""
    max_bytes: int
    """Memory of one grammar and its completions."""


class Call(Struct, frozen=True):
    """One line to the process of a grammar: compile it, or a method of a completion's Rules.

    Example: Call("follow", 3, [[97], [[97, 98]], True]) is `rules[3].follow([97], [[97, 98]],
    True)`.
    """

    verb: str
    """compile, open, accept, follow, force or close."""
    completion: int = 0
    arguments: Sequence[Any] = ()


class Reply(Struct, kw_only=True, frozen=True):
    value: Any = None
    """The method's result."""
    failed: str = ""
    """Why it is not allowed."""
    num_bytes: int
    """Memory of the grammar with all its completions."""


class Verdict(Struct, kw_only=True, frozen=True):
    """The rules' decision on tokens that have arrived.

    Example: of [a b c], b must not stay: allowed has two entries, and is_refused is true.
    """

    allowed: list[list[int]]
    """For each token, up to the first that must not stay: which of its alternatives are allowed, by
    their places among them."""
    is_refused: bool
    """The last of these must not stay."""
    first: list[int]
    """The first two tokens that may come in its place, or the only one."""


class Vocabulary:
    """The tokens of a model, as bits."""

    def __init__(self, num_embeddings: int, end_tokens: Sequence[int]) -> None:
        self.num_embeddings = num_embeddings
        self.end_tokens = frozenset(end_tokens)
        # Once: making them takes milliseconds with a large vocabulary.
        self.all = self.bits(range(num_embeddings))
        self.ends = self.bits(end_tokens)

    def bits(self, tokens: Collection[int]) -> NDArray[np.uint8]:
        mask = np.zeros(8 * ((self.num_embeddings + 31) // 32 * 4), np.uint8)
        mask[list(tokens)] = 1
        return np.packbits(mask, bitorder="little")


class _Allowed:
    """A set of tokens, with a bit for each of the vocabulary: a list would be slow to make."""

    def __init__(self, bits: NDArray[np.uint8]) -> None:
        self._bits = bits

    def places(self, ids: Sequence[int]) -> list[int]:
        """Places of those of `ids` that are in it."""
        wanted = np.asarray(ids, np.int32)
        found = self._bits[wanted >> 3] >> (wanted & 7).astype(np.uint8) & 1
        return list(np.flatnonzero(found).tolist())

    def has(self, token: int) -> bool:
        return bool(self._bits[token >> 3] >> (token & 7) & 1)

    def first_two(self) -> list[int]:
        """Or the only one."""
        places = np.flatnonzero(self._bits)[:2].tolist()
        return [8 * at + bit for at in places for bit in range(8) if self._bits[at] >> bit & 1][:2]


class Rules:
    """Which tokens may come next in one completion."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        matcher: LLMatcher | None,
        min_tokens: int,
        banned: Collection[int],
    ) -> None:
        """`matcher`: the grammar's, if there is one. Raises NotAllowed if no completion can
        begin."""
        self._vocabulary = vocabulary
        self._matcher = matcher
        self._min_tokens = min_tokens
        self._banned = frozenset(banned)
        self._not_banned = ~vocabulary.bits(banned)
        self._length = 0
        self._ahead: list[int] = []
        """Tokens that the grammar forces, last first; none of them accepted yet."""
        self._allowed()

    def accept(self, tokens: Sequence[int]) -> None:
        """These come next; all of them are allowed."""
        for token in tokens:
            self._ahead.clear()
            self._accept(token)

    def follow(
        self, tokens: Sequence[int], alternatives: Sequence[Sequence[int]], last_stays: bool
    ) -> Verdict:
        """Accepts tokens up to the first that must not stay: one that is not allowed, or the last
        of all unless `last_stays`. Raises NotAllowed."""
        found: list[list[int]] = []
        for place, (token, ids) in enumerate(zip(tokens, alternatives, strict=True), start=1):
            allowed = self._allowed()
            found.append(allowed.places(ids))
            if not allowed.has(token) or (place == len(tokens) and not last_stays):
                return Verdict(allowed=found, is_refused=True, first=allowed.first_two())
            self._accept(token)
        return Verdict(allowed=found, is_refused=False, first=[])

    def force(self, after: Sequence[int], most: int) -> list[int]:
        """Accepts `after`, and then the next tokens, at most `most`, of which each is the only one
        that may come, up to one that ends the completion; returns those. Raises NotAllowed."""
        self.accept(after)
        forced: list[int] = []
        while len(forced) < most:
            self._ahead = self._ahead or self._look_ahead()
            if not self._ahead:
                break
            forced.append(self._ahead.pop())
            self._accept(forced[-1])
            if forced[-1] in self._vocabulary.end_tokens:
                break
        return forced

    def _look_ahead(self) -> list[int]:
        # A look at a text that the grammar forces costs as much as the text is long: all of it is
        # taken at once, not a look for each token.
        ahead = [] if self._matcher is None else self._matcher.compute_ff_tokens()
        while not self._banned.isdisjoint(ahead):
            ahead.pop()
        if not ahead:
            first, *others = self._allowed().first_two()
            ahead = [] if others else [first]
        return ahead[::-1]

    def _accept(self, token: int) -> None:
        self._length += 1
        if self._matcher is not None and not self._matcher.is_stopped():
            self._matcher.consume_token(token)

    def _allowed(self) -> _Allowed:
        vocabulary, matcher = self._vocabulary, self._matcher
        if matcher is None:
            bits = vocabulary.all
        elif matcher.is_stopped():
            bits = vocabulary.ends
        else:
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)[: len(vocabulary.all)]
        if matcher is not None and matcher.is_error():  # it counts as stopped, too
            bits = np.zeros_like(vocabulary.all)
        bits = bits & self._not_banned
        if self._length < self._min_tokens:
            bits &= ~vocabulary.ends
        if not bits.any():
            problem = "" if matcher is None else _problem(matcher)
            raise NotAllowed(problem or "no token may follow; allow one of those left out")
        return _Allowed(bits)


def _problem(matcher: LLMatcher) -> str:
    return matcher.get_error().strip().partition("\n<state>")[0]


# The program --------------------------------------------------------------------------------------


def main(number: int) -> None:
    """Reads the setup, writes a line when it is ready, and forks for each descriptor that comes."""
    die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes
    starter = socket.socket(fileno=number)
    with starter.makefile("rb") as sent:
        line = sent.readline()
    if not line.endswith(b"\n"):
        sys.exit(1)  # the worker has ended
    setup = msgspec.json.decode(line, type=Setup)
    vocabulary = Vocabulary(setup.num_embeddings, setup.end_tokens)
    tokenizer = LLTokenizer(
        setup.tokenizer, n_vocab=setup.num_embeddings, eos_token=setup.end_tokens
    )
    starter.sendall(b"ready\n")
    while (received := socket.recv_fds(starter, 1, 1))[0]:
        [descriptor] = received[1]
        if os.fork() == 0:
            starter.close()
            _serve(socket.socket(fileno=descriptor), setup, vocabulary, tokenizer)
        os.close(descriptor)


def _serve(
    connection: socket.socket, setup: Setup, vocabulary: Vocabulary, tokenizer: LLTokenizer
) -> None:
    """Serves calls until the connection closes, then ends the process."""
    try:
        die_with_parent(signal.SIGKILL)
        most = _memory()[0] + _STACK_BYTES + setup.max_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        threading.stack_size(_STACK_BYTES)
        served = threading.Thread(
            target=_Grammar(setup, vocabulary, tokenizer).serve, args=[connection]
        )
        served.start()
        served.join()
    finally:
        os._exit(0)


def _memory() -> tuple[int, int]:
    """Bytes of address space, and bytes that are this process's own."""
    with open("/proc/self/statm") as file:
        size, resident, shared, *_ = (resource.getpagesize() * int(n) for n in file.read().split())
    return size, resident - shared


class _Grammar:
    """One grammar and the completions that follow it, by number."""

    def __init__(self, setup: Setup, vocabulary: Vocabulary, tokenizer: LLTokenizer) -> None:
        self._setup = setup
        self._vocabulary = vocabulary
        self._tokenizer = tokenizer
        self._matcher: LLMatcher | None = None
        self._rules: dict[int, Rules] = {}
        _, self._bytes_before = _memory()

    def serve(self, connection: socket.socket) -> None:
        with connection.makefile("rb") as requests:
            for line in requests:
                call, value, failed = msgspec.json.decode(line, type=Call), None, ""
                limit_s = self._setup.compile_s if call.verb == "compile" else self._setup.step_s
                # At its end SIGPROF, which nothing handles: it ends the process inside of any call.
                signal.setitimer(signal.ITIMER_PROF, limit_s)
                try:
                    value = self._run(call)
                except NotAllowed as error:
                    failed = str(error)
                signal.setitimer(signal.ITIMER_PROF, 0)
                num_bytes = _memory()[1] - self._bytes_before
                reply = Reply(value=value, failed=failed, num_bytes=num_bytes)
                connection.sendall(msgspec.json.encode(reply) + b"\n")

    def _run(self, call: Call) -> Any:
        match call:
            case Call("compile"):
                self._matcher = self._compile(*call.arguments)
            case Call("open"):
                assert self._matcher is not None
                rules = Rules(self._vocabulary, self._matcher.deep_copy(), *call.arguments)
                self._rules[call.completion] = rules
            case Call("close"):
                self._rules.pop(call.completion, None)
            case _:
                return getattr(self._rules[call.completion], call.verb)(*call.arguments)
        return None

    def _compile(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # finds that no text follows the grammar
        if matcher.is_error():
            raise NotAllowed(_problem(matcher))
        return matcher


if __name__ == "__main__":
    main(int(sys.argv[1]))
