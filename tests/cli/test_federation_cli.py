"""`consilience federation`: what is printed, what is written, and what is refused, without starting a process of Flower's."""

from __future__ import annotations

import socket

import numpy as np
import pytest

from consilience.errors import ConfigError
from consilience.runs.lock import folder_lock

pytest.importorskip("flwr", reason="needs the extra 'flower'")


@pytest.fixture
def data(tmp_path):
    np.savez(tmp_path / "site.npz", x=np.zeros((40, 5), np.float32), y=np.arange(40) % 3)
    return "arrays(path='site.npz')"


def test_init_warns_of_what_a_run_would_warn_of(cli, data):
    """Three sites and a model of D numbers: √D/3 is above 5 from 226 numbers on, and the default model for 5 features has more."""
    made = cli("federation", "init", "hospitals", "--method", "fedavg+dp", "--like", data, "--json")
    assert made.err.startswith("Warning: dp adds noise")
    assert made.json()["settings"]["method"] == "fedavg+dp"


def test_init_writes_an_app_whose_hash_sites_can_approve(cli, data, tmp_path):
    made = cli("federation", "init", "hospitals", "--method", "scaffold+dbe", "--like", data, "--rounds", "4", "--set", "dbe.kappa=5", "-o",
               "deadline=60", "--json").json()
    assert made["settings"]["deadline"] == 60
    assert made["settings"]["settings.dbe.kappa"] == 5
    assert sorted(p.name for p in (tmp_path / "hospitals").iterdir()) == ["README.md", "app.py", "pyproject.toml"]
    approved = cli("federation", "approve", "store", made["hash"], "--override", "lr", "--json").json()
    assert approved["overrides"] == ["lr"]
    listed = cli("federation", "approvals", "store", "--json").json()
    assert list(listed["approved"]) == [made["hash"]]
    assert made["hash"] in cli("federation", "approvals", "store").out
    cli("federation", "revoke", "store", made["hash"])
    assert "Nothing approved" in cli("federation", "approvals", "store").out


@pytest.mark.parametrize(("words", "said"), [
    (["--method", "scafold"], "Did you mean 'scaffold'"), (["--method", "local+scaffold"], "cannot be combined"),
    (["--method", "fedavg", "-o", "deadlin=3"], "Did you mean 'deadline'"), (["--method", "fedavg", "--set", "dbe.kappa=1"], "dbe"),
    (["--method", "fedavg", "-o", "deadline"], "name=value"), (["--method", "union"], "no data leave a site"),
    ([], "--run with the folder of a simulation"), (["--run", "nowhere"], "holds no run"),
])
def test_init_refuses_before_it_writes(cli, data, tmp_path, words, said):
    assert said in cli("federation", "init", "hospitals", "--like", data, *words, code=2).err
    assert not (tmp_path / "hospitals").exists()


def test_a_file_that_is_no_app_is_not_approved(cli, data, tmp_path):
    cli("data", "check", data)                                             # the file is there, and is a zip archive without an app
    assert "bundle cannot be read" in cli("federation", "approve", "store", "site.npz", code=2).err
    assert "There is no store 'stroe'" in cli("federation", "approvals", "stroe", code=2).err
    assert not (tmp_path / "store").exists()


def test_init_takes_a_run_s_settings(cli, data, tmp_path):
    cli("run", "fedavg+dbe", "--data", data, "--split", "iid", "--clients", "2", "--rounds", "1", "--batch", "4", "--lr", "0.07", "--set",
        "dbe.kappa=5", "-o", "dropout=0.1", "--engine", "sequential", "--out", "first")
    made = cli("federation", "init", "hospitals", "--run", "first", "--rounds", "9", "--json")
    settings = made.json()["settings"]
    assert "dropout=0.1 is of the simulation alone" in made.err
    assert {k: settings[k] for k in ("method", "sites", "lr", "batch", "rounds", "sample", "classes")} == {
        "method": "dbe", "sites": 2, "lr": 0.07, "batch": 4, "rounds": 9, "sample": "5", "classes": 3}
    assert settings["settings.mr.kappa"] == 5
    assert "train=0.75, validation=0.0, seed=0" in cli("federation", "init", "again", "--run", "first").out


