"""What one request adds to its sample: tokens as they come, their versions when they are known.

While a request runs, its engine reports with each arrival only the version that it serves at that
moment. Which token is of which version it reports at the end:

    arrivals   [ a | b c d | e f g ]  labels 7, 7, 8      until then   (7, a..g)
    settled                           7 up to e, then 8   at the end   (7, a..e) (8, f..g)

The end of a request whose engine was killed never comes, so what is written down until then must
hold by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from buffer.types import VersionSpan
from rollout_pool.sampling.engine_client import merge_spans
from rollout_pool.sampling.sample import Sample


class Answer:
    """One request's part of `sample`. `served_before`: a version not above the request's own."""

    def __init__(self, sample: Sample, served_before: int) -> None:
        self._sample = sample
        self._start = len(sample.output_ids)
        self._spans_before = list(sample.version_spans)
        self._served_before = served_before
        self._label: int | None = None

    @property
    def num_tokens(self) -> int:
        return len(self._sample.output_ids) - self._start

    def add(self, output_ids: Sequence[int], logprobs: Sequence[float], label: int) -> None:
        """Tokens, and the version that was served when they arrived.

        Versions only grow. So tokens with the label of the arrival before them are of that version;
        with another label they are of both, the border is unknown, and all are taken
        for the older: the staleness gate then errs on the safe side, and log-probabilities are
        those of the moment of drawing either way. The first token is sent by itself; if more come
        at once the server was slow to send, and the same holds.
        """
        sample = self._sample
        if self._label is None:
            version = label if len(output_ids) == 1 else min(label, self._served_before)
        else:
            version = min(label, self._label)
        self._label = label
        start = len(sample.output_ids)
        sample.output_ids.extend(output_ids)
        sample.logprobs.extend(logprobs)
        span = VersionSpan(version=version, start=start, end=len(sample.output_ids))
        sample.version_spans = merge_spans([*sample.version_spans, span])

    def settle(self, spans: Sequence[VersionSpan]) -> None:
        """The versions of all tokens of this request, counted from its own first token."""
        shifted = [
            VersionSpan(
                version=span.version, start=self._start + span.start, end=self._start + span.end
            )
            for span in spans
        ]
        self._sample.version_spans = merge_spans([*self._spans_before, *shifted])
