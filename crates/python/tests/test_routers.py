"""The routing schemes, against plain code for one token at a time, with autograd's gradients."""

import math
from unittest import SkipTest

try:
    import torch
except ImportError as error:
    raise SkipTest(str(error)) from error

from moeworks.nn import MoE, entropy_loss, importance_loss, l1_loss
from moeworks._balanced_choices import balanced_assignment, sinkhorn_factors
from moeworks.routers import SCHEMES, make_router

T, D, E, K = 24, 16, 8, 2
ONE = {"switch", "base"}
NAMES = [
    "top_k", "switch", "noisy_top_k", "gshard", "cosine", "gumbel", "expert_choice", "base", "sinkhorn", "hash", "top_p",
    "relu", "hierarchical", "low_rank", "dense_to_sparse", "forced",
]  # fmt: skip


def raises(kind, words, call):
    try:
        call()
    except kind as error:
        assert words in str(error), f"{error} lacks {words!r}"
        return
    raise AssertionError(f"no {kind.__name__}")


def settings_of(kind):
    return {"vocab_size": 32} if kind == "hash" else {}


def router(kind, top_k=None, **settings):
    torch.manual_seed(0)
    made = make_router(kind, D, E, top_k or (1 if kind in ONE else K), settings_of(kind) | settings)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name != "log_scale":
                parameter.copy_(torch.randn(parameter.shape) * 0.4)
    return made


def tokens(num_tokens=T):
    torch.manual_seed(1)
    return torch.randn(num_tokens, D).requires_grad_()


def dense(choice):
    """The weights as ``[T, E]``."""
    table = torch.zeros(choice.expert_ids.shape[0], E + 1, dtype=choice.expert_weights.dtype)
    return table.scatter_add(1, choice.expert_ids, choice.expert_weights)[:, :E]


def assert_as_plain(made, plain, x, token_ids=None):
    """Compares weights, and gradients of a random function of them, with those of ``plain``, ``[T, E]`` of ``x``."""
    found, wanted = dense(made(x, token_ids)), plain(x)
    assert torch.allclose(found, wanted, atol=1e-6), (made.KIND, (found - wanted).abs().max())
    dy = torch.randn(found.shape)
    parameters = [x, *(parameter for parameter in made.parameters() if parameter.requires_grad)]
    ours = torch.autograd.grad(found, parameters, dy, allow_unused=True)
    theirs = torch.autograd.grad(wanted, parameters, dy, allow_unused=True)
    for a, b in zip(ours, theirs, strict=True):
        a, b = (torch.zeros(1) if grad is None else grad for grad in (a, b))
        assert torch.allclose(a, b, atol=1e-5), (made.KIND, (a - b).abs().max())


def rows(weights_of_token):
    """A plain router from a function of one token that gives its weights ``[E]``."""
    return lambda x: torch.stack([weights_of_token(token) for token in x])


def only(values, experts):
    kept = torch.zeros(E)
    kept[list(experts)] = 1.0
    return values * kept


def best(values, count):
    return sorted(range(E), key=lambda e: -values[e].item())[:count]


def test_the_schemes_are_those_of_the_program():
    assert list(SCHEMES) and set(SCHEMES) == set(NAMES)


def test_softmax_schemes_match_one_token_at_a_time():
    for kind in ("top_k", "switch", "noisy_top_k", "gumbel_eval", "expert_choice", "dense_to_sparse"):
        is_gumbel = kind == "gumbel_eval"
        made = router("gumbel" if is_gumbel else kind).eval()

        def weigh(token, made=made, is_gumbel=is_gumbel):
            logits = made.weight @ token / (made.temperature if is_gumbel else 1.0)
            probabilities = logits.softmax(-1)
            chosen = best(probabilities, made.top_k)
            weights = only(probabilities, chosen)
            if is_gumbel:
                return only(torch.full((E,), 1.0 / K), chosen) + weights - weights.detach()
            return weights / weights.sum() if made.normalize_weights else weights

        assert_as_plain(made, rows(weigh), tokens())


