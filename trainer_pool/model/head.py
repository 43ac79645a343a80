"""The output head and the log-softmax in one, tile by tile: the logits never exist as a whole.

    hidden [N, H] ─┐      tile of rows x columns, float32     ┌ log p(target)
    weight [V, H] ─┴─►  z = logits / temperature, discarded  ─►├ entropy            [3, N]
                                                               └ sum of p^2

Of [N, V] logits in float32, the usual way keeps several copies until the backward pass. Here the
forward pass keeps one normalizer per row, and the backward pass computes each tile again.

`ScoringHead` puts it in the place of a transformers model's own head.

Letters: L positions of a packed row, N trained tokens, H hidden size, V vocabulary, K candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_CPU_TILE = (512, 2**20)
"""Most rows and elements: 4 MiB, which a core's cache nearly holds."""
_GPU_TILE = (8192, 2**26)
"""256 MiB; so many rows that adding to the weight's gradient does not bound the product."""
_MASKED = -1e30
"""Logit of an id that was no candidate. Not -inf: it would make NaN of a tile without any."""


class Scores(NamedTuple):
    """[N] each: scores of the predictions of N tokens, in float32."""

    logprobs: Tensor
    """Log-probability of the target."""
    entropy: Tensor
    """In nats. Like `logprobs` it has a gradient."""
    sum_squares: Tensor
    """Sum of the squared probabilities of the vocabulary; a constant."""


@dataclass(kw_only=True, slots=True, frozen=True, eq=False)
class Candidates:
    """The ids that top-k, top-p and min-p left of the vocabulary when each of N tokens was drawn.

    The distribution of such a token is that over its candidates alone.
    """

    ids_K: Tensor
    """int64, one set after the other."""
    ends_N: Tensor
    """int64, on the CPU: where each token's set ends in `ids_K`. An empty set is the whole
    vocabulary."""

    def of_rows(self, rows_M: Tensor) -> Candidates:
        """The candidates of some of the N tokens, in ascending order."""
        counts_N = self.ends_N.diff(prepend=torch.zeros(1, dtype=self.ends_N.dtype))
        is_one_N = torch.zeros(len(counts_N), dtype=torch.bool)
        is_one_N[rows_M.cpu()] = True
        is_one_K = is_one_N.repeat_interleave(counts_N).to(self.ids_K.device)
        return Candidates(ids_K=self.ids_K[is_one_K], ends_N=counts_N[is_one_N].cumsum(0))

    def is_masked(self, rows: slice, columns: slice) -> Tensor:
        """Bool [rows, columns] of the logits: the id is not in the row's set."""
        ends = self.ends_N[rows]
        begin = int(self.ends_N[rows.start - 1]) if rows.start else 0
        lengths = ends.diff(prepend=torch.tensor([begin]))
        ids = self.ids_K[begin : int(ends[-1])]
        masked = (lengths > 0).to(ids.device).unsqueeze(1).repeat(1, columns.stop - columns.start)
        is_inside = (ids >= columns.start) & (ids < columns.stop)
        row_of_id = torch.repeat_interleave(lengths).to(ids.device)
        masked[row_of_id[is_inside], ids[is_inside] - columns.start] = False
        return masked


@dataclass(kw_only=True, slots=True, frozen=True)
class LogitShape:
    """The function that a model applies to its head's output x: scale x, or
    cap tanh(scale x / cap)."""

    scale: float = 1.0
    cap: float | None = None

    def apply_(self, x: Tensor) -> Tensor:
        if self.cap is not None:
            return x.mul_(self.scale / self.cap).tanh_().mul_(self.cap)
        return x if self.scale == 1 else x.mul_(self.scale)

    def chain_(self, grad: Tensor, shaped: Tensor) -> Tensor:
        """The gradient with respect to x, given that with respect to `shaped`, `apply_`'s result;
        overwrites both."""
        if self.cap is not None:
            grad.mul_(shaped.div_(self.cap).square_().neg_().add_(1))
        return grad if self.scale == 1 else grad.mul_(self.scale)


