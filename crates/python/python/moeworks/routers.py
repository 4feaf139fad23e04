"""The routing schemes of Moeworks, as layers of PyTorch.

A router maps tokens to the experts that they go to, and their weights. The names are those of ``model.router.kind`` in
the program's settings, where ``docs/routing-schemes.md`` has the papers. Everything that has a gradient is computed by
PyTorch's operators in f32, so that gradients are autograd's. Random numbers are drawn in training alone, by PyTorch's
generator; nothing is kept in global state.

T tokens, D hidden size, E experts, K experts a token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from ._balanced_choices import balanced_assignment, balanced_table, sinkhorn_factors
from ._torch import torch

Tensor = torch.Tensor

__all__ = ["SCHEMES", "Choice", "Router", "make_router"]

_STD = 0.02
_TINY = 1e-20


class Choice(NamedTuple):
    """The choice of a router.

    Attributes:
        logits: ``[T, E]``, f32, with the noise that was added.
        expert_ids: ``[T, K]``, int64; E for places without an expert, which are skipped.
        expert_weights: ``[T, K]``, f32; 0 for places without an expert.
    """

    logits: Tensor
    expert_ids: Tensor
    expert_weights: Tensor


class Router(torch.nn.Module):
    """The scheme ``top_k``: the K experts with the highest scores, weighed by these. Others change some of its steps.

    Attributes:
        weight: ``[E, D]``, the vectors of the experts.
    """

    KIND = "top_k"
    FIXED_TOP_K: int | None = None
    # The default of normalize_weights.
    NORMALIZES = True

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        normalize_weights: bool | None = None,
        score: str = "softmax",
        device: Any = None,
        dtype: torch.dtype | None = None,
        **settings: Any,
    ) -> None:
        """Makes a router.

        Args:
            hidden_size: D.
            num_experts: E.
            top_k: K.
            normalize_weights: whether a token's weights are divided by their sum; ``None`` for the scheme's own choice.
            score: ``"softmax"`` over the experts, or ``"sigmoid"`` of each (DeepSeek-V3).
            device: where the parameters are.
            dtype: the type of the parameters.
            settings: those of the scheme.
        """
        super().__init__()
        if score not in ("softmax", "sigmoid"):
            raise ValueError(f"score {score!r}: must be softmax or sigmoid")
        if self.FIXED_TOP_K is not None and top_k != self.FIXED_TOP_K:
            raise ValueError(f"top_k {top_k}: router {self.KIND!r} needs {self.FIXED_TOP_K}")
        self.hidden_size, self.num_experts, self.top_k, self.score = hidden_size, num_experts, top_k, score
        self.normalize_weights = self.NORMALIZES if normalize_weights is None else normalize_weights
        self._options = {"device": device, "dtype": dtype}
        self.make(**settings)

    def make(self) -> None:
        """Makes the parameters; arguments are the scheme's settings."""
        self.weight = self.parameter(self.num_experts, self.hidden_size)

    def parameter(self, *shape: int, std: float = _STD) -> torch.nn.Parameter:
        """Returns a parameter with normal numbers of deviation ``std``; zeros for 0."""
        parameter = torch.nn.Parameter(torch.empty(shape, **self._options))
        with torch.no_grad():
            parameter.normal_(std=std) if std > 0.0 else parameter.zero_()
        return parameter

    def logits(self, x: Tensor) -> Tensor:
        """Returns ``[T, E]`` for ``x [T, D]`` in f32."""
        return torch.nn.functional.linear(x, self.weight.float())

    def scores(self, logits: Tensor) -> Tensor:
        """Returns what weighs the experts, ``[T, E]``."""
        return logits.softmax(-1) if self.score == "softmax" else logits.sigmoid()

    def choose(self, scores: Tensor, logits: Tensor) -> Tensor:
        """Returns the ids ``[T, K]``; E for none."""
        return scores.topk(self.top_k, dim=-1).indices

    def weigh(self, scores: Tensor, ids: Tensor) -> Tensor:
        """Returns the weights ``[T, K]`` of chosen experts."""
        weights = _at(scores, ids)
        return weights / weights.sum(-1, keepdim=True).clamp_min(_TINY) if self.normalize_weights else weights

    def forward(self, x: Tensor, token_ids: Tensor | None = None, progress: float = 1.0) -> Choice:
        """Returns the :class:`Choice` for tokens.

        Args:
            x: ``[T, D]``.
            token_ids: ``[T]``, which ``hash`` needs.
            progress: the share of the run that is over, from 0 to 1, for schemes that change with it.
        """
        with torch.autocast("cpu", enabled=False):
            logits = self.logits(x.float())
            scores = self.scores(logits)
            ids = self.choose(scores, logits)
            return Choice(logits, ids, self.weigh(scores, ids))

    def extra_repr(self) -> str:
        return f"kind={self.KIND!r}, num_experts={self.num_experts}, top_k={self.top_k}, score={self.score!r}"


