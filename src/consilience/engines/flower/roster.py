"""Which node is which site, and what sites are asked: requests out, checked answers in.

A node enrols by saying its declared number; requests then go to numbers. Nodes come and go: every round uses those that are
there. An answer that is wrong is refused and logged with the node's id, and counts as no answer.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Protocol, TypeVar

from ...core.federation import Federation
from ...errors import ConsilienceError
from .broadcast import Broadcast
from .build import site_name
from .checks import check_envelope
from .parcel import Parcel, Raw, Refused, Silent, plain, real_number, whole_number
from .settings import FederationSettings
from .site import PROTOCOL

log = logging.getLogger("consilience.federation")
T = TypeVar("T")
HELLO_SECONDS = 120.0
AGAIN_SECONDS = 10.0             # for a node that gave no answer before: it may still be reading its data
MOST_ROWS = 10**8                # of one site's parts: the server keeps eight bytes for each, whatever a site claims


class TooFewAnswers(ConsilienceError):
    """A round that fewer sites answered than it needs. Nothing of it was used."""

    exit_code = 6


class Link(Protocol):
    """The way to the nodes. Flower's grid behind it, or functions called directly in tests."""

    def nodes(self) -> list[int]:
        """Nodes that are reachable now."""

    def ask(self, requests: Mapping[int, Parcel], task: str, seconds: float, least: int) -> Iterator[tuple[int, Parcel | Refused]]:
        """Send a request to each node; answers as they come, until all are there, or the time is over (0: no limit) and at
        least so many have answered.
        """


@dataclass
class Member:
    """A site as the server knows it."""

    number: int
    name: str
    sizes: dict[str, int]
    node: int | None = None                                       # reachable now, under this id
    was: int | None = None                                        # the id it last enrolled under
    held: dict[str, str] = field(default_factory=dict)            # what it had of the broadcast when it last answered


