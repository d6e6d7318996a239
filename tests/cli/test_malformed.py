"""A hundred configurations with something wrong: exit code 2, no traceback, and a message that names what is wrong."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consilience.errors import ConsilienceError
from consilience.runs.config import RunConfig, parse_set

# (arguments of `consilience run`, words the message must hold). `@` stands for a configuration file with the JSON after it.
MALFORMED = [
    # unknown names
    (["fedavgg"], "fedavg"), (["fedprx"], "fedprox"), (["dbe+scafold"], "scaffold"),
    (["fedavg", "--data", "digit"], "digits"), (["fedavg", "--data", "cifar11"], "cifar10"),
    (["fedavg", "--split", "dirichlt(alpha=1)"], "dirichlet"), (["fedavg", "--split", "dirichlet(alfa=1)"], "alpha"),
    (["fedavg", "--shift", "rotatin(step=1)"], "rotation"), (["fedavg", "--model", "resnet19"], "resnet18"),
    (["fedavg", "--model", "mlp(widht=3)"], "widht"), (["fedavg", "-o", "momentun=0.9"], "momentum"),
    (["fedavg", "-o", "transform=flipp"], "flip"), (["fedavg", "--set", "dbe.kappa=5"], "dbe"),
    (["dbe", "--set", "dbe.kapa=5"], "kappa"), (["dbe", "--set", "mr.kapa=5"], "kappa"),
    (["fedprox", "--set", "fedprox.muu=5"], "mu"), (["local", "--set", "local.mu=1"], "mu"),
    (["fedavg", "--set", "fedavg.mu=1"], "mu"), (["fedprox(nu=1)"], "nu"),
    (["fedavg", "@", {"leraning_rate": 0.1}], "leraning_rate"), (["fedavg", "@", {"round": 3}], "rounds"),
    (["fedavg", "@", {"settings": {"prox": {"mu": 1}}}], "prox"), (["fedavg", "-o", "tset=clients"], "test"),
    # wrong types
    (["fedavg", "-o", "rounds=many"], "rounds"), (["fedavg", "-o", "rounds=2.5"], "rounds"),
    (["fedavg", "-o", "lr=fast"], "lr"), (["fedavg", "-o", "batch=ten"], "batch"),
    (["fedavg", "--model", ""], "'model' option of the run is empty"), (["fedavg", "--split", " "], "'split' option of the run is empty"),
    (["fedavg", "@", {"transform": ""}], "'transform' option of the run is empty"),
    (["fedavg", "-o", "epochs=1.5"], "epochs"), (["fedavg", "-o", "seed=x"], "seed"),
    (["fedavg", "-o", "participation=half"], "participation"), (["fedavg", "-o", "dropout=no"], "dropout"),
    (["fedavg", "-o", "clients=three"], "clients"), (["fedavg", "-o", "eval_every=often"], "eval_every"),
    (["fedavg", "@", {"rounds": [1]}], "rounds"), (["fedavg", "@", {"rounds": True}], "rounds"),
    (["fedavg", "@", {"lr": {}}], "lr"), (["fedavg", "@", {"data": 5}], "data"),
    (["fedavg", "@", {"split": 0.1}], "split"), (["fedavg", "@", {"model": ["mlp"]}], "model"),
    (["fedavg", "@", {"settings": "dbe"}], "settings"), (["fedavg", "@", {"settings": [1]}], "settings"),
    (["fedavg", "@", {"rounds": None}], "rounds"), (["dbe", "--set", "dbe.kappa=much"], "kappa"),
    (["fedprox", "--set", "prox.mu=[1,2]"], "mu"), (["dbe", "--set", "mr.half=3"], "half"),
    (["ditto", "--set", "ditto.epochs=0.5"], "epochs"), (["fedprox(mu='a')"], "mu"),
    (["dbe", "@", {"settings": {"dbe": {"kappa": {"x": 1}}}}], "kappa.x"), (["fedavg", "--rounds", "x"], "rounds"),
    (["fedavg", "--lr", "x"], "lr"),
    # out of range
    (["fedavg", "--rounds", "0"], "rounds"), (["fedavg", "--rounds", "-3"], "rounds"),
    (["fedavg", "--lr", "0"], "lr"), (["fedavg", "--lr", "-0.1"], "lr"), (["fedavg", "-o", "lr=nan"], "lr"),
    (["fedavg", "-o", "lr=inf"], "lr"), (["fedavg", "--batch", "0"], "batch"),
    (["fedavg", "--epochs", "0"], "epochs"), (["fedavg", "--steps", "0"], "steps"),
    (["fedavg", "--clients", "0"], "clients"), (["fedavg", "--participation", "0"], "participation"),
    (["fedavg", "--participation", "-1"], "participation"), (["fedavg", "--participation", "2.5"], "participation"),
    (["fedavg", "-o", "momentum=1"], "momentum"), (["fedavg", "-o", "momentum=-0.1"], "momentum"),
    (["fedavg", "-o", "weight_decay=-1"], "weight_decay"), (["fedavg", "-o", "dropout=1"], "dropout"),
    (["fedavg", "--seed", "-1"], "seed"), (["fedavg", "-o", "train=1.5"], "train"),
    (["fedavg", "-o", "validation=-0.1"], "validation"), (["fedavg", "--eval-every", "0"], "eval_every"),
    (["fedavg", "-o", "patience=-1"], "patience"), (["fedavg", "-o", "eval_batch=0"], "eval_batch"),
    (["fedavg", "--split", "dirichlet(alpha=0)"], "alpha"), (["fedavg", "--split", "dirichlet(alpha=-1)"], "alpha"),
    (["fedprox", "--set", "prox.mu=-1"], "mu"), (["dbe", "--set", "dbe.mu=0"], "momentum"),
    (["dbe", "--set", "dbe.kappa=-1"], "kappa"), (["moon", "--set", "moon.tau=0"], "tau"),
    (["lfd", "--set", "lfd.tau=0"], "tau"), (["dbe", "--set", "dbe.noise_mix=2"], "noise_mix"),
    (["fedavg", "-o", "optimiser=sdg"], "optimiser"), (["fedavg", "-o", "weights=equal"], "weights"),
    (["fedavg", "-o", "sampling=x"], "sampling"), (["fedavg", "-o", "batchnorm=none"], "batchnorm"),
    (["fedavg", "-o", "last_batch=pad"], "last_batch"), (["fedavg", "--engine", "warp"], "engine"),
    (["fedavg", "-o", "optimiser_state=keep"], "optimiser_state"), (["fedavg", "-o", "test=everything"], "test"),
    (["fedavg", "-o", "pool=some"], "pool"), (["fedavg", "--device", "tpu9"], "device"),
    (["fedavg", "--participation", "50"], "participation"),
    # written wrongly
    (["fedavg++dbe"], "fedavg++dbe"), (["+"], "'+'"), (["fedavg(" ], "fedavg("), (["fedprox(0.1)"], "fedprox"),
    (["fedavg", "--set", "kappa=5"], "kappa=5"), (["fedavg", "--set", "dbe.kappa"], "dbe.kappa"),
    (["fedavg", "-o", "momentum"], "momentum"), (["fedavg", "--split", "dirichlet("], "dirichlet("),
    (["fedavg", "--split", "dirichlet(0.1)"], "dirichlet"), (["fedavg", "-o", "schedule=linear"], "schedule"),
    (["fedavg", "-o", "schedule=step(every=2)"], "schedule"),
    (["fedavg", "-o", "schedule=cosine(rounds=0)"], "schedule"),
    (["fedavg", "-o", "schedule=exponential(gamma=x)"], "schedule"), (["fedavg", "--taps", "head=fc"], "taps"),
    (["fedavg", "--model", "torch.nn:Flatten", "--taps", "head"], "head"),
    (["fedavg", "-o", "settings=5"], "settings"), (["fedavg", "--config", "absent.toml"], "absent.toml"),
    (["fedavg", "@toml", "rounds = = 3"], "settings.toml"), (["fedavg", "@yaml", "rounds: [1"], "settings.yaml"),
    (["fedavg", "@yaml", "- 1\n- 2"], "settings.yaml"), (["fedavg", "@ini", "rounds=3"], "settings.ini"),
    # contradictions
    (["fedavg", "-o", "optimiser=adam", "-o", "momentum=0.9"], "momentum"),
    (["fedavg", "-o", "patience=3"], "patience"), (["fedavg+fedavg"], "fedavg"), (["fedbabu+fedrep"], "babu"),
    (["local+scaffold"], "scaffold"), (["mixup+fedntd"], "ntd"), (["lfd+fedbabu"], "babu"), (["union+dbe"], "union"),
    (["fedper+fedgen"], "gen"), (["fedprox(mu=1)+prox(mu=2)"], "mu"),
    (["fedavg", "-o", "train=0.9", "-o", "validation=0.5"], "validation"), (["fedavg", "-o", "test=global"], "test"),
    (["fedavg", "-o", "test=published"], "published"),
    (["scaffold", "-o", "momentum=0.9", "-o", "optimiser_state=kept"], "optimiser_state"),
    (["fedavg", "--batch", "1"], "batch"), (["fedavg", "--batch", "5000"], "batch"),
    (["fedbn", "--model", "mlp"], "BatchNorm"),
    (["fedavg", "--model", "nomodule:factory", "--taps", "head=fc"], "nomodule"),
    (["fedavg+./absent.py:Part"], "absent.py"),
]


def test_there_are_a_hundred():
    assert len(MALFORMED) >= 100
    assert len({json.dumps(m) for m in MALFORMED}) == len(MALFORMED)


@pytest.mark.parametrize(("arguments", "named"), MALFORMED, ids=[" ".join(map(str, m[0])) for m in MALFORMED])
def test_malformed_configuration(cli, tmp_path, arguments, named):
    arguments = list(arguments)
    for i, word in enumerate(arguments):
        if word == "@" or str(word).startswith("@"):
            ending = str(word)[1:] or "json"
            content = arguments[i + 1] if ending != "json" else json.dumps(arguments[i + 1])
            (tmp_path / f"settings.{ending}").write_text(content)
            arguments[i: i + 2] = ["--config", f"settings.{ending}"]
    said = cli("run", *arguments, "--out", "folder", code=2)
    assert named in said.err
    assert not said.out


_VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.lists(st.integers(), max_size=2) | \
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=2)
_METHODS = st.text(max_size=12) | st.sampled_from(["fedavg", "dbe", "scaffold+dbe", "fedprox(mu=0.1)", "local+dyn", "fedavg+", "a(b",
                                                   "mr(kappa=[1])"])
_KEYS = st.text(max_size=6) | st.sampled_from([n for n in RunConfig.names() if n != "method"])


@given(st.dictionaries(_KEYS, _VALUES, max_size=3), _METHODS)
def test_no_other_exception_than_ours(values, method):
    """Whatever stands in a configuration, it is accepted or refused with a message."""
    try:
        config = RunConfig.make({**values, "method": method})
    except ConsilienceError:
        return
    assert RunConfig.make(json.loads(json.dumps(config.portable()))).digest() == config.digest()


@given(st.text(max_size=20), st.sampled_from(["", "dbe.kappa=", "dbe.", "="]))
def test_no_other_exception_from_set(text, start):
    with contextlib.suppress(ConsilienceError):
        RunConfig.make({"method": "dbe", "settings": parse_set([start + text])})
