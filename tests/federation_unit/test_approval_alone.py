"""Which apps may run at a site, and which of their settings a run may change."""

from __future__ import annotations

import io
import json
import re
import zipfile

import pytest

from consilience.errors import ConfigError, DataError
from consilience.federation.approval import HARMLESS, KEEP, Approvals, files_in, hash_of, own_settings


def bundle(config='lr = 0.1\nmethod = "fedavg"\nfolder = ""\nsettings.dbe.kappa = 5\n', code="print('hello')") -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("pyproject.toml", f"[tool.flwr.app.config]\n{config}")
        archive.writestr("app.py", code)
    return out.getvalue()


OWN = {"lr": 0.1, "method": "fedavg", "folder": "", "settings.dbe.kappa": 5}


def test_a_store_is_its_owner_s_whoever_makes_it(tmp_path):
    Approvals(tmp_path / "store").approve("0" * 64)
    assert (tmp_path / "store").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(("name", "text", "said"), [
    ("a.txt", "hi", "it has no pyproject.toml"), ("pyproject.toml", "[tool]\nflwr = 1", "no table tool.flwr.app"),
    ("pyproject.toml", "[project]\nname = 'x'", "no table tool.flwr.app"), ("pyproject.toml", "x = ", "Invalid value")])
def test_a_bundle_that_is_no_app_says_what_it_lacks(name, text, said):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(name, text)
    with pytest.raises(DataError, match=re.escape(said)) as refused:
        own_settings(out.getvalue())
    assert "Error(" not in str(refused.value)


def test_only_what_is_listed_may_run(tmp_path):
    held, app = Approvals(tmp_path), bundle()
    assert hash_of(app) in (held.objection(app, OWN) or "")
    held.approve(hash_of(app))
    assert held.objection(app, OWN) is None
    assert "not approved" in (held.objection(bundle(code="print('hallo')"), OWN) or "")
    assert "not approved" in (held.objection(bundle(config="lr = 0.2\n"), OWN) or "")
    held.revoke(hash_of(app))
    assert "not approved" in (held.objection(app, OWN) or "")


@pytest.mark.parametrize(("change", "allowed", "fine"), [
    ({"lr": 0.5}, (), False), ({"lr": 0.5}, ("lr",), True), ({"lr": 0.5, "method": "fedbr"}, ("lr",), False), ({"folder": "/x"}, (), True),
    ({"settings.dbe.kappa": 0}, (), False), ({"settings.dbe.kappa": 0}, ("*",), True), ({"new": 1}, (), False),
])
def test_a_run_may_change_only_what_was_approved(tmp_path, change, allowed, fine):
    held, app = Approvals(tmp_path), bundle()
    held.approve(hash_of(app), allowed)
    why = held.objection(app, {**OWN, **change})
    assert (why is None) == fine
    if why:
        assert any(key in why for key in change if key not in (*HARMLESS, *allowed))


def test_a_server_s_words_neither_paint_nor_fill_the_disk(tmp_path):
    """Names of settings come from whoever starts a run, and go to the site's terminal, log and file of refusals."""
    held, app = Approvals(tmp_path), bundle()
    held.approve(hash_of(app))
    why = held.objection(app, {**OWN, "lr\x1b[2J\nall is well": "x" * 10**6, **{f"more{i}": 1 for i in range(1000)}})
    assert "not a change of lr?[2J?all is well, more0, " in why
    assert why.isprintable()
    assert len(why) < 2000


def test_refusals_are_kept_for_the_operator(tmp_path):
    held = Approvals(tmp_path)
    for i in range(KEEP + 3):
        held.refuse(bundle(code=str(i)), "why not", 7)
    notes = [json.loads(line) for line in (tmp_path / "refused" / "refused.jsonl").read_text().splitlines()]
    assert len(notes) == KEEP + 3
    assert notes[0]["run"] == 7
    assert notes[0]["why"] == "why not"
    kept = list((tmp_path / "refused").glob("*.fab"))
    assert len(kept) == KEEP                                  # a server cannot fill a site's disk
    assert all(hash_of(p.read_bytes()) == p.stem for p in kept)
    assert [n for n, _ in files_in(kept[0].read_bytes())] == ["pyproject.toml", "app.py"]


def test_damage_and_nonsense(tmp_path):
    held = Approvals(tmp_path)
    with pytest.raises(ConfigError, match="64"):
        held.approve("abc")
    with pytest.raises(ConfigError, match="not approved here"):
        held.revoke("0" * 64)
    rubbish = b"not a bundle"
    held.approve(hash_of(rubbish))
    with pytest.raises(DataError, match="bundle"):
        held.objection(rubbish, OWN)
    held.path.write_text("[]")
    with pytest.raises(DataError, match="damaged"):
        held.objection(bundle(), OWN)


def test_what_is_no_hash_takes_nothing_back_and_says_so(tmp_path):
    held = Approvals(tmp_path)
    held.approve("a" * 64)
    for what in ("hospitals", "aaaa"):
        with pytest.raises(ConfigError, match=f"The app '{what}' is not approved here, so nothing was taken back. Its whole hash"):
            held.revoke(what)
    assert list(held.all()) == ["a" * 64]
