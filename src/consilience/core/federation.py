"""The federation: a method on a model and a population, and the state it has come to. Knows no part by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from .. import rng, tree
from ..errors import ConfigError, DataError
from ..tree import Flat, Tree
from . import returned
from .assemble import assemble
from .client import ClientState, ClientView, PlainWork, consult
from .declared import fresh_tensors, initial, moving_keys, still
from .engine import ClientTask, EngineFactory, MappingEngine, RoomyEngine, RoundReport, Unanswered, Work
from .glance import Glance
from .layout import Layout
from .memory_layout import settle_layout
from .method import Method
from .network import Trace
from .part import Model, Part
from .policy import Policy
from .population import Population
from .recall import most_samples, recalled_models
from .round import play, prepare
from .samples import Samples, Schedule
from .server import ServerView, reduce_uploads
from .slot import Slot
from .step import Pass, Step
from .store import ClientStore, MemoryStore, StoreFactory


class Federation:
    """A method on a model and a population. `round` is the whole of federated learning (core/round.py); the rest serves it."""

    def __init__(self, module: nn.Module, layout: Layout, method: Method, population: Population, policy: Policy,
                 engine: EngineFactory, device: str | torch.device = "cpu", store: StoreFactory = MemoryStore) -> None:
        self.method, self.population, self.device = method, population, torch.device(device)
        self.pooled = any(p.pools for p in method.parts)
        if not len(population.table.rows):
            raise DataError("No client has any training sample.")
        policy = settle_layout(policy, module, population, self.device)
        self.made_of = module, layout, method, population, policy          # enough to build a twin in another process
        self.policy = method.resolve(policy)
        held = max([p.reserve for p in method.parts], default=0.0)
        self.samples = Samples(population, self.policy, self.pooled, held, self.device)
        self.size = len(self.samples)
        self.policy.cohort_size(self.size)                      # refuses an impossible cohort now, not in round one
        self.program, self.phases, self.plain_phase = assemble(module, layout, method, self.policy, population, self.device,
                                                               self.size)
        self.spec = self.program.spec
        pieces = max([p.pieces for p in method.parts], default=1)
        self.samples.smallest = pieces * max([2 if self.spec.norm else 1, *(p.min_batch for p in method.parts)])
        if self.policy.batch < self.samples.smallest:
            cut = f", and it is cut in {pieces}" if pieces > 1 else ""
            raise ConfigError(f"The 'batch' option of the run must be at least {self.samples.smallest} for this model and method "
                              f"(statistics over a batch need two samples{cut}). Got {self.policy.batch} instead.")
        if not self.samples.longest(self.phases):
            few, cure = self.samples.too_few
            raise DataError(f"Every client has fewer samples than {few}: the largest has {max(self.samples.rows.different_sizes)}. {cure}")
        self.recalled = recalled_models(self)
        self.engine = engine(self.program, self.make_slot)
        self.round_number, self.last_exchange, self.clock = 0, 0, 0
        self.took_part: list[int] = []        # the clients whose training counted in the last round
        self.model: Model = tree.clone(self.spec.model)
        self.shared, self.server = initial(self, "shared"), initial(self, "server")
        self.versions = {path: 0 for path, _ in tree.paths(self.shared)}    # clock at which a shared tensor last changed
        self.still = still(self)
        self.clients: ClientStore = store(ClientState(fresh_tensors(self)))
        self.moving = moving_keys(self)
        self.asked_before: Collection[int] = ()       # for this round already, in attempts that came to nothing; they may have answered
        self.on_client: Callable[[int, int], None] = lambda done, of: None      # for progress displays
        self.prepared = not method.using("prepare")
        self.secret = b""            # this side's own entropy for noise; empty in a simulation, whose noise is keyed by the seed

    # ---- what is declared ------------------------------------------------------------------------------------------

    @property
    def personal(self) -> bool:
        """Whether clients are served by models of their own rather than by the global one."""
        fresh = self.clients.fresh.tensors
        acting = [p for p in self.method.parts if fresh["personal"].get(p.name) and not p.only_in_training]
        return bool(acting or fresh["local"] or self.method.using("personalise"))

    @property
    def models_travel(self) -> bool:
        """Whether the server sees the clients' models at the end of this round."""
        return self.method.exchanges(self.round_number) or any(p.reads_models for p in self.method.parts)

    @property
    def personal_scoring(self) -> str:
        """When in a client's life the model it is served by was taken."""
        said = [p.scored for p in self.method.parts if p.scored]
        return said[0] if said else "after aggregation, before local training"

    @property
    def no_global_model(self) -> str | None:
        """Why the global model cannot be scored, or None."""
        if not self.spec.trained:
            return "nothing that is trained travels, so there is no global model"
        if any(k not in self.spec.shared for k in self.spec.norm if k in self.model["buffers"]):
            return "normalisation statistics stay on the clients, so the global model has none"
        if any(k not in self.spec.shared for k in self.model["params"]):
            return "a part of the model never leaves the clients"
        return None

    def client(self, number: int) -> ClientState:
        return self.clients.get(number)

    def name_of(self, number: int) -> str:
        names = self.population.names
        return names[number] if names and not self.pooled else str(number)

    # ---- on a client -----------------------------------------------------------------------------------------------

    def received(self, state: ClientState, copied: bool = True) -> Model:
        """What a client starts a round with: the server's model with its own values for what does not travel.

        Between two exchanges of models it goes on from the model it trained itself. Not `copied`, it shares its tensors with server
        and client.
        """
        local = state.tensors["local"]
        model: Model = state.tensors["own"] if self.goes_on_alone(state) else {
            half: {k: local.get(k, v) for k, v in flat.items()} for half, flat in self.model.items()}
        return tree.clone(model) if copied else model

    def goes_on_alone(self, state: ClientState) -> bool:
        """Whether a client continues from the model it trained itself, because models have not travelled since."""
        return bool(state.tensors["own"]) and state.own_round > self.last_exchange

    def scalars(self, number: int, state: ClientState, kind: str = "round") -> dict[str, Tensor]:
        """Numbers that steps read. On the device, because a captured number would stay what it was."""
        return {"lr": torch.tensor(self.policy.lr_at(max(self.round_number, 1))), "first": torch.tensor(state.first),
                "round": torch.tensor(self.round_number), "client": torch.tensor(number),
                "key": rng.key(self.policy.seed, "step", number, self.round_number, kind)}

    def plans(self, number: int, schedule: Schedule, kind: str) -> Tree:
        """The parts' draws for every step, one row per step."""
        sizes = torch.tensor([n for _, s in schedule for n in s] or [self.policy.batch])
        key = lambda p: rng.key(self.policy.seed, "plan", number, self.round_number, kind, p.name)
        return {p.name: returned.planned(p, p.plan(key(p), self.spec, sizes), len(sizes)) for p in self.method.using("plan")}

    def make_slot(self, work: Work) -> Slot:
        """A slot with room for the longest schedule any client has for this kind of work."""
        return Slot(self.samples.x, self.samples.y, self.samples.longest([p for p, _ in work.schedule]),
                    most_samples(self.samples) if self.recalled else 0)

    @torch.no_grad()
    def look(self, number: int, state: ClientState, model: Model, x: Tensor, train: bool, taps: bool, learn: bool = False) -> Trace:
        """A forward pass outside training, with gradients where the model is to `learn`. Taps that act in training find
        their scratch as it is at the beginning of a round.
        """
        glance = Glance(self, number, state, model)
        if train and taps:
            glance.scratch = tree.to(self.first_scratch(number, state, model, glance.hooks["tap"]), self.device)
        with torch.set_grad_enabled(learn):
            return Pass(cast(Step, glance), model, train).forward(model, x, train, taps, "look")

    def first_scratch(self, number: int, state: ClientState, model: Model, parts: Collection[Part]) -> Tree:
        """The scratch of some parts as it is at the beginning of a round, for what is computed outside of one."""
        view = lambda p: ClientView(self, number, p, model, state, "init_scratch", [number])
        return {p.name: returned.tensors(p, "init_scratch", p.init_scratch(view(p)))
                for p in self.method.using("init_scratch") if p in parts}

    def train_plainly(self, number: int, state: ClientState, model: Model, epochs: int, watch: str = "", steps: int | None = None,
                      pace: float = 1.0) -> tuple[Model, Tensor]:
        """The model after `epochs`, or their first `steps`, of the task alone, at `pace` times the run's learning rate, on a client with
        this state; and the batch means at the point watched, one row per step.

        Where the client cannot make a batch the model comes back unchanged.
        """
        work = PlainWork(self, number, state, model, epochs, watch, steps, pace)
        if not work.schedule:
            return tree.clone(model), torch.zeros(0, device=self.device)
        with torch.enable_grad():
            return next(iter(self.engine.run([work])))

    @torch.no_grad()
    def personal_model(self, number: int) -> tuple[Model, bool]:
        """The model a client is served by, and whether taps act in it."""
        state = self.client(number)
        return self.served(number, state, self.received(state))

    @torch.no_grad()
    def served(self, number: int, state: ClientState, model: Model) -> tuple[Model, bool]:
        """The same for a client with this state that holds `model`."""
        taps = True
        for part in self.method.using("personalise"):
            view = ClientView(self, number, part, model, state, "personalise", [number])
            model, taps = returned.served(part, part.personalise(view), model)
        return model, taps

    def each(self, task: ClientTask, numbers: Sequence[int], common: Any = None, given: Sequence[Any] | None = None) -> Iterator[Any]:
        """task(self, number, common, its own of `given`) for every client, in the order of numbers; in other processes where
        the engine has some. So the task is a function of a module, and works only with what it is told and returns.
        """
        own = given or [None] * len(numbers)
        if isinstance(self.engine, MappingEngine):
            return self.engine.map(self, task, numbers, common, own)
        return (task(self, number, common, mine) for number, mine in zip(numbers, own))

    # ---- on the server ---------------------------------------------------------------------------------------------

    def shares(self, ids: list[int]) -> Tensor:
        """Each client's weight in the average, by the run's policy."""
        sizes = self.samples.rows.sizes_of(ids) if self.policy.weights == "samples" else [1] * len(ids)
        total = sum(sizes)
        return cast(Tensor, tree.to(torch.tensor([n / total for n in sizes]), self.device))

    def serve(self, part: Part, stage: str, ids: list[int], models: Sequence[Flat] = (), **more: Any) -> ServerView:
        return ServerView(stage, self.shared.get(part.name, {}), self.server.get(part.name, {}), ids, self.size, self.round_number,
                          self.spec, self.model, rng.key(self.policy.seed, part.name, "server", stage, self.round_number),
                          self.shares(ids), secret=self.secret, network=self.program.network,
                          trained=models if part.reads_models else None, **more)

    @torch.no_grad()
    def downloads(self, number: int) -> dict[str, Tree]:
        """What parts deliver to one client where it takes part alone."""
        return {p.name: returned.tensors(p, "deliver", p.deliver(self.serve(p, "deliver", [number]), number))
                for p in self.method.using("deliver")}

    def keep(self, home: str, part: Part, hook: str, new: Tree) -> None:
        """Keep what a server hook returned; it must be what the part declared."""
        declared: Tree = getattr(self, home)
        old, now = dict(tree.paths(declared.get(part.name, {}))), dict(tree.paths(new))
        returned.check_state(part, hook, new, declared.get(part.name, {}), home)
        if now:
            setattr(self, home, {**declared, part.name: new})
        if home == "shared":
            self.clock += 1
            self.versions.update({f"{part.name}/{p}": self.clock for p, t in now.items() if old[p] is not t})

    def settle(self, part: Part, stage: str, ids: list[int], uploads: list[Tree], models: list[Flat]) -> Tree:
        """Reduce one part's uploads (in the order of client ids) and let it update its state on the server."""
        reduced = reduce_uploads(part, uploads, self.shares(ids))
        for guard in self.method.using("publish"):
            known = guard.publish(self.serve(guard, stage, ids), part.name, reduced, part.reduce)
            returned.check_form(guard.name, "publish", known, reduced, f"what was put together of {part.name}'s uploads")
            reduced = known
        if self.method.has(part, "server"):
            view = self.serve(part, stage, ids, reduced=reduced, models=models)
            shared, server = returned.two(part, "server", part.server(view), "its shared state (s.shared)", "its server state (s.server)")
            self.keep("shared", part, "server", returned.tensors(part, "server", shared, "shared tensors"))
            self.keep("server", part, "server", returned.tensors(part, "server", server, "server tensors"))
        return reduced

    def ask_clients(self, stage: str, ids: list[int], report: RoundReport, silent: frozenset[int] = frozenset()) -> None:
        """prepare (once) and survey (each round): parts look at client data before any training. The report counts what was sent."""
        coming = ids
        for part in self.method.using(stage):
            ids = [i for i in self.took_part if i not in silent] if stage == "survey" and part.surveys_previous else coming
            if not ids:                             # the first round has none before it
                continue
            if ids is not coming:
                report.asked[f"{stage} {part.name}"] = list(self.took_part)
            uploads = list(self.each(consult, ids, (part.name, stage, ids)))
            unanswered = [i for i, upload in zip(ids, uploads) if upload is None]
            if unanswered:                          # parts may have shared work out among the clients, so the rest is no answer
                raise Unanswered(unanswered)
            if any(uploads):
                report.bytes_up += sum(tree.count_bytes(u) for u in uploads)
                self.settle(part, stage, ids, uploads, [])
                report.releases[f"{stage} {part.name}"] = ids

    # ---- a round ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """States are replaced, never written to; so nothing of a round that breaks stays, on the server or on a client."""
        before, versions = dict(self.__dict__), dict(self.versions)
        try:
            yield
            self.clients.commit()
        except BaseException:
            self.clients.rollback()
            self.__dict__.update(before)
            self.versions = versions
            raise
        finally:
            self.samples.let_go()

    def prepare(self) -> RoundReport:
        """Before round one: what parts must know of all clients."""
        return RoundReport(0, [], exchanged=False) if self.prepared else self._attempt(lambda silent: prepare(self, silent))

    @torch.no_grad()
    def cohort(self, round_number: int, there: Sequence[int] | None = None) -> list[int]:
        """The clients of a round, of those that are there: by a keyed draw, or as a part chooses by what the server knows."""
        ids = range(self.size) if there is None else there
        size = min(self.policy.cohort_size(self.size), len(ids))
        if size == len(ids):
            return list(ids)
        drawn = [ids[i] for i in rng.subset(rng.key(self.policy.seed, "cohort", round_number), len(ids), size)]
        for part in self.method.using("choose"):
            able = self._able(ids)
            if not able:                                    # nobody would train, whoever is chosen
                break
            view = replace(self.serve(part, "choose", able), round=round_number,
                           key=rng.key(self.policy.seed, part.name, "server", "choose", round_number))
            drawn = returned.chosen(part, part.choose(view, list(drawn)), {*able, *drawn}, size)
        return drawn

    def trains(self, number: int) -> bool:
        """Whether a client has samples enough for a step; else it is idle in every round."""
        return self.samples.steps_for(self.samples.size_of(number), self.phases) > 0

    def _able(self, ids: Sequence[int]) -> list[int]:
        """Those that have samples enough for a step; the run's own draw leaves the others idle. Found once for each size."""
        sizes = self.samples.rows.sizes_of(ids)
        steps = {n: self.samples.steps_for(n, self.phases) for n in {*sizes}}
        return [i for i, n in zip(ids, sizes) if steps[n]]

    def fails(self, number: int) -> bool:
        """Whether a selected client is lost in this round."""
        coin = rng.uniform(rng.key(self.policy.seed, "dropout", number, self.round_number), ())
        return bool(coin < self.policy.dropout)

    def round(self, cohort: Iterable[int] | None = None) -> RoundReport:
        """Clients train in the order given; everything is summed in the order of their numbers."""
        self.prepare()
        selected = list(self.cohort(self.round_number + 1) if cohort is None else cohort)
        if len({i for i in selected if 0 <= i < self.size}) < len(selected):
            raise ConfigError(f"The clients of a round are different numbers from 0 to {self.size - 1}. Got {selected} instead.")

        def next_round(silent: frozenset[int]) -> RoundReport:
            self.round_number += 1
            return play(self, selected, silent)
        return self._attempt(next_round)

    def _attempt(self, act: Callable[[frozenset[int]], RoundReport]) -> RoundReport:
        """All of it or nothing: again without clients that did not answer, and where memory ran out and the engine has some to give."""
        silent: frozenset[int] = frozenset()
        roomier = 0
        while True:
            said: str | None = None
            try:
                with self._all_or_nothing(), torch.no_grad():
                    return act(silent)
            except Unanswered as nobody:
                silent |= nobody.numbers
            except RuntimeError as error:
                if not isinstance(self.engine, RoomyEngine) or not self.engine.lacks_memory(error):
                    raise
                said = str(error).partition("\n")[0]
            if said is not None and isinstance(self.engine, RoomyEngine):     # here, since the error held on to tensors of its frames
                self.engine.make_room(said, roomier)
                roomier += 1