def score_tokens(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    temperatures_N: Tensor,
    *,
    candidates: Candidates | None = None,
    shape: LogitShape | None = None,
    tile: tuple[int, int] | None = None,
) -> Tensor:
    """[3, N] `Scores` of p = softmax(shape(hidden weight^T + bias) / temperature), by row.

    In float32 (float64 for float64 input), whatever the dtype of `hidden` and `weight`. Gradients
    of the first two rows reach `hidden`, `weight` and `bias`. A target that is none of its
    candidates has log-probability -inf. `tile` (most rows, most elements) changes nothing but
    rounding.
    """
    plan = _Plan(
        candidates=candidates,
        shape=shape or LogitShape(),
        tile=tile or (_GPU_TILE if hidden_NH.is_cuda else _CPU_TILE),
    )
    scores_3N: Tensor = _ScoreTokens.apply(  # type: ignore[no-untyped-call]
        hidden_NH, weight_VH, bias_V, targets_N, temperatures_N, plan
    )
    return scores_3N


@dataclass(kw_only=True, slots=True, frozen=True, eq=False)
class _Plan:
    """Computes the logits, tile by tile."""

    candidates: Candidates | None
    shape: LogitShape
    tile: tuple[int, int]

    def columns(self, hidden_NH: Tensor, weight_VH: Tensor) -> list[slice]:
        """Narrow enough that neither a tile nor its part of the weight is larger than `tile`."""
        rows, elements = self.tile
        widest = max(min(rows, len(hidden_NH)), hidden_NH.shape[1])
        return _slices(len(weight_VH), max(1, elements // widest))

    def rows(self, hidden_NH: Tensor) -> list[slice]:
        return _slices(len(hidden_NH), self.tile[0])

    def logits(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        temperatures_N1: Tensor,
        rows: slice,
        columns: slice,
    ) -> tuple[Tensor, Tensor]:
        """The logits of a tile divided by the temperatures, and with a cap those before it."""
        shaped = _product(hidden[rows], weight.t())
        if bias is not None:
            shaped += bias[columns]
        shaped = self.shape.apply_(shaped)
        z = shaped.clone() if self.shape.cap is not None else shaped
        z.div_(temperatures_N1[rows])
        if self.candidates is not None:
            z.masked_fill_(self.candidates.is_masked(rows, columns), _MASKED)
        return z, shaped


class _ScoreTokens(torch.autograd.Function):
    """Columns are the outer loop: the gradient of a part of the weight is complete, in float32,
    before it is rounded to the weight's dtype."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        temperatures_N: Tensor,
        plan: _Plan,
    ) -> Tensor:
        dtype = _accumulated(hidden_NH.dtype)
        temperatures_N1 = temperatures_N.to(dtype).unsqueeze(1)
        sums = _Sums(len(hidden_NH), dtype, hidden_NH.device)
        for columns in plan.columns(hidden_NH, weight_VH):
            weight = _operand(weight_VH[columns])
            for rows in plan.rows(hidden_NH):
                z, _ = plan.logits(hidden_NH, weight, bias_V, temperatures_N1, rows, columns)
                sums.add(z, targets_N[rows] - columns.start, rows)
        scores_3N, normalizer_N = sums.result()
        ctx.save_for_backward(
            hidden_NH, weight_VH, bias_V, targets_N, temperatures_N1, normalizer_N, scores_3N[1]
        )
        ctx.plan = plan
        return scores_3N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_3N: Tensor) -> tuple[Tensor | None, ...]:
        """d log p(target) / dz = onehot(target) - p, and d entropy / dz = -p (log p + entropy),
        with z = logits / temperature."""
        hidden_NH, weight_VH, bias_V, targets_N, temperatures_N1, normalizer_N, entropy_N = (
            ctx.saved_tensors
        )
        plan: _Plan = ctx.plan
        slopes = _Slopes(grad_3N, entropy_N, normalizer_N)
        dtype = normalizer_N.dtype
        grad_hidden = torch.zeros_like(hidden_NH, dtype=dtype)
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad_weight = torch.empty_like(weight_VH) if needs_weight else None
        grad_bias = torch.empty_like(bias_V) if needs_bias else None
        for columns in plan.columns(hidden_NH, weight_VH):
            weight = _operand(weight_VH[columns])
            of_weight = torch.zeros_like(weight, dtype=dtype)
            of_bias = torch.zeros(len(weight), dtype=dtype, device=weight.device)
            for rows in plan.rows(hidden_NH):
                z, shaped = plan.logits(hidden_NH, weight, bias_V, temperatures_N1, rows, columns)
                grad = slopes.by_logits_(z, targets_N[rows] - columns.start, rows)
                grad = plan.shape.chain_(grad.div_(temperatures_N1[rows]), shaped)
                if needs_bias:
                    of_bias += grad.sum(0)
                grad = grad.to(hidden_NH.dtype) if grad.is_cuda else grad
                if needs_hidden:
                    _add_product(grad_hidden[rows], grad, weight)
                if needs_weight:
                    _add_product(of_weight, grad.t(), hidden_NH[rows])
            if grad_weight is not None:
                grad_weight[columns] = of_weight
            if grad_bias is not None:
                grad_bias[columns] = of_bias
        grads = (grad_hidden.to(hidden_NH.dtype) if needs_hidden else None, grad_weight, grad_bias)
        return *grads, None, None, None


class _Sums:
    """Running sums over the vocabulary, relative to each row's largest logit so far (online
    softmax, arXiv 1805.02867)."""

    def __init__(self, num_rows: int, dtype: torch.dtype, device: torch.device) -> None:
        def filled(value: float) -> Tensor:
            return torch.full((num_rows,), value, dtype=dtype, device=device)

        self._largest, self._chosen = filled(_MASKED), filled(_MASKED)
        self._exp, self._exp_times_z, self._exp_squared = filled(0), filled(0), filled(0)

    def add(self, z: Tensor, targets: Tensor, rows: slice) -> None:
        """Add a tile, which this overwrites; `targets` outside its columns are in other tiles."""
        is_inside, places = _inside(targets, z)
        chosen = z.gather(1, places.unsqueeze(1)).squeeze(1)
        self._chosen[rows] = torch.where(is_inside, chosen, self._chosen[rows])
        sums = (self._largest, self._exp, self._exp_times_z, self._exp_squared)
        for total, value in zip(sums, fold(z, *(total[rows] for total in sums)), strict=True):
            total[rows] = value

    def result(self) -> tuple[Tensor, Tensor]:
        """[3, N] `Scores`, and [N] the normalizers: log p = z - normalizer."""
        log_sum = self._exp.log()
        logprobs = self._chosen - self._largest - log_sum
        logprobs.masked_fill_(self._chosen == _MASKED, -torch.inf)
        entropy = log_sum - self._exp_times_z / self._exp
        sum_squares = self._exp_squared / self._exp.square()
        return torch.stack([logprobs, entropy, sum_squares]), self._largest + log_sum


class _Slopes:
    """The gradient with respect to the logits of a tile."""

    def __init__(self, grad_3N: Tensor, entropy_N: Tensor, normalizer_N: Tensor) -> None:
        self._of_logprob, self._of_entropy, _ = grad_3N
        self._slope_N = self._of_logprob + self._of_entropy * entropy_N
        self._normalizer_N = normalizer_N
        # Without entropy in the loss, two passes over each tile are saved. A GPU, which hardly
        # notices them, would have to wait here for the loss.
        self._has_entropy = grad_3N.is_cuda or bool((self._of_entropy != 0).any())

    def by_logits_(self, z: Tensor, targets: Tensor, rows: slice) -> Tensor:
        """The gradient of a tile's logits `z`, which it overwrites."""
        of_entropy = self._of_entropy[rows].unsqueeze(1) if self._has_entropy else None
        slope_N1 = self._slope_N[rows].unsqueeze(1)
        grad = slope(z, self._normalizer_N[rows].unsqueeze(1), slope_N1, of_entropy)
        is_inside, places = _inside(targets, grad)
        at_target = torch.where(is_inside, self._of_logprob[rows], 0.0)
        return grad.scatter_add_(1, places.unsqueeze(1), at_target.unsqueeze(1))


# The passes over a tile: two functions, so that a compiler can make one kernel of each.


def fold(
    z: Tensor, largest: Tensor, exp_sum: Tensor, exp_times_z: Tensor, exp_squared: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sums of `_Sums` with one more tile, which this overwrites."""
    # nansum: a logit of -inf is a probability of 0, of which z exp(z) is NaN. What else is not
    # finite makes NaN of the other sums.
    before, largest = largest, torch.maximum(largest, z.amax(1))
    down = before - largest
    z.sub_(largest.unsqueeze(1))
    exp, scale = z.exp(), down.exp()
    return (
        largest,
        scale * exp_sum + exp.sum(1),
        scale * (exp_times_z + down * exp_sum) + z.mul_(exp).nansum(1),
        scale.square() * exp_squared + exp.square_().sum(1),
    )


def slope(z: Tensor, normalizer_N1: Tensor, slope_N1: Tensor, of_entropy: Tensor | None) -> Tensor:
    """-p (slope + of_entropy log p), which overwrites `z`."""
    z.sub_(normalizer_N1)
    if of_entropy is None:
        return z.exp_().mul_(-slope_N1)
    p = z.exp()
    z.clamp_(min=_MASKED)  # 0 times -inf is NaN
    return z.mul_(of_entropy).add_(slope_N1).mul_(p).neg_()


def _inside(targets: Tensor, tile: Tensor) -> tuple[Tensor, Tensor]:
    """For each target: whether it is a column of the tile, and which (0 if it is none)."""
    is_inside = (targets >= 0) & (targets < tile.shape[1])
    return is_inside, torch.where(is_inside, targets, 0)


def _accumulated(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _operand(matrix: Tensor) -> Tensor:
    """`matrix` as a factor: CPUs multiply, and round to, a single dtype."""
    return matrix if matrix.is_cuda else matrix.to(_accumulated(matrix.dtype))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a b, not rounded to their dtype."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(_operand(a), _operand(b))


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b."""
    if a.is_cuda and a.dtype is not total.dtype:
        total += _product(a, b)
    else:
        total.addmm_(_operand(a), _operand(b))


def _slices(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


# In place of a model's own head -------------------------------------------------------------------


@dataclass(kw_only=True, slots=True, frozen=True, eq=False)
class TokensToScore:
    """The N trained tokens of a packed row, which a forward pass scores."""

    places_N: Tensor
    """int64, ascending: positions in the row that predict them."""
    targets_N: Tensor
    """int64: their ids."""
    temperatures_N: Tensor
    """Their logits are divided by these."""
    candidates: Candidates | None
    """None: every token was drawn from the whole vocabulary."""


class ScoringHead:
    """Makes a causal language model's forward pass return [3, N] scores instead of logits.

    The product with the head's weight must happen in the head's own forward and backward pass:
    only there does ZeRO-3 hold the whole weight. So this replaces the `forward` of the head, and
    that of the model, whose last lines would take the scores for logits.

    Example, with `model` of transformers and `wanted` a TokensToScore:

        head = ScoringHead(model, "a/model")
        head.learn_shape(lambda: model(input_ids=tokens))
        logprobs, entropy, sum_squares = model(input_ids=tokens, wanted=wanted)

    Raises ValueError for a model whose head is not a linear layer.
    """

    def __init__(self, model: Any, model_path: str, unsampled: Sequence[int] = ()) -> None:
        """`unsampled`: tokens that engines never sample; the others share their probability."""
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise ValueError(
                f"model.path={model_path!r}: the output head of {type(model).__name__} is "
                f"{'missing' if head is None else type(head).__name__}, and only a linear one is "
                "supported; choose a causal language model"
            )
        self._shape = LogitShape()
        self._unsampled = list(unsampled)
        self._model_path = model_path
        self._head = head
        self._forward_of_model = model.forward
        self._wanted: TokensToScore | None = None
        self._scores: Tensor | None = None
        model.forward = self._forward
        head.forward = self._forward_of_head  # type: ignore[method-assign, assignment]
        # Registered after deepspeed's hooks, to keep the tensor that these return: its backward
        # pass gathers the weight.
        head.register_forward_hook(self._keep)
        self._not_finite: Tensor | None = None
        model.get_input_embeddings().register_forward_hook(self._watch)

    def _forward(self, *, wanted: TokensToScore | None = None, **inputs: Any) -> Tensor:
        """Logits if `wanted` is None, else scores."""
        self._wanted, self._scores = wanted, None
        logits: Tensor = self._forward_of_model(**inputs).logits
        scores, self._scores, self._wanted = self._scores, None, None
        assert scores is not None, "the model did not call its output head"
        return logits if wanted is None else scores

    def _forward_of_head(self, hidden: Tensor) -> Tensor:
        wanted = self._wanted
        if wanted is None:
            return _probe(len(self._head.weight), hidden.device).expand(*hidden.shape[:-1], -1)
        hidden_NH = hidden.flatten(0, 1)
        if len(hidden_NH) != len(wanted.places_N):  # some models compute all positions
            hidden_NH = hidden_NH[wanted.places_N]
        return score_tokens(
            hidden_NH,
            self._head.weight,
            self._bias(),
            wanted.targets_N,
            wanted.temperatures_N,
            candidates=wanted.candidates,
            shape=self._shape,
        )

    def _bias(self) -> Tensor | None:
        bias = self._head.bias
        if not self._unsampled:
            return bias
        if bias is None:
            bias = self._head.weight.new_zeros(len(self._head.weight), dtype=torch.float32)
        chosen = torch.tensor(self._unsampled, device=bias.device)
        return bias.index_fill(0, chosen, _MASKED)

    def _keep(self, head: nn.Module, inputs: object, output: Tensor) -> None:
        self._scores = output

    def _watch(self, embeddings: nn.Module, inputs: object, output: Tensor) -> None:
        self._not_finite = torch.zeros(output.shape[:2], dtype=torch.bool, device=output.device)
        if torch.is_grad_enabled() and not output.requires_grad:
            output.requires_grad_()  # of frozen embeddings, whose gradient is watched all the same
        if output.requires_grad:
            output.register_hook(self._note_not_finite)  # type: ignore[no-untyped-call]

    def _note_not_finite(self, grad: Tensor) -> None:
        self._not_finite = ~grad.isfinite().all(-1)

    def take_not_finite(self) -> Tensor:
        """Bool [L]: positions whose input embedding had a gradient that was not finite."""
        found, self._not_finite = self._not_finite, None
        assert found is not None, "no forward pass came before"
        return found.flatten()

    def learn_shape(self, forward: Callable[[], Tensor]) -> None:
        """Find out what the model does with logits after its head; `forward` returns those of any
        tokens.

        Gemma caps them, Granite and Cohere scale them. Raises ValueError for anything else.
        """
        with torch.no_grad():
            found = forward()
        found = found.flatten(0, -2)[-1].float()
        probe = _probe(len(found), found.device)
        scale = float(found[0] / probe[0])
        is_linear = torch.isclose(found[1], scale * probe[1], rtol=1e-2)
        shape = LogitShape(scale=scale, cap=None if is_linear else float(found[1]))
        if not torch.allclose(found, shape.apply_(probe), rtol=1e-2, atol=1e-2):
            raise ValueError(
                f"model.path={self._model_path!r}: this model changes the logits after its output "
                "head by more than a scale and a soft cap, which the trainer does not compute; "
                "choose another model"
            )
        self._shape = shape


def _probe(num_ids: int, device: torch.device) -> Tensor:
    """[V] in place of logits: one so small that a cap hardly changes it, one that a cap cuts off,
    and values from -100 to 100."""
    probe = torch.linspace(-100, 100, num_ids, device=device)
    probe[0], probe[1] = 2.0**-10, 2.0**20
    return probe