def test_certificates_and_keys(cli, tmp_path):
    made = cli("federation", "certificates", "certs", "--host", "hub.example.org", "--host", "10.0.0.2", "--json").json()
    assert made["hosts"][:2] == ["hub.example.org", "10.0.0.2"]
    assert "--again" in cli("federation", "certificates", "certs", "--host", "hub", code=2).err
    assert "give it to every site" in cli("federation", "certificates", "certs", "--host", "hub", "--again").out
    pair = cli("federation", "key", "store", "--json").json()
    assert (tmp_path / pair["public"]).read_text().startswith("ecdsa-sha2-nistp384 ")
    assert "keeps its key" in cli("federation", "key", "store", code=2).err


def test_a_site_looks_at_its_data_first(cli, data):
    common = ("federation", "site", "store", "--number", "0")
    about = cli(*common, "--server", "hub:9092", "--data", data, "--check", "--json").json()
    assert (about["train"], about["validation"], about["test"], about["sample"]) == (30, 4, 6, [5])
    assert "30 samples to train on" in cli(*common, "--server", "hub:9092", "--data", data, "--check").out
    assert "does not exist" in cli(*common, "--server", "hub:9092", "--data", "arrays(path='gone.npz')", code=2).err
    assert "host:port" in cli(*common, "--server", "https://hub", "--data", data, code=2).err
    assert "labels must be 0 to 1" in cli(*common, "--server", "hub:9092", "--data", data, "--classes", "2", code=2).err


def test_a_site_with_words_for_labels_needs_not_name_them(cli, tmp_path):
    """The app has their order; a site that was started as the documentation says was turned away for want of --class-names."""
    rows = "".join(f"{40 + i},{60 + i},{'died' if i % 4 else 'lived'}\n" for i in range(20))
    (tmp_path / "ward.csv").write_text("age,pulse,end\n" + rows)
    common = ("federation", "site", "store", "--number", "0", "--server", "hub:9092", "--data", "table(path='ward.csv', label=end)")
    about = cli(*common, "--check", "--json").json()
    assert about["class_names"] == ["died", "lived"]
    died, lived = about["training_labels"]
    assert f"training labels died {died}, lived {lived} (the app numbers them)" in cli(*common, "--check").out
    assert "--ca must name" in cli(*common, code=2).err                   # what it lacks to start, and nothing else
    assert "'died'" in cli(*common, "--check", "--class-names", "dead,lived", code=2).err


def test_labels_in_brackets_are_words_too(cli, tmp_path):
    """[died] vanished, and [/died] ended the command in a traceback: the terminal's own signs look so."""
    (tmp_path / "ward.csv").write_text("age,end\n" + "".join(f"{40 + i},{'[died]' if i % 4 else '[/home]'}\n" for i in range(20)))
    said = cli("federation", "site", "store", "--number", "0", "--server", "hub:9092", "--data", "table(path='ward.csv', label=end)",
               "--check").out
    assert "training labels [/home] " in said
    assert ", [died] " in said


def test_an_app_s_setting_that_is_typed_twice(cli, data, tmp_path):
    """-o won without a word; in `run` the other did."""
    said = cli("federation", "init", "app", "--method", "dbe", "--like", data, "--lr", "0.1", "-o", "lr=0.2", code=2).err
    assert "'lr' is set twice: by --lr 0.1 and by -o lr=0.2" in said
    assert not (tmp_path / "app").exists()


def test_a_site_s_table_is_checked_against_the_agreed_columns(cli, tmp_path):
    """`--check` said that all was well; the first run was refused."""
    (tmp_path / "ward.csv").write_text("age,pulse,ill\n" + "".join(f"{40 + i},{60 + i},{i % 2}\n" for i in range(20)))
    table = "table(path='ward.csv', label=ill)"
    common = ("federation", "site", "store", "--number", "0", "--server", "hub:9092", "--data", table, "--check")
    assert cli(*common, "--feature-names", "pulse, age", "--json").json()["sample"] == [2]
    assert cli(*common, "--feature-names", "pulse", "--json").json()["sample"] == [1]
    assert "weight" in cli(*common, "--feature-names", "age,pulse,weight", code=2).err


