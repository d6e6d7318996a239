"""`consilience run` and `consilience resume`: one JSON document, equal runs, files of settings, Ctrl-C and SIGTERM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError

import pytest
import typer

from consilience.cli import app
from consilience.runs.lock import folder_lock
from consilience.runs.reload import open_run

TINY = ("--data", "synthetic(samples=160, classes=3, clients=4, features=6)", "--rounds", "3", "--lr", "0.1", "-o", "validation=0.2")


def plain(document: dict) -> dict:
    return {k: v for k, v in document.items() if k != "measured"}


@pytest.mark.parametrize("method", ["scaffold+dbe", "local"])
def test_equal_runs_differ_under_measured_alone(cli, tmp_path, monkeypatch, method):
    one = cli("run", method, *TINY, "--out", "a", "--json").json()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    two = cli("run", "+".join(reversed(method.split("+"))), *TINY, "--out", "other/b", "--json").json()
    assert plain(one) == plain(two)
    assert one["measured"] != two["measured"]
    assert one["measured"]["folder"] == "a"
    assert [r["round"] for r in one["measured"]["rounds"]] == [r["round"] for r in one["records"]]


def test_a_finished_run_is_read_not_run(cli, tmp_path):
    first = cli("run", "fedavg", *TINY, "--json").json()
    folder = tmp_path / first["measured"]["folder"]
    assert folder.name.startswith("fedavg-synthetic-")
    assert folder.name.endswith("-seed0")
    stamp = {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}
    second = cli("run", "fedavg", *TINY, "--json").json()
    assert plain(second) == plain(first)
    assert second["measured"]["rounds"] == first["measured"]["rounds"]          # times included: they were read
    assert {p: p.stat().st_mtime_ns for p in stamp} == stamp
    third = cli("run", "fedavg", *TINY, "--again", "--json").json()
    assert plain(third) == plain(first)
    assert third["measured"]["rounds"] != first["measured"]["rounds"]


def test_a_comparison_whose_clients_are_drawn_anew_says_why_it_has_no_table_of_them(cli):
    asked = ("compare", "fedavg", *TINY, "--split", "iid", "--rounds", "1", "--seeds", "2", "--jobs", "1", "--no-local", "--per-client")
    found = cli(*asked, "--json")
    assert (found.json()["clients"], "Every seed divides the data anew" in found.err) == ([], True)


def test_record_of_the_command_line(cli):
    document = cli("run", "dbe", *TINY, "--set", "dbe.kappa=5", "-o", "momentum=0.9", "--json").json()
    assert document["method"] == "dbe"
    assert document["config"]["settings"] == {"mr.kappa": 5.0}
    assert document["config"]["momentum"] == 0.9
    assert document["data"]["hash"]
    assert [r["round"] for r in document["records"]] == [0, 1, 2, 3]       # 0: DBE's preparation


def test_text_output_and_warnings(cli):
    said = cli("run", "fedavg", *TINY, "--seed", "4")
    assert "last round" in said.out
    assert "best by validation" in said.out
    assert "Records and models: runs/fedavg-synthetic-" in said.out


@pytest.mark.parametrize(("name", "text"), [
    ("s.toml", 'rounds = 2\nlr = 0.1\ndata = "synthetic(samples=80, classes=2, clients=3, features=4)"\n[settings.dbe]\nkappa = 5\n'),
    ("s.yaml", "rounds: 2\nlr: 0.1\ndata: synthetic(samples=80, classes=2, clients=3, features=4)\nsettings:\n  dbe.kappa: 5\n"),
    ("s.json", json.dumps({"rounds": 2, "lr": 0.1, "data": "synthetic(samples=80, classes=2, clients=3, features=4)",
                           "settings": {"dbe": {"kappa": 5}}}))])
def test_settings_from_a_file(cli, tmp_path, name, text):
    (tmp_path / name).write_text(text)
    config = cli("run", "dbe", "--config", name, "--lr", "0.2", "--json").json()["config"]
    assert (config["rounds"], config["lr"], config["settings"]) == (2, 0.2, {"mr.kappa": 5.0})
    other = cli("run", "dbe", "--config", name, "--set", "dbe.kappa=7", "-o", "rounds=1", "--json").json()["config"]
    assert (other["rounds"], other["settings"]) == (1, {"mr.kappa": 7.0})


def test_resume_reads_finished_runs_and_goes_on_with_others(cli, tmp_path):
    whole = cli("run", "fedavg", *TINY, "--out", "a", "--json").json()
    cli("run", "local", *TINY, "--out", "b")
    assert plain(cli("resume", "a", "--json").json()) == plain(whole)
    both = cli("resume", "a", "b", "--json").json()
    assert [d["method"] for d in both] == ["fedavg", "local"]
    (tmp_path / "a" / "done").unlink()                              # as after a kill while the models were written
    (tmp_path / "a" / "final" / "global.safetensors").unlink()
    assert plain(cli("resume", "a", "--json").json()) == plain(whole)
    assert (tmp_path / "a" / "final" / "global.safetensors").is_file()
    said = cli("resume", "absent", "b", "--json", code=2)           # one that fails does not keep the others
    assert [d["method"] for d in said.json()] == ["local"]
    assert "absent" in said.err


def _commands(group, *before):
    for name, command in sorted(group.commands.items()):
        yield from _commands(command, *before, name) if hasattr(command, "commands") else [((*before, name), command)]


def test_every_help_is_plain_text_and_explains_what_is_given(cli):
    """Typer writes "\\[default: 3]" for Rich, which does not read it here; with Click 8.5 it forgets the help of arguments."""
    commands = list(_commands(typer.main.get_command(app)))
    assert len(commands) > 25
    for words, command in commands:
        said = cli(*words, "--help").out
        assert "\\" not in said, words
        assert said.startswith("Usage: "), words
        for parameter in command.params:
            told = getattr(parameter, "told", parameter.help)
            assert told, (words, parameter.name)
            assert " ".join(told.split()) in " ".join(said.split()), (words, parameter.name)
        assert said.lower().count("arguments:") <= 1, words
        assert "_ " not in said.partition("\n")[0] + " ", words            # names of our code, as APP_


def test_version_and_help(cli):
    assert cli("--version").out.startswith("consilience ")
    for command in ("run", "resume", "export", "predict", "onboard", "compare", "explain"):
        assert "Usage" in cli(command, "--help").out


@pytest.mark.parametrize(("words", "seen"), [(("explain", "fedprox"), r"(\u03bc/2)"), (("methods", "--format", "latex"), "fedprox")])
def test_a_terminal_that_lacks_letters_shows_their_numbers(words, seen, tmp_path):
    """As under a locale other than UTF-8. What a terminal cannot show must not end a command, least of all one that has run for hours."""
    command = [sys.executable, "-c", "from consilience.cli import main; main()", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, env=os.environ | {"PYTHONIOENCODING": "ascii"}, check=False)
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr
    assert seen in done.stdout.decode("ascii")


def test_ctrl_c_exits_130_and_the_same_command_goes_on(tmp_path):
    """A real process, because signals are."""
    command = [sys.executable, "-c", "from consilience.cli import main; main()", "run", "dbe", *TINY, "--rounds", "400", "--out", "r"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    records = tmp_path / "r" / "records.jsonl"
    deadline = time.monotonic() + 120
    while not (records.is_file() and records.read_text().count("\n") > 3):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Run the same command again to resume" in err
    assert "Traceback" not in err
    before = records.read_text().count("\n")
    assert 3 < before < 401
    assert 0 < open_run(tmp_path / "r").federation.round_number <= before


@pytest.mark.skipif(os.name == "nt", reason="there is no SIGTERM to send")
@pytest.mark.parametrize("words", ["run dbe", "compare dbe --jobs 2", "sweep dbe --trials 2"])
def test_sigterm_exits_143_with_the_same_words(tmp_path, words):
    """What a scheduler sends when a job's time is over. The default ended the process without a word."""
    command = [sys.executable, "-c", "from consilience.cli import main; main()", *words.split(), *TINY, "--rounds", "4000", "--out", "r"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    begun = lambda: [r for r in tmp_path.rglob("records.jsonl") if r.read_text().count("\n") > 3]
    while not begun():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "Run the same command again to resume" in err
    assert "Traceback" not in err
    for records in begun():
        with folder_lock(records.parent):                    # its process has ended too, and the folder can go on
            assert 0 < open_run(records.parent).federation.round_number < 4000


def test_a_command_leaves_the_handling_of_signals_as_it_was(cli):
    own = lambda number, frame: None
    for handler in (signal.SIG_DFL, signal.SIG_IGN, own):
        before, seen = signal.signal(signal.SIGTERM, handler), []
        try:
            cli("--version")
            seen.append(signal.getsignal(signal.SIGTERM))
        finally:
            signal.signal(signal.SIGTERM, before)
        assert seen == [handler]


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="signals can be blocked on POSIX alone")
def test_ctrl_c_while_processes_start_leaves_no_traceback_of_theirs(tmp_path):
    """A terminal sends Ctrl-C to every process of a comparison, to those that are still importing too."""
    (tmp_path / "sitecustomize.py").write_text(
        "import pathlib, sys, time\n"
        "class Slow:\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        if name == 'torch' and any('spawn_main' in word for word in sys.orig_argv):\n"
        f"            pathlib.Path({str(tmp_path / 'importing')!r}).touch()\n"
        "            time.sleep(60)\n"
        "sys.meta_path.insert(0, Slow)\n")
    command = [sys.executable, "-c", "from consilience.cli import main; main()", "compare", "fedavg", *TINY, "--jobs", "2", "--out", "c"]
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
                               env={**os.environ, "PYTHONPATH": path})
    deadline = time.monotonic() + 120
    while not (tmp_path / "importing").exists():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Run the same command again to resume" in err
    assert "Traceback" not in err


