"""The settings of each correction, by the name of its function in
`trainer_pool/algorithms/corrections.py`; p is proximal / rollout."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from configs.checks import POSITIVE, FunctionConfig, within


@dataclass(kw_only=True, slots=True)
class CorrectionConfig(FunctionConfig):
    """A weight or a mask for tokens that another policy sampled. A rejected token has no gradient,
    but still counts in the denominator of the loss: docs/algorithms.md#corrections."""

    SECTION: ClassVar[str] = "algorithm.correction.*"
    IS_WEIGHT: ClassVar[bool] = False
    """It weights tokens by p; otherwise it rejects tokens or trajectories."""
    IS_PARTIAL: ClassVar[bool] = False
    """It leaves most of what staleness does to p as it is."""


@dataclass(kw_only=True, slots=True)
class OwnCorrection(CorrectionConfig):
    params: dict[str, Any] = field(default_factory=dict)
    """Settings of your own function, by any names."""


@dataclass(kw_only=True, slots=True)
class Truncated(CorrectionConfig):
    IS_WEIGHT: ClassVar[bool] = True

    tis_cap: float = field(default=2.0, metadata=within(1))
    """The largest weight, which is p itself, its product over the trajectory, or its geometric
    mean."""
    normalize: bool = False
    """Divide the weights by their mean over the update."""


@dataclass(kw_only=True, slots=True)
class Icepop(CorrectionConfig):
    IS_WEIGHT: ClassVar[bool] = True

    icepop_low: float = field(default=0.5, metadata=within(0, below=1))
    """Tokens with p below this are rejected."""
    icepop_high: float = field(default=5.0, metadata=within(above=1))
    """Tokens with p above this are rejected; the others are weighted by p."""


@dataclass(kw_only=True, slots=True)
class GeometricMask(CorrectionConfig):
    geometric_low: float = field(default=0.999, metadata=within(0, below=1))
    """The smallest geometric mean of p over a trajectory."""
    geometric_high: float = field(default=1.001, metadata=within(above=1))
    """The largest one; the defaults are verl's."""


@dataclass(kw_only=True, slots=True)
class ProductMask(CorrectionConfig):
    product_low: float = field(default=0.5, metadata=within(0, below=1))
    """The smallest product of p over a trajectory."""
    product_high: float = field(default=2.0, metadata=within(above=1))
    """The largest one."""


@dataclass(kw_only=True, slots=True)
class Veto(CorrectionConfig):
    IS_PARTIAL: ClassVar[bool] = True

    veto_below: float = field(default=1e-4, metadata=within(above=0, below=1))
    """The smallest p that any token of a trajectory may have."""


@dataclass(kw_only=True, slots=True)
class Opsm(CorrectionConfig):
    IS_PARTIAL: ClassVar[bool] = True

    opsm_limit: float = field(default=0.1, metadata=POSITIVE)
    """The largest mean of log(rollout / trainer) of a trajectory of negative advantage."""


@dataclass(kw_only=True, slots=True)
class M2po(CorrectionConfig):
    m2po_limit: float = field(default=0.04, metadata=POSITIVE)
    """The largest mean of (log p)^2 over the tokens of an update that are kept."""


@dataclass(kw_only=True, slots=True)
class Kpop(CorrectionConfig):
    kpop_limit: float = field(default=0.05, metadata=POSITIVE)
    """The largest KL divergence, in nats, of the binary choice of a token or any other."""


CORRECTIONS: dict[str, type[CorrectionConfig]] = {
    "tis_token": Truncated,
    "tis_sequence": Truncated,
    "tis_geometric": Truncated,
    "icepop": Icepop,
    "geometric_mask": GeometricMask,
    "product_mask": ProductMask,
    "veto": Veto,
    "opsm": Opsm,
    "m2po": M2po,
    "kpop": Kpop,
}
