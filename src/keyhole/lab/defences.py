"""`keyhole lab defences`: one table of all defences, each attacked by an attacker who knows it.

A row is a defence with its parameters, in front of one exposure: what the attack got,
what honest users lose, the cost in time, and whether anything is proved. All of it is
measured on the given model. The rows of caches and logits need a causal model; for any
other model, a Llama with random weights and the model's tokenizer takes its place.
`gaussian` in recover/defences.py adds noise and states its ε.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import cache, partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from keyhole import oracle
from keyhole.core import Result, Status, environment
from keyhole.core.errors import MissingExtra, expect_seed
from keyhole.core.progress import Track, untracked
from keyhole.data import NO_LABEL, Example, encode
from keyhole.disrupt import HackAttend
from keyhole.extract.defences import HonestClient, Trial, trials, try_defence
from keyhole.extract.output_layer import cliff
from keyhole.harden import Smoothing
from keyhole.harden.defences.sattend import SAttend
from keyhole.harden.evaluate import attack as attacked
from keyhole.harden.train import train
from keyhole.models import demo
from keyhole.models.anatomy import anatomy
from keyhole.models.capture import Exposure, capture
from keyhole.models.demo import EXAMPLES, NAME, NOTES, TEXTS
from keyhole.models.hooks import hooks
from keyhole.models.loading import Loaded, head_of, identity, transformers
from keyhole.models.next_token import unembedding
from keyhole.recover.defences import LeakTried, gaussian, read_behind, stated
from keyhole.recover.embeddings.counts import SHIPPED
from keyhole.recover.embeddings.sum_search import SumSearch
from keyhole.recover.gradients.recover_batch import recover_batch
from keyhole.recover.gradients.update import (
    Protocol,
    batch_of,
    noise_for,
    update_of,
)
from keyhole.recover.leaks import HiddenStates, KeyValues, Leak
from keyhole.recover.protection import NEAREST, recall
from keyhole.recover.registry import ATTACKS
from keyhole.recover.secrets import Secret, hidden_by, secrets_of, shown_again
from keyhole.recover.simulate import degrade, leak_of

LITTLE_NOISE = 0.1  # standard deviations of what leaks
PUBLIC = [example.text for example in EXAMPLES]
_REPEATS = 3  # of a measurement of time; the fastest counts
_DIM = 8  # of the head whose weights are sought
_SENTENCES = 640  # that a defence is trained on; a quarter of them are in the store
_KEEP = 0.05  # the share of the attention that each mask keeps
_TAG = 16  # bytes that AES-GCM appends
_NAMES = {
    "rotated": "secret rotation",
    "shielded": "KV-Shield",
    "cloaked": "KV-Cloak",
}


class Verdict(StrEnum):
    """The result of a defence."""

    BROKEN = "broken"
    PARTLY = "partly broken"
    HELD = "not read; no proof"
    PROVED = "proved"


@dataclass(frozen=True)
class Row:
    """One defence; `factor` is the processor time of honest use with it, relative to without."""

    guards: str
    defence: str
    setting: str
    attack: str
    attacker: str
    honest: str
    factor: float
    verdict: Verdict
    proof: str = ""
    raw: dict[str, Any] = field(default_factory=dict[str, Any])


Change = Callable[[Leak], Leak]
Plans = Iterator[
    tuple[str, Callable[[], Row]]
]  # the name of each row, and what measures it
Plain = TypeVar("Plain")
Defended = TypeVar("Defended")


@dataclass(frozen=True, repr=False)
class DefenceTable(Result):
    """All rows; `left_out` names those that could not be measured, each with a reason."""

    model: str
    rows: tuple[Row, ...]
    left_out: tuple[str, ...] = ()
    seed: int = 0
    seconds: float = 0.0
    environment: dict[str, str] = field(default_factory=environment)

    kind: ClassVar[str] = "table of defences"

    def summary(self) -> str:
        counts = {
            each: sum(row.verdict is each for row in self.rows) for each in Verdict
        }
        counted = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        head = f"{self.model}: {len(self.rows)} rows, {counted} ({self.seconds:.0f} s)"
        return "\n".join([head, *(f"left out: {reason}" for reason in self.left_out)])


def table(
    model: str = "demo",
    *,
    device: str = "cpu",
    allow_pickle: bool = False,
    seed: int = 0,
    track: Track = untracked,
) -> DefenceTable:
    """Measure every row."""
    expect_seed(seed)
    started = time.perf_counter()
    loaded = demo.open_model(model, None, device, allow_pickle)
    planned = [
        (f"{guards}: {name}", make)
        for guards, plans in sections(loaded, seed).items()
        for name, make in plans
    ]
    overall = track("defences", len(planned))
    rows: list[Row] = []
    left_out: list[str] = []
    for number, (name, make) in enumerate(planned):
        overall(number, note=name)
        try:
            rows.append(make())
        except MissingExtra as error:
            left_out.append(f"{name}: {error}")
    overall(len(planned))
    seconds = time.perf_counter() - started
    return DefenceTable(loaded.name, tuple(rows), tuple(left_out), seed, seconds)


def sections(loaded: Loaded, seed: int) -> dict[str, Plans]:
    """Return the rows to measure, by what the defences guard."""
    parts = anatomy(loaded.model)
    task = head_of(loaded.model)
    causal = loaded if task == "causal" else stand_in(loaded)
    middle = -(-parts.layers // 2)
    classifier = task == "classification"
    return {
        "cache": Leaks("cache", causal, Exposure("kv", 0), seed).plans(),
        "states": Leaks("states", loaded, Exposure("hidden", middle), seed).plans(),
        "embedding": iter(()) if parts.causal else Embeddings(loaded, seed).plans(),
        "gradient": Gradients(loaded, seed).plans() if classifier else iter(()),
        "logits": Logits(causal, seed).plans(),
        "weights": (
            (each.name, partial(weights, each, seed))
            for each in trials(_DIM, seed=seed)
        ),
        "predictions": Predictions(loaded, seed).plans() if classifier else iter(()),
    }


def stand_in(loaded: Loaded) -> Loaded:
    """Return a Llama with random weights and the tokenizer of another model."""
    library = transformers()
    config = library.LlamaConfig(
        vocab_size=len(loaded.tokenizer),
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=256,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        initializer_range=0.05,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = (
            library.AutoModelForCausalLM.from_config(config)
            .eval()
            .requires_grad_(False)
        )
    return Loaded(model, loaded.tokenizer, identity(model), "a Llama of random weights")


def verdict_of(share: float, proof: str) -> Verdict:
    """Return the verdict by the share that the attack recovered."""
    if share:
        return Verdict.BROKEN if share == 1 else Verdict.PARTLY
    return Verdict.PROVED if proof else Verdict.HELD


def text_row(
    guards: str,
    tried: LeakTried,
    setting: str,
    honest: str,
    factor: float,
    proof: str,
    attack: str = "",
) -> Row:
    """Return the row of an attack that reads texts."""
    share = tried.exact / tried.texts or (
        0.5 if tried.status is Status.INEXACT else 0.0
    )
    got = f"{tried.exact} of {tried.texts} texts" + (
        f", {tried.tokens:.0%} of tokens" if share and not tried.exact else ""
    )
    return Row(
        guards,
        _NAMES.get(tried.defence, tried.defence),
        setting,
        attack or tried.attack,
        got,
        honest,
        factor,
        verdict_of(share, proof),
        "" if share else proof,
        asdict(tried),
    )


def strengths(row: Callable[[float | None], Row]) -> Plans:
    """Yield rows of noise: a tenth of the standard deviation, and a meaningful ε."""
    yield "noise, 10%", partial(row, None)
    yield "noise, ε = 8", partial(row, 8.0)


# What a defence costs honest users.


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
                layer.keys, layer.values = (
                    each.to(layer.keys)[None] for each in leak.tensors.values()
                )
            output = model(input_ids=ids[:, half:], past_key_values=past)
        else:
            with hooks(
                (parts.blocks[exposure.layer - 1].register_forward_hook, change_states)
            ):
                output = model(input_ids=ids)
        logits = getattr(output, "logits", None)
        result = output[0].mean(1) if logits is None else logits.argmax(-1)
        results.append(result.flatten())
    return torch.cat(results).cpu()


@torch.no_grad()
def predicted(loaded: Loaded, examples: Sequence[Example]) -> Tensor:
    classes: list[Tensor] = []
    for start in range(0, len(examples), 32):
        batch, _ = encode(
            loaded.tokenizer, examples[start : start + 32], max_length=128
        )
        batch = {name: tensor.to(loaded.model.device) for name, tensor in batch.items()}
        classes.append(loaded.model(**batch).logits.argmax(-1).cpu())
    return torch.cat(classes)


def with_own_labels(loaded: Loaded, examples: Sequence[Example]) -> list[Example]:
    """Return the examples with the model's own predictions as labels."""
    labels = predicted(loaded, examples).tolist()
    return [
        replace(each, label=label) for each, label in zip(examples, labels, strict=True)
    ]