def _at(values: Tensor, ids: Tensor) -> Tensor:
    """Returns ``values [T, E]`` at ``ids [T, K]``; 0 where an id is E."""
    num_experts = values.shape[1]
    found = values.gather(1, ids.clamp(max=num_experts - 1))
    return found.masked_fill(ids == num_experts, 0.0)


def _compact(is_chosen: Tensor, ranking: Tensor, least: int = 1) -> Tensor:
    """Returns the ids ``[T, K]`` of chosen experts, the highest ranks first, with K as large as a token needs."""
    num_experts = is_chosen.shape[1]
    order = ranking.masked_fill(~is_chosen, -math.inf).argsort(dim=-1, descending=True, stable=True)
    ids = torch.where(is_chosen.gather(1, order), order, num_experts)
    if torch.compiler.is_compiling():
        return ids
    most = int(is_chosen.sum(-1).max()) if is_chosen.numel() else 0
    return ids[:, : max(most, least)].contiguous()


def _share(name: str, value: float) -> float:
    if not 0.0 < value <= 1.0:
        raise ValueError(f"{name} {value}: must be above 0 and at most 1")
    return float(value)


def _above_zero(name: str, value: float) -> float:
    if not (value > 0.0 and math.isfinite(value)):
        raise ValueError(f"{name} {value}: must be above 0")
    return float(value)


def _gumbels(like: Tensor) -> Tensor:
    return -torch.empty_like(like).exponential_().clamp_min(_TINY).log()


class Switch(Router):
    """One expert, weighed by its probability (2101.03961); in training the input gets multiplicative ``jitter``."""

    KIND, FIXED_TOP_K, NORMALIZES = "switch", 1, False

    def make(self, jitter: float = 0.01) -> None:
        super().make()
        self.jitter = float(jitter)

    def logits(self, x: Tensor) -> Tensor:
        if self.training and self.jitter > 0.0:
            x = x * torch.empty_like(x).uniform_(1.0 - self.jitter, 1.0 + self.jitter)
        return super().logits(x)


class NoisyTopK(Router):
    """Normal noise on the logits in training, of a learned deviation (1701.06538, section 2.1).

    Attributes:
        noise_weight: ``[E, D]``; the deviation is ``softplus(x noise_weight^T)``.
    """

    KIND = "noisy_top_k"

    def make(self) -> None:
        super().make()
        self.noise_weight = self.parameter(self.num_experts, self.hidden_size, std=0.0)

    def logits(self, x: Tensor) -> Tensor:
        logits = super().logits(x)
        if not self.training:
            return logits
        deviation = torch.nn.functional.softplus(torch.nn.functional.linear(x, self.noise_weight.float()))
        return logits + torch.randn_like(logits) * deviation


class Gshard(Router):
    """Two experts, the second of which is used always, at random by its weight, or over a threshold (2006.16668)."""

    KIND, FIXED_TOP_K = "gshard", 2

    def make(self, second: str = "random", second_threshold: float = 0.5) -> None:
        if second not in ("always", "random", "threshold"):
            raise ValueError(f"second {second!r}: must be always, random or threshold")
        super().make()
        self.second, self.second_threshold = second, _share("second_threshold", second_threshold)

    def choose(self, scores: Tensor, logits: Tensor) -> Tensor:
        ids = super().choose(scores, logits)
        weights = _at(scores, ids).detach()
        share = weights[:, 1] / weights.sum(-1).clamp_min(_TINY)
        if self.second == "threshold":
            is_used = share > self.second_threshold
        elif self.second == "random" and self.training:
            is_used = share / self.second_threshold > torch.rand_like(share)
        else:
            return ids
        return torch.stack((ids[:, 0], torch.where(is_used, ids[:, 1], self.num_experts)), 1)

    def weigh(self, scores: Tensor, ids: Tensor) -> Tensor:
        # Weights are those of both experts, whether or not the second is used.
        both = Router.choose(self, scores, scores)
        return super().weigh(scores, both).masked_fill(ids == self.num_experts, 0.0)


