"""Clipping and noise on uploads: factors, joint norms and noise by hand; what is counted, what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consilience import rng, tree
from consilience.core.client import train_client
from consilience.core.engine import RoundReport
from consilience.core.part import Part
from consilience.core.snapshot import restore, snapshot
from consilience.engines._pool import Pool
from consilience.engines.workers import Workers
from consilience.errors import ConfigError, RefusedCombination
from consilience.parts import PARTS
from consilience.parts.dp import Dp
from consilience.privacy.accountant import epsilon_of
from consilience.testing import differences, in_model, run_tiny, tiny_federation, trial


def send(part: Dp, change: dict[str, Any], uploads: dict[str, Any] | None = None, *, start: float = 0.0, client: int = 0, expected: int = 4,
         secret: bytes = b"") -> tuple[Any, Any]:
    """What leaves a client whose model changed by `change` from `start` everywhere."""
    values = {k: torch.as_tensor(v) for k, v in change.items()}
    received = {"params": {k: torch.full_like(v, start) for k, v in values.items()}, "buffers": {}}
    model = {"params": {k: start + v for k, v in values.items()}, "buffers": {}}
    c: Any = SimpleNamespace(received=received, moving=list(values), expected=expected, secret=secret, key=rng.key(0, "test", client))
    return part.release(c, uploads or {}, model)


def told(part: Dp, clients: int, size: float = 1e9) -> str | None:
    """What is said before a run of so many clients a round, with 40,000 numbers that travel, of that norm, and a million that do not."""
    spec = SimpleNamespace(policy=SimpleNamespace(cohort_size=lambda population: clients), population=2000, trained=("a", "b"),
                           model={"params": {"a": torch.full((100, 300), size / 200), "b": torch.full((10000,), size / 200),
                                             "mine": torch.zeros(10**6)}})
    return part.caution(spec)                                       # type: ignore[arg-type]


def test_noise_that_drowns_the_changes_is_warned_of() -> None:
    """z·√D/m with D = 40,000 numbers: z = 1 and 40 clients give 200/40 = 5, the bound; 41 less. With place=local √m is in place of m:
    200/√1600 = 5. Numbers that do not travel get no noise.
    """
    said = told(Dp(), 40)
    assert said is not None
    assert said.startswith("adds noise 5 times as long as the change it hides can be, with 40 clients in a round and 40,000 numbers")
    assert told(Dp(), 41) is None
    assert told(Dp(noise=0.5), 20)
    assert told(Dp(noise=0.0), 1) is None
    assert told(Dp(place="local"), 1600)
    assert told(Dp(place="local"), 1601) is None
    assert "noise 4,000 times as long as the change it hides can be, with 1 client in a round" in str(told(Dp(noise=20.0), 1))


def test_noise_that_buries_the_model_is_warned_of() -> None:
    """z·C·√D/m = 0.1·C·200/100 = C/5, twice the norm of a model of norm 3 where C = 30. A bound far above the changes does that."""
    said = told(Dp(noise=0.1, clip=30.1), 100, size=3.0)
    assert said is not None
    assert said.startswith("adds noise 2 times as long as the model is at first, with 100 clients in a round")
    assert said.endswith("Use more clients in a round, a smaller dp.clip, or less noise.")
    assert told(Dp(noise=0.1, clip=29.9), 100, size=3.0) is None
    assert told(Dp(noise=0.1, clip=30.1), 101, size=3.0) is None
    assert told(Dp(noise=0.1, clip=1e6), 100, size=0.0) is None           # a model that begins at zero has no size to speak of
    assert told(Dp(noise=0.0, clip=None), 100, size=3.0) is None
    # z·√D/m = 10, which is warned of by itself; of both the worse is said: C·10 is 3 times a model of norm 3, or 10,000 times
    assert "a smaller model" in str(told(Dp(clip=1.0), 20, size=3.0))
    assert str(told(Dp(clip=3000.0), 20, size=3.0)).startswith("adds noise 10,000 times as long as the model is at first")


# ---- clipping ------------------------------------------------------------------------------------------------------

def test_the_clip_factor() -> None:
    """‖(3, 4)‖ = 5 and C = 1: factor 1/5, so 10 + (0.6, 0.8)."""
    _, model = send(Dp(clip=1.0, noise=0.0), {"a": [3.0], "b": [4.0]}, start=10.0)
    torch.testing.assert_close(model["params"], {"a": torch.tensor([10.6]), "b": torch.tensor([10.8])})


def test_what_is_short_enough_stays() -> None:
    _, model = send(Dp(clip=6.0, noise=0.0), {"a": [3.0], "b": [4.0]})
    torch.testing.assert_close(model["params"], {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}, rtol=0, atol=0)


@pytest.mark.parametrize(("scale", "factor"), [(1.0, 2.5 / 5), (0.5, 2.5 / 13**0.5), (3.0, 2.5 / 153**0.5)])
def test_one_norm_for_the_model_and_all_uploads(scale: float, factor: float) -> None:
    """Change 3, an upload of 4 that counts as 4·scale: norms 5, √(9 + 4) and √(9 + 144), all above C = 2.5; one factor for both."""
    uploads, model = send(Dp(clip=2.5, noise=0.0, scale=scale), {"a": [3.0]}, {"other": {"deep": {"u": torch.tensor([4.0])}}})
    torch.testing.assert_close(model["params"]["a"], torch.tensor([3 * factor]), rtol=1e-5, atol=0)
    torch.testing.assert_close(uploads["other"]["deep"]["u"], torch.tensor([4 * factor]), rtol=1e-5, atol=0)


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=12), st.lists(st.floats(-1e6, 1e6, width=32), max_size=5),
       st.floats(1e-3, 1e3), st.floats(0.01, 100))
@settings(max_examples=150, deadline=None)
def test_the_norm_of_what_is_sent_never_exceeds_the_bound(change: list[float], other: list[float], clip: float, scale: float) -> None:
    uploads, model = send(Dp(clip=clip, noise=0.0, scale=scale), {"a": change}, {"p": {"u": torch.tensor(other)}})
    sent = [model["params"]["a"].double(), scale * uploads["p"]["u"].double()]
    assert float(torch.cat(sent).norm()) <= clip
    whole = torch.cat([torch.tensor(change).double(), scale * torch.tensor(other).double()])
    if float(whole.norm()) <= 0.999 * clip:
        torch.testing.assert_close(torch.cat(sent), whole, rtol=1e-5, atol=1e-30)


def test_the_change_is_counted_from_the_servers_model() -> None:
    """With a bound that binds, every uploaded model lies at that distance from the global model; what the client keeps is not clipped."""
    fed = tiny_federation([Dp(clip=0.01, noise=0.0), PARTS["moon"]()])
    with torch.no_grad():
        fed.round_number = 1
        out = train_client(fed, 0, [0, 1, 3], {})
    moved = lambda model: tree.norm({k: model[half][k].double() - fed.model[half][k].double() for half in model for k in model[half]
                                     if fed.model[half][k].is_floating_point()})
    assert float(moved(out.model)) == pytest.approx(0.01, rel=1e-4)
    assert float(moved(out.state.tensors["previous"])) > 0.1


# ---- noise ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("place", "deviation"), [("client", (1 / 12) ** 0.5), ("server", 1 / 3), ("local", (1 / 3) ** 0.5)])
def test_noise_in_the_average(place: str, deviation: float) -> None:
    """z·C = 6, lr ≈ 0, so the new model is the old one plus noise. Four clients are expected, three make a step.

    client: each adds 36/4, the average of three has 3·9/9 = 3 = 36/12. server: the sum gets 36, the average 36/9.
    local: each adds 36, the average has 3·36/9 = 36/3. The deviation of 1,100 numbers is known to 2.1 %.
    """
    fed = tiny_federation([Dp(clip=2.0, noise=3.0, place=place)], lr=1e-30, weight_decay=0.0)
    before = tree.clone(fed.model["params"])
    fed.round()
    noise = torch.cat([(fed.model["params"][k] - before[k]).flatten() for k in before])
    assert len(noise) > 1000
    assert float(noise.std()) == pytest.approx(6 * deviation, rel=0.07)
    assert abs(float(noise.mean())) < 4 * 6 * deviation / len(noise) ** 0.5


@pytest.mark.parametrize("place", ["client", "server"])
def test_noise_on_other_uploads(place: str) -> None:
    """SCAFFOLD's mean of changes at lr ≈ 0 of an unmoving gradient: its noise is the model's over the scale. c moves by |S|/N of it."""
    fed = tiny_federation([Dp(clip=1e-3, noise=1.0, place=place, scale=0.1), PARTS["scaffold"]()], sizes=(24, 17, 16, 40))
    fed.round()
    moved = torch.cat([t.flatten() for t in fed.shared["scaffold"]["c"].values()])
    assert float(moved.std()) == pytest.approx(1e-3 / 0.1 / 4, rel=0.1)        # 4 of 4 clients, mean over 4; signal at most 1e-3/0.1/√1,100


def test_noise_differs_from_client_to_client_and_round_to_round() -> None:
    fed = tiny_federation([Dp(clip=1.0, noise=5.0)], lr=1e-30, weight_decay=0.0)
    with torch.no_grad():
        heads = [train_client(fed, i, [0, 1, 3], {}).model["params"]["head.weight"] for i in (0, 1)]
        fed.round_number += 1
        heads.append(train_client(fed, 0, [0, 1, 3], {}).model["params"]["head.weight"])
    for i, one in enumerate(heads):
        for other in heads[i + 1:]:
            assert not (one == other).any()


def test_a_secret_replaces_the_keyed_noise() -> None:
    """The noise is another with another secret, the same when the same upload is sent again, and the record says where it comes from."""
    keyed, again = send(Dp(), {"a": [0.3] * 6}), send(Dp(), {"a": [0.3] * 6})
    secret, repeated, other = (send(Dp(), {"a": [0.3] * 6}, secret=s)[1]["params"]["a"] for s in (b"x" * 32, b"x" * 32, b"y" * 32))
    assert torch.equal(keyed[1]["params"]["a"], again[1]["params"]["a"])
    assert torch.equal(secret, repeated)
    assert not (secret == other).any()
    assert not (secret == keyed[1]["params"]["a"]).any()
    fed = tiny_federation([Dp()], participation=2)
    assert fed.round().privacy["noise"] == "keyed"
    fed.secret = b"x" * 32
    report = fed.round()
    assert report.privacy["noise"] == "secret"
    assert report.losses == {}                                # nobody noised them
    assert report.privacy["epsilon_sampled"] is None          # the cohort follows from the seed, which every site knows


def test_two_uploads_under_one_round_number_do_not_share_noise() -> None:
    """A server that asks twice, with another model, must not be able to subtract the noise."""
    one = send(Dp(clip=1.0, noise=1.0), {"a": [0.3] * 6}, secret=b"x" * 32)[1]["params"]["a"]
    other = send(Dp(clip=1.0, noise=1.0), {"a": [0.2] * 6}, secret=b"x" * 32)[1]["params"]["a"]
    assert not torch.allclose(one - other, torch.full((6,), 0.1), atol=1e-3)


# ---- what is counted -----------------------------------------------------------------------------------------------

def test_epsilon_of_each_round_adds_up() -> None:
    """z = 2, shares for 4 clients of which 3 arrive: 1/z² = (1/4)·(4/3) a round."""
    fed = tiny_federation([Dp(noise=2.0)])
    for rounds in (1, 2, 3):
        said = fed.round().privacy
        assert said["releases"] == rounds
        assert said["epsilon"] == pytest.approx(epsilon_of(rounds / 3, 1e-5), rel=1e-9)
        assert said["epsilon_replace"] == pytest.approx(epsilon_of(rounds * 4 / 3, 1e-5), rel=1e-9)
        assert said["epsilon_server"] == pytest.approx(epsilon_of(rounds * 1.0, 1e-5), rel=1e-9)
    assert fed.server["dp"]["releases"].tolist() == [3, 3, 0, 3]                # client 2 has too few samples for a step


def test_a_look_before_training_is_a_release_of_its_own() -> None:
    fed = tiny_federation([Dp(noise=2.0, place="server"), PARTS["anchors"](start=0)])
    said = fed.round()
    assert list(said.releases) == ["survey anchors", "finish"]
    assert said.privacy["epsilon"] == pytest.approx(epsilon_of(2 / 4, 1e-5))


def test_a_look_before_training_carries_noise() -> None:
    """Three classes' sums of 12 features and three counts, clipped to 1e-6: nearly all that arrives is noise of z·C = 0.5 a coordinate."""
    fed = tiny_federation([Dp(clip=1e-6, noise=5e5, place="local"), PARTS["anchors"](start=0)])
    quiet = tiny_federation([Dp(clip=1e-6, noise=0.0), PARTS["anchors"](start=0)])
    for f in (fed, quiet):
        f.ask_clients("survey", [0, 1, 3], RoundReport(1, [0, 1, 3]))
    assert float(quiet.shared["anchors"]["anchor"].abs().max()) < 1e-5
    assert float(fed.shared["anchors"]["anchor"].abs().max()) > 0.1


