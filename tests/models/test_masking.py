"""The registered attention function against each model's own eager one, and its rewrites."""

from __future__ import annotations

import copy
import threading

import pytest
import torch

import tiny_architectures as zoo
from keyhole.core.errors import InputError
from keyhole.models.masking import NAME, Untouched, rewriting

SINKS = "gpt_oss"


@pytest.fixture(scope="module", params=[*zoo.SIXTEEN, SINKS])
def case(request):
    return request.param, zoo.model(request.param), zoo.inputs(request.param)


def sites_of(model, **inputs):
    """The sites of one forward pass with their shapes."""
    with rewriting(model, Untouched()) as sites, torch.no_grad():
        model(**inputs)
    return sites.calls


class Seen(Untouched):
    def __init__(self):
        self.maps = {}

    def seen(self, site, probabilities):
        self.maps[site] = probabilities


class RandomCut(Seen):
    """Cuts random units, among them padding and the future."""

    def __init__(self, share=0.4, seed=0):
        super().__init__()
        self.share, self.stream, self.cuts = (
            share,
            torch.Generator().manual_seed(seed),
            {},
        )

    def cut(self, site, shape):
        self.cuts[site] = torch.rand(shape, generator=self.stream) < self.share
        return self.cuts[site]


class Everything(Seen):
    def cut(self, site, shape):
        return torch.ones(shape, dtype=torch.bool)


class Zeros(Untouched):
    """What attacks differentiate by: a summand of zeros and a factor of ones, with gradients."""

    def __init__(self):
        self.bumps = {}
        self.gates = {}

    def bump(self, site, shape):
        self.bumps[site] = torch.zeros(shape, requires_grad=True)
        return self.bumps[site]

    def gate(self, site, shape):
        self.gates[site] = torch.ones(shape[1], 1, 1, requires_grad=True)
        return self.gates[site]


def loss_of(model, given, seed=0):
    state = model(**given).last_hidden_state
    stream = torch.Generator().manual_seed(seed)
    return (state * torch.randn(state.shape, generator=stream)).sum()


def above(weights, family):
    """The future of a causal model, as a boolean square."""
    causal = family in (*zoo.DECODERS, SINKS)
    square = torch.ones(weights.shape[-2:], dtype=torch.bool).triu(1)
    return square if causal else torch.zeros_like(square)


def test_outputs_equal_eager(case):
    family, model, given = case
    eager = model(**given).last_hidden_state
    with rewriting(model, Untouched()):
        ours = model(**given).last_hidden_state
    assert eager.abs().max() > 0.1
    if family == SINKS:  # its eager subtracts the maximum by hand
        assert (ours - eager).abs().max() <= 2e-6 * eager.abs().max()
    else:
        assert torch.equal(ours, eager)


def test_every_head_has_a_gradient(case):
    _, model, given = case
    zeros = Zeros()
    with rewriting(model, zeros) as sites:
        loss_of(model, given).backward()
    assert [site for site, _ in sites.calls] == list(zeros.gates)
    for site, shape in sites.calls:
        assert (zeros.gates[site].grad.flatten() != 0).sum() == shape[1], site
        assert (zeros.bumps[site].grad.abs().amax((0, 2, 3)) > 0).all(), site


def test_a_cut_removes_exactly_and_rows_renormalise(case):
    family, model, given = case
    plain = Seen()
    cutting = RandomCut()
    with rewriting(model, plain):
        before = model(**given).last_hidden_state
    with rewriting(model, cutting):
        after = model(**given).last_hidden_state
    assert not torch.allclose(before, after)
    for number, (site, weights) in enumerate(cutting.maps.items()):
        cut = cutting.cuts[site]
        whole = plain.maps[site]
        opened = whole > 1e-20  # Swin masks with −100, which is not quite nothing
        # Padding that asks may see nothing: eager lets it see all, and so it stays.
        blind = (opened & above(whole, family)).any(-1, keepdim=True)
        emptied = (cut | ~opened).all(-1, keepdim=True) | blind
        assert (weights[cut & ~emptied] == 0).all()
        assert (weights[~opened] < 1e-15).all(), (
            "a cut never opens padding or the future"
        )
        assert ((weights > 1e-15) == (opened & (~cut | emptied))).all()
        if family != SINKS:
            assert torch.allclose(
                weights.sum(-1), torch.ones(weights.shape[:-1]), atol=1e-5
            )
        if number == 0 and family != SINKS:  # later layers have other scores
            kept = whole.masked_fill(cut & ~emptied, 0)
            assert torch.allclose(weights, kept / kept.sum(-1, keepdim=True), atol=1e-5)


def test_a_row_is_never_emptied(case):
    _, model, given = case
    plain = Seen()
    cutting = Everything()
    with rewriting(model, plain):
        before = model(**given).last_hidden_state
    with rewriting(model, cutting):
        assert torch.equal(model(**given).last_hidden_state, before)
    assert all(torch.equal(plain.maps[site], cutting.maps[site]) for site in plain.maps)


