"""A ledger belongs to the model behind an address, not to the address."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest
import torch
from endpoint_server import Endpoint, scores, serving, vectors

from keyhole import extract, oracle
from keyhole.core import Status
from keyhole.core.errors import InputError
from keyhole.oracle import Counted, EndpointOptions, Ledger, OpenInference, OracleError
from keyhole.oracle.ledger import answers_in
from keyhole.oracle.token_questions import ABSENT

DIM = 4
OLD, NEW = (oracle.plant(dim=DIM, seed=seed) for seed in (3, 4))


def draw(count: int, seed: int = 0) -> torch.Tensor:
    stream = torch.Generator().manual_seed(seed)
    return torch.randn(count, 2, DIM, dtype=torch.float64, generator=stream)


def asked(endpoint: Endpoint) -> int:
    return sum(request["inputs"][0]["shape"][0] for request in endpoint.requests)


@pytest.fixture
def endpoint():
    with serving(Endpoint([vectors(DIM)], scores(OLD))) as running:
        yield running


def extracted(running, path, **options):
    notices = []
    result = extract.run(
        running.address, "single-head", ledger=path, notice=notices.append, **options
    )
    assert result.status is Status.RECOVERED
    return result, notices


def test_a_model_that_was_trained_again_gets_a_new_generation(endpoint, tmp_path):
    path = tmp_path / "run.db"
    first, notices = extracted(endpoint, path)
    assert not notices
    kept = answers_in(path)
    endpoint.answer = scores(NEW)
    second, notices = extracted(endpoint, path)
    assert torch.allclose(second.model.W, NEW.W, rtol=0, atol=1e-10)
    assert second.remembered == 0
    (line,) = notices
    assert f"another model answers at {endpoint.address} than {path} remembers" in line
    assert f"the {kept} old answers are kept there as answers_1 and not used" in line
    assert line in second.reason
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT count(*) FROM answers_1").fetchone() == (kept,)
    endpoint.answer = scores(OLD)  # and back: the third generation is a new one too
    third, notices = extracted(endpoint, path)
    assert torch.allclose(third.model.W, first.model.W, rtol=0, atol=1e-10)
    assert "answers_2" in notices[0]


def test_checking_for_the_same_model_is_cheap_and_uncounted(endpoint, tmp_path):
    first, _ = extracted(endpoint, tmp_path / "run.db")
    before = asked(endpoint)
    again, notices = extracted(endpoint, tmp_path / "run.db", budget=0)
    assert not notices
    assert again.remembered == again.queries == first.queries == DIM**2 + DIM
    checks = asked(endpoint) - before
    assert 1 <= checks <= 8
    assert (
        f"{checks} remembered answers were asked for again, uncounted" in again.reason
    )


def test_rounding_and_stated_errors_are_not_another_model(endpoint, tmp_path):
    noisy = oracle.Noisy(OLD, 1e-6, seed=1)
    path = tmp_path / "run.db"

    def opened(**options):
        counted = Counted(OpenInference(endpoint.url, "m"))
        return Ledger(counted, path, notice=notices.append, **options), counted

    for answer, options, changes in (
        (scores(OLD), {}, 0),
        (scores(lambda X: OLD(X) * (1 + 1e-15)), {}, 0),
        (scores(noisy), {"answer_error": 1e-6}, 0),
        (scores(noisy), {}, 1),
    ):
        notices: list[str] = []
        endpoint.answer = answer
        ledger, counted = opened(**options)
        with ledger:
            ledger(draw(20))
        counted.inner.close()
        assert len(notices) == changes
    assert counted.queries == 20


def test_answers_of_another_shape_are_another_model(endpoint, tmp_path):
    vectors_now = oracle.plant("attention", dim=DIM, seed=1)
    for answer, count in ((scores(OLD), 0), (scores(vectors_now), 1)):
        endpoint.answer = answer
        notices = []
        remote = OpenInference(endpoint.url, "m")
        with Ledger(remote, tmp_path / "run.db", notice=notices.append) as ledger:
            ledger(draw(5))
        remote.close()
        assert len(notices) == count


@pytest.mark.parametrize(
    ("before", "after", "changes"),
    [
        ((-1.0, -2.0, ABSENT), (-1.0, -2.0, ABSENT), 0),
        ((-1.0, -2.0, ABSENT), (-1.0, ABSENT, -9.0), 0),  # what both gave is the same
        ((-1.0, -2.0, ABSENT), (-4.0, -5.0, ABSENT), 1),
        ((0.0, ABSENT), (ABSENT, 0.0), 1),  # another token was sampled
        ((0.0, ABSENT), (ABSENT, ABSENT), 0),
    ],
)
def test_numbers_that_a_server_left_out_are_not_compared(
    tmp_path, before, after, changes
):
    class Server:
        dim = DIM
        identity = "a server"
        may_change = True
        precision = 2.0**-24
        answer = torch.tensor(before, dtype=torch.float64)

        def __call__(self, sequences):
            return self.answer.expand(len(sequences), -1)

    notices = []
    server = Server()
    for _ in range(2):
        with Ledger(server, tmp_path / "run.db", notice=notices.append) as ledger:
            ledger(draw(2))
        server.answer = torch.tensor(after, dtype=torch.float64)
    assert len(notices) == changes


def test_a_server_that_is_down_changes_nothing(endpoint, tmp_path):
    path = tmp_path / "run.db"
    with closing(OpenInference(endpoint.url, "m", retries=0)) as remote:
        with Ledger(remote, path) as ledger:
            ledger(draw(9))
        endpoint.token = "closed"
        with (
            Ledger(remote, path) as ledger,
            pytest.raises(OracleError, match="status 401"),
        ):
            ledger(draw(9))
        assert answers_in(path) == 9
        endpoint.token = None
        with Ledger(remote, path) as ledger:
            assert torch.equal(ledger(draw(9)), OLD(draw(9)))
            assert ledger.remembered == 9


def test_ledgers_without_witnesses_are_accepted(endpoint, tmp_path):
    path = tmp_path / "run.db"
    with closing(OpenInference(endpoint.url, "m")) as remote:
        with Ledger(remote, path) as ledger:
            ledger(draw(12)[:9])
        with closing(sqlite3.connect(path)) as db:
            db.execute("DROP TABLE witnesses")
            db.commit()
        with Ledger(remote, path) as ledger:
            ledger(draw(12))
            assert (ledger.remembered, ledger.asked, ledger.asked_again) == (9, 3, 0)
        with Ledger(remote, path) as ledger:
            ledger(draw(12))
            assert ledger.asked_again == 2  # of the three that were new


def test_an_endpoint_inside_a_wrapper_is_checked_too(endpoint, tmp_path):
    for answer, count in ((scores(OLD), 0), (scores(OLD), 0), (scores(NEW), 1)):
        endpoint.answer = answer
        notices = []
        with closing(OpenInference(endpoint.url, "m")) as remote:
            rounded = oracle.Rounded(remote, 3)
            with Ledger(rounded, tmp_path / "run.db", notice=notices.append) as ledger:
                assert torch.equal(ledger(draw(5)), rounded(draw(5)))
        assert len(notices) == count


def test_another_output_of_the_same_address_has_a_ledger_of_its_own(endpoint, tmp_path):
    path = tmp_path / "run.db"
    extracted(endpoint, path)
    with pytest.raises(InputError, match=r", that of .* has target"):
        extracted(endpoint, path, endpoint=EndpointOptions(output="answers"))