def compared(
    plain: Callable[[], Plain], defended: Callable[[], Defended]
) -> tuple[Plain, Defended, float]:
    """Run both several times in turn; return their results, and the ratio of their best times."""
    turns = [(timed(plain), timed(defended)) for _ in range(_REPEATS)]
    without, with_it = (
        min(seconds for _, seconds in side) for side in zip(*turns, strict=True)
    )
    (first, _), (second, _) = turns[-1]
    return first, second, with_it / without


def timed(run: Callable[[], Plain]) -> tuple[Plain, float]:
    started = time.process_time()  # the time of this process alone
    return run(), time.process_time() - started


def lost(clean: Tensor, changed: Tensor) -> str:
    """Describe how much a defence changes answers."""
    if clean.is_floating_point():
        error = float((changed - clean).norm() / clean.norm())
        return f"off by {error:.1e}" if error else "nothing"
    different = int((clean != changed).sum())
    return f"{different} of {len(clean)} answers changed" if different else "nothing"


# Defences as functions of a leak.


def hidden_and_restored(form: str) -> Change:
    """Return the round trip of an owner: hide a leak by a secret, and restore it with the key."""
    secrets: dict[tuple[Exposure, int | None], list[Secret]] = {}

    def change(leak: Leak) -> Leak:
        place = (leak.exposure, leak.length)
        if (
            place not in secrets
        ):  # only in the first of several runs, whose time does not count
            secrets[place] = secrets_of(leak, form, 7, torch.Generator().manual_seed(0))
        return shown_again(hidden_by(secrets[place], leak), secrets[place], leak)

    return change


