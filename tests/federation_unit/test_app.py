"""`federation init`: an app that reads back as it was meant, and refusals before anything is written."""

from __future__ import annotations

import subprocess
import sys
import tomllib

import numpy as np
import pytest

from consilience.engines.flower.settings import FederationSettings
from consilience.errors import ConfigError, ConsilienceError
from consilience.federation.app import app_hash, bundle, init, pyproject, read_settings, settle
from consilience.federation.approval import files_in, own_settings


def test_settings_read_back(tmp_path):
    written = init(tmp_path / "hospitals", {"method": "scaffold+dbe", "rounds": 7, "settings.dbe.kappa": 5, "lr": 0.02}, like="digits")
    assert read_settings(tmp_path / "hospitals") == written
    assert written.run.run.model == "digits_cnn"
    assert written.agreed.sample == (1, 8, 8)
    assert written.agreed.input == "uint8"
    assert "normalise" in written.agreed.transform
    text = (tmp_path / "hospitals" / "pyproject.toml").read_text()
    assert "settings.dbe.kappa = 5" in text
    assert "# local learning rate" in text
    told = (tmp_path / "hospitals" / "README.md").read_text()
    assert "scaffold+dbe" in told
    assert "exits with 0 whatever becomes of the run" in told                # and the command that shows how it ended
    assert "flwr list consilience --format json" in told


def test_the_app_is_a_stub_over_the_installed_package(tmp_path):
    init(tmp_path / "a", {"method": "fedavg"}, like="digits")
    said = subprocess.run([sys.executable, "-c", "import app; print(type(app.server).__name__, type(app.client).__name__)"],
                          cwd=tmp_path / "a", capture_output=True, text=True, check=True).stdout
    assert said.split()[-2:] == ["ServerApp", "ClientApp"]
    code = [line for line in (tmp_path / "a" / "app.py").read_text().splitlines() if line and not line.startswith('"""')]
    assert code == ["from consilience.engines.flower import client_app, server_app", "server = server_app()", "client = client_app()"]


def test_the_bundle_holds_the_settings_and_its_hash_follows_them(tmp_path):
    settings = init(tmp_path / "a", {"method": "fedavg+dbe", "settings.dbe.kappa": 5}, like="digits")
    content = bundle(tmp_path / "a")
    assert {name for name, _ in files_in(content)} >= {"app.py", "pyproject.toml"}
    assert own_settings(content) == settings.flat()
    before = app_hash(tmp_path / "a")
    text = (tmp_path / "a" / "pyproject.toml").read_text()
    (tmp_path / "a" / "pyproject.toml").write_text(text.replace("settings.dbe.kappa = 5", "settings.dbe.kappa = 6"))
    assert app_hash(tmp_path / "a") != before


@pytest.mark.parametrize(("values", "said"), [
    ({"method": "scafold"}, "'scaffold'"), ({"method": "fedavg", "lrr": 0.1}, "'lr'"), ({"method": "local+scaffold"}, "cannot be combined"),
    ({"method": "union"}, "pooled data"), ({"method": "fedbr"}, "allow_raw_averages"), ({"method": "fedfa", "model": "mlp"}, "stages"),
    ({"method": "fedavg", "settings.dbe.kappa": 1}, "dbe"), ({"method": "fedavg", "rounds": 0}, "rounds"),
    ({"method": "fedavg", "model": "resnet999"}, "resnet"), ({"method": "fedavg", "sites": 2, "min_sites": 3}, "min_sites"),
])
def test_refusals_come_before_anything_is_written(tmp_path, values, said):
    with pytest.raises(ConsilienceError, match=said):
        init(tmp_path / "a", values, like="digits")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(("values", "said"), [
    ({"method": "fedavg+dp"}, "dp adds noise 47 times as long as the change it hides can be, with 3 clients in a round"),      # √19,722 / 3
    ({"method": "fedfm", "rounds": 5}, "anchors first acts in round 21, and the run has 5"),
    ({"method": "fedavg+dp", "settings.dp.noise": 0.05}, None)])
def test_what_a_run_warns_of_is_said_when_the_app_is_made(tmp_path, values, said):
    heard = []
    init(tmp_path / "a", values, like="digits", warn=heard.append)
    assert len(heard) == (said is not None)
    assert all(line.startswith(said) for line in heard)


def test_names_and_folders_flower_would_refuse(tmp_path):
    with pytest.raises(ConfigError, match="a letter first"):
        init(tmp_path / "3 hospitals", {"method": "fedavg"}, like="digits")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        init(tmp_path / "full", {"method": "fedavg"}, like="digits")
    with pytest.raises(ConfigError, match="--like"):
        init(tmp_path / "a", {"method": "fedavg"})
    with pytest.raises(ConsilienceError, match="--like takes"):
        init(tmp_path / "a", {"method": "fedavg"}, like="digitz")


def test_the_form_of_a_sites_own_data(tmp_path):
    np.savez(tmp_path / "s.npz", x=np.zeros((30, 5), np.float32), y=np.array([0, 1, 3] * 10))
    settings = settle({"method": "fedavg", "classes": 6}, like=f"arrays(path='{tmp_path}/s.npz')")
    assert (settings.agreed.sample, settings.agreed.input, settings.agreed.classes) == ((5,), "float32", 6)
    assert settings.run.run.model == "mlp"
    (tmp_path / "t.csv").write_text("a,b,label\n" + "1,2,ill\n3,4,well\n" * 5)
    settings = settle({"method": "fedavg"}, like=f"table(path='{tmp_path}/t.csv')")
    assert settings.agreed.class_names == ("ill", "well")
    assert settings.agreed.feature_names == ("a", "b")
    assert FederationSettings.make(settings.flat()).agreed.feature_names == ("a", "b")
    (tmp_path / "t.csv").write_text('a,"b, in mg",label\n' + "1,2,\"ill, mildly\"\n3,4,well\n" * 5)
    commas = settle({"method": "fedavg"}, like=f"table(path='{tmp_path}/t.csv')")
    assert commas.agreed.feature_names == ("a", "b, in mg")
    assert commas.agreed.class_names == ("ill, mildly", "well")
    assert FederationSettings.make(commas.flat()).agreed == commas.agreed
    assert tomllib.loads(pyproject("wards", commas))["tool"]["flwr"]["app"]["config"]["feature_names"] == '["a", "b, in mg"]'
    plain = settle({"method": "fedavg", "sample": "1,28,28", "classes": 10, "input": "uint8"})
    assert plain.run.run.model


def test_classes_that_the_site_lacks_are_named(tmp_path):
    """Three names used to be written beside two classes, so that a site with the third one was refused in the run."""
    (tmp_path / "t.csv").write_text("a,b,label\n" + "1,2,ill\n3,4,well\n" * 5)
    two = f"table(path='{tmp_path}/t.csv')"
    settings = settle({"method": "fedavg", "class_names": "ill,well,unknown"}, like=two)
    assert (settings.agreed.classes, settings.agreed.class_names) == (3, ("ill", "well", "unknown"))
    for values in ({"classes": 3}, {"classes": 3, "class_names": "ill,well"}):
        with pytest.raises(ConfigError, match="has 3 classes and names 2 of them: ill, well"):
            settle({"method": "fedavg", **values}, like=two)
    (tmp_path / "t.csv").write_text("a,b,label\n" + "1,2,well\n" * 5)
    assert settle({"method": "fedavg", "class_names": "ill,well"}, like=two).agreed.classes == 2
    with pytest.raises(ConfigError, match=r"Got 1 instead\. Name all classes in their order, as in class_names=well,"):
        settle({"method": "fedavg"}, like=two)
