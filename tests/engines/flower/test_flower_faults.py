"""What goes wrong at a site or on the way: the run ends right or stops with a clear message, and nobody else is harmed."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_federation
import pytest
import torch
from fake_federation import simulate, site_data, unequal

from consilience import tree
from consilience.engines.flower.parcel import Parcel, Raw, Refused
from consilience.engines.flower.roster import TooFewAnswers
from consilience.errors import ConfigError, ConsilienceError, DataError
from consilience.runs.lock import folder_lock

Answer = Callable[[], Parcel]


class Fake(fake_federation.Fake):
    """With a small model: these tests look at who takes part, not at what is trained."""

    def __init__(self, folder: Path, method: str = "fedavg", fault: Any = None, **settings: Any) -> None:
        super().__init__(folder, method, fault, **{"model": "mlp", **settings})


def only(site: int, task: str, round_number: int, change: Callable[[Parcel], Any]) -> Callable[[int, Parcel, Answer], Any]:
    """A fault in one answer of one site; it still does its work."""
    def fault(number: int, request: Parcel, work: Answer) -> Any:
        answer = work()
        about = request.about
        return change(answer) if (number, about["task"], about["round"]) == (site, task, round_number) else answer
    return fault


def with_array(name_of: Callable[[str], bool], raw: Callable[[Raw], Raw]) -> Callable[[Parcel], Parcel]:
    def change(answer: Parcel) -> Parcel:
        name = next(n for n in answer.arrays if name_of(n))
        return Parcel(answer.about, {**answer.arrays, name: raw(answer.arrays[name])})
    return change


MODEL = lambda name: name.startswith("model/")
UPLOAD = lambda name: name.startswith("uploads/")
like = lambda raw, fill: Raw.of(torch.full(raw.shape, fill))
WRONG: dict[str, tuple[Callable[[Parcel], Any], str]] = {
    "nothing": (lambda answer: None, "no answer in time"),
    "nan in the model": (with_array(MODEL, lambda raw: like(raw, float("nan"))), "is not finite"),
    "infinity in an upload": (with_array(UPLOAD, lambda raw: like(raw, float("inf"))), "is not finite"),
    "wrong shape": (with_array(MODEL, lambda raw: Raw.of(torch.zeros(3, 3, 3))), "expected"),
    "wrong type": (with_array(MODEL, lambda raw: Raw.of(torch.zeros(raw.shape, dtype=torch.float64))), "expected"),
    "huge": (with_array(MODEL, lambda raw: Raw.of(torch.zeros(4_000_000))), "bytes, at most"),
    "header that claims more": (with_array(MODEL, lambda raw: Raw(raw.dtype, raw.shape, _claiming(raw))), "its header"),
    "not an array": (with_array(MODEL, lambda raw: Raw(raw.dtype, raw.shape, b"\x80\x04" + bytes(len(raw.data) - 2))), "is not an array"),
    "a header that nobody can read": (with_array(MODEL, lambda raw: _headed(raw, "{'descr': (((")), "is not an array"),
    "a header of other values": (with_array(MODEL, lambda raw: _headed(raw, "{'descr': (), 'fortran_order': False, 'shape': ()}")),
                                 "is not an array"),
    "a name too many": (lambda answer: Parcel(answer.about, {**answer.arrays, "model/extra": Raw.of(torch.zeros(1))}), "not expected"),
    "a name missing": (lambda answer: Parcel(answer.about, dict(list(answer.arrays.items())[1:])), "is missing"),
    "an old round": (lambda answer: Parcel({**answer.about, "round": 1}, answer.arrays), "answers for round"),
    "another site": (lambda answer: Parcel({**answer.about, "site": 3}, answer.arrays), "answers for site"),
    "another federation": (lambda answer: Parcel({**answer.about, "federation": "0" * 16}, answer.arrays), "answers for federation"),
    "nan loss": (lambda answer: Parcel({**answer.about, "loss": float("nan")}, answer.arrays), "finite number"),
    "a loss that float32 cannot hold": (lambda answer: Parcel({**answer.about, "loss": 1e39}, answer.arrays), "finite number"),
    "a loss of four hundred digits": (lambda answer: Parcel({**answer.about, "loss": 10**400}, answer.arrays), "finite number"),
    "an error that paints": (lambda answer: Parcel({**answer.about, "error": "\x1b[2Jall is well"}, {}), "reports: ?[2Jall is well"),
    "an error": (lambda answer: Parcel({**answer.about, "error": "out of\nmemory"}, {}), "the site reports: out of memory"),
    "a refusal of Flower": (lambda answer: Refused("Flower reports error 3"), "Flower reports"),
}


def _claiming(raw: Raw) -> bytes:
    """The same bytes with a header that says there are a million times as many numbers."""
    import io

    import numpy as np
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(out, {"descr": "<f4", "fortran_order": False, "shape": (10**12,)})
    return out.getvalue() + raw.data[len(out.getvalue()):]


def _headed(raw: Raw, text: str) -> Raw:
    """The same numbers with these words in place of the header's."""
    return Raw(raw.dtype, raw.shape, raw.data[:10] + text.encode().ljust(117) + b"\n" + raw.data[128:])


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_answer_is_refused_and_the_round_goes_on(what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Site 1's answer of round 2 is wrong. All is as if it had not been selected then: the others' bits, and its own state, which
    it takes up again where it was after round 1.
    """
    change, message = WRONG[what]
    fake = Fake(tmp_path, "scaffold", only(1, "train", 2, change))
    with caplog.at_level(logging.INFO, "consilience.federation"):
        records = fake.run()
    assert not unequal(fake, simulate(fake.settings, [None, [0, 2, 3], None]))
    assert records[1]["lost"] == ["site-1"]
    said = [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
    assert len(said) == 1
    assert "node 101" in said[0]
    assert message in said[0]


@pytest.mark.parametrize("what", ["nothing", "a name missing", "an old round"])
@pytest.mark.parametrize("method", ["fedfm", "fedbr"])
def test_a_wrong_answer_before_training(what: str, method: str, tmp_path: Path) -> None:
    fake = Fake(tmp_path, method, only(0, "consult", 2, WRONG[what][0]))
    lost = {r["round"]: r["lost"] for r in fake.run()}
    assert [lost[i] for i in (1, 2, 3)] == [[], ["site-0"], []]
    assert not unequal(fake, simulate(fake.settings, [None, [1, 2, 3], None]))


def test_sums_that_no_losses_add_up_to_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two such sums would pool to infinity, which no record can hold."""
    def fault(number: int, request: Parcel, work: Answer) -> Parcel:
        answer = work()
        if number in (0, 1) and request.about["task"] == "score":
            answer.about["scores"]["global"]["test"]["loss"] = 1.7e308
        return answer
    record = Fake(tmp_path, fault=fault, rounds=1).run()[-1]
    assert [*record["global"]["per_client"]] == ["site-2", "site-3"]
    assert caplog.text.count("loss adds up to 1.7e+308 on") == 2


def test_too_few_rows_of_pseudo_data_are_refused(tmp_path: Path) -> None:
    """FedBR's rows are shared out by a common draw, so the server knows how many each site owes."""
    fewer = with_array(lambda name: name == "rows", lambda raw: Raw.of(torch.zeros(raw.shape[0] + 1, *raw.shape[1:])))
    fake = Fake(tmp_path, "fedbr", only(3, "consult", 1, fewer), rounds=1)
    assert fake.run()[-1]["lost"] == ["site-3"]
    assert not unequal(fake, simulate(fake.settings, [[0, 1, 2]]))


def test_a_site_that_trains_to_nan_says_so_and_keeps_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fake = Fake(tmp_path, "fedper", rounds=2)
    data = site_data(1)
    bad = data.x.clone()
    bad[0] = float("nan")
    fake.sites[1] = fake.link.sites[101] = fake.site(1, replace(data, x=bad))
    with caplog.at_level(logging.ERROR, "consilience.federation"):
        records = fake.run()
    assert [r["lost"] for r in records] == [["site-1"], ["site-1"]]
    assert "non-finite" in caplog.text
    assert fake.versions(1).rounds() == []
    assert not unequal(fake, simulate(fake.settings, [[0, 2, 3], [0, 2, 3]]))


def test_a_loss_that_is_not_finite_on_test_rows_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """JSON has no word for it. Training goes on with the site, and the round's scores are those of the others."""
    fake, data = Fake(tmp_path, rounds=1), site_data(1)
    outlier = data.x.clone()
    outlier[data.clients[0].test[0]] = 3e38
    fake.sites[1] = fake.link.sites[101] = fake.site(1, replace(data, x=outlier))
    record = fake.run()[-1]
    assert [*record["global"]["per_client"]] == ["site-0", "site-2", "site-3"]
    assert "the site reports: the loss of the global model on its test rows is not finite in round 1." in caplog.text
    assert not unequal(fake, simulate(fake.settings))


@pytest.mark.parametrize("method", ["scaffold", "fedper", "moon", "dbe", "ditto"])
def test_a_restarted_site_has_its_state(method: str, tmp_path: Path) -> None:
    """A new process at site 1 before every training."""
    fakes: list[Fake] = []

    def restart(number: int, request: Parcel, work: Answer) -> Parcel:
        if number == 1 and request.about["task"] == "train":
            fakes[0].restart(1)
            return fakes[0].sites[1].answer(request)
        return work()
    fakes.append(Fake(tmp_path, method, restart))
    fakes[0].run()
    assert not unequal(fakes[0], simulate(fakes[0].settings))


def test_an_old_question_that_comes_again_costs_no_state(tmp_path: Path) -> None:
    """Site 1 answers the question of round 1 once more, after that of round 3. Nobody waits for it, and what it keeps of round 3 stays."""
    asked: dict[int, Parcel] = {}

    def again(number: int, request: Parcel, work: Answer) -> Parcel:
        answer = work()
        if (number, request.about["task"]) == (1, "train"):
            asked[request.about["round"]] = request
            if request.about["round"] == 3:
                assert "error" not in fake.sites[1].answer(asked[1]).about
        return answer
    fake = Fake(tmp_path, "scaffold", again, rounds=5)
    assert [r["lost"] for r in fake.run()] == [[]] * 5
    assert fake.versions(1).rounds() == [3, 4, 5]
    assert not unequal(fake, simulate(fake.settings))


def test_an_emptied_cache_is_filled_again(tmp_path: Path) -> None:
    """A site that lost the last broadcast says so and gets everything, within the same round."""
    fakes: list[Fake] = []

    def forget(number: int, request: Parcel, work: Answer) -> Parcel:
        if (number, request.about["task"], request.about["round"]) == (0, "train", 2) and not forgotten:
            forgotten.append(1)
            for held in tmp_path.glob("store0/*/site-0/held.safetensors"):
                held.unlink()
            fakes[0].restart(0)
            return fakes[0].sites[0].answer(request)
        return work()
    forgotten: list[int] = []
    fakes.append(Fake(tmp_path, "scaffold", forget))
    records = fakes[0].run()
    assert forgotten
    assert not any(r["lost"] for r in records)
    assert not unequal(fakes[0], simulate(fakes[0].settings))


def test_a_site_whose_store_is_gone_is_left_out_with_the_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def wipe(number: int, request: Parcel, work: Answer) -> Parcel:
        if (number, request.about["task"], request.about["round"]) == (1, "train", 2):
            for folder in tmp_path.glob("store1/*/site-1/round-*"):
                shutil.rmtree(folder)
        return work()
    fake = Fake(tmp_path, "scaffold", wipe)
    with caplog.at_level(logging.ERROR, "consilience.federation"):
        records = fake.run()
    assert [r["lost"] for r in records] == [[], ["site-1"], ["site-1"]]
    assert "round 1 is not in its store" in caplog.text
    assert not unequal(fake, simulate(fake.settings, [None, [0, 2, 3], [0, 2, 3]]), sites=[0, 2, 3])


# ---- nodes that come and go ------------------------------------------------------------------------------------------------


def test_a_site_leaves_and_returns(tmp_path: Path) -> None:
    def leave(number: int, request: Parcel, work: Answer) -> Parcel:
        if request.about["task"] == "score":
            fakes[0].link.away = {103} if request.about["round"] in (1, 2) else set()
        return work()
    fakes = [Fake(tmp_path, "scaffold", leave, rounds=4)]
    records = fakes[0].run()
    assert [r["absent"] for r in records] == [[], ["site-3"], ["site-3"], []]
    assert not unequal(fakes[0], simulate(fakes[0].settings, [None, [0, 1, 2], [0, 1, 2], None]))


def test_a_site_joins_late(tmp_path: Path) -> None:
    """It was not there when DBE's mean was taken and in round 1; from round 2 on it trains, with its declared number's keys."""
    def join(number: int, request: Parcel, work: Answer) -> Parcel:
        if request.about["task"] == "score":
            fakes[0].link.away = set()
        return work()
    fakes = [Fake(tmp_path, "scaffold", join)]
    fakes[0].link.away = {100}
    records = fakes[0].run()
    assert [r["absent"] for r in records] == [["site-0"], [], []]
    assert not unequal(fakes[0], simulate(fakes[0].settings, [[1, 2, 3], None, None]))


@pytest.mark.parametrize("silence", [1, 2])
def test_a_site_that_says_late_who_it_is(silence: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It reads its data when it is first asked, and a folder of images takes longer than the server waits. It is there all the time, and
    is asked again.
    """
    asked: list[int] = []

    def reading(number: int, request: Parcel, work: Answer) -> Parcel | None:
        if number == 1 and request.about["task"] == "hello":
            asked.append(number)
            return work() if len(asked) > silence else None
        return work()
    fake = Fake(tmp_path, "scaffold", reading)
    records = fake.run()
    assert [r["absent"] for r in records] == [["site-1"]] * (silence - 1) + [[]] * (4 - silence)
    assert len(asked) == silence + 1
    assert caplog.text.count("Node 101 does not say who it is: no answer in time") == 1
    assert not unequal(fake, simulate(fake.settings, [[0, 2, 3]] * (silence - 1) + [None] * (4 - silence)))


def test_a_node_that_never_says_who_it_is_is_named(tmp_path: Path) -> None:
    fake = Fake(tmp_path, fault=lambda number, request, work: None if number else work(), rounds=1)
    with pytest.raises(TooFewAnswers, match=r"1 of 4 sites enrolled .* Node 101 did not say who it is: no answer in time\."):
        fake.run()


def test_a_site_whose_data_change_enrols_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Averages go by the sizes a site enrolled with. Site 3 has 40 rows in round 1 and 16 from round 2 on: round 2 does without it, and
    from round 3 on it counts with 16.
    """
    def replace_data(number: int, request: Parcel, work: Answer) -> Parcel:
        if request.about["task"] == "train" and number == 3 and request.about["round"] == 2:
            fakes[0].sites[3] = fakes[0].link.sites[103] = fakes[0].site(3, site_data(3, 16))
            return fakes[0].sites[3].answer(request)
        return work()
    fakes = [Fake(tmp_path, "scaffold", replace_data)]
    records = fakes[0].run()
    assert [r["lost"] for r in records] == [[], ["site-3"], []]
    assert "its data have changed" in caplog.text
    assert "Site 3 returns with" in caplog.text
    assert fakes[0].fed.samples.rows.table.sizes.tolist() == [24, 17, 5, 16]


def test_what_is_waited_for_at_the_start_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="consilience.federation")
    fake = Fake(tmp_path, wait=7.0, rounds=1)
    fake.link.away = {101, 103}
    clock = iter(range(100))
    fake.run(now=lambda: float(next(clock)))
    assert [r.getMessage() for r in caplog.records if "Waiting" in r.message] == ["Waiting up to 7 s for the sites [1, 3]."]


def test_selection_among_those_there(tmp_path: Path) -> None:
    fake = Fake(tmp_path, "fedavg", participation=2, rounds=4, min_sites=1)
    fake.link.away = {101}
    records = fake.run()
    assert all(len(r["cohort"]) == 2 and "site-1" not in r["cohort"] for r in records)


def test_a_part_chooses_among_those_there(tmp_path: Path) -> None:
    """The part of the page, from a file. Site 1 is away and site 2 too small to train, so that two are left to choose among."""
    page = (Path(__file__).parents[3] / "docs" / "parts.md").read_text(encoding="utf-8")
    code = page.partition("## An example that chooses clients")[2].partition("```python\n")[2].partition("```")[0]
    (tmp_path / "choice.py").write_text(code, encoding="utf-8")
    method = f"fedavg+{tmp_path / 'choice.py'}:Choice"
    fake = Fake(tmp_path / "all", method, participation=2, rounds=4, **{"settings.choice.candidates": 4})
    cohorts = [r["cohort"] for r in fake.run()]
    assert not unequal(fake, simulate(fake.settings))
    assert cohorts[0] == ["site-0", "site-1"]
    assert "site-3" in cohorts[1]                                                     # who never took part comes first
    fewer = Fake(tmp_path / "fewer", method, participation=2, rounds=2, **{"settings.choice.candidates": 4})
    fewer.link.away = {101}
    assert [r["cohort"] for r in fewer.run()] == [["site-0", "site-3"]] * 2


def test_too_few_sites_stop_the_run_with_what_to_do(tmp_path: Path) -> None:
    fake = Fake(tmp_path, "fedavg")
    fake.link.away = {100, 101, 102}
    with pytest.raises(TooFewAnswers, match=r"1 of 4 sites enrolled .* at least 2 are needed"):
        fake.run()


def test_too_few_answers_are_tried_again_and_then_stop(tmp_path: Path) -> None:
    def silent(number: int, request: Parcel, work: Answer) -> Parcel | None:
        return work() if request.about["task"] != "train" or request.about["round"] < 2 or number == 0 else None
    fake = Fake(tmp_path, "scaffold", silent, retries=2)
    with pytest.raises(TooFewAnswers, match=r"Round 2: 1 sites answered in training; at least 2 are needed. Tried 3 times"):
        fake.run()
    fake.link.fault = None
    fake.run()                                    # the same command goes on from there
    assert not unequal(fake, simulate(fake.settings))


def test_a_round_tried_again_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """In round 2 every answer is lost after training. Sites are ahead, and roll back."""
    lost: list[int] = []

    def lose(number: int, request: Parcel, work: Answer) -> Parcel | None:
        answer = work()
        if request.about["task"] == "train" and request.about["round"] == 2 and len(lost) < 3:
            lost.append(number)
            return None
        return answer
    fake = Fake(tmp_path, "scaffold", lose)
    fake.run()
    assert sorted(lost) == [0, 1, 3]
    assert not unequal(fake, simulate(fake.settings))


def test_the_server_is_killed_and_goes_on(tmp_path: Path) -> None:
    """Killed while round 3's answers come in: two sites have trained and written versions that nobody accepted."""
    class Killed(BaseException):
        pass
    dead: list[int] = []

    def kill(number: int, request: Parcel, work: Answer) -> Parcel:
        answer = work()
        if request.about["task"] == "train" and request.about["round"] == 3 and number == 1 and not dead:
            dead.append(1)
            raise Killed
        return answer
    fake = Fake(tmp_path, "scaffold+dbe", kill, rounds=4)
    with pytest.raises(Killed):
        fake.run()
    assert 3 in fake.versions(0).rounds()
    records = fake.run()
    assert [r["round"] for r in records] == [0, 1, 2, 3, 4]
    assert not unequal(fake, simulate(fake.settings))


def test_a_run_that_is_to_have_more_rounds_is_not_said_to_be_done(tmp_path: Path) -> None:
    """`done` says how a run ended. The longer one stops for want of sites, and the shorter one's end is not its own."""
    for rounds in (2, 1):                                                  # fewer rounds are done already
        Fake(tmp_path, rounds=rounds).run()
        assert (tmp_path / "server" / "done").is_file()
    longer = Fake(tmp_path, rounds=3)
    longer.link.away = {100, 101, 102, 103}
    with pytest.raises(TooFewAnswers):
        longer.run()
    assert not (tmp_path / "server" / "done").exists()
    longer.link.away = set()
    assert len(longer.run()) == 3
    assert (tmp_path / "server" / "done").is_file()


def test_a_server_that_lost_its_newest_checkpoint_goes_on_from_the_one_before(tmp_path: Path) -> None:
    fake = Fake(tmp_path, "scaffold", rounds=3)
    fake.run()
    newest = max((tmp_path / "server" / "checkpoints").iterdir())
    (newest / "state.safetensors").write_bytes(b"damaged")
    longer = Fake(tmp_path, "scaffold", rounds=4)
    assert [r["round"] for r in longer.run()] == [1, 2, 3, 4]
    assert not unequal(longer, simulate(longer.settings))


def test_damaged_checkpoints_do_not_begin_anew_in_silence(tmp_path: Path) -> None:
    Fake(tmp_path, "fedavg", rounds=1).run()
    for folder in (tmp_path / "server" / "checkpoints").iterdir():
        (folder / "state.json").write_text("{}")
    with pytest.raises(DataError, match="No checkpoint"):
        Fake(tmp_path, "fedavg", rounds=2).run()


def test_two_runs_of_the_same_settings_do_not_mix(tmp_path: Path) -> None:
    """Sites keep states by the run's token: a second run begins from nothing."""
    first = Fake(tmp_path, "scaffold", rounds=1)
    first.run()
    shutil.move(tmp_path / "server", tmp_path / "earlier")
    again = Fake(tmp_path, "scaffold", rounds=1)
    again.run()
    assert not unequal(again, simulate(again.settings))
    assert len(list((tmp_path / "store0").iterdir())) == 2


# ---- enrolment -------------------------------------------------------------------------------------------------------------


def test_a_site_trains_no_more_rounds_than_were_approved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever runs the server can run it with other settings than the sites were shown."""
    fake = Fake(tmp_path, "fedavg", rounds=1)
    shown = fake.link.sites
    longer = Fake(tmp_path, "fedavg", rounds=2)
    longer.link.sites = shown
    with caplog.at_level(logging.ERROR, "consilience.federation"), pytest.raises(TooFewAnswers, match="Round 2: 0 sites answered"):
        longer.run()
    assert "round 2 is asked, and what was approved here has 1" in caplog.text


def test_what_is_asked_cannot_be_guessed(tmp_path: Path) -> None:
    """Flower names a message by a hash of what is in it, and takes an answer under that name from any admitted node, whoever was asked.
    So no two questions may be alike but for what another site knows.
    """
    asked: list[Any] = []

    def listen(number: int, request: Parcel, work: Answer) -> Parcel:
        asked.append(request.about["once"])
        return work()
    Fake(tmp_path, "scaffold", listen, rounds=2).run()
    assert len(asked) == len(set(asked)) > 8
    assert all(len(word) == 32 for word in asked)


def test_a_second_run_beside_the_first_is_told_what_to_do(tmp_path: Path) -> None:
    with folder_lock(tmp_path / "server"), pytest.raises(ConfigError, match=r"Another run of this federation is under way.*flwr stop"):
        Fake(tmp_path, "fedavg", rounds=1).run()


def test_two_nodes_with_one_number(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fake = Fake(tmp_path, "fedavg", rounds=1)
    fake.link.sites[200] = fake.site(1)
    with caplog.at_level(logging.ERROR, "consilience.federation"):
        fake.run()
    assert "Node 200 is refused: it says it is site 1, which node 101 is already" in caplog.text
    assert not unequal(fake, simulate(fake.settings))


def test_names_that_stand_for_another_site(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Sites count from 0 and people from 1; wards of two hospitals have one name. Every site keeps a line of its own in the records."""
    fake = Fake(tmp_path, "fedavg", rounds=2)
    for number, name in ((0, "site-1"), (2, "ward"), (3, "ward")):
        fake.sites[number].own = replace(fake.sites[number].own, name=name)
    with caplog.at_level(logging.WARNING, "consilience.federation"):
        last = fake.run()[-1]
    assert [*last["global"]["per_client"]] == ["site-0", "site-1", "ward", "site-3"]
    assert "Site 0 calls itself site-1, which stands for another site. It is called site-0 here." in caplog.text
    assert "Site 3 calls itself ward" in caplog.text
    assert not unequal(fake, simulate(fake.settings))


def test_another_node_under_a_known_number_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also when the server was started anew in between. It may be the same site with a new key; its operator should know."""
    Fake(tmp_path, "fedavg", rounds=1).run()
    longer = Fake(tmp_path, "fedavg", rounds=2)
    longer.link.sites[200] = longer.link.sites.pop(101)
    with caplog.at_level(logging.WARNING, "consilience.federation"):
        longer.run()
    assert "Site 1 was node 101 before and is node 200 now" in caplog.text
    assert not unequal(longer, simulate(longer.settings))


@pytest.mark.parametrize(("change", "message"), [
    ({"site": 4}, "the sites are 0 to 3"), ({"site": -1}, "whole number"), ({"site": True}, "whole number"),
    ({"version": "0.0.1"}, "it runs consilience 0.0.1"), ({"declaration": "other"}, "other names, shapes or types"),
    ({"sizes": {"train": 10**9, "val": 0, "test": 0}}, "at most 100000000"), ({"version": "1\x1b[2J"}, r"it runs consilience 1?[2J"),
    ({"sizes": {"train": 5}}, "how many samples"), ({"sizes": {"train": -5, "val": 0, "test": 0}}, "whole number"),
])
def test_a_newcomer_that_does_not_fit_is_refused(change: dict, message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fake = Fake(tmp_path, "fedavg", only(0, "hello", 0, lambda answer: Parcel({**answer.about, **change}, {})), rounds=1)
    with caplog.at_level(logging.ERROR, "consilience.federation"):
        records = fake.run()
    assert "Node 100 is refused" in caplog.text
    assert message in caplog.text
    assert records[0]["absent"] == ["site-0"]
    assert not unequal(fake, simulate(fake.settings, [[1, 2, 3]]), sites=[1, 2, 3])


def test_data_that_do_not_fit_are_refused_at_the_site(tmp_path: Path) -> None:
    from dataclasses import replace
    fake = Fake(tmp_path, "fedavg")
    data = site_data(0)
    for wrong, message in ((replace(data, x=data.x.repeat(1, 3, 1, 1)), "agreed on"), (replace(data, x=data.x.double()), "agreed on"),
                           (replace(data, y=data.y + 5, classes=9), "beyond the 3 classes")):
        with pytest.raises(DataError, match=message):
            fake.site(0, wrong)
    with pytest.raises(ConfigError, match="0 to 3"):
        fake.site(7, data)


def test_other_settings_are_not_served(tmp_path: Path) -> None:
    """A site that was given another configuration says so."""
    fake = Fake(tmp_path / "a", "fedavg", rounds=1)
    other = Fake(tmp_path / "b", "fedprox", rounds=1)
    fake.link.sites = other.link.sites
    with pytest.raises(ConsilienceError, match=r"0 of 4 sites enrolled.*other settings"):
        fake.run()


def test_a_folder_of_other_settings_is_not_overwritten(tmp_path: Path) -> None:
    Fake(tmp_path, "fedavg", rounds=1).run()
    with pytest.raises(ConfigError, match=r"other settings \(.*method"):
        Fake(tmp_path, "fedprox", rounds=1).run()


def test_a_token_cannot_lead_out_of_the_store(tmp_path: Path) -> None:
    fake = Fake(tmp_path, "fedavg", rounds=1)
    fake.run()
    request = Parcel.of({"protocol": 1, "federation": "../../../etc", "digest": fake.settings.digest(), "task": "train", "round": 1,
                         "site": 0, "accepted": 0, "last_exchange": 0, "broadcast": {}, "cohort": [0]})
    answer = fake.sites[0].answer(request)
    assert "hexadecimal" in answer.about["error"]


def test_unexpected_errors_tell_the_server_no_details(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(tmp_path, "fedavg", rounds=1)
    def broken(*args: Any) -> Any:
        raise ValueError("patient 4711")
    monkeypatch.setattr(fake.sites[1], "_train", broken)
    assert fake.run()[0]["lost"] == ["site-1"]
    answer = fake.sites[1].answer(Parcel.of({**dict.fromkeys(("round", "accepted", "last_exchange"), 0), "protocol": 1, "task": "train",
                                             "federation": fake.server.roster.token, "digest": fake.settings.digest(), "site": 1}))
    assert answer.about["error"] == "an unexpected ValueError; the site's log has the details"


def test_errors_that_name_files_of_a_site_stay_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def damage(number: int, request: Parcel, work: Answer) -> Parcel:
        if (number, request.about["task"], request.about["round"]) == (1, "train", 2):
            for path in tmp_path.glob("store1/*/site-1/round-*/state.json"):
                path.write_text("{")
        answer = work()
        assert str(tmp_path) not in str(answer.about)
        return answer
    with caplog.at_level(logging.ERROR, "consilience.federation"):
        records = Fake(tmp_path, "scaffold", damage, rounds=2).run()
    assert records[-1]["lost"] == ["site-1"]
    assert str(tmp_path) in caplog.text                         # where the operator of the site finds it
    assert "DataError; the site's log has the details" in caplog.text


def test_a_site_that_only_has_test_samples_is_scored(tmp_path: Path) -> None:
    fake = Fake(tmp_path, "dbe", rounds=1)
    records = fake.run()
    assert "site-2" in records[-1]["personalised"]["per_client"]
    assert not [p for p, t in tree.paths(fake.state(2)) if not bool(t.isfinite().all())]