def test_preparation_is_counted_too() -> None:
    fed = tiny_federation([Dp(noise=2.0, place="server"), PARTS["mr"]()])
    assert fed.prepare().privacy["epsilon"] == pytest.approx(epsilon_of(1 / 4, 1e-5))
    assert fed.round().privacy["epsilon"] == pytest.approx(epsilon_of(2 / 4, 1e-5))


def test_lost_clients_leave_less_noise_and_more_epsilon() -> None:
    fed, sure = tiny_federation([Dp(noise=2.0)], dropout=0.6, sizes=(24,) * 6), tiny_federation([Dp(noise=2.0)], sizes=(24,) * 6)
    spent = 0.0
    for _ in range(4):
        report = fed.round()
        assert sure.round().privacy["epsilon"]
        arrived = [i for i in report.cohort if i not in report.lost]
        if 0 in arrived:
            spent += 6 / len(arrived) / 4
    assert float(fed.server["dp"]["spent"][0]) == pytest.approx(spent)
    assert fed.server["dp"]["spent"].max() / fed.server["dp"]["releases"].max() > 1 / 4


def test_a_run_that_goes_on_remembers_what_was_spent() -> None:
    whole, first, second = (tiny_federation([Dp()]) for _ in range(3))
    for _ in range(3):
        said = whole.round().privacy
    first.round()
    restore(second, *snapshot(first))
    second.round()
    assert second.round().privacy == said


