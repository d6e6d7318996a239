"""`consilience federation admit` and `dismiss`: which sites' keys a running server lets in."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .output import AsJson, err, out, print_json

Server = Annotated[Path, typer.Argument(help="The running server's folder.", show_default=False)]


def admit(folder: Server, public: Annotated[list[Path], typer.Argument(help="Sites' public keys.", show_default=False)],
          as_json: AsJson = False) -> None:
    """Admit sites' keys to a running server, on its own machine."""
    from ..federation.launch import connect
    launcher, link = connect(folder)
    nodes = {str(path): admit_key(launcher, link, path) for path in public}
    if as_json:
        print_json({"admitted": nodes})


def dismiss(folder: Server, what: Annotated[list[str], typer.Argument(metavar="KEY|NODE", help="A site's public key, or its node's number.",
                                                                     show_default=False)],
            as_json: AsJson = False) -> None:
    """Take sites' keys back. These sites are no longer let in; a run that is under way continues without them."""
    from ..federation.admitted import Door
    from ..federation.launch import connect
    door = Door(*connect(folder))
    nodes = {}
    for key in what:
        nodes[key] = door.dismiss(key)
        if not as_json:
            out().print(f"Took the key of node {nodes[key]} back. That site is let in again only with a new key.", soft_wrap=True)
    if as_json:
        print_json({"dismissed": nodes})


def admit_key(launcher: Any, link: Any, public: Path) -> str | None:
    """Admit one key and say so; its node's number, None where it was admitted before."""
    from ..federation.admitted import Door
    node = Door(launcher, link).admit(public)
    err().print(f"Admitted {public} as node {node}." if node else f"{public} was admitted before.", soft_wrap=True, markup=False)
    return node
