"""Every defence, attacked by somebody who knows it: what is read, and what honest users lose.

The attacker knows the defence and its parameters, but not its secrets; honest users
hold the key, if there is one. Of the demo, or of another `--model`, `--parts` are

    cache      texts from a first layer's keys and values
    states     texts from the hidden states of the middle layer
    embedding  two short texts from pooled embeddings
    gradient   two texts from a classifier's gradient
    logits     the last layer of a language model
    weights    one head, from a server's answers

(a Llama with random weights takes the place of a model that is not causal, in the rows
of caches and logits). Of an `--encoder` and `--texts` sentences of SST-2 that are no
line of the corpus, they are

    vectors    every defence of stored vectors (vectors.py)
    near       texts close to the true one, given to the judge: none may be verified
    nobody     `--nobody` vectors that belong to no text: none may be verified

A verdict is "proved" only by a theorem; what is "not read" was only not read by our
attacks. `--quick` takes a model with random weights.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import show
import stored_vectors as vectors
import subjects
from keyhole import oracle
from keyhole.audit.defences import DISTANCE
from keyhole.core import Status, Unsuccessful
from keyhole.data import NO_LABEL, Example, read_texts
from keyhole.defence import Changes, Defence, add_noise
from keyhole.extract.defences import HonestClient, server_defences, try_defence
from keyhole.extract.output_layer import cliff
from keyhole.models import demo
from keyhole.models.anatomy import anatomy
from keyhole.models.capture import Exposure, capture
from keyhole.models.hooks import hooks
from keyhole.models.loading import Loaded, head_of, identity
from keyhole.models.next_token import unembedding
from keyhole.recover import HiddenStates, KeyValues, Leak, MixedCache, leak_of
from keyhole.recover.attack import Target
from keyhole.recover.embeddings.counts import SHIPPED
from keyhole.recover.embeddings.sum_search import SumSearch
from keyhole.recover.gradients import (
    Protocol,
    Update,
    batch_of,
    recover_batch,
    update_of,
)
from keyhole.recover.gradients.update import DELTA, epsilon_of, noise_for
from keyhole.recover.own_texts import hidden, own_texts, secret, undone
from keyhole.recover.secrets import by_lengths, unrotated
from show import Row

PUBLIC = [example.text for example in demo.EXAMPLES]
LITTLE_NOISE = 0.1  # standard deviations of what leaks
DIM = 8  # of the head whose weights are sought
PARTLY = 0.5  # the share of what is sought that counts as read in part
NAMES = {"rotated": "secret rotation", "shielded": "KV-Shield", "cloaked": "KV-Cloak"}
PARTS = ["cache", "states", "embedding", "gradient", "logits", "weights"]
Change = Callable[[Leak], Leak]


def run(
    quick: bool,
    model: str = "demo",
    parts: list[str] = PARTS,
    data: Path = subjects.DATA,
    encoder: Path | None = None,
    another: Path | None = None,
    device: str = subjects.DEVICE,
    texts: int = 20,
    passes: int | None = None,
    nobody: int = 1_000,
    tokens: str = "4-9",
) -> Iterator[Row]:
    if quick:
        yield from quick_rows()
        return
    loaded = demo.open_model(model, None, device, False)
    for part in parts:
        yield from TABLE.get(part, lambda _: ())(loaded)
    if set(parts) <= set(TABLE):
        return
    loaded = subjects.minilm(encoder, device)
    reviews = set(read_texts(data / "sst2" / "train.tsv"))
    corpus = random.Random(0).sample(sorted(reviews), 20_000)
    ((least, most),) = subjects.lengths(tokens)
    fresh = subjects.sentences(data, loaded.tokenizer, least, most, set(corpus))
    search = SumSearch(passes=passes)
    secrets = fresh[:texts]
    setting = vectors.prepared(loaded, secrets, corpus, 2_000, search, most + 3)
    if "vectors" in parts:
        yield from vector_rows(setting, vectors.every(setting.docs))
    if "near" in parts:
        yield from vectors.near_rows(setting)
    if "nobody" in parts:
        yield from vectors.nobody_rows(setting, another, device, nobody)


def quick_rows() -> Iterator[Row]:
    loaded = subjects.tiny("bert", words=96)
    words = subjects.random_lines(loaded, 160, 2, 4)
    search = SumSearch(passes=300)
    setting = vectors.prepared(loaded, words[:2], words[2:], 60, search, 5)
    few = [vectors.no_defence(), vectors.rounding("int4"), vectors.projection(16, 32)]
    yield from vector_rows(setting, few)
    yield from vectors.near_rows(setting)
    yield from weights_rows(dim=4, count=2)


def row(
    guards: str,
    defence: str,
    setting: str,
    attacker: str,
    honest: str,
    share: float,
    proof: str = "",
    **raw: Any,
) -> Row:
    """Return the row of an attack that got a `share` of what it sought."""
    if share:
        verdict = "broken" if share == 1 else "partly broken"
    else:
        verdict = f"proved: {proof}" if proof else "not read; no proof"
    cells = {
        "it guards": guards,
        "defence": defence,
        "parameters": setting,
        "attacker": attacker,
        "honest users lose": honest,
        "verdict": verdict,
    }
    what = f"{guards}, {defence}, {setting}"
    details = f"honest users lose {honest}; {verdict}"
    return Row(what, attacker, details=details, run={"row": what, **cells, **raw})


def stated(noise: float, sigma: float, tokens: int, vocabulary: int) -> tuple[str, str]:
    """Return the privacy that noise gives, in words, and what that proves of texts, or "".

    `sigma` is its deviation, and `noise` that in units of Δ, the largest difference of
    two leaks. Nobody names the right one of N equally likely texts with a probability
    above e^ε/N + δ. For n tokens N ≤ vocabularyⁿ, so this says nothing unless ε < n
    log(vocabulary).
    """
    epsilon = epsilon_of(noise)
    setting = f"ε = {epsilon:.3g}, δ = {DELTA:g}, σ = {sigma:.2g}"
    if epsilon >= tokens * math.log(vocabulary):
        return setting, ""
    most = f"{math.exp(min(epsilon, 700)):.3g}/N + {DELTA:g}"
    return setting, f"of N equally likely texts at most {most} are named"


def lost(clean: Tensor, changed: Tensor) -> str:
    """Describe how much a defence changes answers."""
    if clean.is_floating_point():
        error = float((changed - clean).norm() / clean.norm())
        return f"off by {error:.1e}" if error else "nothing"
    different = int((clean != changed).sum())
    return f"{different} of {len(clean)} answers changed" if different else "nothing"


def stand_in(loaded: Loaded) -> Loaded:
    """Return a causal model itself, or a Llama with random weights and the same tokenizer."""
    if head_of(loaded.model) == "causal":
        return loaded
    words = len(loaded.tokenizer) - len(subjects.SPECIAL)
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2}
    model = subjects.tiny("llama", words, "AutoModelForCausalLM", **shape).model
    return Loaded(model, loaded.tokenizer, identity(model), "a Llama of random weights")


# Caches and hidden states: texts are read behind each defence.


def cache_rows(loaded: Loaded) -> Iterator[Row]:
    leaks = Leaks("cache", stand_in(loaded), Exposure("kv", 0))
    yield from leaks.rounded_and_noisy()
    yield leaks.behind("rotated", own=0)
    yield leaks.behind("shielded", own=0)
    yield leaks.behind("shielded", own=1)
    yield leaks.behind("cloaked", known=0)
    yield leaks.behind("cloaked", known=4)
    yield leaks.encrypted(twice=False)
    yield leaks.encrypted(twice=True)


def states_rows(loaded: Loaded) -> Iterator[Row]:
    middle = -(-anatomy(loaded.model).layers // 2)
    leaks = Leaks("states", loaded, Exposure("hidden", middle))
    yield from leaks.rounded_and_noisy()
    for own in (0, 1, 10):
        yield leaks.behind("rotated", own)
    permuted = Defence(changes=Changes.STATES, forms=("permuted",))
    hide = partial(hidden, defence=permuted, seed=0)
    yield leaks.row("permuted", "rows in no order", hide, same)


def same(leak: Leak) -> Leak:
    return leak


@dataclass(frozen=True, eq=False)
class Leaks:
    """The leaks of a model's texts at one exposure."""

    guards: str
    loaded: Loaded
    exposure: Exposure

    def of(self, texts: Sequence[str], exposure: Exposure | None = None) -> list[Leak]:
        source = (self.loaded.model, self.loaded.tokenizer)
        return [leak_of(*source, text, exposure or self.exposure) for text in texts]

    def row(
        self,
        defence: str,
        setting: str,
        hide: Change,
        use: Change | None = None,
        undo: Callable[[list[Leak]], list[Leak]] = list,
        proof: str = "",
    ) -> Row:
        """Return a row: the attacker sees `hide` of each leak, honest users `use` of it."""
        ids = subjects.encoded(self.loaded, demo.TEXTS)
        items: list[dict[str, Any]] = []
        reason = ""
        try:
            leaks = undo([hide(leak) for leak in self.of(demo.TEXTS)])
            items, _ = subjects.read(self.loaded, ids, leaks)
        except Unsuccessful as end:
            reason = end.reason
        exact = sum(item["exact"] and item["verified"] for item in items)
        right = sum(item["right"] for item in items) / sum(map(len, ids))
        attacker = f"{exact} of {len(ids)} texts, {right:.0%} of tokens"
        share = exact / len(ids) or PARTLY * (right >= PARTLY)
        plain = answers(self.loaded, self.exposure, same)
        honest = lost(plain, answers(self.loaded, self.exposure, use or hide))
        cells = (self.guards, defence, setting, attacker, honest, share, proof)
        return row(*cells, reason=reason, items=items)

    def rounded_and_noisy(self) -> Iterator[Row]:
        yield self.row("none", str(self.exposure), same)
        for precision, bits in (("int8", 8), ("int4", 4)):
            defence = Defence(changes=Changes.STATES, precision=precision)
            hide = partial(hidden, defence=defence, seed=0)
            yield self.row(precision, f"{bits} bits, a scale for each row", hide)

        def to_one_decimal(leak: Leak) -> Leak:
            short = {
                name: each.round(decimals=1) for name, each in leak.tensors.items()
            }
            return replace(leak, **short, precision=None)

        yield self.row("rounding", "to one decimal", to_one_decimal)
        yield self.noisy(None)
        yield self.noisy(vectors.PRIVATE)

    def behind(self, form: str, own: int = 0, known: int | None = None) -> Row:
        """Return the row of a secret: the attacker knows texts, or the first tokens of each."""
        defence = secret(form)
        target = Target.of(self.loaded.model, self.loaded.tokenizer)
        setting = f"known texts: {own}"
        if known is not None:
            setting = f"known first tokens: {known}"

        def undo(leaks: list[Leak]) -> list[Leak]:
            if known:
                ids = subjects.encoded(self.loaded, demo.TEXTS)
                return [
                    MixedCache(
                        leak.keys, leak.values, leak.layer + 1, known=text[:known]
                    )
                    for leak, text in zip(leaks, ids, strict=True)
                ]
            if own:
                pairs = own_texts(target, self.exposure, defence, 0, own)
                return undone(pairs, leaks, defence)
            if form != "cloaked" and self.exposure.kind == "kv":
                return unrotated(by_lengths(target, leaks), leaks)
            return leaks

        hide = partial(hidden, defence=defence, seed=0)
        return self.row(NAMES[form], setting, hide, same, undo)

    def noisy(self, epsilon: float | None) -> Row:
        """Return the row of Gaussian noise, in all layers of a cache or in the one of states.

        This is the Gaussian mechanism (Balle and Wang, arXiv 1805.06530, Theorem 8).
        Rows are scaled down to the largest norm C of public texts, so Δ = 2C√(nL) for
        texts of n tokens, whose length is taken to be public, and L layers.
        """
        parts = anatomy(self.loaded.model)
        layers = [self.exposure.layer]
        if self.exposure.kind == "kv":
            layers = list(range(parts.layers))
        leaks = [
            leak
            for layer in layers
            for leak in self.of(PUBLIC, replace(self.exposure, layer=layer))
        ]
        rows = torch.cat([leak.rows(leak.tensors) for leak in leaks])
        length = max(leak.length or 1 for leak in leaks)
        clip = float(rows.norm(dim=-1).max())
        distance = 2 * clip * (length * len(layers)) ** 0.5
        sigma = LITTLE_NOISE * float(rows.std())
        if epsilon is not None:
            sigma = noise_for(epsilon) * distance
        stream = torch.Generator().manual_seed(0)

        def hide(leak: Leak) -> Leak:
            norms = leak.rows(leak.tensors).norm(dim=-1, keepdim=True)
            scale = (clip / norms).clamp(max=1)
            noisy = {
                name: add_noise(tensor * scale, sigma, stream)
                for name, tensor in leak.tensors.items()
            }
            return replace(leak, **noisy, noise=sigma, precision=None)

        setting, proof = stated(sigma / distance, sigma, length, len(parts.table))
        return self.row("Gaussian noise", setting, hide, proof=proof)

    def encrypted(self, twice: bool) -> Row:
        """Return the row of AES-GCM; with a nonce used `twice`, an own text gives the keystream."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        box = AESGCM(AESGCM.generate_key(256))
        nonces = (number.to_bytes(12, "big") for number in range(1, 1 << 32))

        def hide(leak: Leak) -> Leak:
            """Return what the attacker reads from the ciphertext without the key."""
            plain = torch.stack(list(leak.tensors.values())).numpy()
            nonce = bytes(12) if twice else next(nonces)
            seen = np.frombuffer(box.encrypt(nonce, plain.tobytes(), None), np.uint8)
            if twice:  # a known text with its ciphertext gives what zeros would become
                zeros = bytes(plain.nbytes)
                seen = seen ^ np.frombuffer(box.encrypt(nonce, zeros, None), np.uint8)
            read = seen[: plain.nbytes].view(np.float32).reshape(plain.shape)
            numbers = torch.nan_to_num(torch.tensor(read), 0.0, 0.0, 0.0)
            return replace(leak, **dict(zip(leak.tensors, numbers, strict=True)))

        if twice:
            return self.row("AES-GCM", "one nonce for all texts", hide, same)
        setting = "a key of 256 bits, a nonce for each text"
        proof = (
            "no better than AES told from a random permutation (McGrew and Viega, 2004)"
        )
        return self.row("AES-GCM", setting, hide, same, proof=proof)


@torch.no_grad()
def answers(loaded: Loaded, exposure: Exposure, change: Change) -> Tensor:
    """Return the model's answers for public texts, with `change` applied to what it exposes.

    For a cache, the first half of each text is cached in all layers, and the second
    half is run with it. Answers are classes, next tokens at each position, or vectors
    if there is no head.
    """
    model = loaded.model
    parts = anatomy(loaded.model)
    results: list[Tensor] = []

    def change_states(_module: Any, _args: Any, output: Any) -> Any:
        states = output if isinstance(output, Tensor) else output[0]
        leak = change(HiddenStates(states[0].cpu(), exposure.layer))
        changed = leak.tensors["values"].to(states)[None]
        return changed if isinstance(output, Tensor) else (changed, *output[1:])

    for text in PUBLIC:
        ids = loaded.tokenizer(text, return_tensors="pt")["input_ids"].to(parts.device)
        if exposure.kind == "kv":
            half = ids.shape[1] // 2
            past = model(input_ids=ids[:, :half], use_cache=True).past_key_values
            for number, layer in enumerate(past.layers):
                leak = change(
                    KeyValues(layer.keys[0].cpu(), layer.values[0].cpu(), number)
                )
                layer.keys = leak.tensors["keys"].to(layer.keys)[None]
                layer.values = leak.tensors["values"].to(layer.values)[None]
            output = model(input_ids=ids[:, half:], past_key_values=past)
        else:
            block = parts.blocks[exposure.layer - 1]
            with hooks((block.register_forward_hook, change_states)):
                output = model(input_ids=ids)
        logits = getattr(output, "logits", None)
        result = output[0].mean(1) if logits is None else logits.argmax(-1)
        results.append(result.flatten())
    return torch.cat(results).cpu()


# Embeddings: of the model, or of an encoder whose vectors a store keeps.


def embedding_rows(loaded: Loaded) -> Iterator[Row]:
    corpus = read_texts(SHIPPED)
    search = SumSearch(passes=2_000)
    setting = vectors.prepared(loaded, demo.NOTES[:2], corpus, 160, search, 12)
    d = setting.docs.shape[1]
    made = [
        vectors.no_defence(),
        *(vectors.rounding(precision) for precision in ("int8", "binary")),
        vectors.noise(LITTLE_NOISE, d),
        vectors.private_noise(d),
        *(vectors.rotation(pairs, d) for pairs in (0, 1, 10, 2 * d)),
    ]
    yield from vector_rows(setting, made, "embedding")


def vector_rows(
    setting: vectors.Setting, defences: Sequence[vectors.Stored], guards: str = ""
) -> Iterator[Row]:
    special = set(setting.loaded.tokenizer.all_special_ids)
    vocabulary = len(anatomy(setting.loaded.model).table)
    longest = max(map(len, setting.secrets))
    for defence, read in vectors.reading(setting, defences):
        pairs = list(zip(read, setting.secrets, strict=True))
        exact = sum(made.ids == ids for made, ids in pairs)
        wrong = sum(made.verified and made.ids != ids for made, ids in pairs)
        f1 = statistics.mean(
            subjects.f1(*([id_ for id_ in each if id_ not in special] for each in pair))
            for pair in ((made.ids, ids) for made, ids in pairs)
        )
        found = vectors.retrieval(defence, setting.docs, setting.queries)
        name, _, strength = defence.name.partition(", ")
        proof = ""
        if name == "Gaussian noise":
            sigma = defence.stated["noise"]
            _, proof = stated(sigma / DISTANCE, sigma, longest, vocabulary)
        made = row(
            guards or setting.name,
            name,
            strength,
            f"{exact} of {len(pairs)} texts, token F1 {f1:.3f}",
            f"recall@10 {found:.3f} of {len(setting.docs)}",
            exact / len(pairs) or PARTLY * (f1 >= PARTLY),
            proof,
            exact=exact,
            texts=len(pairs),
            recall=found,
        )
        yield replace(made, target="0 verified wrongly", met=wrong == 0)


# A classifier's gradient for two texts.


def gradient_rows(loaded: Loaded) -> Iterator[Row]:
    model = loaded.model
    tokenizer = loaded.tokenizer
    examples = [Example(text, NO_LABEL, text) for text in demo.TEXTS[:2]]
    batch = batch_of(model, tokenizer, examples, 128)

    def numbers(update: Update) -> Tensor:
        return torch.cat([each.float().flatten() for each in update.values.values()])

    def measure(
        defence: str,
        setting: str,
        proof: str = "",
        precision: str = "float32",
        **protocol: float,
    ) -> Row:
        update = update_of(model, batch, Protocol(**protocol), precision=precision)
        found = recover_batch(model, tokenizer, update)
        exact = sum(
            text.verified and tuple(text.ids) in batch.texts for text in found.texts
        )
        share = exact / 2 or PARTLY * (found.status is Status.INEXACT)
        honest = lost(numbers(update_of(model, batch)), numbers(update))
        cells = (defence, setting, f"{exact} of 2 texts", honest, share, proof)
        return row("gradient", *cells, reason=found.reason)

    yield measure("none", "a batch of 2 texts")
    yield measure("rounding", "bfloat16", precision="bfloat16")
    yield measure("clipping", "each text to a norm of 1", clip=1.0)
    tokens = len(batch.texts[0])
    for noise in (1e-5, noise_for(vectors.PRIVATE)):
        # In units of Δ = 2, the largest difference of two texts of norm 1.
        vocabulary = len(anatomy(model).table)
        setting, proof = stated(noise, 2 * noise, tokens, vocabulary)
        setting = f"{setting}, clipped to 1"
        yield measure("Gaussian noise", setting, proof, clip=1.0, noise=2 * noise)


# A causal model's logits, which span the columns of the last layer's matrix.


def logits_rows(loaded: Loaded) -> Iterator[Row]:
    """Yield the rows of an attacker who knows the size of the errors.

    The attacker takes the directions with larger singular values
    (extract/output_layer.py) from twice as many answers as the model is wide.
    """
    loaded = stand_in(loaded)
    vocabulary, width = anatomy(loaded.model).table.shape
    stream = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (2 * width, 4), generator=stream)
    logits = torch.cat([logits_of(loaded, each) for each in ids.split(64)])
    some = torch.randperm(vocabulary, generator=stream)[: 8 * width]
    true = unembedding(loaded.model).weight.detach().double().cpu()[some]
    texts = [
        loaded.tokenizer(text, return_tensors="pt")["input_ids"] for text in PUBLIC
    ]
    public = torch.cat([logits_of(loaded, each) for each in texts])
    clip = float(public.norm(dim=-1).max())

    def measure(
        defence: str,
        setting: str,
        change: Callable[[Tensor], Tensor],
        step: float | None = None,
    ) -> Row:
        leaked = change(logits)[:, some]
        found = cliff(leaked, 8, step)
        directions = torch.linalg.svd(leaked, full_matrices=False).Vh
        basis = directions[: min(found.rank, width)]
        error = float((true - basis.T @ (basis @ true)).norm() / true.norm())
        share = 0.0
        if found.seen and found.rank == width:
            share = 1.0 if error < 0.1 else PARTLY
        seen = found.rank if found.seen else "unknown"
        attacker = f"width {seen} of {width}, matrix off by {error:.1e}"
        honest = lost(public.argmax(-1), change(public).argmax(-1))
        cells = ("logits", defence, setting, attacker, honest, share)
        return row(*cells, **asdict(found))

    yield measure("none", loaded.name, torch.clone)
    yield measure("rounding", "to two decimals", lambda y: y.round(decimals=2), 0.01)
    for sigma in (
        LITTLE_NOISE * float(public.std()),
        2 * clip * noise_for(vectors.PRIVATE),
    ):

        def noisy(logits: Tensor, sigma: float = sigma) -> Tensor:
            scale = (clip / logits.norm(dim=-1, keepdim=True)).clamp(max=1)
            return add_noise(logits * scale, sigma, stream)

        setting, _ = stated(sigma / (2 * clip), sigma, 1, vocabulary)
        step = sigma * 12**0.5
        yield measure("Gaussian noise", f"{setting}, each answer", noisy, step)


@torch.no_grad()
def logits_of(loaded: Loaded, ids: Tensor) -> Tensor:
    ids = ids.to(anatomy(loaded.model).device)
    values = capture(loaded.model, Exposure("logits"), ids=ids)["values"]
    return values[:, 0].double().cpu()


# One head, from a server's answers.


def weights_rows(
    _loaded: Loaded | None = None, dim: int = DIM, count: int | None = None
) -> Iterator[Row]:
    target = oracle.plant(dim=dim)
    client = HonestClient.of(target)
    unknowns = dim * dim + dim
    for defence in server_defences(dim)[:count]:
        tried = try_defence(defence, target, client, 0)
        honest = f"answers off by {tried.service.error:.1e}"
        if tried.service.refused:
            honest += f", {tried.service.refused:.0%} refused"
        proof = ""
        if defence.max_queries is not None:
            proof = f"{defence.max_queries} numbers do not settle {unknowns} unknowns"
        yield row(
            "weights",
            defence.name,
            f"{str(defence) or 'answers as they are'}, d = {dim}",
            "nothing" if tried.error is None else f"copy off by {tried.error:.1e}",
            honest if tried.service.error else "nothing",
            {Status.RECOVERED: 1.0, Status.INEXACT: PARTLY}.get(tried.status, 0.0),
            proof,
            attack=tried.attack,
            queries=tried.extraction.queries,
            reason=tried.extraction.reason,
        )


TABLE: dict[str, Callable[[Loaded], Iterator[Row]]] = {
    "cache": cache_rows,
    "states": states_rows,
    "embedding": embedding_rows,
    "gradient": gradient_rows,
    "logits": logits_rows,
    "weights": weights_rows,
}


if __name__ == "__main__":
    show.main(run)