def test_sigmoid_scores_and_weights_as_they_are():
    made = make_router("top_k", D, E, K, score="sigmoid", normalize_weights=False)

    def weigh(token):
        scores = (made.weight @ token).sigmoid()
        return only(scores, best(scores, K))

    assert_as_plain(made, rows(weigh), tokens())


def test_projected_schemes_match_one_token_at_a_time():
    cosine, low_rank = router("cosine", dim=6), router("low_rank", dim=5, normalize=True)

    def of_cosine(token):
        projected = cosine.projection @ token
        norms = projected.norm() * cosine.weight.norm(dim=1)
        logits = cosine.weight @ projected / norms * cosine.log_scale.exp()
        weights = only(logits.softmax(-1), best(logits, K))
        return weights / weights.sum()

    def of_low_rank(token):
        projected = low_rank.projection @ token
        logits = low_rank.weight @ (projected / (projected.square().mean() + 1e-6).sqrt())
        weights = only(logits.softmax(-1), best(logits, K))
        return weights / weights.sum()

    assert math.isclose(cosine.log_scale.item(), math.log(2.0), rel_tol=1e-6)
    assert_as_plain(cosine, rows(of_cosine), tokens())
    assert_as_plain(low_rank, rows(of_low_rank), tokens())


def test_gshard_keeps_the_first_and_uses_the_second_by_its_weight():
    made = router("gshard", second="threshold", second_threshold=0.3)

    def weigh(token):
        probabilities = (made.weight @ token).softmax(-1)
        first, second = best(probabilities, 2)
        both = only(probabilities, (first, second))
        both = both / both.sum()
        return both if both[second] > 0.3 else only(both, [first])

    assert_as_plain(made, rows(weigh), tokens())
    is_left_out = made(tokens()).expert_ids[:, 1] == E
    assert is_left_out.any() and not is_left_out.all()
    made.second = "random"
    x = tokens()
    shares = torch.stack([(made(x).expert_ids[:, 1] < E).float() for _ in range(300)]).mean(0)
    logits = made(x).logits
    pairs = logits.softmax(-1).topk(2).values
    wanted = (pairs[:, 1] / pairs.sum(-1) / 0.3).clamp(max=1.0)
    assert (shares - wanted).abs().max() < 0.15, (shares - wanted).abs().max()