def test_nothing_travels_nothing_is_spent() -> None:
    report = tiny_federation([Dp(), PARTS["local"]()]).round()
    assert report.releases == {}
    assert report.privacy["epsilon"] == 0.0


def test_rounds_without_models_release_only_what_parts_upload() -> None:
    """FedFM-Lite between two exchanges: anchors alone are clipped and sent; the model at home is the one trained."""
    fed = tiny_federation([Dp(noise=0.1, place="server"), PARTS["anchors"](lite=True, every=2, start=0, warm_exchange=False)])
    before = tree.clone(fed.model)
    report = fed.round()
    assert not report.exchanged
    assert list(report.releases) == ["finish"]
    assert torch.equal(fed.model["params"]["head.weight"], before["params"]["head.weight"])
    own = fed.client(0).tensors["own"]["params"]["head.weight"]
    assert not torch.equal(own, before["params"]["head.weight"])


# ---- engines and order ---------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    made = Pool(2)
    yield made
    made.close()


@pytest.mark.parametrize("partner", ["scaffold", "anchors", "per"])
def test_worker_processes_give_the_same_bits(partner: str, pool: Pool) -> None:
    parts = [Dp(noise=0.2), trial(PARTS[partner])]
    assert not differences(run_tiny(parts), run_tiny(parts, engine=Workers.sharing(pool)))