def rounded(leak: Leak) -> Leak:
    tensors = {name: tensor.round(decimals=1) for name, tensor in leak.tensors.items()}
    return replace(leak, **tensors, precision=None)


def same(leak: Leak) -> Leak:
    return leak


def _bytes(leak: Leak) -> bytes:
    return torch.stack(list(leak.tensors.values())).cpu().numpy().tobytes()


def _from_bytes(leak: Leak, data: bytes) -> Leak:
    """Return such a leak with its numbers from these bytes; NaN and infinity become 0."""
    flat = torch.frombuffer(bytearray(data), dtype=torch.float32)
    numbers = torch.nan_to_num(flat, nan=0.0, posinf=0.0, neginf=0.0)
    shape = (len(leak.tensors), *next(iter(leak.tensors.values())).shape)
    return replace(leak, **dict(zip(leak.tensors, numbers.reshape(shape), strict=True)))


# The rows: a class for each exposure, whose `plans` yields them.


@dataclass(frozen=True, eq=False)
class Leaks:
    """The rows of a cache or of states: texts are read behind each defence."""

    guards: str
    loaded: Loaded
    exposure: Exposure
    seed: int

    def plans(self) -> Plans:
        row = self.row
        cache_ = self.guards == "cache"
        yield "none", partial(row, "none", f"{self.loaded.name}, {self.exposure}", same)
        for name, bits in (("int8", 8), ("int4", 4)):
            change = partial(degrade, precision=name)
            yield name, partial(row, name, f"{bits} bits, a scale for each row", change)
        yield (
            "one decimal",
            partial(row, "rounding", "to one decimal", rounded, hide=rounded),
        )
        yield from strengths(self.noise)
        forms = [("rotated", own) for own in ((0,) if cache_ else (0, 1, 10))]
        forms += [("shielded", own) for own in (0, 1) if cache_]
        for form, own in forms:
            name = f"{_NAMES[form]}, {own}"
            setting = f"known texts: {own}"
            yield name, partial(row, form, setting, hidden_and_restored(form), own=own)
        if not cache_:
            yield "permuted", partial(row, "permuted", "rows in no order", same)
            return
        for known in (0, 4):
            name = f"KV-Cloak, {known}"
            setting = f"known first tokens: {known}"
            change = hidden_and_restored("cloaked")
            yield name, partial(row, "cloaked", setting, change, known=known or None)
        for twice in (False, True):
            yield (
                f"AES-GCM, {'one nonce' if twice else 'nonces'}",
                partial(self.sealed, twice),
            )

    def row(
        self,
        defence: str,
        setting: str,
        change: Change,
        *,
        hide: Change | None = None,
        proof: str = "",
        attack: str = "",
        **how: Any,
    ) -> Row:
        """Measure a row: honest users get `change` of a leak, the attacker `hide` of it.

        Without `hide`, the attacker sees what the `defence` of that name leaves.
        """
        tried = read_behind(
            self.loaded, TEXTS, self.exposure, defence, self.seed, hide=hide, **how
        )
        plain, changed, factor = compared(
            partial(answers, self.loaded, self.exposure, same),
            partial(answers, self.loaded, self.exposure, change),
        )
        return text_row(
            self.guards, tried, setting, lost(plain, changed), factor, proof, attack
        )

    def noise(self, epsilon: float | None) -> Row:
        """Measure Gaussian noise, in all layers of a cache or in the one layer of states."""
        parts = anatomy(self.loaded.model)
        at = self.exposure
        layers = range(parts.layers) if at.kind == "kv" else [at.layer]
        clips: dict[int, float] = {}
        sigmas: dict[int, float] = {}
        mu = 0.0
        length = 0
        leaked = partial(leak_of, self.loaded.model, self.loaded.tokenizer)
        for layer in layers:
            leaks = [leaked(text, replace(at, layer=layer)) for text in PUBLIC]
            rows = torch.cat([leak.rows(leak.tensors) for leak in leaks])
            clips[layer], length = (
                float(rows.norm(dim=-1).max()),
                max(k.length or 1 for k in leaks),
            )
            apart = 2 * clips[layer] * length**0.5
            sigmas[layer] = LITTLE_NOISE * float(rows.std())
            if epsilon is not None:
                sigmas[layer] = noise_for(epsilon) * apart * len(layers) ** 0.5
            mu = math.hypot(mu, apart / sigmas[layer])
        stream = torch.Generator().manual_seed(self.seed)

        def change(leak: Leak) -> Leak:
            layer = leak.exposure.layer
            return gaussian(leak, clips[layer], sigmas[layer], stream)

        setting, proof = stated(1 / mu, sigmas[layers[0]], length, len(parts.table))
        return self.row("Gaussian noise", setting, change, hide=change, proof=proof)

    def sealed(self, twice: bool) -> Row:
        """Measure AES-GCM; with a nonce used `twice`, an own text gives the keystream away."""
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError as error:
            raise MissingExtra(
                "AES-GCM needs the package cryptography", "stores"
            ) from error
        box = AESGCM(AESGCM.generate_key(256))
        count = iter(range(1 << 32))
        stream = torch.Generator().manual_seed(self.seed)
        model = self.loaded.model
        ids = torch.randint(len(anatomy(model).table), (64,), generator=stream).tolist()
        own = _bytes(leak_of(model, None, ids, self.exposure))
        first = bytes(12)

        def nonce() -> bytes:
            return first if twice else (1 + next(count)).to_bytes(12, "big")

        def hide(leak: Leak) -> Leak:
            """Return what the attacker reads from the ciphertext without the key."""
            seen = box.encrypt(nonce(), _bytes(leak), None)[:-_TAG]
            if twice:
                stream = zip(seen, box.encrypt(first, own, None), own, strict=False)
                seen = bytes(a ^ b ^ c for a, b, c in stream)
            return _from_bytes(leak, seen)

        def change(leak: Leak) -> Leak:
            own_nonce = nonce()
            sealed = box.encrypt(own_nonce, _bytes(leak), None)
            return _from_bytes(leak, box.decrypt(own_nonce, sealed, None))

        if twice:
            return self.row(
                "AES-GCM",
                "one nonce for all texts",
                change,
                hide=hide,
                attack="keystream of one own text",
            )
        return self.row(
            "AES-GCM",
            "a key of 256 bits, a nonce for each text",
            change,
            hide=hide,
            attack="ciphertext read as numbers",
            proof="no better than AES told from a random permutation (McGrew and Viega, 2004)",
        )