class Roster:
    """The sites, by number."""

    def __init__(self, settings: FederationSettings, link: Link, token: str, declaration: str) -> None:
        self.settings, self.link, self.token, self.declaration = settings, link, token, declaration
        self.members: dict[int, Member] = {}
        self.accepted: Callable[[int], int] = lambda number: 0    # last round accepted from a site
        self.wire: dict[str, int] = {"up": 0, "down": 0}
        self.seconds: dict[int, float] = {}                       # of each site's last answer
        self._refused: dict[int, str] = {}                        # node -> why it may not take part
        self._silent: dict[int, str] = {}                         # node -> how it gave no answer; it is asked again

    # ---- who is there ----------------------------------------------------------------------------------------------------

    def refresh(self) -> list[int]:
        """Look who is reachable, enrol newcomers; returns the numbers of the sites that are there, ascending."""
        there = set(self.link.nodes())
        for member in self.members.values():
            if member.node is not None and member.node not in there:
                log.warning("Site %d (%s) is gone: node %d is not reachable.", member.number, member.name, member.node)
                member.node = None
        self._refused = {node: why for node, why in self._refused.items() if node in there}      # one that returns may try again
        self._silent = {node: how for node, how in self._silent.items() if node in there}
        strangers = there - {m.node for m in self.members.values()} - self._refused.keys()
        for nodes, seconds in ((strangers - self._silent.keys(), HELLO_SECONDS), (strangers & self._silent.keys(), AGAIN_SECONDS)):
            if nodes:
                self._greet(sorted(nodes), seconds)
        return self.present

    def _greet(self, nodes: list[int], seconds: float) -> None:
        """Ask nodes who they are, and enrol those that are sites."""
        hellos = {node: Parcel.of(self._envelope("hello", 0)) for node in nodes}
        for node, answer in self.link.ask(hellos, "hello", self._deadline(seconds), 0):
            told = self._silent.pop(node, None)
            try:
                self._enrol(node, answer)
            except Silent as error:
                self._silent[node] = str(error).rstrip(".")
                if told is None:
                    log.warning("Node %d does not say who it is: %s. It is asked again; it may still be reading its data.", node,
                                self._silent[node])
            except Refused as error:
                self._refused[node] = str(error)
                log.error("Node %d is refused: %s.", node, error)

    @property
    def present(self) -> list[int]:
        return sorted(n for n, m in self.members.items() if m.node is not None)

    @property
    def refusals(self) -> str:
        """Nodes that may not take part or gave no answer, and why."""
        return " ".join([*(f"Node {node} was refused: {why}." for node, why in sorted(self._refused.items())),
                         *(f"Node {node} did not say who it is: {how}." for node, how in sorted(self._silent.items()))])

    def _deadline(self, most: float) -> float:
        agreed = self.settings.agreed.deadline
        return min(agreed, most) if agreed else most

    def _enrol(self, node: int, answer: Parcel | Refused) -> None:
        if isinstance(answer, Refused):
            raise answer
        about = answer.about
        check_envelope(about, {"federation": self.token, "task": "hello"})
        number, sizes = whole_number(about, "site"), about.get("sizes")
        if number >= self.settings.agreed.sites:
            raise Refused(f"it says it is site {number}, but the sites are 0 to {self.settings.agreed.sites - 1}")
        other = self.members.get(number)
        if other is not None and other.node is not None:
            raise Refused(f"it says it is site {number}, which node {other.node} is already")
        if about.get("version") != version("consilience"):
            raise Refused(f"it runs consilience {plain(about.get('version'), 40)}, the server {version('consilience')}")
        if about.get("declaration") != self.declaration:
            raise Refused("its model or method has other names, shapes or types of state than the server's")
        if not isinstance(sizes, dict) or sorted(sizes) != ["test", "train", "val"]:
            raise Refused("it does not say how many samples it has")
        counted = {k: whole_number(sizes, k) for k in sizes}
        if max(counted.values()) > MOST_ROWS:
            raise Refused(f"it says it has {plain(counted, 80)} samples, and at most {MOST_ROWS} of a kind are counted")
        if other is not None and other.sizes != counted:
            log.warning("Site %d returns with %s samples; it had %s.", number, counted, other.sizes)
        if other is not None and other.was not in (None, node):
            log.warning("Site %d was node %d before and is node %d now: another key, or a SuperLink that forgot its nodes.", number,
                        other.was, node)
        self.members[number] = Member(number, self._name_for(number, about.get("name")), counted, node, node)
        log.info("Site %d (%s) enrolled as node %d with %d training, %d validation and %d test samples.", number,
                 self.members[number].name, node, counted["train"], counted["val"], counted["test"])

    def _name_for(self, number: int, said: object) -> str:
        """The name it gave itself, for logs and records, unless another site has it, or goes by it where it gives none."""
        own, name = site_name(number), re.sub(r"[^\w.+-]+", "_", str(said or ""))[:60]
        others = [i for i in range(self.settings.agreed.sites) if i != number]
        if name in {*map(site_name, others), *(self.members[i].name for i in others if i in self.members)}:
            log.warning("Site %d calls itself %s, which stands for another site. It is called %s here.", number, name, own)
            return own
        return name or own

    def _same_rows(self, member: Member, about: Mapping[str, Any]) -> None:
        """A site whose data were replaced enrols anew: averages go by the sizes it enrolled with."""
        if about.get("sizes", member.sizes) != member.sizes:
            member.node = None
            raise Refused(f"its data have changed: it enrolled with {member.sizes} samples and has {plain(about['sizes'], 80)} now; it may "
                          "enrol anew")

    @property
    def sizes(self) -> list[int]:
        """Training samples by site; 0 for one that has not enrolled."""
        return [self.members[i].sizes["train"] if i in self.members else 0 for i in range(self.settings.agreed.sites)]

    @property
    def names(self) -> list[str]:
        return [self.members[i].name if i in self.members else site_name(i) for i in range(self.settings.agreed.sites)]

    # ---- questions and answers -------------------------------------------------------------------------------------------

    def _envelope(self, task: str, round_number: int, **more: Any) -> dict[str, Any]:
        """`once` makes that nobody can guess what Flower will call the message: by that name it takes an answer, from any admitted node."""
        return {"protocol": PROTOCOL, "federation": self.token, "digest": self.settings.digest(), "task": task, "round": round_number,
                "once": secrets.token_hex(16), **more}

    def ask(self, fed: Federation, task: str, numbers: list[int], read: Callable[[int, Parcel], T], *,
            downloads: Mapping[int, dict[str, Raw]] | None = None, least: int = 0, **more: Any) -> dict[int, T]:
        """Ask sites; returns what `read` makes of each answer that is in time and right. For `least` of them a federation that
        waits for late answers waits beyond the deadline.
        """
        least = least if self.settings.agreed.late == "wait" else 0
        broadcast = Broadcast(fed)
        out: dict[int, T] = {}
        waiting = {n: self.members[n] for n in numbers if n in self.members and self.members[n].node is not None}
        for full in (False, True):                           # a second time for those that miss something of the broadcast
            requests: dict[int, Parcel] = {}
            listed: dict[int, dict[str, str]] = {}
            by_node = {m.node: m for m in waiting.values() if m.node is not None}
            for node, member in by_node.items():
                listed[node] = broadcast.listed(alone=fed.goes_on_alone(fed.client(member.number)))
                arrays = broadcast.beyond(listed[node], {} if full else member.held)
                own = (downloads or {}).get(member.number, {})
                about = self._envelope(task, fed.round_number, site=member.number, accepted=self.accepted(member.number),
                                       last_exchange=fed.last_exchange, broadcast=listed[node], download=list(own), **more)
                requests[node] = Parcel(about, {**arrays, **{f"download/{path}": raw for path, raw in own.items()}})
                self.wire["down"] += requests[node].bytes
            waiting = {}
            for node, answer in self.link.ask(requests, task, self.settings.agreed.deadline, max(least - len(out), 0)):
                member = by_node[node]
                try:
                    if isinstance(answer, Refused):
                        raise answer
                    self.wire["up"] += answer.bytes
                    check_envelope(answer.about, {"federation": self.token, "site": member.number, "task": task, "round": fed.round_number})
                    self._same_rows(member, answer.about)
                    if answer.about.get("missing") is True and not full:
                        waiting[member.number] = member
                        continue
                    self.seconds[member.number] = real_number(answer.about.get("seconds", 0.0), "seconds")
                    out[member.number] = read(member.number, answer)
                    member.held = listed[node]
                except Refused as error:
                    member.held = {}
                    log.error("Round %d, %s: the answer of site %d (%s), node %d, is not used: %s.", fed.round_number, task,
                              member.number, member.name, node, error)
            if not waiting:
                break
        return out

