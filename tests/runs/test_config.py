"""One flat set of names for Python, files and the command line; equal runs have equal names however they are typed."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pytest

from consilience.core.policy import Policy
from consilience.data import load
from consilience.errors import ConfigError
from consilience.options import describe
from consilience.runs import config as module
from consilience.runs.config import RunConfig, flatten_settings, parse_set, read_config_file
from consilience.runs.folder import default_folder, safe_name


def folder(method: str, settings: dict | None = None, **more) -> str:
    return default_folder(RunConfig.make({"method": method, "settings": settings or {}, **more})).name


def test_the_same_run_has_the_same_folder_however_it_is_typed():
    assert folder("scaffold+dbe") == folder("dbe+scaffold") == folder("fedavg+dbe+scaffold")
    assert folder("fedprox(mu=0.1)") == folder("fedprox", {"fedprox.mu": 0.1}) == folder("fedprox", {"prox": {"mu": 0.1}})
    assert folder("dbe", {"dbe.kappa": 1.0}) == folder("dbe")                       # the default, spelled out
    assert folder("fedavg", data_dir="here") == folder("fedavg", data_dir="there")


def test_different_runs_have_different_folders():
    names = [folder("fedavg"), folder("fedavg", seed=1), folder("fedavg", rounds=3), folder("fedprox(mu=0.1)"), folder("fedprox(mu=0.2)"),
             folder("dbe"), folder("dbe", {"dbe.kappa": 5}), folder("dbe", {"dbe.mu": 0.5}), folder("fedavg", data="synthetic"),
             folder("fedavg", layout="contiguous"), folder("fedavg", layout="channels_last")]
    assert len(set(names)) == len(names)


def test_data_settings_are_all_that_load_takes():
    """A setting that decided the data and were missing here would let runs in a row share data that are not theirs."""
    said = RunConfig.make({"method": "fedavg", "seed": 3, "hold_out": ("1", "ward b"), "map_data": True}).data_settings()
    assert said.keys() == inspect.signature(load).parameters.keys() - {"source"}
    assert (said["seed"], said["hold_out"], said["map_data"]) == (3, [1, "ward b"], True)
    assert RunConfig.make({"method": "fedavg", "seed": 3, "data_seed": 0}).data_settings()["seed"] == 0


def test_what_is_stored_makes_the_same_configuration_again():
    config = RunConfig.make({"method": "moon+dbe(kappa=5)", "settings": {"moon": {"mu": 2}}, "rounds": 7, "momentum": 0.9, "taps": None})
    stored = json.loads(json.dumps(config.portable(), default=list))
    assert stored["method"] == "dbe+moon"
    assert stored["settings"] == {"mr.kappa": 5.0, "moon.mu": 2.0}
    again = RunConfig.make(stored)
    assert again.digest() == config.digest()
    assert again.stack().parts == config.stack().parts


def test_replace_keeps_the_rest():
    config = RunConfig.make({"method": "dbe", "settings": {"dbe.kappa": 5}, "rounds": 7})
    other = config.replace(seed=4)
    assert (other.policy.seed, other.run.rounds, dict(other.settings)) == (4, 7, {"dbe.kappa": 5})


def test_settings_may_be_nested():
    assert flatten_settings({"dbe": {"kappa": 5}, "prox.mu": 1}) == {"dbe.kappa": 5, "prox.mu": 1}
    with pytest.raises(ConfigError, match="settings"):
        flatten_settings([1])  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "value"), [("dbe.kappa=5", 5), ("dbe.kappa=1e-3", 0.001), ("dbe.half=false", False),
                                             ("a.b=[1, 2]", [1, 2]), ("a.b=none", "none"), ("a.b=x y", "x y"), ("a.b=", None)])
def test_set_reads_values_as_yaml(text, value):
    assert list(parse_set([text]).values()) == [value]


@pytest.mark.parametrize(("text", "value"), [("010", 10), ("-007", -7), ("0x10", 16), ("1_000", 1000), ("12", 12)])
def test_a_whole_number_may_begin_with_zero(tmp_path, text, value):
    """YAML 1.1 takes 010 for eight."""
    (tmp_path / "a.yaml").write_text(f"rounds: {text}\n")
    assert read_config_file(tmp_path / "a.yaml") == {"rounds": value}
    assert parse_set([f"a.b={text}"]) == {"a.b": value}


def test_files_must_hold_a_table(tmp_path):
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(ConfigError, match="table of settings"):
        read_config_file(tmp_path / "list.json")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config_file(tmp_path / "bytes.toml")


@pytest.mark.parametrize(("name", "text"), [
    ("a.yaml", "rounds: 2\nrounds: 3\n"), ("b.yml", "settings:\n  prox.mu: 1\n  rounds: 1\n  prox.mu: 1\n"),
    ("c.json", '{"rounds": 2, "rounds": 3}'), ("d.toml", "rounds = 2\nrounds = 3\n")])
def test_a_name_is_set_once(tmp_path, name, text):
    """YAML and JSON take the last of two values, and say nothing."""
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=re.escape(name)) as refused:
        read_config_file(tmp_path / name)
    assert name == "d.toml" or f"{'prox.mu' if name == 'b.yml' else 'rounds'!r} is set twice" in str(refused.value)


def test_what_a_merge_brings_in_may_be_set_again(tmp_path):
    (tmp_path / "a.yaml").write_text("settings:\n  <<: {prox.mu: 1, dbe.kappa: 2}\n  prox.mu: 3\n")
    assert read_config_file(tmp_path / "a.yaml") == {"settings": {"prox.mu": 3, "dbe.kappa": 2}}
    # one that merges itself, and is merged before it is read
    (tmp_path / "b.yaml").write_text("a: &a {x: 1}\nb:\n  c: &c {<<: *a, x: 2}\nd: {<<: *c}\n")
    assert read_config_file(tmp_path / "b.yaml") == {"a": {"x": 1}, "b": {"c": {"x": 2}}, "d": {"x": 2}}


@pytest.mark.parametrize(("name", "text", "said"), [("a.yaml", "settings: !!map [1, 2]\n", "expected a mapping node"),
                                                    ("b.json", '{"": 1, "": 2}', "'' is set twice")])
def test_odd_files_are_refused_like_others(tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_config_file(tmp_path / name)


@pytest.mark.parametrize(("name", "text"), [("a.toml", "rounds = 2\r\n"), ("a.yaml", "rounds: 2\r\n"), ("a.json", '{"rounds": 2}')])
def test_files_of_windows_editors_are_read(tmp_path, name, text):
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert read_config_file(tmp_path / name) == {"rounds": 2}


def test_client_names_become_file_names_that_do_not_meet():
    names = ["a", "a/b", "a_b", "a b", ".hidden", "..", "ü", "A"]
    files = [safe_name(n) for n in names]
    assert len({f.lower() if f != "A" else f for f in files}) == len(names)
    assert all("/" not in f and not f.startswith(".") for f in files)
    assert safe_name("client7") == "client7"


def test_the_page_lists_every_setting_with_default_and_meaning():
    section = (Path(__file__).parents[2] / "docs" / "runs.md").read_text(encoding="utf-8").partition("\n## Settings\n")[2]
    rows = {name: (default, meaning) for name, default, meaning in re.findall(r"^\| `(\w+)` \| (.+?) \| (.+) \|$", section, re.MULTILINE)}
    said = lambda value: "–" if value in (None, ()) else str(value).lower() if isinstance(value, bool) else str(value)
    choices = lambda row: f" ({', '.join(row['choices'])})" if row["choices"] else ""
    assert rows == {row["name"]: (said(row["default"]), row["doc"] + choices(row))
                    for row in describe(module._RunOnly) + describe(Policy) if row["name"] != "method"}


def test_the_pages_file_is_one(tmp_path):
    section = (Path(__file__).parents[2] / "docs" / "runs.md").read_text(encoding="utf-8").partition("\n## Settings\n")[2]
    code = re.search(r"```toml\n(.*?)```", section, re.DOTALL)
    (tmp_path / "night.toml").write_text(code[1], encoding="utf-8")
    made = RunConfig.make({**read_config_file(tmp_path / "night.toml"), "method": "scaffold+dbe"})
    assert (made.policy.momentum, made.run.rounds, dict(made.settings)) == (0.9, 30, {"dbe.kappa": 5})


@pytest.mark.parametrize(("key", "cure"), [("dbe.kappa", "--set dbe.kappa=…"), ("seeds", "`consilience compare`, --seeds"),
                                           ("seedz", "Did you mean 'seed'")])
def test_what_is_no_setting_of_a_run_is_told_where_it_goes(key, cure):
    with pytest.raises(ConfigError, match=f"has no option '{re.escape(key)}'.*{re.escape(cure)}"):
        RunConfig.make({"method": "dbe", key: 5})


def test_a_setting_of_the_run_is_told_from_a_methods_option():
    with pytest.raises(ConfigError, match=r"'lr' is a setting of the run: -o lr=0.1\.$"):
        parse_set(["lr=0.1"], of_run=True)
    with pytest.raises(ConfigError, match=r"Got 'mu=0.1' instead\.$"):
        parse_set(["mu=0.1"], of_run=True)
    with pytest.raises(ConfigError, match=r"Got 'steps=9' instead\.$"):       # of a measure
        parse_set(["steps=9"])
