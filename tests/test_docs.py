"""README and docs/ against the code: links lead somewhere, commands and options exist, and what is public is on a page."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import shlex
import tomllib
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

import consilience
from consilience.cli import app
from consilience.cli.settings import configure
from consilience.data import splits
from consilience.data.sources import SOURCES
from consilience.errors import RefusedCombination
from consilience.metrics.registry import describe_measures, make_measures
from consilience.models.registry import MODELS
from consilience.parts import PARTS
from consilience.parts.presets import PRESETS
from consilience.parts.registry import find_part
from consilience.recipes.load import recipe_names
from consilience.runs.config import parse_set

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
WRITTEN = [p for p in PAGES if p.name != "CHANGELOG.md" and p.parent.name != "results"]       # what describes the program as it is
FOREIGN = {  # options of other programs that the pages name
    "benchmarks and tests": {"--turns", "--keep", "--no-install", "--methods", "--no-kernels", "--like-real", "--processors", "--store"},
    "flwr": {"--stream", "--run-config"}, "ray": {"--head", "--address", "--object-store-memory"},
    "mlflow and tensorboard": {"--backend-store-uri", "--logdir"}}
READS_SETTINGS = ("run", "compare", "sweep", "explain")
REFUSED = "run local+scaffold"                         # the README's example of a stack that makes no sense
MISSPELT = "measure runs/dbe aurok"                    # shown for its error


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@cache
def blocks(page: Path) -> tuple[tuple[str, str], ...]:
    """(language, text) of every block of code, fenced or indented by four."""
    text = page.read_text(encoding="utf-8")
    fenced = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    rest = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return (*fenced, *(("", m) for m in re.findall(r"(?<=\n\n)((?: {4}.*\n)+)", rest)))


def prose(page: Path) -> str:
    return re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to headings."""
    heads = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", h.replace("`", "")) for h in heads]
    return {re.sub(r"[^\w\- ]", "", h.strip().lower()).replace(" ", "-") for h in plain}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files_and_headings_that_are_there(page: Path) -> None:
    lost = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        to = page.parent / path if path else page
        if not to.exists() or (anchor and anchor not in anchors(to)):
            lost.append(target)
    assert lost == []


def test_a_reader_gets_from_the_index_to_every_page() -> None:
    linked = {(DOCS / t.partition("#")[0]).resolve() for t in re.findall(r"\]\(([^)\s]+)\)", prose(DOCS / "README.md")) if t[0] != "#"}
    assert [name_of(p) for p in DOCS.glob("*.md") if p.name != "README.md" and p.resolve() not in linked] == []
    decisions = {p.name for p in (DOCS / "decisions").glob("0*.md")}
    assert set(re.findall(r"\((0[^)]+)\)", prose(DOCS / "decisions" / "README.md"))) == decisions
    assert "(docs/README.md)" in prose(ROOT / "README.md")


def test_files_that_a_page_names_are_there() -> None:
    paths = re.compile(r"(?<![\w./])((?:src/consilience|tests|benchmarks|docs)/[\w/-]+\.(?:py|md))")
    named = {(name_of(p), f) for p in WRITTEN for f in paths.findall(p.read_text(encoding="utf-8"))}
    assert len(named) > 20
    assert sorted((page, file) for page, file in named if not (ROOT / file).exists()) == []


# The command line

def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


COMMANDS = dict(commands(typer.main.get_command(app)))
OPTIONS = {o for c in COMMANDS.values() for p in c.params for o in p.opts if o.startswith("--")} | {"--help"}


def documented_commands(page: Path) -> list[str]:
    """Every `consilience …` of the page's blocks and of its inline code, to the end of the shell's command."""
    in_blocks = [line.replace("\\\n", " ") for language, text in blocks(page) if language in ("", "sh", "console")
                 for line in re.sub(r"\\\n\s*", " ", text).splitlines()]
    inline = re.findall(r"`([^`\n]+)`", prose(page))
    begins = re.compile(r"(?:^\s*(?:\$ )?(?:\w+=\S+ )*|; do )consilience (?=[a-z-])")
    found = []
    for line in [*in_blocks, *inline]:
        if start := begins.search(line):
            words = re.split(r"""\s#\s|;|\s\|\s|\s…$""", line[start.end():])[0]
            found.append(re.sub(r"(?<=\s)\[|\](?=\s|$)", "", words).strip())
    return found


def parsed(text: str) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The command and its options, read by the command's own parser, which refuses those that it does not have."""
    words = shlex.split(text)
    size = 2 if tuple(words[:2]) in COMMANDS else 1
    path = tuple(words[:size])
    command = COMMANDS[path]
    context = command.context_class(command, info_name=path[-1])
    values, rest, _ = command.make_parser(context).parse_args(words[size:])
    assert not rest, rest
    return path, {k: v for k, v in values.items() if isinstance(v, (str, list, tuple))}        # Click has marks for what was not given


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_documented_commands_can_be_given(page: Path) -> None:
    """Their options, methods, methods' options, settings, splits, data sets and models exist."""
    for text in documented_commands(page):
        if text.split()[0] in {path[0] for path in COMMANDS if len(path) > 1} and len(text.split()) == 1:
            continue                                   # a group, as in `consilience data`
        path, values = parsed(text)
        if path[0] == "reproduce":
            recipes = [n.partition(":")[0] for n in values["names"]] if "/" in text.split()[1] else []
            assert [r for r in recipes if r not in recipe_names()] == [], text
        if path[0] == "measure" and text != MISSPELT and "NAMES" not in text:
            make_measures(values.get("names") or [], parse_set(values.get("set_") or []))
        if path[0] not in READS_SETTINGS or "NAME" in text:
            continue
        methods = values.get("methods") or [values.get("method")]
        for method in methods:
            if method and method != "METHOD" and "./" not in method and "$" not in method:
                settings = values.get("set_") or []
                mine = [s for s in settings if len(methods) == 1 or s.partition(".")[0] in method]
                with pytest.raises(RefusedCombination) if text == REFUSED else nullcontext():
                    configure(None, mine, values.get("option"), method=method, model=values.get("model"), taps=values.get("taps"))
        if split := values.get("split"):
            splits.make(split.replace("$a", "1"))
        for kind, known in (("data", SOURCES), ("model", MODELS)):
            if (value := values.get(kind)) and ":" not in value:
                assert value.partition("(")[0] in known, text


def test_the_pages_have_commands_to_look_at() -> None:
    """Else the test above would pass for finding none."""
    found = [c for page in WRITTEN for c in documented_commands(page)]
    assert len(found) > 100
    with pytest.raises(Exception, match="No such option"):
        parsed("run fedavg --no-such-option 3")


def test_every_option_that_a_page_names_exists() -> None:
    known = OPTIONS.union(*FOREIGN.values())
    named = {(name_of(p), o) for p in WRITTEN for o in re.findall(r"(?<![\w-])--[a-z][a-z-]+", p.read_text(encoding="utf-8"))}
    assert sorted((page, option) for page, option in named if option not in known) == []


# What is public is on a page

@cache
def all_pages() -> str:
    return "\n".join(p.read_text(encoding="utf-8") for p in WRITTEN)


def test_every_command_and_option_is_on_a_page() -> None:
    assert [c for c in map(" ".join, COMMANDS) if not re.search(rf"consilience {c}\b", all_pages())] == []
    assert [o for o in sorted(OPTIONS) if not re.search(rf"(?<![\w-]){o}(?![\w-])", all_pages())] == []


def test_every_public_name_is_on_a_page() -> None:
    shown = lambda n: re.search(rf"consilience\.{n}\b|`{n}`|from consilience import [^\n]*\b{n}\b", all_pages())
    assert [n for n in consilience.__all__ if not shown(n)] == []


def test_every_measure_data_set_and_model_is_on_its_page() -> None:
    for page, names in (("measurements", [m["name"] for m in describe_measures()]), ("data", SOURCES), ("models", MODELS)):
        text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
        assert names
        assert [n for n in names if not re.search(rf"`{n}[`(]", text)] == []


def test_the_page_on_methods_says_what_every_method_is_made_of() -> None:
    page = (DOCS / "methods.md").read_text(encoding="utf-8")
    section = page.partition("\n## What every method is made of\n")[2].partition("\n## ")[0]
    made = {}
    for names, parts in re.findall(r"\| (`[^|]+`) \| `([^|`]+)` (?=\|)", section):
        made |= dict.fromkeys(re.findall(r"`([^`]+)`", names), parts)
    assert made == {p.name: "+".join(p.parts) for p in PRESETS.values() if p.parts and p.parts != (p.name,)}
    assert [n for n in PARTS if not re.search(rf"`[^`\n]*\b{n}\b[^`\n]*`", section)] == []
    assert [n for n in PRESETS if f"[`{n}`](#" not in page] == []


def test_the_page_on_parts_has_every_claim_and_trait_with_the_parts_that_have_it() -> None:
    section = (DOCS / "parts.md").read_text(encoding="utf-8").partition("Combinations are refused by words.")[2].partition("\n## ")[0]
    tables = {what: {word: set(re.findall(r"`(\w+)`", owners)) for word, owners in re.findall(r"^\| `([^`|]+)` \| (.+) \|$", rows, re.M)}
              for what, rows in re.findall(r"^\| (claim|trait) \| of \|\n((?:\|.*\n)+)", section, re.M)}
    for what, own in (("claim", lambda part: part.claims), ("trait", lambda part: part.traits)):
        parts = [find_part(name)() for name in PARTS]
        for part in parts:
            assert [word for word in own(part) if part.name not in tables[what].get(word, ())] == [], part.name
        for word, owners in tables[what].items():               # a row may say with which setting a part belongs to it
            assert owners >= {p.name for p in parts if word in own(p)}
            assert owners <= {*PARTS}, word


# Blocks of code

@pytest.mark.parametrize("page", [p for p in WRITTEN if any(lang in ("python", "toml") for lang, _ in blocks(p))], ids=name_of)
def test_blocks_of_python_and_toml_can_be_read(page: Path) -> None:
    for language, text in blocks(page):
        if language == "toml":
            tomllib.loads(text)
        if language != "python":
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "consilience":
                module = importlib.import_module(node.module or "")
                for alias in node.names:
                    assert hasattr(module, alias.name) or importlib.util.find_spec(f"{node.module}.{alias.name}"), alias.name


@pytest.mark.slow
@pytest.mark.parametrize("command", ["run scaffold+dbe --config FILE",
                                     next(c for c in documented_commands(ROOT / "README.md") if "--out" in c)])
def test_the_first_examples_train_to_their_end(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They became non-finite once: the learning rate, momentum and κ of an example have to go together."""
    monkeypatch.chdir(tmp_path)
    file = next(text for language, text in blocks(DOCS / "runs.md") if language == "toml")
    Path("FILE.toml").write_text(file, encoding="utf-8")
    done = CliRunner().invoke(app, shlex.split(command.replace("FILE", "FILE.toml")))
    assert done.exit_code == 0, done.exception
    assert "last round" in done.output
