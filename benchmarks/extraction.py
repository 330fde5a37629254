"""Weights from answers, one method after the other: queries, precision, and the attack's overhead.

Targets are planted; errors are relative to the largest entry or, on 100 fresh sequences of each
length, to the largest answer. `--parts` takes some: `one-head` and `many-heads` count queries next
to the unknowns, H(d² + d), or H(2rd − r² + d) for heads of rank r; `one-layer` has Transformers of
one layer and ReLU networks, `vectors` layers that return vectors, `signs` one bit an answer;
`overhead` is an attack's time without the judge's over the time spent inside the oracle, for the
same batches. The full run takes minutes, most of them the oracle's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import mean
from typing import Any

import torch
from torch import Tensor

import show
from keyhole import extract, oracle
from keyhole.extract import Extraction, Method, Status, canonical
from keyhole.oracle import Head, OneLayer, Oracle, ReluFfn
from keyhole.oracle.planted import Attention
from planted import fresh_error, normals, worst_error
from show import Row, Stopwatch

PARTS = ["overhead", "one-head", "many-heads", "one-layer", "vectors", "signs"]
Runs = list[tuple[Extraction, Any]]  # each with the target as it was planted


def run(quick: bool, parts: list[str] = PARTS) -> Iterator[Row]:
    measured = {
        "overhead": overhead, "one-head": one_head, "many-heads": many_heads,
        "one-layer": one_layer, "vectors": vectors, "signs": signs,
    }  # fmt: skip
    for part in parts:
        yield from measured[part](quick)


def attacked(
    method: Callable[..., Method], plant: Callable[[int], Any], seeds: Sequence[int], **options: Any
) -> Runs:
    targets = [(seed, plant(seed)) for seed in seeds]
    return [(method(seed=seed, **options)(target), target) for seed, target in targets]


def planting(kind: str, **shape: Any) -> Callable[[int], Any]:
    return lambda seed: oracle.plant(kind, seed=seed, **shape)


def off(runs: Runs) -> float:
    """The worst error of any entry."""
    return max(worst_error(result.model, target) for result, target in runs)


def asked(runs: Runs) -> list[int]:
    return sorted({result.queries for result, _ in runs})


def recovered(runs: Runs) -> int:
    return sum(result.status is Status.RECOVERED for result, _ in runs)


# One head.


def one_head(quick: bool) -> Iterator[Row]:
    seeds, d = range(2 if quick else 10), 16 if quick else 64
    full = asked(attacked(extract.SingleHead, planting("head", dim=d), seeds))
    yield show.exactly(f"queries, d={d}, full rank", full, [d * d + d])
    for r in (1, d // 8):
        plant, unknowns = planting("head", dim=d, rank=r), d + 2 * r * d - r * r
        given = asked(attacked(extract.LowRank, plant, seeds, rank=r))
        found = asked(attacked(extract.LowRank, plant, seeds))
        yield show.exactly(f"queries, d={d}, rank {r} known", given, [unknowns])
        what, most = f"queries, d={d}, rank {r} unknown", unknowns + 2 * d
        yield Row(what, f"{found[0]} to {found[-1]}", f"<= {most}", found[-1] <= most)
    for scale, bound in ((1.0, 1e-11), (30.0, 1e-8)):
        runs = attacked(extract.SingleHead, planting("head", dim=d, scale=scale), seeds)
        yield show.at_most(f"error of W and v, d={d}, W x {scale:.0f}", off(runs), bound)
    extra = asked(runs)[-1] / (d * d + d) - 1
    yield Row("extra queries there", f"{extra:.2%}", "<= 2%", extra <= 0.02)


# Many heads.

RELATED = (
    "plain", "equal", "opposite", "proportional", "zero", "invisible", "anti-proportional",
    "opposite with equal v", "mixed",
)  # fmt: skip


def many_heads(quick: bool) -> Iterator[Row]:
    seeds = range(2 if quick else 5)
    small, large, heads = (12, 16, 2) if quick else (32, 64, 8)
    for d in (4,) if quick else (4, 8, 16):  # finding the heads costs more than reading them
        yield from heads_of(d, 2, None, seeds, 1e-9, 8.0)
    yield from heads_of(small, 2 if quick else 4, small // 4, seeds, 1e-10, 2.0)
    yield from heads_of(large, heads, None, seeds, 1e-9, 1.6)
    yield from heads_of(large, heads, large // 8, seeds, 1e-9, 1.6, by_rank=True)
    yield from related(range(9 if quick else 50))


def heads_of(
    d: int, heads: int, rank: int | None, seeds: range, bound: float, share: float,
    by_rank: bool = False,
) -> Iterator[Row]:  # fmt: skip
    """`by_rank`: queries next to the unknowns of heads of that rank, not of full rank."""
    plant = planting("multi-head", dim=d, heads=heads, rank=rank)
    runs = attacked(extract.MultiHead, plant, seeds)
    least, *_, most = [*asked(runs)[:1], *asked(runs)]
    r = rank if by_rank and rank else d
    unknowns = heads * (2 * r * d - r * r + d)
    what = f"d={d}, H={heads}, " + ("full rank" if rank is None else f"rank {rank}")
    formula = "H(d²+d)" if r == d else "H(2rd-r²+d)"
    yield show.at_most(f"error, {what}", off(runs), bound)
    yield Row(
        f"queries, {what}",
        f"{least} to {most} = {most / unknowns:.2f} {formula}",
        f"<= {share} x {unknowns} (published: {4 * heads * d * d - 2 * heads + 1})",
        most <= share * unknowns if d >= 32 else None,  # below, fixed costs weigh most
    )


def related(seeds: range) -> Iterator[Row]:
    """Equal, opposite, proportional, zero and invisible heads: is the canonical form right?"""
    runs = attacked(extract.MultiHead, related_heads, seeds)
    errors = [worst_error(result.model, canonical(target)) for result, target in runs]
    right = sum(
        result.status is Status.RECOVERED and error <= 1e-6
        for (result, _), error in zip(runs, errors, strict=True)
    )
    what = f"canonical form right, {len(RELATED)} kinds, up to 16 heads"
    yield Row(what, f"{right} of {len(seeds)}", f"{len(seeds)}", right == len(seeds))
    yield Row("recovered there; worst error of W or v", f"{recovered(runs)}; {max(errors):.1e}")


def related_heads(seed: int) -> oracle.MultiHead:
    """Up to 16 heads with d from 8 to 16, among them the kind that the seed says."""
    stream = torch.Generator().manual_seed(seed)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=stream))

    d, heads = pick(8, 16), pick(1, 12)
    rank = (None, None, pick(1, 4))[pick(0, 2)]
    target = oracle.plant("multi-head", dim=d, heads=heads, rank=rank, seed=seed)
    W, v = list(target.W), list(target.v)
    kind = RELATED[seed % len(RELATED)]
    todo = {"mixed": ["equal", "opposite", "proportional", "zero"], "plain": []}.get(kind, [kind])
    for what in todo:
        i = pick(0, heads - 1)
        other = torch.randn(d, generator=stream, dtype=torch.float64)
        factor = float(torch.exp(0.6 * torch.randn((), generator=stream) + 0.5))
        new_W, new_v = relative_of(what, W[i], v[i], other, factor)
        W.append(new_W)
        v.append(new_v)
    return oracle.MultiHead(W, v)


def relative_of(
    kind: str, W: Tensor, v: Tensor, other: Tensor, factor: float
) -> tuple[Tensor, Tensor]:
    """A head that stands to (W, v) as `kind` says, with value `other` where that is free."""
    if kind == "invisible":
        return W.mT.contiguous(), 0 * v
    if kind == "opposite with equal v":
        return -W, v
    factors = {"equal": 1, "opposite": -1, "zero": 0, "proportional": factor,
               "anti-proportional": -factor}  # fmt: skip
    return factors[kind] * W, other


# One-layer Transformers and ReLU networks.


def one_layer(quick: bool) -> Iterator[Row]:
    seeds = range(3 if quick else 10)
    for what, make, attention, widths in (
        ("one-layer Transformer", lambda m: planting("one-layer", dim=16, width=m), None, (32, 64)),
        ("the same with Aᵀw = 0", mirrored, None, (32, 64)),
        ("attention of rank 2, LowRank",
         lambda m: planting("one-layer", dim=16, width=m, rank=2), extract.LowRank, (32,)),
    ):  # fmt: skip
        for m in widths:
            cost = f"(m·d = {m * 16}, d² = 256)"
            yield transformers(f"{what}, d=16, width {m}", make(m), attention, seeds, cost)
    shapes = [(2, 12, 16), (3, 12, 16)]
    if not quick:
        shapes = [(H, d, m) for d in (12, 16) for H in (2, 3) for m in (16, 32)]
        shapes += [(4, 16, 32), (4, 64, 64)]
    for heads, d, m in shapes:
        plant = planting("one-layer", dim=d, width=m, heads=heads)
        cost = f"(m·H·d = {m * heads * d}, 2H·d² = {2 * heads * d * d})"
        what = f"one-layer Transformer, {heads} heads, d={d}, width {m}"
        yield transformers(what, plant, extract.MultiHead, seeds, cost)
    every = [(d, m) for d in (8, 16, 32) for m in (16, 32, 64, 128)]
    for d, m in [(8, 16), (16, 64)] if quick else every:
        runs = attacked(extract.ReluNetwork, planting("relu", dim=d, width=m), seeds)
        ratios = [result.queries / (m * d) for result, _ in runs]
        planes = sorted({hyperplanes(result.model) for result, _ in runs})
        details = f"{len(seeds)} seeds, hyperplanes {planes}, queries/(m·d) = {mean(ratios):.2f}, "
        error = fresh(runs, (1, 1, 1))
        what = f"ReLU network, d={d}, m={m}"
        yield show.at_most(what, error, 1e-8, f"{details}at most {max(ratios):.2f}")


def fresh(runs: Runs, lengths: Sequence[int]) -> float:
    return max(fresh_error(target, result.model, lengths) for result, target in runs)


def all_right(what: str, runs: Runs, worst: float, cost: str = "") -> Row:
    met = worst <= 1e-8 and recovered(runs) == len(runs)
    return Row(
        what, f"{worst:.1e}", "<= 1e-08", met, f"{recovered(runs)}/{len(runs)} recovered{cost}"
    )


def transformers(
    what: str, plant: Callable[[int], OneLayer], attention: Callable[..., Method] | None,
    seeds: range, cost: str,
) -> Row:  # fmt: skip
    def method(seed: int) -> Method:
        options = {} if attention is None else {"attention": attention(seed=seed)}
        return extract.OneLayerTransformer(seed=seed, **options)

    runs = attacked(method, plant, seeds)
    queries = mean(result.queries for result, _ in runs)
    return all_right(what, runs, fresh(runs, (1, 2, 4, 16)), f", {queries:,.0f} queries {cost}")


def mirrored(width: int) -> Callable[[int], OneLayer]:
    """Aᵀw = 0: every neuron has its mirror image, so half as many hyperplanes as neurons."""

    def plant(seed: int) -> OneLayer:
        half = oracle.plant("one-layer", dim=16, width=width // 2, seed=seed)
        return OneLayer(half.W, torch.cat([half.A, -half.A]), torch.cat([half.w, half.w]))

    return plant


def hyperplanes(model: object) -> int:
    """Neurons of the model, but for the two opposite ones that carry a linear remainder."""
    if not isinstance(model, ReluFfn):
        return -1
    extra = len(model.A) > 2 and torch.equal(model.A[-1], -model.A[-2])
    return len(model.A) - (2 if extra else 0)


# Layers that return vectors.

ANSWERS = {
    "every token": {"every_token": True},
    "every token, causal": {"every_token": True, "causal": True},
    "last token": {},
}


def vectors(quick: bool) -> Iterator[Row]:
    """The lower bound is the number of unknowns over the numbers per answer; where every token
    answers, a long enough sequence would bring it down to 1.
    """
    d, seeds = (12, range(3)) if quick else (64, range(5))
    for m in (d, d // 4):
        blocks = math.ceil(d / m)
        most = (d + blocks, 1 + blocks, d + d * blocks + 2)
        for queries, (name, kind) in zip(most, ANSWERS.items(), strict=True):
            plant = planting("attention", dim=d, outputs=m, **kind)
            yield layers(f"one head, {name}, d={d}, m={m}", plant, seeds, queries)
    shapes = [(8, 2, 8), (12, 4, 12)]
    if not quick:
        shapes = [(32, 2, 32), (32, 4, 32), (32, 4, 8), (64, 8, 64)]
    for d, heads, m in shapes:
        for name, kind in ANSWERS.items():
            # Another x, or a second key, is tried where the first has two heads too close.
            scores = heads * (d * d + d * m) // m
            queries = 2 * scores + 96 if "last" in name else 3 * d + 64
            what = f"{heads} heads, {name}, d={d}, m={m}"
            plant = planting("attention", dim=d, heads=heads, outputs=m, **kind)
            yield layers(what, plant, seeds, queries)
            if m == d:
                low = transformer_heads(d, heads, **kind)
                yield layers(f"{what}, rank {d // heads}", low, seeds, queries)


def transformer_heads(d: int, heads: int, **kind: bool) -> Callable[[int], Attention]:
    """W and V of rank d/H, each head writing into its own dimensions of a mixed output."""

    def plant(seed: int) -> Attention:
        normal, k = normals(seed), d // heads
        W = 2 / d * normal(heads, d, k) @ normal(heads, k, d)
        return Attention(W, normal(heads, d, k) @ normal(heads, k, d) / math.sqrt(k), **kind)

    return plant


def layers(what: str, plant: Callable[[int], Attention], seeds: range, most: int) -> Row:
    runs = attacked(extract.FullOutput, plant, seeds)
    right = sum(worst_error(result.model, target) <= 1e-9 for result, target in runs)
    right, first, queries = min(right, recovered(runs)), runs[0][1], asked(runs)[-1]
    bound = 1 if first.every_token else math.ceil(first.unknowns / first.V.shape[2])
    return Row(
        what,
        f"{queries} queries, error {off(runs):.1e}, {right}/{len(runs)}",
        f"<= {most} queries, error <= 1e-09, all",
        right == len(runs) and queries <= most,
        f"lower bound {bound}",
    )


# One bit an answer.


def signs(quick: bool) -> Iterator[Row]:
    """Queries next to the lower bound of one bit each; errors against W and v/‖v‖."""
    few = ((8, 1e-6, 3),)
    for d, accuracy, seeds in few if quick else ((8, 1e-6, 10), (8, 1e-11, 3), (32, 1e-6, 3)):
        heads = [oracle.plant(dim=d, seed=seed) for seed in range(seeds)]
        method = extract.SignOnly(accuracy=accuracy)
        runs = [(method(oracle.SignOnly(head)), head) for head in heads]
        error = max(
            max(entry(result, head), float((result.model.v - head.v / head.v.norm()).abs().max()))
            for result, head in runs
        )
        bits = (d * d + d) * math.log2(1 / accuracy)
        queries, case = asked(runs), f"d={d}, accuracy {accuracy:.0e}"
        yield Row(
            f"queries, {case}, {seeds} seeds",
            f"{queries[0]:,} to {queries[-1]:,} = {queries[-1] / bits:.2f} x the lower bound",
            f"<= 1.5 x {bits:,.0f}",
            queries[-1] <= 1.5 * bits,
        )
        yield show.at_most(f"error of W and v, {case}", error, accuracy)
        guarantee = max(result.guarantee or math.inf for result, _ in runs)
        yield show.at_most(f"guaranteed error of W, {case}", guarantee, accuracy)
        yield show.every(f"recovered, {case}", recovered(runs), seeds)


def entry(result: Extraction, head: Head) -> float:
    """The largest error of an entry of W."""
    return math.inf if result.model is None else float((result.model.W - head.W).abs().max())


# What an attack costs beyond the oracle's own time.


def cases(d: int) -> dict[str, tuple[Method, Oracle]]:
    head, low = oracle.plant(dim=d, seed=1), oracle.plant(dim=d, rank=d // 8, seed=1)
    several = {"kind": "multi-head", "dim": d, "heads": 8, "seed": 1}
    return {
        "SingleHead": (extract.SingleHead(), head),
        "LowRank": (extract.LowRank(), low),
        "Tolerant": (extract.Tolerant(5e-4), oracle.Rounded(head, 3)),
        "SignOnly": (extract.SignOnly(accuracy=1e-4), oracle.SignOnly(head)),
        "MultiHead, 8 heads": (extract.MultiHead(), oracle.plant(**several)),
        "MultiHead, 8 heads of rank d/8": (
            extract.MultiHead(), oracle.plant(**several, rank=d // 8)
        ),
        "OneLayerTransformer, width d": (
            extract.OneLayerTransformer(), oracle.plant("one-layer", dim=d, width=d, seed=1)
        ),
        "FullOutput, last token": (extract.FullOutput(), oracle.plant("attention", dim=d, seed=1)),
        "FullOutput, every token": (
            extract.FullOutput(), oracle.plant("attention", dim=d, every_token=True, seed=1)
        ),
    }  # fmt: skip


def overhead(quick: bool) -> Iterator[Row]:
    # The large ones first: peak memory is the process's.
    for d, rank in ((96, None), (128, 8)) if quick else ((768, None), (2048, 64)):
        method = extract.SingleHead() if rank is None else extract.LowRank(rank=rank)
        head = oracle.plant(dim=d, rank=rank, seed=1)
        size = f"d={d}" if rank is None else f"d={d}, r={rank}"
        result, row = timed(f"{type(method).__name__}, {size}", method, head, 1, quick)
        yield row
        what = f"error, {size}, {result.queries:,} queries"
        yield show.at_most(what, worst_error(result.model, head), 1e-9)
        peak = show.peak_memory()
        yield Row(f"peak memory, {size}", f"{peak:.2f} GiB", "< 2 GiB", peak < 2)
    for d in (16,) if quick else (64, 128):
        for name, (method, target) in cases(d).items():
            yield timed(f"{name}, d={d}", method, target, 1 if quick else 3, quick)[1]


def timed(
    what: str, method: Method, target: Oracle, turns: int, quick: bool
) -> tuple[Extraction, Row]:
    """The last extraction, and the best ratio of some."""
    best = (math.inf, 0.0)
    for _ in range(turns):
        watch = Stopwatch(target)
        result = method(watch)
        inside = watch.until(result.queries)
        best = min(best, (result.seconds / inside, inside))
    ratio, inside = best
    met = None if quick else ratio <= 1.5  # small batches cost the attack more than the oracle
    details = f"oracle {inside:.3f} s, {torch.get_num_threads()} threads"
    return result, show.ratio(what, f"{ratio:.2f}", "<= 1.5", met, details)


if __name__ == "__main__":
    show.main(run)
