"""`consilience federation …`: apps, certificates, the server, the sites and what they approve."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from typer.core import TyperGroup

from ..errors import ConfigError
from ..federation import require_flower
from ..options import coerce
from ..runs.config import parse_set
from .federation_keys import admit, admit_key, dismiss
from .federation_study import demo, study
from .output import AsJson, err, out, print_json, warn
from .settings import set_twice


class _NeedsFlower(TyperGroup):
    """Commands that say so before they do anything where Flower is not installed. Their help can be read all the same."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        if "--help" not in rest:
            require_flower()
        return name, command, rest


app = typer.Typer(no_args_is_help=True, help="A real federation on Flower: sites that keep their data.", cls=_NeedsFlower)
app.command()(demo)
app.command()(study)

Ca = Annotated[Path | None, typer.Option("--ca", help="The authority's certificate (ca.crt), by which the server is known.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="No TLS and no keys. For a test on one machine only.")]
Store = Annotated[Path, typer.Argument(help="The site's folder: its key, its approvals, and what it keeps between rounds.",
                                       show_default=False)]
AppFolder = Annotated[Path, typer.Argument(metavar="APP", help="An app's folder, or a .fab file.", show_default=False)]


@app.command()
def init(folder: Annotated[Path, typer.Argument(help="A new folder; its name becomes the app's.", show_default=False)],
         method: Annotated[str | None, typer.Option("--method", help="Names joined by '+', as in scaffold+dbe.")] = None,
         run: Annotated[Path | None, typer.Option("--run", help="The folder of a simulation: its method, model, training, transform and "
                                                  "classes are used. Other options change them.")] = None,
         model: Annotated[str | None, typer.Option("--model", help="Model; without it one that suits the samples.")] = None,
         like: Annotated[str | None, typer.Option("--like", help="A source whose samples have the agreed form: a site's data, as in "
                                                  "\"arrays(path='site.npz')\", or a data set such as digits. Only their form is "
                                                  "read.")] = None,
         sites: Annotated[int | None, typer.Option("--sites", help="Number of sites; 3, or as many as the run has clients.", min=1)] = None,
         rounds: Annotated[int | None, typer.Option("--rounds", help="Rounds of training; 30, or the run's.", min=1)] = None,
         sample: Annotated[str | None, typer.Option("--sample", help="Shape of a sample, as in 1,28,28; instead of --like.")] = None,
         classes: Annotated[int | None, typer.Option("--classes", help="Number of classes; instead of --like.")] = None,
         lr: Annotated[float | None, typer.Option("--lr", help="Local learning rate.")] = None,
         set_: Annotated[list[str] | None, typer.Option("--set", help="An option of the method, as in dbe.kappa=5. May be "
                                                         "repeated.")] = None,
         option: Annotated[list[str] | None, typer.Option("--option", "-o", help="Any other setting, as in deadline=600. "
                                                          "May be repeated.")] = None,
         as_json: AsJson = False) -> None:
    """Write a small Flower app. Settings are checked first; nothing is written when one is refused."""
    from ..federation.app import app_hash
    from ..federation.app import init as write
    from ..federation.from_run import cut_of, read_run
    if method is None and run is None:
        raise ConfigError("Which method? Say --method, as in --method scaffold+dbe, or --run with the folder of a simulation.")
    simulated = read_run(run) if run else None
    given: dict[str, Any] = {"method": method, "model": model, "sites": sites, "rounds": rounds, "sample": sample, "classes": classes,
                              "lr": lr}
    more: dict[str, str] = {}
    for pair in option or []:
        key, equals, text = pair.partition("=")
        if not equals:
            raise ConfigError(f"--option takes name=value, as in deadline=600. Got {pair!r} instead.")
        if given.get(key.strip()) is not None:
            raise set_twice(key.strip(), given[key.strip()], pair)
        more[key.strip()] = text
    values = {**(simulated.values if simulated else {}), **{k: v for k, v in given.items() if v is not None}, **more,
              **{f"settings.{k}": v for k, v in parse_set(set_ or []).items()}}
    if simulated:
        like = like or (None if sample else simulated.like)
        for what in simulated.left:
            warn(f"The run's {what} is of the simulation alone; sites differ and fail by themselves.")
    settings = write(folder, values, like=like, name_of_data=simulated.name if simulated else "", warn=warn)
    sha256 = app_hash(folder)
    if as_json:
        return print_json({"app": str(folder), "hash": sha256, "settings": settings.flat()})
    console = out()
    console.print(f"{folder}/pyproject.toml   every setting, with its meaning\n{folder}/app.py           imports the installed package\n"
                  f"{folder}/README.md        what to do next", markup=False)
    console.print(f"{settings.run.stack().canonical} on {settings.run.run.model}, {settings.agreed.sites} sites, "
                  f"{settings.run.run.rounds} rounds.", markup=False)
    console.print(f"Hash for the sites to approve: {sha256}")
    if simulated and cut_of(simulated):
        console.print(cut_of(simulated), soft_wrap=True, markup=False)


@app.command()
def certificates(folder: Annotated[Path, typer.Argument(help="Folder to write them to.", show_default=False)],
                 host: Annotated[list[str], typer.Option("--host", help="A name or address by which sites reach the server. May be "
                                                         "repeated.", show_default=False)],
                 days: Annotated[int, typer.Option("--days", help="How long the server's certificate is valid.", min=1)] = 365,
                 again: Annotated[bool, typer.Option("--again", help="Make a new server certificate from the same authority.")] = False,
                 as_json: AsJson = False) -> None:
    """Make a certificate authority and the server's certificate."""
    from ..federation.certificates import expires, hosts_of, make_certificates
    files = make_certificates(folder, host, days=days, again=again)
    names, until = hosts_of(files.certificate), expires(files.certificate)
    if as_json:
        return print_json({"authority": str(files.authority), "certificate": str(files.certificate), "key": str(files.key),
                           "authority_key": str(files.authority_key), "hosts": names, "expires": until.isoformat()})
    console = out()
    console.print(f"{files.authority}       give it to every site\n"
                  f"{files.certificate}   the server's, for {', '.join(names)}; valid until {until:%Y-%m-%d}\n"
                  f"{files.key}   the server's secret\n"
                  f"{files.authority_key}       needed only for another certificate: keep it off the server", markup=False)


@app.command()
def key(store: Store, as_json: AsJson = False) -> None:
    """Make a site's key pair. The private half never leaves the site; the public one goes to the server's operator."""
    from ..federation.certificates import make_key
    pair = make_key(store)
    if as_json:
        return print_json({"private": str(pair.private), "public": str(pair.public)})
    out().print(f"{pair.private}   the site's secret\n{pair.public}   give it to the server's operator", markup=False)


@app.command("hash")
def hash_(app_: AppFolder, as_json: AsJson = False) -> None:
    """Print an app's hash and what its bundle holds."""
    from ..federation.app import bundle
    from ..federation.approval import files_in, hash_of
    content = bundle(app_)
    if as_json:
        return print_json({"hash": hash_of(content), "files": [{"name": n, "bytes": b} for n, b in files_in(content)]})
    console = out()
    console.print(hash_of(content))
    for name, size in files_in(content):
        console.print(f"  {size:>8} bytes  {name}", markup=False)


@app.command()
def approve(store: Store, what: Annotated[str, typer.Argument(metavar="HASH|APP", help="An app's hash, its folder, or its .fab file.",
                                                              show_default=False)],
            override: Annotated[list[str] | None, typer.Option("--override", help="A setting that runs may change, as in lr; * for all. "
                                                               "May be repeated.")] = None,
            study: Annotated[bool, typer.Option("--study", help="Let runs change method, lr, seed, rounds and eval_every, as "
                                                "`federation study` does.")] = False,
            as_json: AsJson = False) -> None:
    """Let an app run at this site."""
    from ..federation.app import bundle
    from ..federation.approval import HARMLESS, STUDY, Approvals, hash_of, own_settings
    sha256 = what.strip().lower()
    if Path(what).exists():
        content = bundle(what)
        own_settings(content)                      # refuses a file that is no app
        sha256 = hash_of(content)
    entry = Approvals(store).approve(sha256, [*(override or []), *(STUDY if study else ())])
    if as_json:
        return print_json({"hash": sha256, **entry})
    changes = ", ".join(entry["overrides"]) or "nothing"
    out().print(f"Approved {sha256}\nRuns may change {changes} (and {', '.join(HARMLESS)}, which concern the server alone).", markup=False)


@app.command()
def revoke(store: Store, what: Annotated[str, typer.Argument(metavar="HASH", help="An approved app's hash; `approvals` lists them.",
                                                             show_default=False)], as_json: AsJson = False) -> None:
    """Take an approval back. This takes effect with the next message."""
    from ..federation.approval import Approvals
    Approvals(store).revoke(what)
    print_json({"revoked": what}) if as_json else out().print(f"Revoked {what}")


@app.command()
def approvals(store: Store, as_json: AsJson = False) -> None:
    """List what a site has approved and refused."""
    from ..federation.approval import Approvals
    from ..runs.folder import read_lines
    if not store.is_dir():
        raise ConfigError(f"There is no store {str(store)!r}. `federation key` makes a site's, and `federation approve` too.")
    held = Approvals(store)
    log = held.refused / "refused.jsonl"
    refused = read_lines(log) if log.is_file() else []
    if as_json:
        return print_json({"approved": held.all(), "refused": refused})
    console = out()
    for sha256, entry in held.all().items():
        console.print(f"approved {entry['approved']}  {sha256}  runs may change: {', '.join(entry['overrides']) or 'nothing'}",
                      markup=False)
    for entry in refused:
        console.print(f"refused  {entry['time']}  {entry['hash']}  run {entry['run']}: {entry['why']}", markup=False)
    if not held.all() and not refused:
        console.print("Nothing approved, nothing refused.")


@app.command()
def server(folder: Annotated[Path, typer.Argument(help="The server's folder: its memory, logs and Flower configuration.",
                                                  show_default=False)],
           certificates_: Annotated[Path | None, typer.Option("--certificates", help="Folder made by `federation certificates`.")] = None,
           host: Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
           port: Annotated[int, typer.Option("--port", help="Port to listen on.", min=1, max=65535)] = 9092,
           admitted: Annotated[list[Path] | None, typer.Option("--admit", help="A site's public key. May be repeated.")] = None,
           insecure: Insecure = False) -> None:
    """Run a SuperLink until Ctrl-C. Other machines can reach only the interface for sites; runs are started on this one."""
    from ..federation.certificates import ServerFiles
    from ..federation.launch import Launcher
    from ..federation.processes import only_one
    from ..federation.trust import ends_soon, read_by_others
    console = err()
    files = ServerFiles(certificates_) if certificates_ else None
    with only_one(folder, "server"), Launcher(folder, certificates=files, insecure=insecure) as launcher:
        for caution in (ends_soon(files), read_by_others(files.key)) if files else ():
            if caution:
                warn(caution)
        link = launcher.superlink(host, port, database=folder.absolute() / "superlink.db")
        console.print(f"The SuperLink answers on {link.address} {'without' if insecure else 'with'} TLS; its log: "
                      f"{launcher.log('superlink')}", soft_wrap=True, markup=False)
        for public in admitted or []:
            admit_key(launcher, link, public)
        home = shlex.quote(str(folder.absolute() / "flower" / "server"))
        console.print(f"Start a run with: FLWR_TELEMETRY_ENABLED=0 FLWR_HOME={home} flwr run APP consilience --stream", soft_wrap=True,
                      markup=False)
        console.print("Ctrl-C stops it; started again with the same folder, it knows its sites.")
        while True:
            launcher.check()
            time.sleep(1)


app.command()(admit)
app.command()(dismiss)


@app.command()
def site(store: Store,
         server_: Annotated[str, typer.Option("--server", help="The server, as in hub.example.org:9092.", show_default=False)],
         number: Annotated[int, typer.Option("--number", help="This site's number, from 0; its random draws are keyed by it.", min=0,
                                             show_default=False)],
         data: Annotated[str, typer.Option("--data", help="folder(path=…), arrays(path=…), table(path=…) or package.module:function.",
                                           show_default=False)],
         ca: Ca = None, name: Annotated[str, typer.Option("--name", help="The site's name in records.")] = "",
         device: Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1 …; auto: a GPU where there is one.")] = "auto",
         threads: Annotated[int, typer.Option("--threads", help="Threads on a CPU; 0: all cores.", min=0)] = 0,
         classes: Annotated[int | None, typer.Option("--classes", help="Number of classes, to check labels at once.")] = None,
         class_names: Annotated[str, typer.Option("--class-names", help="Names of the classes in the app's order, where labels are "
                                                  "text, to check them at once.")] = "",
         feature_names: Annotated[str, typer.Option("--feature-names", help="Names of a table's columns in the agreed order, as "
                                                    "feature_names of the app.")] = "",
         check: Annotated[bool, typer.Option("--check", help="Read the data, say what they hold, and stop.")] = False,
         insecure: Insecure = False, as_json: AsJson = False) -> None:
    """Run a site until Ctrl-C. That is Flower's SuperNode, and a starter that runs approved apps only."""
    from ..federation.approval import Approvals
    from ..federation.certificates import NodeKey
    from ..federation.commands import Site, SuperLink, check_address
    from ..federation.launch import Launcher
    from ..federation.processes import only_one
    from ..federation.site import describe_site, load_site
    from ..federation.trust import check_authority, check_node_key, read_by_others
    from .federation_site import watch
    check_address(server_)
    if insecure and ca is not None:
        raise ConfigError("--ca and --insecure contradict each other; leave one of them out.")
    held = load_site(data, number=number, classes=classes, class_names=coerce(class_names, tuple[str, ...], "--class-names"),
                     feature_names=coerce(feature_names, tuple[str, ...], "--feature-names"), alone=True)
    about = describe_site(held)
    if check:
        return print_json(about) if as_json else _show_site(about)
    if not insecure and (ca is None or not ca.is_file()):
        raise ConfigError(f"--ca must name the authority's certificate (ca.crt), which the server's operator gives out. Got "
                          f"{str(ca) if ca else None!r} instead.")
    pair = NodeKey(store / "site.key")
    if not insecure and not pair.private.is_file():
        raise ConfigError(f"The site has no key in {str(store)!r}. Make one with: consilience federation key "
                          f"{shlex.quote(str(store))}")
    if not insecure:
        assert ca is not None
        check_authority(ca)
        check_node_key(pair)
        if loose := read_by_others(pair.private):
            warn(loose)
    _show_site(about, stderr=True)
    if not Approvals(store).all():
        warn("No app is approved yet; every run will be refused. Approve one with: consilience federation approve "
             f"{shlex.quote(str(store))} HASH")
    link = SuperLink(server_, None if insecure else ca)
    own = Site(number, data, store, link, None if insecure else pair, name, device, threads)
    with only_one(store, "site"), Launcher(store, client=True, insecure=insecure) as launcher:
        running = launcher.site(own, wait=False)
        watch(launcher, running, Approvals(store))


def _show_site(about: dict[str, Any], stderr: bool = False) -> None:
    counts, names = about["training_labels"], about.get("class_names")
    labels = ", ".join(f"{name} {count}" for name, count in zip(names, counts)) + " (the app numbers them)" if names else str(counts)
    (err() if stderr else out()).print(
        f"{about['train']} samples to train on, {about['validation']} to validate, {about['test']} to test; shape "
        f"{'×'.join(map(str, about['sample']))}, {about['input']}; training labels {labels}", soft_wrap=True, markup=False)