def test_a_site_does_not_start_without_authority_or_key(cli, data, tmp_path):
    common = ("federation", "site", "store", "--number", "0", "--server", "hub:9092", "--data", data)
    assert "--ca" in cli(*common, code=2).err
    cli("federation", "certificates", "certs", "--host", "hub")
    assert "consilience federation key store" in cli(*common, "--ca", "certs/ca.crt", code=2).err


def test_a_site_does_not_start_with_wrong_files(cli, data, tmp_path):
    common = ("federation", "site", "store", "--number", "0", "--server", "hub:9092", "--data", data, "--ca")
    cli("federation", "certificates", "certs", "--host", "hub")
    cli("federation", "key", "store")
    (tmp_path / "junk.crt").write_text("hello")
    assert "Ask the server's operator for ca.crt" in cli(*common, "junk.crt", code=2).err
    assert "a server's own certificate" in cli(*common, "certs/server.crt", code=2).err
    assert "--ca and --insecure contradict each other" in cli(*common, "certs/ca.crt", "--insecure", code=2).err
    with folder_lock(tmp_path / "store"):
        assert "Another site runs in 'store'" in cli(*common, "certs/ca.crt", code=2).err
    (tmp_path / "store" / "site.key").write_text("nonsense")
    assert "not a site's key" in cli(*common, "certs/ca.crt", code=2).err


def test_a_server_that_cannot_start_says_why_at_once(cli, tmp_path):
    cli("federation", "certificates", "certs", "--host", "hub")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert f"Port {port} is in use" in cli("federation", "server", "srv", "--certificates", "certs", "--port", port, code=2).err
    with folder_lock(tmp_path / "srv"):
        assert "Another server runs in 'srv'" in cli("federation", "server", "srv", "--certificates", "certs", code=2).err
    (tmp_path / "file").write_text("")
    assert "is a file" in cli("federation", "server", "file", "--certificates", "certs", code=2).err


def test_a_server_without_certificates_must_say_so(cli, tmp_path):
    assert "--insecure" in cli("federation", "server", "srv", code=2).err
    assert "consilience federation certificates" in cli("federation", "server", "srv", "--certificates", "absent", code=2).err
    assert "No server was started" in cli("federation", "admit", "srv", "site.pub", code=2).err


def test_a_study_needs_an_app_and_a_federation(cli, data, tmp_path):
    from consilience.federation.app import init
    assert "--demo" in cli("federation", "study", code=2).err
    assert "leave APP" in cli("federation", "study", "x", "--demo", code=2).err
    assert "There is no app" in cli("federation", "study", "x", "--server", "srv", code=2).err
    assert "--lrs" in cli("federation", "study", "--demo", "--lrs", "fast", code=2).err
    init("fixed", {"method": "dbe", "settings.dbe.kappa": 5}, like=data)
    assert "dbe.kappa" in cli("federation", "study", "fixed", "--server", "srv", code=2).err
    init("free", {"method": "fedavg"}, like=data)
    assert "Did you mean 'scaffold'" in cli("federation", "study", "free", "--server", "srv", "--candidate", "scafold", code=2).err
    assert "No server was started" in cli("federation", "study", "free", "--server", "srv", code=2).err


def test_the_demo_does_not_write_over_anything(cli, tmp_path):
    (tmp_path / "mine").mkdir()
    assert "exists" in cli("federation", "demo", "--out", "mine", code=2).err
    assert "scaffold" in cli("federation", "demo", "--method", "scafold", code=2).err


def test_a_demo_whose_sites_tell_no_loss(cli, monkeypatch, tmp_path):
    """As under `dp`, where no noise would hide it."""
    heard = {"round": 1, "loss": None, "global": None, "personalised": {"accuracy": 0.25}}

    def demo(method, folder, *, hear, **more):
        hear(heard)
        raise ConfigError("The end of the test.")
    monkeypatch.setattr("consilience.federation.demo.demo", demo)
    said = cli("federation", "demo", "--method", "fedavg+dp", "--rounds", "1", code=2).err
    assert "1/1" in said
    assert "accuracy 0.250" in said


def test_hash_of_a_folder_without_an_app(cli, tmp_path):
    assert "pyproject.toml is missing" in cli("federation", "hash", str(tmp_path), code=2).err
