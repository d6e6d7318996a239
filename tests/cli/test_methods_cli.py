"""`consilience methods`, `explain` and `new`: what is listed can be used, what is written passes its own test."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from consilience.parts import registry
from consilience.parts.presets import PRESETS
from consilience.parts.registry import PARTS
from consilience.parts.stack import parse_stack
from consilience.runs.explain import list_methods

WANTED = ["local", "union", "fedavg", "fedavgm", "fedprox", "fednova", "scaffold", "feddyn", "fedcm", "moon", "fedntd", "mixup", "fedsam",
          "fedbn", "groupdro", "dann", "fedper", "fedrep", "fedbabu", "ditto", "fedgen", "fedfomo", "fedproto", "pfedme", "apple",
          "fedbr", "lfd", "fedfm", "fedfa", "dbe"]
STACKS = ("scaffold+dbe", "fedprox+fedfm", "fedavg+mixup+fedbr", "fedfa+mixup", "moon+dbe", "fedgen+dbe", "fedrep+mr")
IMAGES = ("--data", "synthetic(samples=96, classes=3, clients=3, size=8)", "-o", "last_batch=keep")

OWN_PART = '''
from dataclasses import dataclass
from consilience import Part, option, tree

@dataclass(frozen=True)
class Pull(Part):
    """Pull towards the received model."""
    strength: float = option(0.5, "how much", low=0.0)
    name = "pull"
    paper = "mine"
    helps = ("label skew",)
    neutral = {"strength": 0.0}

    def loss(self, v):
        return 0.5 * self.strength * tree.sq_dist(tree.pick(v.params, v.travelling), v.received["params"])
'''


def test_methods_lists_every_name_with_its_fields(cli):
    rows = cli("methods", "--json").json()
    names = {r["name"]: r for r in rows}
    assert set(WANTED) <= set(names)
    assert {"prbm", "mr"} <= set(names)
    for row in rows:
        assert set(row) >= {"name", "parts", "paper", "options", "kind", "helps", "uploads"}
        assert row["kind"] in ("method", "part")
        assert row["paper"]
        assert row["helps"]
        assert all(o["name"] and o["type"] for o in row["options"])
    assert names["dbe"]["parts"] == ["prbm", "mr"]
    assert "kappa" in {o["name"] for o in names["dbe"]["options"]}
    assert names["local"]["uploads"] == []
    assert names["local"]["helps"] == ["none: the reference for every client"]
    assert names["fedproto"]["helps"] == ["label skew"]                    # local is one of its parts
    assert names["scaffold"]["uploads"][0] == "model"
    text = cli("methods").out
    assert all(name in text for name in WANTED)


@pytest.mark.parametrize("row", list_methods(), ids=lambda r: r["name"])
def test_every_listed_name_and_option_is_usable(row):
    stack = parse_stack(row["name"])
    assert {p.name for p in stack.parts} == set(row["parts"])
    for option in row["options"]:
        if option["default"] is not None:
            parse_stack(row["name"], {f"{row['name']}.{option['name']}": option["default"]}).method()


@pytest.mark.parametrize("method", [*PRESETS, *STACKS])
def test_explain(cli, method):
    quick = [f"--set={p.name}.{k}={v}" for p in parse_stack(method).parts for k, v in p.trial.items()]
    document = cli("explain", method, *IMAGES, "--model", "digits_cnn", *quick, "--json").json()
    assert [p["name"] for p in document["parts"]] == [p.name for p in parse_stack(method).method().parts]
    for part in document["parts"]:
        assert part["hooks"] or part["name"] == "union"            # which only says whose samples are trained on
        assert part["paper"]
        assert (part["neutral"] is not None) != bool(part["not_neutral"])
    assert document["model"]["parameters"] > 0
    for home in document["state"].values():
        assert home["bytes"] == sum(t["bytes"] for t in home["tensors"])
    assert set(document["traffic"]["later_rounds"]) == {"up", "down"}
    assert document["resolves"]


def test_explain_as_text(cli):
    said = cli("explain", "scaffold+dbe", *IMAGES, "--model", "digits_cnn", "--set", "dbe.kappa=5").out
    for words in ("mr.kappa = 5.0", "SCAFFOLD", "hooks", "traffic", "bytes per client", "prbm/shift",
                  "over parameters that travel and train only"):
        assert words in said
    assert "local: " not in said


def test_explain_says_what_mixed_features_mean_for_others(cli):
    resolved = cli("explain", "moex+mixstyle+fedfa+moon", *IMAGES, "--model", "digits_cnn", "--json").json()["resolves"]
    assert "ffa: its statistics are those of features that mixstyle, moex mixed before" in resolved
    assert "moon: in other models the batch passes without mixstyle, moex" in resolved
    alone = cli("explain", "fedfa+moon", *IMAGES, "--model", "digits_cnn", "--json").json()["resolves"]
    assert not [line for line in alone if "mixed" in line or "passes without" in line]


def test_explain_says_what_others_compare_with_beside_apple(cli):
    said = "ntd: the received model is the client's core, while its mixture of all cores is in training"
    assert said in cli("explain", "apple+fedntd", *IMAGES, "--model", "digits_cnn", "--json").json()["resolves"]
    assert "its mixture of all cores" not in cli("explain", "apple", *IMAGES, "--model", "digits_cnn").out


def test_a_part_from_a_file(cli, tmp_path):
    (tmp_path / "mine.py").write_text(OWN_PART)
    tiny = ("--data", "synthetic(samples=90, classes=3, clients=3, features=4)", "--rounds", "2")
    own = cli("run", "fedavg+./mine.py:Pull", *tiny, "--json").json()
    assert own["method"] == "./mine.py:Pull"
    ours = cli("run", "fedprox", *tiny, "--set", "prox.mu=0.5", "--json").json()
    assert own["records"] == ours["records"]                   # the same term as FedProx's
    weaker = cli("run", "./mine.py:Pull", *tiny, "--set", "pull.strength=0", "--json").json()
    plain = cli("run", "fedavg", *tiny, "--json").json()
    assert weaker["records"] == plain["records"]
    assert "Pull" in cli("run", "./mine.py:Pul", *tiny, code=2).err
    (tmp_path / "broken.py").write_text("import nothing_of_the_kind")
    assert "broken.py" in cli("run", "./broken.py:Pull", *tiny, code=2).err
    (tmp_path / "unfrozen.py").write_text("from consilience import Part\nclass P(Part):\n    name = 'p'\n")
    assert "frozen" in cli("run", "./unfrozen.py:P", *tiny, code=2).err


def test_a_part_from_a_package(cli, tmp_path, monkeypatch, request):
    (tmp_path / "their_package.py").write_text(OWN_PART)
    monkeypatch.syspath_prepend(str(tmp_path))
    point = EntryPoint("pull", "their_package:Pull", registry.ENTRY_POINTS)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == registry.ENTRY_POINTS else [])
    registry.installed_parts.cache_clear()
    request.addfinalizer(registry.installed_parts.cache_clear)
    rows = {r["name"]: r for r in cli("methods", "--json").json()}
    assert rows["pull"]["kind"] == "part"
    tiny = ("--data", "synthetic(samples=90, classes=3, clients=3, features=4)", "--rounds", "1")
    document = cli("run", "scaffold+pull", *tiny, "--json").json()
    assert document["method"] == "pull+scaffold"
    taken = EntryPoint("prox", "their_package:Pull", registry.ENTRY_POINTS)
    monkeypatch.setattr(registry, "entry_points", lambda group: [taken])
    registry.installed_parts.cache_clear()
    assert "taken" in cli("methods", code=2).err


def test_a_model_from_a_module(cli, tmp_path, monkeypatch):
    (tmp_path / "my_models.py").write_text(
        "from torch import nn\n"
        "def narrow(classes, width=6):\n"
        "    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, classes))\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    tiny = ("--data", "synthetic(samples=90, classes=3, clients=3, features=4)", "--rounds", "1")
    document = cli("explain", "dbe", *tiny[:2], "--model", "my_models:narrow(width=5)", "--taps", "head=2", "--json").json()
    assert document["model"]["parameters"] == 4 * 5 + 5 + 5 * 3 + 3
    cli("run", "dbe", *tiny, "--model", "my_models:narrow", "--taps", "head=2")
    assert "taps" in cli("run", "dbe", *tiny, "--model", "my_models:narrow", code=2).err
    assert "narrow" in cli("run", "dbe", *tiny, "--model", "my_models:narow", "--taps", "head=2", code=2).err


def test_new_part_passes_its_own_test(cli, tmp_path):
    said = cli("new", "part", "my_idea").out
    assert "my_idea.py:MyIdea" in said
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_idea.py"], cwd=tmp_path,
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
    cli("run", "./my_idea.py:MyIdea", "--data", "synthetic(samples=90, classes=3, clients=3, features=4)", "--rounds", "1")
    alone = cli("explain", "local+my_idea.py:MyIdea", code=2).err
    assert "local has no global model, and my_idea pulls towards it" in alone
    assert "exists already" in cli("new", "part", "my_idea", code=2).err
    assert "taken" in cli("new", "part", "prox", code=2).err
    assert "small letters" in cli("new", "part", "My-Idea", code=2).err
    assert set(PARTS).isdisjoint({"my_idea"})
