"""The workers engine against other frameworks on the same task and the same number of steps.

    python benchmarks/peers.py                       # installs each peer in a throw-away environment, then the table
    python benchmarks/peers.py --keep FOLDER         # environments stay in FOLDER and are used again
    python benchmarks/peers.py --only flower pfl --turns 1
    python benchmarks/peers.py --no-install          # measures what is there already and names what is missing

FedAvg, its 4-layer CNN on images of Fashion-MNIST's shape, 20 clients of 400 samples, batch 10, one epoch, the global model scored
on 2,000 samples after each round: 800 client-steps a round. Every framework runs in a process of its own with the same PyTorch (the
environments see this interpreter's packages; a peer installs only what is missing). A framework's rate is that of its median round
after the first; start-up is not counted. Turns go round all frameworks, and a ratio is the median over the turns. Settings are the best
we found on two cores: Flower with one actor of one CPU per core, pfl with one process per core under torchrun, fluke (whose processes
are one per GPU) with one thread per core or with one. Flower's and pfl's users write the model's pass themselves, so both are measured
with channels_last too. A peer that is missing or does not run is said so, with the command that installs it or its last words.

The table has two columns: ours in float32 with PyTorch's default layout, and ours in bfloat16 with channels_last, each over theirs.
The last line is the first column's ratio to the fastest peer at its defaults.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from pathlib import Path
from typing import Any

CLIENTS, SAMPLES, TEST, BATCH, LR = 20, 400, 2000, 10, 0.005
LIMIT = 300             # seconds for one framework's turn
STEPS = CLIENTS * SAMPLES // BATCH
HERE, SOURCE = Path(__file__).resolve(), Path(__file__).resolve().parents[1] / "src"
PACKAGES = {"flower": "flwr[simulation]", "pfl": "pfl", "fluke": "fluke-fl"}
MODULES = {"flower": ("flwr", "ray"), "pfl": ("pfl",), "fluke": ("fluke",)}
LAST, HALF = "channels_last", "bfloat16 + channels_last"
WAYS = {"consilience": ["workers", f"workers, {LAST}", f"workers, {HALF}"], "flower": ["actors", f"actors, {LAST}"],
        "pfl": ["processes", f"processes, {LAST}"], "fluke": ["one thread", "threads"]}


# ---- the task --------------------------------------------------------------------------------------------------------

def task() -> tuple[Any, Any, Any]:
    """Images, labels and the model."""
    import torch

    from consilience import rng
    from consilience.models import make
    n = CLIENTS * SAMPLES + TEST
    x = rng.integers(rng.key(0, "x"), 256, (n, 1, 28, 28)).to(torch.uint8)
    y = rng.integers(rng.key(0, "y"), 10, (n,))
    return x, y, make("fedavg_cnn", sample=(1, 28, 28), classes=10, key=rng.key(0, "model"))


def say(marks: list[float]) -> None:
    """Seconds of each round, from the moments at which rounds ended."""
    print(json.dumps({"rounds": [b - a for a, b in itertools.pairwise(marks)]}), flush=True)


# ---- one function for each framework: runs rounds and tells when each ended --------------------------------------------

def consilience(way: str, cores: int, rounds: int) -> None:
    import torch

    from consilience.core.federation import Federation
    from consilience.core.policy import Policy
    from consilience.core.population import Population
    from consilience.data import as_float
    from consilience.engines.workers import Workers
    from consilience.metrics.accuracy import score_global
    from consilience.parts import parse_stack
    torch.set_num_threads(1)
    x, y, built = task()
    more = {"layout": "channels_last"} if "channels_last" in way else {}
    more |= {"precision": "bfloat16"} if "bfloat16" in way else {}
    rows = tuple(torch.arange(CLIENTS * SAMPLES).split(SAMPLES))
    fed = Federation(built.module, built.layout, parse_stack("fedavg").method(), Population(x, y, rows, 10, as_float),
                     Policy(lr=LR, batch=BATCH, **more), Workers.of(cores))
    marks = []
    for _ in range(rounds + 1):
        fed.round()
        score_global(fed, [torch.arange(CLIENTS * SAMPLES, len(x))], ["test"])
        marks.append(time.perf_counter())
    fed.engine.close()
    say(marks)


def flower(way: str, cores: int, rounds: int) -> None:
    import torch
    import torch.nn.functional as F
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation
    x, y, built = task()
    form = torch.channels_last if LAST in way else torch.contiguous_format
    net, marks = built.module.to(memory_format=form), []
    client_app, server_app = ClientApp(), ServerApp()
    @client_app.train()
    def train(message: Any, context: Any) -> Any:
        torch.set_num_threads(1)
        if not hasattr(torch, "benchmark_task"):      # an actor makes the data once; what this function refers to is sent each time
            torch.benchmark_task = task()
        xs, ys, made = torch.benchmark_task
        own = made.module
        own.load_state_dict(message.content["arrays"].to_torch_state_dict())
        own.to(memory_format=form)
        optimiser = torch.optim.SGD(own.parameters(), lr=LR)
        first = int(context.node_config["partition-id"]) * SAMPLES
        for rows in (first + torch.randperm(SAMPLES)).split(BATCH):
            optimiser.zero_grad()
            F.cross_entropy(own((xs[rows].float() / 255).contiguous(memory_format=form)), ys[rows]).backward()
            optimiser.step()
        return Message(content=RecordDict({"arrays": ArrayRecord(own.state_dict()),
                                           "metrics": MetricRecord({"num-examples": SAMPLES})}), reply_to=message)

    def evaluate(number: int, arrays: Any) -> Any:
        net.load_state_dict(arrays.to_torch_state_dict())
        with torch.no_grad():
            rows = torch.arange(CLIENTS * SAMPLES, len(x)).split(256)
            correct = sum(int((net((x[r].float() / 255).contiguous(memory_format=form)).argmax(1) == y[r]).sum()) for r in rows)
        marks.append(time.perf_counter())
        return MetricRecord({"accuracy": correct / TEST})

    @server_app.main()
    def main(grid: Any, context: Any) -> None:
        strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=CLIENTS)
        strategy.start(grid, ArrayRecord(net.state_dict()), num_rounds=rounds + 1, evaluate_fn=evaluate)
        say(marks[1:])                                # the first mark is before round one, the second after a cold round
    run_simulation(server_app, client_app, CLIENTS, backend_config={"init_args": {"num_cpus": cores, "log_to_driver": False},
                                                                    "client_resources": {"num_cpus": 1, "num_gpus": 0.0}})


def pfl(way: str, cores: int, rounds: int) -> None:
    import numpy as np
    import torch
    import torch.nn.functional as F
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Weighted
    from pfl.model.pytorch import PyTorchModel
    torch.set_num_threads(1)
    x, y, built = task()
    form = torch.channels_last if LAST in way else torch.contiguous_format

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = built.module.to(memory_format=form)

        def forward(self, images: Any) -> Any:
            return self.net((images.float() / 255).contiguous(memory_format=form))

        def loss(self, images: Any, labels: Any, is_eval: bool = False) -> Any:
            self.eval() if is_eval else self.train()
            return F.cross_entropy(self(images), labels)

        @torch.no_grad()
        def metrics(self, images: Any, labels: Any, is_eval: bool = True) -> Any:
            self.eval() if is_eval else self.train()
            right = (self(images).argmax(1) == labels).sum().item()
            return {"accuracy": Weighted(right, len(labels))}
    net = Net()
    model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))

    def user(number: int) -> Any:
        order = number * SAMPLES + torch.randperm(SAMPLES)
        return Dataset(raw_data=[x[order], y[order]])
    training = FederatedDataset(user, get_user_sampler("minimize_reuse", list(range(CLIENTS))))
    test = Dataset(raw_data=[x[CLIENTS * SAMPLES:], y[CLIENTS * SAMPLES:]])
    marks: list[float] = []

    class Mark(TrainingProcessCallback):
        def after_central_iteration(self, aggregate_metrics: Any, model: Any, *, central_iteration: int) -> Any:
            model.evaluate(test, lambda name: name, NNEvalHyperParams(local_batch_size=256))
            marks.append(time.perf_counter())
            return False, _no_metrics()

    def _no_metrics() -> Any:
        from pfl.metrics import Metrics
        return Metrics()
    np.random.seed(0)
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(central_num_iterations=rounds + 1, evaluation_frequency=10**6, train_cohort_size=CLIENTS,
                                           val_cohort_size=0),
        backend=SimulatedBackend(training_data=training, val_data=training), model=model,
        model_train_params=NNTrainHyperParams(local_num_epochs=1, local_learning_rate=LR, local_batch_size=BATCH),
        model_eval_params=NNEvalHyperParams(local_batch_size=256), callbacks=[Mark()])
    if os.environ.get("RANK", "0") == "0":
        say(marks)


def fluke(way: str, cores: int, rounds: int) -> None:
    import torch
    if torch.version.cuda is None:          # torchvision from the index asks for its CUDA operators when it is imported; none is used
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor boxes, Tensor scores, float threshold) -> Tensor")
    from fluke import DDict, FlukeENV
    from fluke.algorithms.fedavg import FedAVG
    from fluke.data import DataContainer, DataSplitter
    from fluke.evaluation import ClassificationEval
    torch.set_num_threads(1 if way == "one thread" else cores)
    x, y, built = task()
    split = CLIENTS * SAMPLES
    images = x.float() / 255
    env = FlukeENV()
    env.set_seed(0)
    env.set_device("cpu")
    env.set_eval_cfg(task="classification", eval_every=1, locals=False, server=True, pre_fit=False, post_fit=False)
    marks: list[float] = []

    class Accuracy(ClassificationEval):
        """Accuracy alone: its full set of metrics would cost it time that the others do not spend."""

        def evaluate(self, round: int, model: Any, loader: Any, **kwargs: Any) -> dict[str, float]:
            model.eval()
            with torch.no_grad():
                right = sum(int((model(a).argmax(1) == b).sum()) for a, b in zip(images[split:].split(256), y[split:].split(256)))
            marks.append(time.perf_counter())
            return {"accuracy": right / TEST}
    env.set_evaluator(Accuracy(eval_every=1, n_classes=10))
    splitter = DataSplitter(DataContainer(images[:split], y[:split], images[split:], y[split:], 10), distribution="iid")
    settings = DDict({"model": built.module, "server": {"weighted": True},
                      "client": {"batch_size": BATCH, "local_epochs": 1, "loss": "CrossEntropyLoss", "optimizer": {"name": "SGD", "lr": LR},
                                 "scheduler": {"name": "StepLR", "gamma": 1.0, "step_size": 1}}})
    FedAVG(CLIENTS, splitter, settings).run(n_rounds=rounds + 1, eligible_perc=1.0)
    say(marks[: rounds + 1])        # it scores once more at the end


# ---- environments and turns ------------------------------------------------------------------------------------------

def environment(name: str, folder: Path, install: bool = True) -> tuple[Path, str]:
    """The interpreter of a peer's own environment, and why there is none where there is none."""
    if name == "consilience":
        return Path(sys.executable), ""
    home = folder / name
    python = home / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if (home / "ready").exists():
        return python, ""
    if not install:
        here = all(importlib.util.find_spec(module) for module in MODULES[name])
        return Path(sys.executable), "" if here else f"missing; pip install '{PACKAGES[name]}'"
    import torch
    venv.create(home, with_pip=False, clear=True)
    inside = subprocess.run([python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"], capture_output=True, text=True,
                            check=True).stdout.strip()
    (Path(inside) / "shared.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    pins = home / "pins.txt"
    pins.write_text(f"torch=={torch.__version__.partition('+')[0]}\n")
    done = subprocess.run([sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "-c", str(pins), PACKAGES[name]],
                          capture_output=True, text=True, timeout=1200)
    if done.returncode:
        return python, f"missing; pip install '{PACKAGES[name]}' said: {(done.stderr.strip().splitlines() or ['nothing'])[-1]}"
    (home / "ready").touch()
    return python, ""


def measure(name: str, way: str, python: Path, cores: int, rounds: int) -> tuple[float | None, str]:
    """Client-steps per second of the median round, or the last words."""
    threads = str(cores) if way == "threads" else "1"
    start = [str(python)]
    if name == "pfl":
        start += ["-m", "torch.distributed.run", "--nproc_per_node", str(cores)]
    command = [*start, str(HERE), "--framework", name, "--way", way, "--cores", str(cores), "--rounds", str(rounds)]
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    print(f"{name}, {way} …", file=sys.stderr, flush=True)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT,
                              env={**os.environ, **quiet, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": threads})
    except subprocess.TimeoutExpired:
        return None, f"no end after {LIMIT} s"
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"rounds"')]
    if not lines:
        return None, (done.stderr.strip().splitlines() or ["no word"])[-1]
    return STEPS / statistics.median(json.loads(lines[-1])["rounds"]), ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--only", nargs="+", choices=list(PACKAGES), default=list(PACKAGES))
    parser.add_argument("--no-install", action="store_true")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--cores", type=int, default=0)
    parser.add_argument("--framework", help=argparse.SUPPRESS)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.framework:
        globals()[options.framework](options.way, options.cores, options.rounds)
        return
    sys.path.insert(0, str(SOURCE))
    from consilience.engines.hardware import usable_cores
    cores = options.cores or usable_cores()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        names = ["consilience", *options.only]
        pythons = {name: environment(name, folder, not options.no_install) for name in names}
        rates: dict[tuple[str, str], list[float]] = {}
        words: dict[tuple[str, str], str] = {(n, w): why for n, (_, why) in pythons.items() if why for w in WAYS[n]}
        for _ in range(options.turns):
            for name in names:
                for way in WAYS[name]:
                    if (name, way) in words:
                        continue
                    rate, last = measure(name, way, pythons[name][0], cores, options.rounds)
                    if rate is None:
                        words[name, way] = last
                    else:
                        rates.setdefault((name, way), []).append(rate)
    ours, half = rates["consilience", WAYS["consilience"][0]], rates["consilience", WAYS["consilience"][-1]]
    print(f"{cores} cores, {CLIENTS} clients, {STEPS} client-steps a round, {options.turns} turns of {options.rounds} rounds")
    print(f"{'':42s}{'client-steps/s':>16s}{'ours ÷ theirs':>16s}{'bf16 + ch.-last ÷ theirs':>26s}")
    best: list[float] = []
    for name in names:
        for way in WAYS[name]:
            label = f"{name}, {way}"
            if (name, way) in words:
                print(f"{label:42s}  {words[name, way][:110]}")
                continue
            theirs = rates[name, way]
            over = lambda us, them=theirs: statistics.median(a / b for a, b in zip(us, them))
            print(f"{label:42s}{statistics.median(theirs):14.0f}/s{over(ours):16.2f}{over(half):26.2f}")
            if name != "consilience" and LAST not in way:
                best = max(best, theirs, key=lambda r: statistics.median(r) if r else 0.0)
    if best:
        print(f"{statistics.median(a / b for a, b in zip(ours, best)):.2f}")


if __name__ == "__main__":
    main()