def test_a_row_may_be_emptied_with_empties(case):
    """Emptied rows are zero; the other rows are as without `empties`."""
    family, model, given = case
    usual = RandomCut(0.9)
    silent = RandomCut(0.9)
    silent.empties = True
    with rewriting(model, usual):
        model(**given)
    with rewriting(model, silent):
        model(**given)
    site = next(iter(usual.maps))  # later layers have other scores
    left = usual.maps[site]
    weights = silent.maps[site]
    gone = (weights == 0).all(-1)
    assert gone.any()
    assert not gone.all()
    assert torch.equal(weights[~gone], left[~gone])
    opened = (left > 1e-20) & ~above(left, family)
    assert (silent.cuts[site] | ~opened)[gone].all(), "only rows that have nothing left"


def test_gate_and_bump_against_autograd_and_by_hand(case):
    """At zero, the factor's gradient of a head is the summand's times the probabilities."""
    _, model, given = case

    class Both(Zeros, Seen):
        def __init__(self):
            Zeros.__init__(self)
            Seen.__init__(self)

    both = Both()
    with rewriting(model, both):
        loss_of(model, given).backward()
    for site, gate in both.gates.items():
        expected = (both.bumps[site].grad * both.maps[site]).sum((0, 2, 3))
        assert torch.allclose(gate.grad.flatten(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.filterwarnings(
    "ignore:.torch.jit.script. is deprecated"
)  # DeBERTa's module
@pytest.mark.parametrize("family", zoo.REFUSED)
def test_models_with_attention_of_their_own_are_refused(family):
    model = zoo.model(family)
    given = zoo.inputs(family)
    before = model(**given).last_hidden_state
    with pytest.raises(InputError, match="computes attention on its own"):
        sites_of(model, **given)
    assert torch.equal(model(**given).last_hidden_state, before)


def test_sites_have_numbers_names_and_kinds():
    shapes = dict(sites_of(zoo.model("albert"), **zoo.inputs("albert")))
    assert [(s.index, s.call) for s in shapes] == [(0, 0), (1, 1)]
    assert len({s.name for s in shapes}) == 1
    for family, cross in (("t5", 2), ("bart", 2)):
        sites = sites_of(zoo.model(family), **zoo.inputs(family))
        kinds = [site.kind for site, _ in sites]
        assert kinds == ["self", "self", "self", "cross", "self", "cross"]
        assert sum(kind == "cross" for kind in kinds) == cross
        assert [tuple(shape) for _, shape in sites] == [
            (2, 4, 9, 9),
            (2, 4, 9, 9),
            (2, 4, 6, 6),
            (2, 4, 6, 9),
            (2, 4, 6, 6),
            (2, 4, 6, 9),
        ]


def test_the_model_is_restored_when_the_context_ends_or_raises():
    model = zoo.model("t5")
    given = zoo.inputs("t5")
    model.decoder.config._attn_implementation = "sdpa"
    counts = [
        len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()
    ]
    before = model(**given).last_hidden_state
    with rewriting(model, Everything()):
        assert model.encoder.config._attn_implementation == NAME
    with pytest.raises(ZeroDivisionError), rewriting(model, Everything()):
        _ = 1 / 0
    assert model.config._attn_implementation == "eager"
    assert model.encoder.config._attn_implementation == "eager"
    assert model.decoder.config._attn_implementation == "sdpa"
    assert [
        len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()
    ] == counts
    assert torch.equal(model(**given).last_hidden_state, before)


def test_a_failing_pass_does_not_confuse_the_next():
    model = zoo.model("bert")
    given = zoo.inputs("bert")
    with rewriting(model, Untouched()) as sites:
        with pytest.raises(IndexError):
            model(input_ids=torch.full((1, 3), 10**6))
        model(**given)
        model(**given)
        assert [site.index for site, _ in sites.calls] == [0, 1]
        assert sites.forwards == 2


def test_the_encoder_inside_starts_a_pass_too():
    model = zoo.model("t5")
    given = zoo.inputs("t5")
    with rewriting(model, Untouched()) as sites:
        for _ in range(2):
            model.encoder(input_ids=given["input_ids"])
            assert [site.index for site, _ in sites.calls] == [0, 1]


def test_several_models_may_be_rewritten_at_once():
    bert = zoo.model("bert")
    two = zoo.model("gpt2")
    inner = RandomCut(seed=1)
    outer = RandomCut(seed=2)
    with rewriting(bert, outer), rewriting(two, inner):
        bert(**zoo.inputs("bert"))
        two(**zoo.inputs("gpt2"))
    assert [s.name.split(".")[0] for s in outer.maps] == ["encoder"] * 2
    assert [s.name.split(".")[0] for s in inner.maps] == ["h"] * 2
    with rewriting(bert, Untouched()):
        with (
            pytest.raises(InputError, match="attention is being rewritten already"),
            rewriting(bert, inner),
        ):
            pass
        assert bert.config._attn_implementation == NAME
        assert sites_of(two, **zoo.inputs("gpt2"))


def test_a_copy_is_not_rewritten():
    model = zoo.model("bert")
    given = zoo.inputs("bert")
    before = model(**given).last_hidden_state
    with rewriting(model, RandomCut()):
        copied = copy.deepcopy(model)
    for hook in (
        "_forward_hooks",
        "_forward_pre_hooks",
        "_forward_hooks_always_called",
    ):
        for module in copied.modules():
            getattr(module, hook).clear()
    assert (copied(**given).last_hidden_state - before).abs().max() < 1e-5


def test_one_model_in_two_threads_is_refused_and_two_models_are_not():
    model = zoo.model("bert")
    given = zoo.inputs("bert")
    refusals = []

    def intrude():
        try:
            model(**given)
        except InputError as error:
            refusals.append(str(error))

    class Slow(Untouched):
        def seen(self, site, probabilities):
            if site.index == 0 and not refusals:
                thread = threading.Thread(target=intrude)
                thread.start()
                thread.join()

    with rewriting(model, Slow()) as sites:
        model(**given)
        assert [site.index for site, _ in sites.calls] == [0, 1]
    assert refusals == ["two threads use the model at once: give each its own copy"]


def test_gradient_checkpointing_gets_the_same_cut_again():
    model = zoo.model("bert")
    given = zoo.inputs("bert")
    model.train().requires_grad_(True)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0

    class ByIndex(Untouched):
        def cut(self, site, shape):
            stream = torch.Generator().manual_seed(site.index)
            return torch.rand(shape, generator=stream) < 0.3

    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.zero_grad()
        with rewriting(model, ByIndex()):
            loss_of(model, given).backward()
        gradients.append(model.embeddings.word_embeddings.weight.grad.clone())
    assert torch.allclose(*gradients, rtol=1e-4, atol=1e-5)


def test_boolean_and_float_masks_agree():
    model = zoo.model("bert")
    given = zoo.inputs("bert")
    with rewriting(model, Untouched()):
        boolean = given["attention_mask"].bool()[:, None, None].expand(2, 1, 9, 9)
        want = model(**given).last_hidden_state
        got = model(
            input_ids=given["input_ids"], attention_mask=boolean
        ).last_hidden_state
    assert torch.equal(want, got)


def test_dropout_in_training_only():
    model = zoo.model("bert")
    given = zoo.inputs("bert")
    with rewriting(model, Untouched()):
        assert torch.equal(model(**given)[0], model(**given)[0])
        model.train()
        torch.manual_seed(0)
        ours = model(**given)[0]
        assert not torch.equal(model(**given)[0], ours)
    torch.manual_seed(0)
    assert torch.allclose(model(**given)[0], ours, atol=1e-5)


def test_tensors_that_do_not_fit_are_refused():
    model = zoo.model("bert")
    given = zoo.inputs("bert")

    class Wrong(Untouched):
        def __init__(self, kind, tensor):
            setattr(self, kind, lambda *_: tensor)

    for kind, tensor, message in (
        ("cut", torch.zeros(1, 1, 9, 9), "expected a boolean cut at encoder"),
        (
            "cut",
            torch.zeros(7, 9, dtype=torch.bool),
            "expected a cut that broadcasts to",
        ),
        ("gate", torch.zeros(3, 1, 1), "expected a gate that broadcasts to"),
        ("bump", torch.zeros(1, 2, 4, 9, 9), "expected a bump that broadcasts to"),
    ):
        with (
            rewriting(model, Wrong(kind, tensor)),
            pytest.raises(InputError, match=message),
        ):
            model(**given)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # CPUs without bfloat16
def test_half_precision_and_autocast_stay_close_to_eager():
    for family in ("bert", "llama", SINKS):
        model = zoo.model(family)
        given = zoo.inputs(family)
        with torch.autocast("cpu", torch.bfloat16):
            eager = model(**given)[0]
            with rewriting(model, RandomCut(0.0)):
                ours = model(**given)[0]
        assert (ours - eager).abs().max() <= 0.05 * eager.abs().max(), family


def test_begin_names_positional_arguments():
    model = zoo.model("bert")
    given = zoo.inputs("bert")
    inputs_seen = []

    class Recorder(Untouched):
        def begin(self, inputs):
            inputs_seen.append(dict(inputs))

    with rewriting(model, Recorder()):
        model(given["input_ids"], attention_mask=given["attention_mask"])
    assert set(inputs_seen[0]) == {"input_ids", "attention_mask"}
    assert len(inputs_seen) == 1


def test_a_pass_that_begin_declines_is_the_models_own():
    model = zoo.model("t5")
    given = zoo.inputs("t5")
    model.set_attn_implementation("sdpa")
    before = model(**given)[0]

    class Sometimes(RandomCut):
        wanted = False

        def begin(self, inputs):
            return self.wanted

    with rewriting(model, Sometimes()) as sites:
        assert torch.equal(model(**given)[0], before)
        with pytest.raises(IndexError):
            model(**{**given, "input_ids": torch.full((2, 9), 10**6)})
        Sometimes.wanted = True
        assert not torch.allclose(model(**given)[0], before)
        Sometimes.wanted = False
        assert torch.equal(model(**given)[0], before)
        assert sites.forwards == 1
    assert torch.equal(model(**given)[0], before)