def test_the_score_of_clients_held_out_is_printed(cli, tmp_path):
    said = cli("run", "fedavg", "--data", "digits", "--clients", "4", "--split", "iid", "--rounds", "1", "-o", "hold_out=client1,client3",
               "--out", str(tmp_path / "run"))
    held = json.loads((tmp_path / "run" / "records.jsonl").read_text().splitlines()[-1])["held_out"]
    own = held["per_client"]
    each = f"(client1 {own['client1']:.3f}, client3 {own['client3']:.3f})"
    assert f"Clients held out, last round: {held['accuracy']:.3f} with the global model {each}." in said.out


def test_the_score_of_clients_held_out_by_the_criterion_is_printed(cli, tmp_path):
    said = cli("run", "fedavg", "--data", "digits", "--clients", "4", "--split", "iid", "--rounds", "1", "-o", "hold_out=client1",
               "-o", "criterion=auroc", "-o", "eval_clients=2", "--out", str(tmp_path / "run"))
    last = json.loads((tmp_path / "run" / "records.jsonl").read_text().splitlines()[-1])
    accuracy, auroc = last["held_out"]["accuracy"], last["criterion"]["held_out"]["value"]
    assert accuracy != auroc
    for words in (f"accuracy {accuracy:.3f}", f"auroc {auroc:.3f}"):
        assert f"Clients held out, last round: {words} with the global model (client1 {words.split()[1]})." in said.out
    judged = next(line for line in said.out.splitlines() if line.startswith("Judged by auroc"))
    assert judged.endswith("on 2 of 3 clients drawn by the seed.")


def test_without_flower_a_federation_can_be_read_about_and_not_run(cli, monkeypatch):
    def absent(name):
        raise PackageNotFoundError(name)
    monkeypatch.setattr("consilience.federation.version", absent)
    assert "Admit sites' keys" in cli("federation", "admit", "--help").out
    assert "pip install 'consilience[flower]'" in cli("federation", "key", "k", code=2).err