def test_expert_choice_gives_each_expert_its_best_tokens():
    made = router("expert_choice").train()

    def plain(x):
        probabilities = (x @ made.weight.T).softmax(-1)
        kept = torch.zeros(T, E)
        for e in range(E):
            for t in sorted(range(T), key=lambda t, e=e: -probabilities[t, e].item())[: T * K // E]:
                kept[t, e] = 1.0
        return probabilities * kept

    assert_as_plain(made, plain, tokens())
    ids = made(tokens()).expert_ids
    assert torch.bincount(ids[ids < E], minlength=E).tolist() == [T * K // E] * E


def test_base_assigns_equal_loads_with_the_highest_sum():
    import itertools

    for seed in range(6):
        torch.manual_seed(seed)
        scores = torch.randn(6, 3)
        chosen = balanced_assignment(scores)
        assert torch.bincount(chosen, minlength=3).tolist() == [2, 2, 2]
        orders = set(itertools.permutations([0, 0, 1, 1, 2, 2]))
        highest = max(sum(float(scores[t, e]) for t, e in enumerate(order)) for order in orders)
        found = scores.gather(1, chosen.unsqueeze(1)).sum().item()
        assert found >= highest - 6 * (scores.max() - scores.min()).item() / 1000, (found, highest)
    assert sorted(torch.bincount(balanced_assignment(torch.randn(7, 3)), minlength=3).tolist()) == [2, 2, 3]
    assert balanced_assignment(torch.full((4, 2), math.nan)).bincount(minlength=2).tolist() == [2, 2]
    assert balanced_assignment(torch.zeros(0, 3)).numel() == 0
    made = router("base").train()
    choice = made(tokens())
    assert torch.bincount(choice.expert_ids[:, 0], minlength=E).tolist() == [T // E] * E
    assert torch.allclose(choice.expert_weights, choice.logits.gather(1, choice.expert_ids).sigmoid())


def test_sinkhorn_balances_rows_and_columns():
    torch.manual_seed(0)
    logits = torch.randn(T, E)
    matrix = (logits + sinkhorn_factors(logits)).exp()
    matrix = matrix / matrix.sum(1, keepdim=True) / T
    assert torch.allclose(matrix.sum(0), torch.full((E,), 1.0 / E), atol=1e-4)
    made = router("sinkhorn").train()

    def plain(x):
        logits = x @ made.weight.T
        factors = sinkhorn_factors(logits.detach())
        chosen = [best(row + factors, K) for row in logits.detach()]
        return torch.stack([only(row.softmax(-1), ids) for row, ids in zip(logits, chosen, strict=True)])

    assert_as_plain(made, plain, tokens())


def test_top_p_takes_the_fewest_experts_that_suffice():
    made = router("top_p", top_p=0.6)

    def weigh(token):
        probabilities, chosen, total = (made.weight @ token).softmax(-1), [], 0.0
        for e in best(probabilities, E):
            if chosen and total >= 0.6:
                break
            chosen.append(e)
            total += probabilities[e].item()
        return only(probabilities, chosen)

    assert_as_plain(made, rows(weigh), tokens())


def test_relu_takes_all_positive_logits():
    made = router("relu")
    assert_as_plain(made, lambda x: (x @ made.weight.T).relu(), tokens())
    logits = tokens() @ made.weight.T
    share = (logits > 0).float().sum(0) * E / (K * T)
    assert torch.allclose(l1_loss(logits, K), (logits.relu() * share).sum() / (T * E))


def test_hierarchical_takes_experts_of_open_clusters():
    made = router("hierarchical", tree=(4,), beam=2)

    def weigh(token):
        clusters = (made.clusters[0] @ token).log_softmax(-1)
        logits, opened = made.weight @ token, sorted(range(4), key=lambda c: -clusters[c].item())[:2]
        logs = []
        for c in range(4):
            within = logits[2 * c : 2 * c + 2].log_softmax(-1) if c in opened else torch.full((2,), -math.log(2.0))
            logs.append(clusters[c] + within)
        probabilities = torch.cat(logs).exp()
        is_open = torch.tensor([1.0 if e // 2 in opened else 0.0 for e in range(E)])
        weights = only(probabilities, best(probabilities.detach() * is_open, K))
        return weights / weights.sum()

    assert_as_plain(made, rows(weigh), tokens())
    assert torch.allclose(made(tokens()).logits.exp().sum(-1), torch.ones(T))
    raises(ValueError, "divides 8", lambda: router("hierarchical", tree=(3,)))


def test_hash_and_forced_do_not_look_at_tokens():
    made, ids = router("hash"), torch.arange(T) % 5
    choice = made(tokens(), ids)
    assert torch.equal(choice.expert_ids[0], choice.expert_ids[5]) and (choice.expert_weights == 0.5).all()
    assert (choice.expert_ids[:, 0] != choice.expert_ids[:, 1]).all()
    raises(ValueError, "needs the id of each token", lambda: made(tokens()))
    counts = torch.tensor([100, 1, 1, 50, 49, 1] + [0] * 26)
    table = router("hash", counts=counts).table
    loads = torch.zeros(E).index_add(0, table.reshape(-1), counts.repeat_interleave(K).float())
    assert loads.max() == 100 and table[0].tolist() == [0, 1] and table[3].tolist() == [2, 3]
    assert router("forced")(tokens()).expert_ids[:5].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7], [0, 1]]


def test_noise_is_drawn_in_training_alone_by_the_generator():
    for kind in ("switch", "noisy_top_k", "gumbel", "dense_to_sparse"):
        made, x = router(kind), tokens()
        draws = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            draws.append(made(x, progress=0.1).logits)
        assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2]), kind
        made.eval()
        assert torch.equal(made(x).logits, made(x).logits), kind


def test_learned_noise_has_the_gradient_of_its_deviation():
    made, x = router("noisy_top_k").train(), tokens()
    torch.manual_seed(5)
    logits = made(x).logits
    torch.manual_seed(5)
    noise = torch.randn(T, E)
    wanted = x @ made.weight.T + noise * torch.nn.functional.softplus(x @ made.noise_weight.T)
    dy = torch.randn(T, E)
    parameters = [made.weight, made.noise_weight, x]
    for a, b in zip(torch.autograd.grad(logits, parameters, dy), torch.autograd.grad(wanted, parameters, dy), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_dense_to_sparse_falls_to_its_k():
    made = router("dense_to_sparse", share=0.5).train()
    counts = [made(tokens(), progress=step / 10).expert_ids.shape[1] for step in range(8)]
    assert counts == [8, 7, 6, 5, 4, 2, 2, 2], counts


def test_layers_of_all_schemes_train_and_tell_their_routing():
    for kind in NAMES:
        torch.manual_seed(0)
        top_k = 1 if kind in ONE else K
        layer = MoE(D, 12, E, top_k, router=kind, router_settings=settings_of(kind), capacity_factor=1.5)
        x, ids = tokens(), torch.arange(T)
        y, logits, routing = layer(x, output_router_logits=True, output_routing=True, token_ids=ids)
        y.square().sum().backward()
        assert y.shape == (T, D) and logits.shape == (T, E) and torch.isfinite(x.grad).all(), kind
        assert routing[0].loads.max() <= math.ceil(1.5 * T * top_k / E), kind
        with torch.no_grad():
            assert layer.eval()(x, token_ids=ids).shape == (T, D), kind


def test_what_a_layer_tells_is_what_it_did():
    torch.manual_seed(0)
    layer, x = MoE(D, 12, E, K), tokens()
    y, routing = layer(x, output_routing=True)
    ids, weights = torch.tensor(routing[0].expert_ids), torch.tensor(routing[0].expert_weights)
    assert torch.equal(layer.experts(x, ids, weights), y)
    assert routing.loads.sum() == T * K and routing[0].cv >= 0.0
    page = routing._repr_html_()
    assert page.startswith("<table") and page.count("<td title=") == E and "http" not in page and "<script" not in page


def test_losses_of_distributions():
    torch.manual_seed(0)
    logits, weights = torch.randn(T, E).requires_grad_(), torch.rand(T, K).requires_grad_()
    ids = torch.randint(0, E + 1, (T, K))
    probabilities = logits.softmax(-1)
    assert torch.allclose(entropy_loss(logits), -(probabilities * probabilities.log()).sum() / T)
    sums = torch.stack([weights[ids == e].sum() for e in range(E)])
    wanted = sums.var(correction=0) / sums.mean() ** 2
    found = importance_loss(ids, weights, E)
    assert torch.allclose(found, wanted)
    pairs = [torch.autograd.grad(loss, weights)[0] for loss in (found, wanted)]
    assert torch.allclose(*pairs, atol=1e-6)


def test_what_is_wrong_is_said():
    raises(ValueError, "router 'best'", lambda: make_router("best", D, E, K))
    raises(ValueError, "its settings are top_p", lambda: make_router("top_p", D, E, K, {"p": 0.5}))
    raises(ValueError, "it has none", lambda: make_router("top_k", D, E, K, {"p": 0.5}))
    raises(ValueError, "above 0 and at most 1", lambda: make_router("top_p", D, E, K, {"top_p": 1.5}))
    raises(ValueError, "'switch' needs 1", lambda: make_router("switch", D, E, K))
    raises(ValueError, "number of token ids", lambda: make_router("hash", D, E, K))
    raises(ValueError, "score 'x'", lambda: make_router("top_k", D, E, K, score="x"))
