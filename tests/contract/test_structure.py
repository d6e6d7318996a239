"""One name everywhere, imports that point one way, and parts that stay small."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import consilience
from consilience.parts import PARTS, find_part, parse_stack
from consilience.testing import run_tiny, state_of, trial

ROOT = Path(consilience.__file__).parent
NAMES = sorted(PARTS)
HOMES = ("kept", "personal")
SMALL: dict[str, Any] = {"sizes": (16, 9, 5, 8), "epochs": 1}        # where state stands shows after one step as after ten


@pytest.mark.parametrize("name", NAMES)
def test_one_name_everywhere(name: str) -> None:
    """File = class attribute = registry key = token of a stack."""
    cls = PARTS[name]
    assert cls.name == name
    assert cls.__module__ == f"consilience.parts.{name}"
    assert Path(inspect.getfile(cls)).stem == name
    assert find_part(name) is cls
    assert [p.name for p in parse_stack(name).parts] == [name]


def test_every_file_is_a_part_or_a_helper_that_parts_use() -> None:
    """Helpers begin with an underscore, and every one of them is named by another file of the folder."""
    texts = {p.stem: p.read_text() for p in (ROOT / "parts").glob("*.py")}
    rest = set(texts) - set(NAMES) - {"__init__", "registry", "presets", "stack"}
    assert [f for f in rest if not f.startswith("_")] == []
    assert [f for f in rest if not any(f in text for name, text in texts.items() if name != f)] == []


@cache
def _paths_of_fedavg() -> frozenset[str]:
    return frozenset(state_of(run_tiny(rounds=1, **SMALL)))


@pytest.mark.parametrize("name", NAMES)
def test_state_stands_under_the_name_of_the_part(name: str) -> None:
    """Beside the model of the run, whatever a part keeps anywhere is found under its own name."""
    for path in set(state_of(run_tiny([trial(PARTS[name])], rounds=1, **SMALL))) - _paths_of_fedavg():
        home, *rest = path.split("/")
        if home in ("shared", "server"):
            owner = rest[0]
        elif home == "model":                      # what is attached, or a head that replaces the model's
            owner = rest[1].split(".")[0]
            owner = name if owner == "head" else owner
        else:
            _, kind, *inner = rest
            owner = inner[0] if kind in HOMES else name      # local, previous: keys of the model
        assert owner == name, path


@cache                               # every rule looks at every file
def _imports(path: Path) -> tuple[str, ...]:
    """Names of modules a file imports anywhere, ours as 'consilience.…'."""
    package = ["consilience", *path.relative_to(ROOT).parent.parts]
    out = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            out += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            out += [f"{stem}.{alias.name}" for alias in node.names] if stem in (".".join(base), "consilience") else [stem]
    return tuple(out)


def _ours(path: Path) -> set[str]:
    return {name.split(".")[1] for name in _imports(path) if name.startswith("consilience.")}


BASE = {"tree", "rng", "errors", "options", "memory", "channels_last"}
MAY_IMPORT = {"errors.py": set(), "tree.py": set(), "channels_last.py": set(), "rng.py": {"kernels"}, "memory.py": set(),
              "cuda_start.py": set(), "blame.py": set(), "loading.py": {"blame", "errors"}, "options.py": {"errors"},
              # what kernels may not know: rng, which calls them; models, methods, rounds
              "kernels": {"channels_last", "errors", "kernels"}, "layers": {"channels_last", "kernels", "layers"},
              "core": BASE | {"core", "kernels", "layers"}, "privacy": BASE | {"privacy"},
              "parts": BASE | {"core", "kernels", "loading", "parts", "privacy"}, "parts/kernels": {"kernels", "parts", "tree"},
              "engines": BASE | {"blame", "core", "engines", "loading"},
              # joins a run with Flower, so it stands above runs
              "engines/flower": BASE | {"core", "data", "engines", "federation", "metrics", "models", "parts", "runs"}}
BELOW_RUNS = ("data", "models", "metrics")


@pytest.mark.parametrize("layer", MAY_IMPORT)
def test_imports_point_one_way(layer: str) -> None:
    """kernels ← rng; kernels ← layers ← core ← parts; core ← engines."""
    files = [ROOT / layer] if layer.endswith(".py") else sorted((ROOT / layer).rglob("*.py"))
    assert files
    for path in files:
        inner = [other for other in MAY_IMPORT if other.startswith(layer + "/") and path.is_relative_to(ROOT / other)]
        wrong = _ours(path) - MAY_IMPORT[layer]
        assert inner or not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


def test_nothing_below_knows_the_flower_engine() -> None:
    """`import consilience` and every simulation work without Flower."""
    for path in sorted(ROOT.rglob("*.py")):
        where = path.relative_to(ROOT).parts
        if where[0] not in ("federation", "cli") and where[:2] != ("engines", "flower"):
            assert not [n for n in _imports(path) if n.startswith("consilience.engines.flower")], path


@pytest.mark.parametrize("layer", BELOW_RUNS)
def test_data_models_and_metrics_know_no_parts_and_no_runs(layer: str) -> None:
    for path in sorted((ROOT / layer).rglob("*.py")):
        wrong = _ours(path) & {"parts", "engines", "runs", "report", "cli", "recipes"}
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


@pytest.mark.parametrize("folder", ["core", "engines", "metrics", "runs"])
def test_a_folders_words_name_every_file_in_it(folder: str) -> None:
    """Who looks for something begins there."""
    words = ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text())) or ""
    there = {path.stem for path in (ROOT / folder).iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()} - {"__init__"}
    assert [name for name in sorted(there) if not re.search(rf"(?<![\w.]){name}(?!\w)", words)] == []


KERNELS = ("kernels", "parts/kernels")


def test_kernels_have_rooms_of_their_own() -> None:
    """Triton is used nowhere else, and kernels of parts see no part: neither parts nor the core hold kernels."""
    for path in sorted(ROOT.rglob("*.py")):
        where = str(path.relative_to(ROOT).parent)
        if where in KERNELS:
            wrong = [n for n in _imports(path) if n.startswith("consilience.parts.") and not n.startswith("consilience.parts.kernels.")]
            assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"
        else:
            assert not [n for n in _imports(path) if n.split(".")[0] == "triton"], path.relative_to(ROOT)


def test_kernels_of_a_part_stand_under_its_name() -> None:
    """And `fused` is what they share."""
    files = {p.stem for p in (ROOT / "parts" / "kernels").glob("*.py")} - {"__init__", "fused"}
    assert [f for f in sorted(files) if f.split("_")[0] not in NAMES] == []


ONLY_IN = {"dp_accounting": "privacy/accountant", "flwr": "engines/flower", "ray": "engines/ray", "typer": "cli"}


def test_heavy_libraries_have_one_place() -> None:
    for path in sorted(ROOT.rglob("*.py")):
        where = str(path.relative_to(ROOT).with_suffix(""))
        for library, place in ONLY_IN.items():
            if any(name.split(".")[0] == library for name in _imports(path)):
                assert where.startswith(place), f"{where} imports {library}"


@cache
def _imported_by_a_run() -> frozenset[str]:
    """By the command line, and by a process that trains and compares."""
    script = ("import sys, consilience.cli, consilience.runs.many, consilience.engines.choose; "
              "consilience.run('fedavg', 'digits', clients=2, rounds=1, steps=1, device='cpu'); "
              "from consilience.runs.statistics import paired; paired([1, 2, 4], [1, 1, 1]); print(*sys.modules)")
    return frozenset(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split())


def test_ray_is_not_imported_before_it_is_asked_for() -> None:
    """Everything but `engine=ray` and `--on ray` works without Ray, and does not wait for it."""
    assert "torch" in _imported_by_a_run()
    assert "ray" not in _imported_by_a_run()


@pytest.mark.parametrize("library", ["flwr", "matplotlib", "optuna", "scipy.stats", "sklearn", "sympy"])
def test_what_takes_long_to_import_is_imported_where_it_is_used(library: str) -> None:
    """Every command and every worker process would wait for it, a quarter of a second and more."""
    assert library not in _imported_by_a_run()


CORE = sorted(path for folder in ("core", "kernels", "layers") for path in (ROOT / folder).glob("*.py"))      # and what it stands on


def test_core_reads_and_writes_no_files() -> None:
    for path in CORE:
        wrong = {n.split(".")[0] for n in _imports(path)} & {"os", "io", "json", "pathlib", "pickle", "shutil", "yaml", "sklearn"}
        assert not wrong, f"{path.name} imports {sorted(wrong)}"
        assert not [n for n in ast.walk(ast.parse(path.read_text()))
                    if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id in ("open", "print")]


def test_core_knows_no_part_by_name() -> None:
    """No string in core equals the name of a part or of a preset."""
    from consilience.parts.presets import PRESETS
    words = (set(PARTS) | set(PRESETS)) - {"local", "cosine"}      # also a BatchNorm policy, and a schedule
    for path in CORE:
        found = {n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        assert not found & words, f"{path.name}: {sorted(found & words)}"


WAITS = {"item", "tolist", "cpu", "new_tensor"}            # of a tensor: each waits for the GPU, or for a copy from ordinary memory


def _waiting(source: str) -> list[str]:
    """Calls in hooks of clients and steps, and in what these hand their view to, that make the host wait for a GPU."""
    out = []
    for function in (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)):
        views = {ast.unparse(a.annotation) for a in function.args.args if a.annotation is not None}
        if not views & {"ClientView", "StepView"}:
            continue
        for call in (n for n in ast.walk(function) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)):
            sends = ast.unparse(call.func) in ("torch.tensor", "torch.as_tensor") and any(k.arg == "device" for k in call.keywords)
            if sends or call.func.attr in WAITS:                                                            # type: ignore[attr-defined]
                out.append(f"{function.name}, line {call.lineno}: {ast.unparse(call)}")
    return out


@pytest.mark.parametrize("path", sorted((ROOT / "parts").glob("*.py")), ids=lambda p: p.stem)
def test_no_client_makes_the_host_wait_for_the_gpu(path: Path) -> None:
    """It is to feed other clients meanwhile. `new_full` makes a number where it is needed, `tree.to` sends tensors without waiting."""
    assert _waiting(path.read_text()) == []


def test_waiting_is_found() -> None:
    text = "def finish(self, c: ClientView):\n    return torch.tensor(1.0, device=c.losses.device), {call}\n"
    assert len(_waiting(text.format(call="c.losses.sum().item()"))) == 2
    assert len(_waiting(text.format(call="torch.tensor(1.0)"))) == 1
    assert _waiting("def server(self, s: ServerView):\n    return s.p.tolist()\n") == []


def _code_lines(name: str) -> int:
    """Lines of the class that are neither blank, comment nor docstring."""
    source = inspect.getsource(PARTS[name])
    docs = {n.lineno + i for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.ClassDef, ast.FunctionDef))
            and ast.get_docstring(node) for n in node.body[:1] for i in range(n.end_lineno - n.lineno + 1)}  # type: ignore[operator]
    lines = source.splitlines()
    return sum(bool(line.strip()) and not line.strip().startswith("#") and i not in docs for i, line in enumerate(lines, 1))


@pytest.mark.parametrize(("name", "most"), [("prox", 13), ("moon", 35)])
def test_small_ideas_stay_small(name: str, most: int) -> None:
    assert _code_lines(name) <= most


@pytest.mark.parametrize("name", NAMES)
def test_no_part_is_large(name: str) -> None:
    assert len(Path(inspect.getfile(PARTS[name])).read_text().splitlines()) <= 160
    assert _code_lines(name) <= 150
