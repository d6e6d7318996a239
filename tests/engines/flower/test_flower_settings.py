"""What a federation agrees on, as Flower's flat configuration holds it; and what a site keeps on its disk."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import torch

from consilience.core.client import ClientState
from consilience.engines.flower import FederationSettings, SiteSettings
from consilience.engines.flower.parcel import Refused
from consilience.engines.flower.versions import Versions, new_token
from consilience.errors import ConfigError, DataError

BASE = {"sample": "1,8,8", "classes": 10}


def test_settings_survive_flower_s_flat_form() -> None:
    made = FederationSettings.make({**BASE, "method": "scaffold+dbe", "settings.dbe.kappa": 5, "min-sites": 3,
                                    "class_names": "a,b,c,d,e,f,g,h,i,j",
                                    "transform": "normalise(mean=(0.5,), std=(0.5,))", "steps": "none", "vocabulary": "none"})
    flat = made.flat()
    assert all(isinstance(v, (str, int, float, bool)) for v in flat.values())
    assert FederationSettings.make(flat) == made
    assert made.agreed.sample == (1, 8, 8)
    assert made.agreed.min_sites == 3
    assert made.run.settings == {"dbe.kappa": 5}


@pytest.mark.parametrize(("values", "message"), [
    ({"metod": "fedavg", **BASE}, "Did you mean 'method'"), ({"method": "fedavg"}, "'sample' setting"),
    ({"sample": "1,8,8"}, "'classes' setting"), ({**BASE, "sites": 2, "min_sites": 3}, "there are 2 sites"),
    ({**BASE, "method": "union"}, "pooled data"), ({**BASE, "method": "scaffoldd"}, "Did you mean 'scaffold'"),
    ({**BASE, "data": "digits"}, "no setting 'data'"), ({**BASE, "late": "keep"}, "must be one of discard, wait"),
    ({**BASE, "participation": 9}, "asks for 9 clients"), ({**BASE, "transform": "crop(size=3)"}, "crop"),
    ({**BASE, "class_names": "a,b"}, "has 10 classes and names 2 of them"),
    ({**BASE, "deadline": -1}, "at least 0"), ({**BASE, "dropout": 0.5}, "fail by themselves"),
])
def test_wrong_settings_are_refused_by_name(values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        FederationSettings.make(values)


def test_what_decides_numbers_is_in_the_digest_and_nothing_else() -> None:
    digest = lambda **more: FederationSettings.make({**BASE, **more}).digest()
    assert digest() == digest(deadline=5.0) == digest(folder="x") == digest(rounds=7) == digest(min_sites=1) == digest(label="y")
    assert len({digest(), digest(lr=0.5), digest(method="fedprox"), digest(seed=1), digest(sites=4), digest(transform="raw")}) == 6
    assert digest(method="dbe+scaffold") == digest(method="scaffold+dbe")
    # the order of names says which label a class has, and which column a number stands in
    orders = [{"class_names": "a,b,c"}, {"class_names": "b,a,c"}, {"feature_names": "age,bp"}, {"feature_names": "bp,age"}]
    assert len({digest(classes=3), *(digest(**{"classes": 3, **names}) for names in orders)}) == 5


def test_fewer_selected_sites_need_fewer_answers() -> None:
    assert FederationSettings.make({**BASE, "sites": 5}).least == 2
    assert FederationSettings.make({**BASE, "sites": 5, "participation": 0.2}).least == 1


def test_a_site_s_own_settings() -> None:
    made = SiteSettings.make({"site": 1, "data": "arrays(path='x.npz')", "store": "/s", "partition-id": 3, "name": "St. Mary's / ward 2"})
    assert made.site == 1
    assert made.shown == "St._Mary_s_ward_2"
    assert SiteSettings(2, "d", "s").shown == "site-2"
    for missing in ("site", "data", "store"):
        given = {"site": 0, "data": "d", "store": "s"}
        del given[missing]
        with pytest.raises(ConfigError, match=f"The '{missing}' setting of the site is missing"):
            SiteSettings.make(given)


# ---- versions --------------------------------------------------------------------------------------------------------------

FRESH = ClientState({"kept": {"p": {"c": torch.zeros(3)}}, "local": {}})


def _state(value: float, own_round: int) -> ClientState:
    return ClientState({"kept": {"p": {"c": torch.full((3,), value)}}, "local": {}}, first=False, seen=2, own_round=own_round)


def test_versions_by_round(tmp_path: Path) -> None:
    """Two accepted versions stay, for a server that goes back to its second checkpoint, and the one just trained."""
    versions = Versions(tmp_path, new_token(), 0, FRESH)
    assert versions.at(0) is FRESH
    for round_number in (1, 2, 3, 4):
        versions.write(round_number, _state(float(round_number), round_number), accepted=round_number - 1)
    assert versions.rounds() == [2, 3, 4]
    again = Versions(tmp_path, versions.folder.parent.name, 0, FRESH).at(3)
    assert torch.equal(again.tensors["kept"]["p"]["c"], torch.full((3,), 3.0))
    assert again.tensors["local"] == {}
    assert (again.first, again.seen, again.own_round) == (False, 2, 3)
    with pytest.raises(Refused, match="round 1 is not in its store"):
        versions.at(1)


def test_versions_that_nobody_accepted_go(tmp_path: Path) -> None:
    versions = Versions(tmp_path, new_token(), 0, FRESH)
    for round_number, accepted in ((1, 0), (2, 1), (3, 1)):       # the answer of round 2 was lost
        versions.write(round_number, _state(float(round_number), round_number), accepted)
    assert versions.rounds() == [1, 3]
    versions.write(2, _state(9.0, 2), accepted=1)                 # the server went back behind round 3, or its question is an old one
    assert versions.rounds() == [1, 2, 3]
    versions.write(4, _state(4.0, 4), accepted=2)                 # it went back, and the round 3 that came then was without this site
    assert versions.rounds() == [1, 2, 4]


def test_a_damaged_or_foreign_state_is_not_used(tmp_path: Path) -> None:
    versions = Versions(tmp_path, new_token(), 0, FRESH)
    versions.write(1, _state(1.0, 1), accepted=0)
    other = Versions(tmp_path, versions.folder.parent.name, 0, ClientState({"kept": {"p": {"c": torch.zeros(4)}}, "local": {}}))
    with pytest.raises(DataError, match="does not fit"):
        other.at(1)
    path = versions.folder / "round-000001" / "state.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(DataError, match="damaged"):
        versions.at(1)


def test_secrets_are_the_owner_s_alone(tmp_path: Path) -> None:
    versions = Versions(tmp_path, new_token(), 0, FRESH)
    secret = versions.secret()
    assert len(secret) == 32
    assert versions.secret() == secret
    assert stat.S_IMODE((versions.folder / "secret").stat().st_mode) == 0o600