class Cosine(Router):
    """Cosines of projected tokens and experts' vectors over a learned temperature (Tutel, 2206.03382).

    Attributes:
        projection: ``[dim, D]``.
        weight: ``[E, dim]``.
        log_scale: ``[1]``, the logarithm of the inverse temperature.
    """

    KIND = "cosine"

    def make(self, dim: int = 0, temperature: float = 0.5) -> None:
        dim = dim or min(self.hidden_size, 256)
        self.projection = self.parameter(dim, self.hidden_size)
        self.weight = self.parameter(self.num_experts, dim)
        self.log_scale = self.parameter(1, std=0.0)
        with torch.no_grad():
            self.log_scale.fill_(-math.log(_above_zero("temperature", temperature)))

    def logits(self, x: Tensor) -> Tensor:
        functional = torch.nn.functional
        projected = functional.normalize(functional.linear(x, self.projection.float()), dim=-1)
        experts = functional.normalize(self.weight.float(), dim=-1)
        return functional.linear(projected, experts) * self.log_scale.float().clamp_max(math.log(100.0)).exp()


class LowRank(Router):
    """Logits of tokens that are projected to few dimensions (X-MoE, 2204.09179).

    Attributes:
        projection: ``[dim, D]``.
        weight: ``[E, dim]``.
    """

    KIND = "low_rank"

    def make(self, dim: int = 0, normalize: bool = False) -> None:
        dim = dim or max(1, min(self.num_experts // 2, self.hidden_size))
        if normalize and dim == 1:
            raise ValueError("normalize: must be false with one dimension, of which only the sign would be left")
        self.normalize = normalize
        self.projection = self.parameter(dim, self.hidden_size, std=self.hidden_size**-0.5)
        self.weight = self.parameter(self.num_experts, dim)

    def logits(self, x: Tensor) -> Tensor:
        projected = torch.nn.functional.linear(x, self.projection.float())
        if self.normalize:
            projected = torch.nn.functional.rms_norm(projected, projected.shape[-1:], eps=1e-6)
        return torch.nn.functional.linear(projected, self.weight.float())


class _Equal(Router):
    """Weights of 1 over the number of a token's experts; their gradient is that of the scores (straight-through)."""

    def weigh(self, scores: Tensor, ids: Tensor) -> Tensor:
        is_chosen = ids < self.num_experts
        equal = is_chosen / is_chosen.sum(-1, keepdim=True).clamp_min(1)
        gates = super().weigh(scores, ids)
        return equal + (gates - gates.detach())


class Gumbel(_Equal):
    """Experts drawn by Gumbel noise in training, with straight-through gradients (1611.01144)."""

    KIND, NORMALIZES = "gumbel", False

    def make(self, temperature: float = 0.5) -> None:
        super().make()
        self.temperature = _above_zero("temperature", temperature)

    def logits(self, x: Tensor) -> Tensor:
        logits = super().logits(x)
        return (logits + _gumbels(logits) if self.training else logits) / self.temperature


class ExpertChoice(Router):
    """In training each expert takes the ``K T / E`` tokens that score it highest (2202.09368), otherwise ``top_k``."""

    KIND, NORMALIZES = "expert_choice", False

    def make(self, capacity_factor: float = 1.0) -> None:
        super().make()
        self.capacity_factor = _above_zero("capacity_factor", capacity_factor)

    def choose(self, scores: Tensor, logits: Tensor) -> Tensor:
        if not self.training:
            return super().choose(scores, logits)
        num_tokens = scores.shape[0]
        count = math.ceil(self.capacity_factor * num_tokens * self.top_k / self.num_experts * (1 - 1e-12))
        tokens = scores.topk(min(count, num_tokens), dim=0).indices
        is_chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(0, tokens, True)
        return _compact(is_chosen, scores)


class Base(Router):
    """In training an assignment of equal loads with the highest total score, weighed by sigmoids (2103.16716)."""

    KIND, FIXED_TOP_K = "base", 1

    def scores(self, logits: Tensor) -> Tensor:
        return logits.sigmoid()

    def choose(self, scores: Tensor, logits: Tensor) -> Tensor:
        if not self.training:
            return logits.argmax(-1, keepdim=True)
        return balanced_assignment(logits.detach()).unsqueeze(1)

    def weigh(self, scores: Tensor, ids: Tensor) -> Tensor:
        return _at(scores, ids)


class Sinkhorn(Router):
    """In training the K best of logits that Sinkhorn's iteration balances (2202.01169); weights are unbalanced."""

    KIND, NORMALIZES = "sinkhorn", False

    def scores(self, logits: Tensor) -> Tensor:
        return logits.sigmoid() if self.top_k == 1 else logits.softmax(-1)

    def choose(self, scores: Tensor, logits: Tensor) -> Tensor:
        ranking = logits.detach()
        return (ranking + sinkhorn_factors(ranking) if self.training else ranking).topk(self.top_k, dim=-1).indices


class Hash(_Equal):
    """Experts by a hash of the token's id, with equal weights; nothing is learned (2106.04426).

    Attributes:
        table: ``[ids, K]``, the experts of each id.
    """

    KIND, NORMALIZES = "hash", False

    def make(self, vocab_size: int = 0, counts: Tensor | None = None) -> None:
        if vocab_size < 1:
            raise ValueError(f"vocab_size {vocab_size}: router 'hash' needs the number of token ids")
        generator = torch.Generator().manual_seed(0x4D6F6577)
        if counts is None:
            table = torch.rand(vocab_size, self.num_experts, generator=generator).argsort(-1)[:, : self.top_k]
        else:
            table = balanced_table(counts, vocab_size, self.num_experts, self.top_k)
        self.register_buffer("table", table.contiguous().to(self._options["device"]))

    def forward(self, x: Tensor, token_ids: Tensor | None = None, progress: float = 1.0) -> Choice:
        if token_ids is None:
            raise ValueError("token_ids: router 'hash' needs the id of each token")
        token_ids = token_ids.reshape(-1)
        if token_ids.shape[0] != x.shape[0]:
            raise ValueError(f"token_ids: has {token_ids.shape[0]} ids for {x.shape[0]} tokens")
        try:
            ids = self.table[token_ids]
        except IndexError:
            message = f"token_ids: must be whole numbers from 0 to vocab_size - 1, {self.table.shape[0] - 1}"
            raise ValueError(message) from None
        logits = torch.zeros(x.shape[0], self.num_experts, device=x.device)
        return Choice(logits, ids, torch.full(ids.shape, 1.0 / self.top_k, device=x.device))


class TopP(Router):
    """The fewest experts whose probabilities add up to ``top_p`` (2403.07652)."""

    KIND, NORMALIZES = "top_p", False

    def make(self, top_p: float = 0.4) -> None:
        super().make()
        self.top_p = _share("top_p", top_p)

    def choose(self, scores: Tensor, logits: Tensor) -> Tensor:
        ordered, order = scores.detach().sort(dim=-1, descending=True, stable=True)
        is_needed = (ordered.cumsum(-1) - ordered < self.top_p) & (ordered > 0.0)
        is_needed[:, 0] = True
        is_chosen = torch.zeros_like(is_needed).scatter(1, order, is_needed)
        return _compact(is_chosen, scores.detach())


class Relu(Router):
    """All experts whose logit is positive, weighed by it (ReMoE, 2412.14711); see :func:`moeworks.nn.l1_loss`."""

    KIND, NORMALIZES = "relu", False

    def scores(self, logits: Tensor) -> Tensor:
        return logits.relu()

    def choose(self, scores: Tensor, logits: Tensor) -> Tensor:
        return _compact(scores > 0.0, scores.detach())

    def weigh(self, scores: Tensor, ids: Tensor) -> Tensor:
        return _at(scores, ids)


class Hierarchical(Router):
    """Clusters above the experts; a token takes experts of the clusters that it finds likeliest (2510.02345).

    Attributes:
        weight: ``[E, D]``.
        clusters: one ``[number of clusters, D]`` for each level.
    """

    KIND = "hierarchical"

    def make(self, tree: tuple[int, ...] = (), beam: int = 0) -> None:
        super().make()
        if not tree:
            root = math.isqrt(self.num_experts)
            tree = next(((n,) for n in range(root, 1, -1) if self.num_experts % n == 0), ())
        if any(n < 2 for n in tree) or self.num_experts % math.prod(tree):
            raise ValueError(f"tree {tree}: must be numbers of at least 2 whose product divides {self.num_experts}")
        self.tree, self.beam = tuple(tree), beam or self.top_k
        sizes = [math.prod(tree[: level + 1]) for level in range(len(tree))]
        self.clusters = torch.nn.ParameterList([self.parameter(size, self.hidden_size) for size in sizes])
        leaves = self.num_experts // math.prod(tree)
        if (opened := min(self.beam, sizes[-1]) * leaves if tree else leaves) < self.top_k:
            raise ValueError(f"beam {self.beam}: leaves a token {opened} experts, fewer than top_k {self.top_k}")

    def descend(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns logits ``[T, E]`` and whether a token has opened each expert's cluster.

        Logits are logarithms of probabilities. Those of a cluster that is not opened are spread over its experts.
        """
        total = x.new_zeros(x.shape[0], 1)
        is_open = torch.ones_like(total, dtype=torch.bool)
        for weight in [*self.clusters, self.weight]:
            nodes = torch.nn.functional.linear(x, weight.float())
            siblings = nodes.shape[1] // total.shape[1]
            within = nodes.view(x.shape[0], total.shape[1], siblings).log_softmax(-1)
            within = torch.where(is_open.unsqueeze(-1), within, -math.log(siblings))
            total = (total.unsqueeze(-1) + within).flatten(1)
            is_open = is_open.repeat_interleave(siblings, 1)
            if total.shape[1] < self.num_experts:
                best = total.masked_fill(~is_open, -math.inf).topk(min(self.beam, total.shape[1]), dim=-1).indices
                is_open = torch.zeros_like(is_open).scatter(1, best, True) & is_open
        return total, is_open

    def forward(self, x: Tensor, token_ids: Tensor | None = None, progress: float = 1.0) -> Choice:
        with torch.autocast("cpu", enabled=False):
            logits, is_open = self.descend(x.float())
            scores = self.scores(logits)
            ids = scores.detach().masked_fill(~is_open, -1.0).topk(self.top_k, dim=-1).indices
            return Choice(logits, ids, self.weigh(scores, ids))


class DenseToSparse(Router):
    """Every expert at first; K falls to its value over a share of the run, with Gumbel noise on logits meanwhile."""

    KIND = "dense_to_sparse"

    def make(self, start: int = 0, share: float = 0.25) -> None:
        super().make()
        if start and not self.top_k <= start <= self.num_experts:
            raise ValueError(f"start {start}: must be 0 for all experts, or from {self.top_k} to {self.num_experts}")
        self.start, self.share = start or self.num_experts, _share("share", share)

    def forward(self, x: Tensor, token_ids: Tensor | None = None, progress: float = 1.0) -> Choice:
        with torch.autocast("cpu", enabled=False):
            logits = self.logits(x.float())
            num_choices = self.top_k
            if self.training and progress < self.share:
                logits = logits + _gumbels(logits)
                fallen = (self.start - self.top_k) * progress / self.share
                num_choices = max(self.top_k, math.ceil(self.start - fallen - 1e-9))
            scores = self.scores(logits)
            ids = scores.topk(num_choices, dim=-1).indices
            return Choice(logits, ids, self.weigh(scores, ids))


class Forced(Router):
    """Experts in turn, whatever the scores: for measurements at an even load."""

    KIND = "forced"

    def choose(self, scores: Tensor, logits: Tensor) -> Tensor:
        places = torch.arange(scores.shape[0] * self.top_k, device=scores.device)
        return (places % self.num_experts).view(-1, self.top_k)


_CLASSES = (
    Router, Switch, NoisyTopK, Gshard, Cosine, Gumbel, ExpertChoice, Base, Sinkhorn, Hash, TopP, Relu, Hierarchical,
    LowRank, DenseToSparse, Forced,
)  # fmt: skip

#: The routing schemes by name.
SCHEMES: Mapping[str, type[Router]] = {scheme.KIND: scheme for scheme in _CLASSES}


def make_router(
    kind: str, hidden_size: int, num_experts: int, top_k: int, settings: Mapping[str, Any] | None = None, **options: Any
) -> Router:
    """Returns the router of a scheme.

    Args:
        kind: its name in :data:`SCHEMES`.
        hidden_size: D.
        num_experts: E.
        top_k: K.
        settings: the scheme's own settings, the arguments of its ``make``.
        options: those of :class:`Router`.

    Raises:
        ValueError: if the scheme or a setting is unknown, or a value is out of range.
    """
    if kind not in SCHEMES:
        raise ValueError(f"router {kind!r}: must be one of {', '.join(SCHEMES)}")
    scheme = SCHEMES[kind]
    code = scheme.make.__code__
    known = code.co_varnames[1 : code.co_argcount]
    for name in settings or {}:
        if name not in known:
            wanted = f"its settings are {', '.join(known)}" if known else "it has none"
            raise ValueError(f"router setting {name!r}: unknown to {kind!r}; {wanted}")
    return scheme(hidden_size, num_experts, top_k, **dict(settings or {}), **options)