@given(st.permutations([0, 1, 2, 3]))
@settings(max_examples=6, deadline=None)
def test_order_of_clients_does_not_matter(order: list[int]) -> None:
    parts = [Dp(noise=0.3), PARTS["scaffold"]()]
    how: dict[str, Any] = {"rounds": 1, "sizes": (16, 9, 8, 8), "epochs": 1}
    assert not differences(run_tiny(parts, **how), run_tiny(parts, order=order, **how))


def test_neutral_beside_others_changes_no_bit() -> None:
    """As FedAvg alone, so SCAFFOLD and FedFM: without bound and noise every upload passes as it is."""
    for name in ("scaffold", "anchors", "ffa", "apple", "fomo"):
        alone = run_tiny([trial(PARTS[name])])
        both = run_tiny([trial(PARTS[name]), Dp(clip=None, noise=0.0)])
        assert not differences(alone, both, only=lambda k: not k.startswith("server/dp"))


def test_neutral_weighs_clients_as_fedavg_does() -> None:
    """Where the run leaves the weights to the method; a bound needs uniform ones, and clients here differ in size."""
    neutral = tiny_federation([Dp(clip=None, noise=0.0)], weights="auto")
    assert neutral.policy.weights == "samples"
    assert not differences(run_tiny(weights="auto"), run_tiny([Dp(clip=None, noise=0.0)], weights="auto"), only=in_model)
    assert tiny_federation([Dp(noise=0.0)], weights="auto").policy.weights == "uniform"


