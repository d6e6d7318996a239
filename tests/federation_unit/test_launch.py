"""Commands as Flower takes them, TLS unless asked otherwise, and children that never outlive their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from consilience.errors import ConfigError
from consilience.federation.certificates import NodeKey, make_certificates, make_key
from consilience.federation.commands import (
    Site,
    SuperLink,
    answers,
    check_address,
    connection_toml,
    free_port,
    override_arguments,
    superlink_command,
    supernode_command,
    toml_value,
)
from consilience.federation.launch import Launcher, connect
from consilience.federation.processes import LaunchError, Processes, marked


@pytest.fixture
def files(tmp_path):
    return make_certificates(tmp_path / "c", ["hub.example.org"])


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_server_has_tls_and_authentication_unless_told_otherwise(files, tmp_path):
    command = superlink_command("127.0.0.1", 9092, files, None)
    assert "--enable-supernode-auth" in command
    assert command[command.index("--ssl-keyfile") + 1] == str(files.key)
    assert "--insecure" not in command
    assert "--disable-runtime-dependency-installation" in command
    plain = superlink_command("127.0.0.1", 9092, None, tmp_path / "db")
    assert "--insecure" in plain
    assert "--enable-supernode-auth" not in plain
    assert plain[plain.index("--database") + 1] == str(tmp_path / "db")


def test_no_tls_must_be_asked_for(files, tmp_path):
    with pytest.raises(ConfigError, match="--insecure"):
        Launcher(tmp_path / "l")
    with pytest.raises(ConfigError, match="contradict"):
        Launcher(tmp_path / "l", certificates=files, insecure=True)
    link = SuperLink("127.0.0.1:1", files.authority)
    with Launcher(tmp_path / "l", certificates=files) as launcher, pytest.raises(ConfigError, match="consilience federation key"):
        launcher.site(Site(0, "arrays(path='a')", tmp_path / "s", link))


def test_a_certificate_for_another_host(files):
    with pytest.raises(ConfigError, match=r"not for '10\.1\.1\.1'"):
        superlink_command("10.1.1.1", 9092, files, None)
    assert superlink_command("0.0.0.0", 9092, files, None)


def test_a_site_command(files, tmp_path):
    site = Site(2, "arrays(path='/a b/x.npz')", tmp_path / "store", SuperLink("hub:9092", files.authority), NodeKey(tmp_path / "site.key"))
    command = supernode_command(site, 5000, tmp_path / "secret")
    value = lambda name: command[command.index(name) + 1]
    assert value("--isolation") == "process"                   # the SuperNode itself runs no app
    assert value("--auth-supernode-private-key") == str(tmp_path / "site.key")
    assert value("--root-certificates") == str(files.authority)
    assert value("--host") == "127.0.0.1"
    assert "--insecure" not in command
    assert "--allow-runtime-dependency-installation" not in command


def test_node_config_reads_back_in_flower(tmp_path):
    from flwr.common.config import parse_config_args

    from consilience.engines.flower.settings import SiteSettings
    site = Site(1, "ward.data:load(path='/a b/=x', k=3)", tmp_path / "st ore", SuperLink("h:1", None), name="St. Mary's", threads=1)
    read = SiteSettings.make(parse_config_args([site.node_config()]))
    assert (read.site, read.data, read.name, read.threads) == (1, site.data, "St. Mary's", 1)
    assert read.store == str(tmp_path / "st ore" / "state")


@pytest.mark.parametrize("value", [True, 3, 0.1, 1e-05, "plain", "fedavg+dbe(kappa=5)", "a 'quoted' word", 'another "one"', "C:\\data", ""])
def test_overrides_read_back_as_toml(tmp_path, value):
    arguments = override_arguments({"x": value}, tmp_path / "o.toml")
    assert tomllib.loads(Path(arguments[1]).read_text()) == {"x": value}


def test_values_no_reader_would_take():
    for wrong in ("both ' and \"", "two\nlines"):
        with pytest.raises(ConfigError, match="quotes"):
            toml_value(wrong)
    for wrong in ("hub", "hub:port", "https://hub:9", ":9", "hub:99999"):
        with pytest.raises(ConfigError, match="host:port"):
            check_address(wrong)
    check_address("[::1]:9092")


def test_the_connection_file(files):
    held = tomllib.loads(connection_toml("127.0.0.1:9", files.authority))["superlink"]
    assert held[held["default"]] == {"address": "127.0.0.1:9", "root-certificates": str(files.authority.absolute())}
    assert tomllib.loads(connection_toml("h:1", None))["superlink"]["consilience"]["insecure"] is True


def test_connecting_to_no_server(tmp_path, files):
    with pytest.raises(ConfigError, match="No server was started"):
        connect(tmp_path)
    home = tmp_path / "flower" / "server"
    home.mkdir(parents=True)
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    (home / "config.toml").write_text(connection_toml(address, files.authority))
    assert not answers(SuperLink(address, files.authority))
    with pytest.raises(ConfigError, match="does not answer"):
        connect(tmp_path)


GRANDCHILD = ("import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], "
              "start_new_session=True); print(p.pid, flush=True); time.sleep(600)")


def test_stopping_leaves_nothing_behind_not_even_grandchildren_in_sessions_of_their_own(tmp_path):
    with Processes() as processes:
        child = processes.start("parent", [sys.executable, "-c", GRANDCHILD], tmp_path / "log")
        child.wait_for(lambda: child.said().strip().isdigit(), "it says the grandchild's number", 60)
        grandchild = int(child.said())
        assert alive(grandchild)
        assert set(marked(processes.mark)) >= {child.process.pid, grandchild}
    assert not child.running
    assert marked(processes.mark) == []


def test_a_server_ends_what_one_before_it_left(tmp_path, monkeypatch):
    """A server was killed: its SuperLink lives on, for it waits for whoever follows a run's log. The next one in the folder ends it."""
    left = Processes()
    child = left.start("SuperLink", [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"],
                       tmp_path / "log")
    (tmp_path / "mark").write_text(f"{left.mark}\n{tmp_path}")
    monkeypatch.setattr("consilience.federation.launch.superlink_command", lambda *args: [sys.executable, "-c", "pass"])
    with Launcher(tmp_path, insecure=True) as launcher:
        with pytest.raises(LaunchError, match="ended with code 0"):
            launcher.superlink()
        assert not child.running
        assert (tmp_path / "mark").read_text() == f"{launcher.mark}\n{tmp_path}"


@pytest.mark.parametrize("copied", [True, False])
def test_a_copy_of_a_server_s_folder_or_a_damaged_one_ends_nobody(tmp_path, monkeypatch, copied):
    """A copy was tried out on the machine of the true server, whose processes were all killed."""
    monkeypatch.setattr("consilience.federation.launch.superlink_command", lambda *args: [sys.executable, "-c", "pass"])
    (tmp_path / "copy").mkdir()
    with Processes() as server:
        child = server.start("SuperLink", [sys.executable, "-c", "import time; time.sleep(600)"], tmp_path / "log")
        (tmp_path / "copy" / "mark").write_bytes(f"{server.mark}\n{tmp_path / 'server'}".encode() if copied else b"\xff\n")
        with Launcher(tmp_path / "copy", insecure=True) as launcher, pytest.raises(LaunchError, match="ended with code 0"):
            launcher.superlink()
        assert child.running


def test_an_error_stops_children_too(tmp_path):
    def fail() -> None:
        with Processes() as processes:
            started.append(processes.start("sleeper", [sys.executable, "-c", "import time; time.sleep(600)"], tmp_path / "log"))
            raise RuntimeError("stop here")
    started: list = []
    with pytest.raises(RuntimeError, match="stop here"):
        fail()
    assert not started[0].running


def test_a_parent_that_is_ended_takes_its_children_along(tmp_path):
    script = ("import sys, time; from pathlib import Path; from consilience.federation.processes import Processes\n"
              "with Processes() as p:\n"
              "    c = p.start('sleeper', [sys.executable, '-c', 'import time; time.sleep(600)'], Path(sys.argv[1]))\n"
              "    print(c.process.pid, flush=True); time.sleep(600)\n")
    parents = {number: subprocess.Popen([sys.executable, "-c", script, str(tmp_path / f"log{number}")], stdout=subprocess.PIPE,
                                        stderr=subprocess.DEVNULL, text=True) for number in (signal.SIGTERM, signal.SIGKILL)}
    children = {number: int(parent.stdout.readline()) for number, parent in parents.items() if parent.stdout}
    for number, parent in parents.items():
        parent.send_signal(number)
        parent.wait(60)
        deadline = time.monotonic() + 60
        while alive(children[number]) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not alive(children[number]), number


def test_a_child_that_fails_says_why(tmp_path):
    with Processes() as processes:
        child = processes.start("The thing", [sys.executable, "-c", "print('no such luck'); raise SystemExit(4)"], tmp_path / "log")
        with pytest.raises(LaunchError, match=r"The thing ended with code 4 before it is up[\s\S]*no such luck"):
            child.wait_for(lambda: False, "it is up", 60)
        with pytest.raises(LaunchError, match="code 4"):
            processes.check()
        with pytest.raises(LaunchError, match="could not be started"):
            processes.start("Nothing", [str(tmp_path / "absent")], tmp_path / "log2")


def test_a_slow_child_is_not_waited_for_for_ever(tmp_path):
    with Processes() as processes:
        child = processes.start("Sloth", [sys.executable, "-c", "import time; time.sleep(600)"], tmp_path / "log")
        with pytest.raises(LaunchError, match="not ready after 0 seconds"):
            child.wait_for(lambda: False, "it is up", 0.2)


def test_keys_differ(tmp_path):
    assert make_key(tmp_path / "a").public.read_bytes() != make_key(tmp_path / "b").public.read_bytes()