@dataclass(frozen=True, eq=False)
class Embeddings:
    """The rows of pooled embeddings: short texts are read, and retrieval is measured on others."""

    loaded: Loaded
    seed: int

    def plans(self) -> Plans:
        row = self.row
        width = anatomy(self.loaded.model).table.shape[1]
        yield "none", partial(row, "none", f"{self.loaded.name}, the mean", same)
        for name, bits in (("int8", "8 bits"), ("binary", "signs alone")):
            change = partial(degrade, precision=name)
            yield name, partial(row, "rounding", bits, change, hide=change)
        yield from strengths(self.noise)
        for own in (0, 1, 10, 2 * width):
            setting = f"known texts: {own}"
            change = hidden_and_restored("rotated")
            yield f"rotated, {own}", partial(row, "rotated", setting, change, own=own)

    def row(
        self,
        defence: str,
        setting: str,
        change: Change,
        *,
        hide: Change | None = None,
        proof: str = "",
        own: int | None = None,
    ) -> Row:
        method = ATTACKS.make("counted-reader", search=SumSearch(passes=2_000))
        tried = read_behind(
            self.loaded,
            NOTES[:2],
            Exposure("pooled"),
            defence,
            self.seed,
            own=own,
            method=method,
            hide=hide,
        )
        texts = _sentences()[: _SENTENCES // 4]

        def stored(change: Change) -> Tensor:
            model = self.loaded.model
            tokenizer = self.loaded.tokenizer
            leaks = (
                change(leak_of(model, tokenizer, text, Exposure("pooled")))
                for text in texts
            )
            return torch.stack([leak.tensors["values"] for leak in leaks])

        plain, changed, factor = compared(
            partial(stored, same), partial(stored, change)
        )
        queries, docs = plain.tensor_split([len(texts) // 4])
        hits = recall(docs, changed[len(queries) :], queries, queries)
        if hits < 1:
            honest = f"recall@{NEAREST} {hits:.2f} of {len(docs)}"
        else:
            honest = "nothing"
        return text_row("embedding", tried, setting, honest, factor, proof)

    def noise(self, epsilon: float | None) -> Row:
        table = anatomy(self.loaded.model).table
        stream = torch.Generator().manual_seed(self.seed)
        if epsilon is None:
            sigma = LITTLE_NOISE * table.shape[1] ** -0.5
        else:
            sigma = 2 * noise_for(epsilon)
        length = max(len(self.loaded.tokenizer(text)["input_ids"]) for text in NOTES)
        setting, proof = stated(sigma / 2, sigma, length, len(table))
        change = partial(gaussian, clip=1.0, sigma=sigma, stream=stream)
        return self.row("Gaussian noise", setting, change, hide=change, proof=proof)


@dataclass(frozen=True, eq=False)
class Gradients:
    """The rows of a classifier's gradient for two texts."""

    loaded: Loaded
    seed: int

    def plans(self) -> Plans:
        yield (
            "none",
            partial(self.row, "none", f"{self.loaded.name}, a batch of 2 texts"),
        )
        yield (
            "bfloat16",
            partial(self.row, "rounding", "bfloat16", precision="bfloat16"),
        )
        clipped = partial(
            self.row, "clipping", "each text to a norm of 1", protocol=Protocol(1.0)
        )
        yield "clipped", clipped
        for name, noise in (("little", 1e-5), ("ε = 8", noise_for(8.0))):
            yield f"noise, {name}", partial(self.noise, noise)

    def row(
        self,
        defence: str,
        setting: str,
        proof: str = "",
        precision: str = "float32",
        protocol: Protocol | None = None,
    ) -> Row:
        model = self.loaded.model
        tokenizer = self.loaded.tokenizer
        batch = batch_of(
            model, tokenizer, [Example(t, NO_LABEL, t) for t in TEXTS[:2]], 128
        )
        make = partial(update_of, model, batch, seed=self.seed)
        plain, update, factor = compared(
            make, partial(make, protocol, precision=precision)
        )
        found = recover_batch(model, tokenizer, update)
        exact = sum(
            text.verified and tuple(text.ids) in batch.texts for text in found.texts
        )
        flat = [
            torch.cat([tensor.float().flatten() for tensor in each.values.values()])
            for each in (plain, update)
        ]
        tried = LeakTried(
            defence,
            "gradient",
            len(batch.texts),
            found.method,
            found.status,
            found.reason,
            exact,
            seconds=found.seconds,
        )
        return text_row("gradient", tried, setting, lost(*flat), factor, proof)

    def noise(self, noise: float) -> Row:
        """Measure noise in units of Δ = 2, the largest difference of two texts of norm 1."""
        tokens = len(self.loaded.tokenizer(TEXTS[0])["input_ids"])
        vocabulary = len(anatomy(self.loaded.model).table)
        setting, proof = stated(noise, 2 * noise, tokens, vocabulary)
        rules = Protocol(clip=1.0, noise=2 * noise)
        return self.row(
            "Gaussian noise", f"{setting}, clipped to 1", proof, protocol=rules
        )


@dataclass(frozen=True, eq=False)
class Logits:
    """The rows of a causal model's logits, which span the columns of the last layer's matrix.

    The attacker knows the size of the errors, and takes the directions with larger
    singular values (extract/output_layer.py) from twice as many answers as the model is
    wide.
    """

    loaded: Loaded
    seed: int

    def plans(self) -> Plans:
        yield "none", partial(self.row, "none", self.loaded.name, torch.clone)
        change = partial(torch.round, decimals=2)
        yield (
            "two decimals",
            partial(self.row, "rounding", "to two decimals", change, 0.01),
        )
        yield from strengths(self.noise)

    @torch.no_grad()
    def logits(self, ids: Tensor) -> Tensor:
        values = capture(self.loaded.model, Exposure("logits"), ids=ids)["values"]
        return values[:, 0].double().cpu()

    def logits_of_public_texts(self) -> Tensor:
        tokenizer = self.loaded.tokenizer
        device = anatomy(self.loaded.model).device
        ids = [
            tokenizer(text, return_tensors="pt")["input_ids"].to(device)
            for text in PUBLIC
        ]
        return torch.cat([self.logits(each) for each in ids])

    def row(
        self,
        defence: str,
        setting: str,
        change: Callable[[Tensor], Tensor],
        step: float | None = None,
    ) -> Row:
        parts = anatomy(self.loaded.model)
        stream = torch.Generator().manual_seed(self.seed)
        vocabulary, width = parts.table.shape
        count = 2 * width
        ids = torch.randint(vocabulary, (count, 4), generator=stream)
        rows = torch.cat(
            [change(self.logits(each.to(parts.device))) for each in ids.split(64)]
        )
        some = torch.randperm(vocabulary, generator=stream)[: 4 * count]
        found = cliff(rows[:, some], 8, step)
        true = unembedding(self.loaded.model).weight.detach().double().cpu()[some]
        basis = torch.linalg.svd(rows[:, some], full_matrices=False).Vh[
            : min(found.rank, width)
        ]
        off = float((true - basis.T @ (basis @ true)).norm() / true.norm())
        public = self.logits_of_public_texts
        plain, changed, factor = compared(public, lambda: change(public()))
        known = found.seen and found.rank == width
        if not known:
            share = 0.0
        elif off < 0.1:
            share = 1.0
        else:
            share = 0.5
        return Row(
            "logits",
            defence,
            setting,
            f"singular values above the errors, {count:,} queries",
            f"width {found.rank if found.seen else 'unknown'} of {width}, matrix off by {off:.1e}",
            lost(plain.argmax(-1), changed.argmax(-1)),
            factor,
            verdict_of(share, ""),
            "",
            asdict(found),
        )

    def noise(self, epsilon: float | None) -> Row:
        public = self.logits_of_public_texts()
        stream = torch.Generator().manual_seed(self.seed)
        clip = float(public.norm(dim=-1).max())
        if epsilon:
            sigma = 2 * clip * noise_for(epsilon)
        else:
            sigma = LITTLE_NOISE * float(public.std())

        def change(answers: Tensor) -> Tensor:
            scale = (clip / answers.norm(dim=-1, keepdim=True)).clamp(max=1)
            return answers * scale + sigma * torch.randn(
                answers.shape, generator=stream
            )

        setting, _ = stated(
            sigma / (2 * clip), sigma, 1, len(anatomy(self.loaded.model).table)
        )
        return self.row(
            "Gaussian noise", f"{setting}, each answer", change, sigma * 12**0.5
        )


def weights(trial: Trial, seed: int) -> Row:
    """Measure a defence of a server, in front of a head with random weights."""
    target = oracle.plant(dim=_DIM, seed=seed)
    client = HonestClient.of(target, seed=seed)
    tried = try_defence(trial, target, client, seed)
    _, _, factor = compared(
        lambda: client.served(target),
        lambda: client.served(trial.change.applied(target)),
    )
    error = tried.attacker_error
    budget = trial.queries(_DIM)
    unknowns = _DIM * _DIM + _DIM
    if tried.honest_error:
        honest = f"answers off by {tried.honest_error:.1e}"
    else:
        honest = "nothing"
    refused = f", {tried.refused:.0%} refused" if tried.refused else ""
    proof = f"{budget} numbers do not settle {unknowns} unknowns, of one client"
    proof = "" if budget is None else proof
    share = {Status.RECOVERED: 1.0, Status.INEXACT: 0.5}.get(tried.status, 0.0)
    return Row(
        "weights",
        tried.defence,
        f"{tried.setting}, d = {_DIM}",
        f"{tried.attack}, {tried.queries:,} queries",
        "nothing" if error is None else f"copy off by {error:.1e}",
        honest + refused,
        factor,
        verdict_of(share, proof),
        proof,
        asdict(tried),
    )


@dataclass(frozen=True, eq=False)
class Predictions:
    """The rows of a classifier whose attention is cut: the demo, or one with its own labels."""

    loaded: Loaded
    seed: int

    @property
    def examples(self) -> list[Example]:
        if self.loaded.name == NAME:
            return list(EXAMPLES)
        return with_own_labels(self.loaded, EXAMPLES)

    def plans(self) -> Plans:
        yield "none", partial(self.row, "none", self.loaded.name, lambda: self.loaded)
        yield (
            "S-Attend",
            partial(
                self.row,
                "S-Attend",
                f"rate 0.2, on {_SENTENCES} sentences with its own answers",
                lambda: self.trained(SAttend(rate=0.2, seed=self.seed)),
            ),
        )
        if self.loaded.name == NAME:
            hardened = partial(demo.load_demo, "classification", hardened=True)
            yield (
                "attack masks",
                partial(self.row, "AttackMasks", "as it ships", hardened),
            )
        yield "smoothing", self.smoothed

    def row(self, defence: str, setting: str, make: Callable[[], Loaded]) -> Row:
        other = make()
        examples = self.examples
        found = attacked(other.model, other.tokenizer, examples, HackAttend.strongest())
        plain, changed, factor = compared(
            partial(predicted, self.loaded, examples),
            partial(predicted, other, examples),
        )
        tried = len(found.attacked)
        return Row(
            "predictions",
            defence,
            setting,
            "HackAttend, strongest, 1% cut",
            f"{found.flips} of {tried} flipped",
            lost(plain, changed),
            factor,
            verdict_of(found.flips / max(1, tried), ""),
            "",
            {
                "flipped": [each.id for each in found.attacked if each.flipped],
                "attacked": tried,
            },
        )

    def smoothed(self) -> Row:
        other = self.trained(SAttend(1 - _KEEP, seed=self.seed, emptied=True))
        examples = self.examples
        smoothing = Smoothing(keep=_KEEP, kind="partition", seed=self.seed)
        plain, votes, factor = compared(
            partial(predicted, self.loaded, examples),
            partial(smoothing.certify, other.model, other.tokenizer, examples),
        )
        held = [round(votes.certified(k) * len(examples)) for k in (1, 4)]
        voted = torch.tensor([ballot.answer for ballot in votes.ballots])
        return Row(
            "predictions",
            "smoothing over masks",
            f"{smoothing.masks} masks that keep {_KEEP:.0%}, after S-Attend at {1 - _KEEP:g}",
            "any cut",
            f"{held[0]} of {len(examples)} stand against 1 unit, {held[1]} against 4",
            lost(plain, voted),
            factor,
            Verdict.PROVED if held[0] else Verdict.HELD,
            "certificate by a partition" if held[0] else "",
            asdict(votes),
        )

    def trained(self, defence: SAttend) -> Loaded:
        """Return the model after one epoch with a defence, on sentences with its own answers."""
        examples = [
            Example(str(n), NO_LABEL, text) for n, text in enumerate(_sentences())
        ]
        examples = with_own_labels(self.loaded, examples)
        model = copy.deepcopy(self.loaded.model).requires_grad_(True)
        train(
            model,
            self.loaded.tokenizer,
            examples,
            defence,
            epochs=1,
            rate=2e-4,
            seed=self.seed,
            device=model.device,
        )
        return replace(self.loaded, model=model.requires_grad_(False))


@cache
def _sentences() -> list[str]:
    return SHIPPED.read_text("utf-8").splitlines()[:_SENTENCES]
