"""The page: complete in itself, safe against what names may hold, and working in a real browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest
from browser import needs_browser, opened
from stored_runs import write_run

from consilience.report.gather import gather
from consilience.report.report import write_report
from consilience.report.reproduce import command_of, settings_table

EVIL = "</script><img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>\u2028'\"&amp;<!--"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Three methods, two seeds, a trace, and one unfinished run."""
    top = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        write_run(top, "local", seed, level=0.6, rounds=12)
        path = write_run(top, "fedavg", seed, level=0.7, rounds=12)
        write_run(top, "scaffold", seed, level=0.8, rounds=12, done=seed == 0)
        (path / "measures.json").write_text(json.dumps({"cka": {"result": {"client": "client0", "trace": {
            "step": [0, 10, 20], "cka": [1.0, 0.9, 0.8]}}}}))
    return write_report([top], top.with_suffix(".html"))         # beside the folder, whose number other tests decide


@pytest.fixture(scope="module")
def evil_page(tmp_path_factory):
    top = tmp_path_factory.mktemp("evil")
    names = tuple(f"{EVIL}{i}" for i in range(6))
    for method in ("local", "fedavg"):
        path = write_run(top, method, names=names, about={"name": EVIL, "split": EVIL, "class_names": [f"{EVIL}{c}" for c in range(10)]})
        stored = json.loads((path / "config.json").read_text())
        stored["config"]["transform"] = EVIL
        stored["config"]["settings"] = {EVIL: EVIL}
        (path / "config.json").write_text(json.dumps(stored))
        (path / "environment.json").write_text(json.dumps({"python": EVIL, "packages": {EVIL: EVIL}}))
        (path / "measures.json").write_text(json.dumps({"cka": {"result": {"client": EVIL, "point": EVIL, "trace": {
            "step": [0, 1], "cka": [1.0, 0.9]}}}}))
    return write_report([top], top.parent / "evil.html", title=EVIL)