def test_clipping_alone_protects_nothing_and_says_so() -> None:
    report = tiny_federation([Dp(noise=0.0), PARTS["ffa"]()]).round()
    assert report.privacy["epsilon"] is None
    assert "hides nothing" in Dp(noise=0.0).privacy


def test_without_a_bound_nothing_is_said_to_be_clipped() -> None:
    part = Dp(clip=None, noise=0.0)
    assert tiny_federation([part]).round().privacy == {}
    assert part.privacy == "none: without a bound uploads leave as they are"


# ---- what is refused -----------------------------------------------------------------------------------------------

def test_running_statistics_stay_at_home_under_noise() -> None:
    fed = run_tiny([Dp(noise=0.1)])
    assert not any(k in fed.spec.shared for k in fed.model["buffers"])
    assert (fed.client(0).tensors["local"]["stage1.1.running_var"] > 0).all()
    assert "statistics stay on the clients" in str(fed.no_global_model)
    assert not differences(run_tiny([Dp(noise=0.1)]), run_tiny([Dp(noise=0.1)], batchnorm="params"), only=in_model)


def test_weights_by_samples_are_refused_and_uniform_ones_preferred() -> None:
    with pytest.raises(ConfigError, match="dp needs weights=uniform"):
        tiny_federation([Dp()], weights="samples")
    assert tiny_federation([Dp()], weights="auto").policy.weights == "uniform"
    tiny_federation([Dp(noise=0.0)], weights="samples")


def test_noise_needs_a_bound() -> None:
    with pytest.raises(ConfigError, match=r"set dp\.clip"):
        tiny_federation([Dp(clip=None)])


@pytest.mark.parametrize(("name", "what"), [("ffa", "ffa.stats"), ("gen", "single models"),
                                            ("nova", "nova.length, weights of single clients"),
                                            ("dro", "dro.loss, weights of single clients"), ("debias", "debias.rows")])
def test_uploads_read_client_by_client_need_local_noise(name: str, what: str) -> None:
    part = trial(PARTS[name])
    for place in ("client", "server"):
        with pytest.raises(RefusedCombination, match=f"makes the server read {what}"):
            tiny_federation([Dp(place=place), part])
    said = tiny_federation([Dp(place="local"), part]).round().privacy
    assert said["epsilon_server"] == said["epsilon"] > 4


def test_parts_whose_settings_make_them_sums_are_accepted() -> None:
    tiny_federation([Dp(), PARTS["anchors"]()])
    tiny_federation([Dp(), PARTS["debias"](pseudo="mixture", projection="released")])
    with pytest.raises(RefusedCombination, match=r"anchors\.mean"):
        tiny_federation([Dp(), PARTS["anchors"](aggregation="uniform")])


@dataclass(frozen=True)
class Counting(Part):
    name = "counting"
    reduce = {"n": "sum"}

    def finish(self, c: Any) -> Any:
        return c.kept, {"n": torch.tensor(c.size)}


def test_whole_numbers_do_not_slip_past() -> None:
    with pytest.raises(ConfigError, match="cannot protect the upload 'counting/n'"):
        tiny_federation([Dp(), Counting()]).round()
    assert tiny_federation([Dp(noise=0.0), Counting()]).round().releases


def test_counting_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("consilience.privacy.accountant.PACKAGE", "not_there")
    with pytest.raises(ConfigError, match=r"consilience\[privacy\]"):
        tiny_federation([Dp()])
    tiny_federation([Dp(noise=0.0)])