class Outline(HTMLParser):
    """Elements and the addresses they name."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.handlers: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [v or "" for k, v in attrs if k in ("src", "href", "action", "data")]
        self.handlers += [k for k, _ in attrs if k.startswith("on")]


def test_page_names_no_address_outside_itself(page):
    text = page.read_text()
    outline = Outline(text)
    assert all(a.startswith("#") for a in outline.addresses)
    assert set(re.findall(r"https?://[^\s\"'`)]+", text)) == {"http://www.w3.org/2000/svg"}        # a name space, never fetched
    assert "@import" not in text
    assert "default-src 'none'" in text


def test_only_the_scripts_of_the_page_may_run(page):
    text = page.read_text()
    script = re.search(r"<script>(.*?)</script>", text, re.S)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text


def test_page_is_the_same_for_the_same_runs(page, tmp_path):
    assert write_report([page.with_suffix("")], tmp_path / "again.html").read_bytes() == page.read_bytes()


def test_tables_and_settings_can_be_read_without_scripts(page):
    text = page.read_text()
    for words in ("gain over fedavg", "worse than alone", "only what differs", "consilience run scaffold --data digits"):
        assert words in text
    assert "is not finished: round 12 of 12" in text


def test_names_cannot_become_markup(evil_page):
    text = evil_page.read_text()
    outline = Outline(text)
    assert "img" not in outline.tags
    assert outline.tags.count("script") == 2
    assert outline.handlers == []
    # inside the data nothing can end the element, and what was written comes back
    data = re.search(r'<script type="application/json" id="report-data">(.*?)</script>', text, re.S)[1]
    assert not re.search("[<>&\u2028\u2029]", data)
    assert json.loads(data)["traces"][0]["client"] == EVIL


def test_settings_that_differ_are_marked(tmp_path):
    write_run(tmp_path, "fedavg", 0)
    write_run(tmp_path, "fedavg", 0, lr=0.5)
    rows = {r["name"]: r for r in settings_table(gather([tmp_path]).groups)}
    assert rows["lr"]["differs"]
    assert sorted(rows["lr"]["values"]) == ["0.05", "0.5"]
    assert not rows["batch"]["differs"]


def test_command_says_what_is_not_default(tmp_path):
    write_run(tmp_path, "fedprox(mu=0.1)", 3, momentum=0.9, eval_every=2, split="dirichlet(alpha=0.5)")
    [run] = gather([tmp_path]).runs
    words = command_of(run)
    assert words.startswith("consilience run ")
    assert "--split 'dirichlet(alpha=0.5)' --clients 6 --rounds 5 --eval-every 2 --seed 3" in words
    assert "-o momentum=0.9" in words
    assert "batch" not in words


DRIVE = """
const q = s => document.querySelector(s), all = s => [...document.querySelectorAll(s)], out = {};
out.drawn = Number(document.documentElement.dataset.drawn);
out.figures = all(".plot svg[role=img]").length;
out.lines = all("#figure-curves svg path.line").filter(p => !p.closest("button")).length;
out.bands = all("#figure-curves path.band").length;
const plot = q("#figure-curves .plot");
plot.focus();
out.focused = document.activeElement === plot;
for (let i = 0; i < 3; i++) plot.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
out.read = q("#figure-curves .readout").textContent;
q("#figure-curves input[value=bytes]").click();
plot.dispatchEvent(new KeyboardEvent("keydown", { key: "Home" }));
out.bytes = q("#figure-curves .readout").textContent;
q("#figure-curves .legend button").click();
out.pressed = q("#figure-curves .legend button").getAttribute("aria-pressed");
out.bandsAfter = all("#figure-curves path.band").length;
out.worst = all("#figure-clients svg text").map(t => t.textContent).find(t => t.startsWith("worst"));
out.circles = all("#figure-split circle").length;
const nameOf = e => e.getAttribute("aria-label") || e.textContent || e.closest("label").textContent;
out.named = all("button, select, input, [tabindex='0']").every(e => nameOf(e).trim());
out.hidden = getComputedStyle(q("#settings-table tr.same")).display;
q("#only-differences").click();
out.shown = getComputedStyle(q("#settings-table tr.same")).display;
out.overflow = document.documentElement.scrollWidth - innerWidth;
out.width = innerWidth;
out.paper = getComputedStyle(document.body).backgroundColor;
const saved = [];
URL.createObjectURL = blob => { saved.push(blob); return "blob:none"; };
HTMLAnchorElement.prototype.click = function () { saved.push(this.download); };
for (const b of all("#figure-curves .actions button").reverse()) b.click();
const describe = async s => ({ type: s.type, size: s.size, head: s.type.includes("svg") ? await s.text() : "" });
(async () => {
  while (saved.length < 4) await new Promise(later => setTimeout(later, 20));
  out.saved = await Promise.all(saved.map(s => typeof s === "string" ? s : describe(s)));
  return out;
})()
"""


@needs_browser
def test_page_works_in_a_browser(page):
    with opened(page) as browser:
        said = browser.evaluate(DRIVE)
    assert said["figures"] == 4                                          # curves, clients, split, trace
    assert (said["lines"], said["bands"]) == (3, 3)
    assert said["focused"]
    assert re.fullmatch(r"round 3 — local: [\d.]+ ± [\d.]+; fedavg: [\d.]+ ± [\d.]+; scaffold: [\d.]+ ± [\d.]+", said["read"])
    assert said["bytes"].startswith("sent and received 1.5 kB — ")
    assert (said["pressed"], said["bandsAfter"]) == ("false", 2)
    assert said["worst"].startswith("worst: client")
    assert said["circles"] == 60                                         # six clients, ten classes, all present
    assert said["named"]
    assert (said["hidden"], said["shown"]) == ("none", "table-row")
    assert said["overflow"] <= 0
    assert said["paper"] == "rgb(255, 255, 255)"
    svg, name, png, png_name = said["saved"]
    assert (name, png_name) == ("convergence.svg", "convergence.png")
    assert svg["type"] == "image/svg+xml"
    assert "var(" not in svg["head"]
    assert "scaffold" in svg["head"]
    assert png["type"] == "image/png"
    assert png["size"] > 5000


@needs_browser
def test_narrow_and_dark(page):
    with opened(page, "--window-size=360,800", "--blink-settings=preferredColorScheme=0") as browser:
        said = browser.evaluate("""({overflow: document.documentElement.scrollWidth - innerWidth, width: innerWidth,
                                     paper: getComputedStyle(document.body).backgroundColor})""")
    assert said["width"] <= 500
    assert said["overflow"] <= 0
    assert said["paper"] == "rgb(20, 23, 28)"


@needs_browser
@pytest.mark.parametrize("policy", ["its own", "lifted"])
def test_evil_names_do_nothing_in_a_browser(evil_page, policy, tmp_path):
    """Even with the page's own policy lifted, names stay text."""
    if policy == "lifted":
        text, lifted = re.subn(r"script-src 'sha256-[^']+'", "script-src 'unsafe-inline'", evil_page.read_text(encoding="utf-8"))
        assert lifted == 1
        evil_page = tmp_path / "lifted.html"
        evil_page.write_text(text, encoding="utf-8")
    with opened(evil_page) as browser:
        drawn, title, images = browser.evaluate("[document.documentElement.dataset.drawn, document.title, document.images.length]")
    assert int(drawn) >= 0                                               # the page's script came to its end
    assert title.startswith("</script><img")
    assert images == 0


@pytest.mark.slow
@needs_browser
def test_twenty_runs_of_five_hundred_rounds(tmp_path):
    """Under ten megabytes, and drawn; how soon is printed (docs/report.md has it), for a time is no test."""
    for method in ("local", "fedavg", "scaffold", "fedprox"):
        for seed in range(5):
            write_run(tmp_path / "runs", method, seed, rounds=500, clients=20)
    page = write_report([tmp_path / "runs"], tmp_path / "report.html")
    with opened(page) as browser:
        drawn = browser.evaluate("Number(document.documentElement.dataset.drawn)")
        curves = browser.evaluate('document.querySelectorAll("#figure-curves svg path.band").length')
    print(f"{page.stat().st_size / 1e6:.2f} MB; drawn after {drawn:.0f} ms")
    assert page.stat().st_size < 10e6
    assert curves == 4
