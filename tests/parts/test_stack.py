"""From text to parts: order, nearest names, forwarded options, conflicts."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consilience.errors import ConfigError, RefusedCombination
from consilience.parts import PARTS, parse_stack
from consilience.parts.presets import PRESETS
from consilience.parts.stack import split_tokens

# The names the issue fixes for stacks; what is no preset is a part.
NAMES = (
    "local", "union", "fedavg", "fedavgm", "fedprox", "fednova", "scaffold", "feddyn", "fedcm", "moon", "fedntd", "mixup", "fedsam",
    "fedbn", "groupdro", "dann", "fedper", "fedrep", "fedbabu", "ditto", "fedgen", "fedfomo", "fedbr", "lfd", "fedfm", "fedfa", "dbe",
)
HARMLESS = ("fedprox", "scaffold", "mixup", "dbe", "moon", "fedavgm", "fedfm", "fedsam")


def named(text, values=None):
    return {p.name: p for p in parse_stack(text, values).parts}


@pytest.mark.parametrize("name", NAMES)
def test_every_name_stands_alone(name):
    stack = parse_stack(name)
    stack.method()
    assert stack.canonical == name
    assert name in PRESETS or name in PARTS


def test_what_presets_are_made_of():
    assert set(named("dbe")) == {"prbm", "mr"}
    assert set(named("lfd")) == {"cosine", "drift"}
    assert set(named("fedprox")) == {"prox"}
    assert named("fedavg") == {}


@given(st.lists(st.sampled_from(HARMLESS), min_size=1, max_size=5, unique=True), st.randoms(use_true_random=False))
@settings(max_examples=10)
def test_the_order_of_typing_does_not_matter(names, random):
    shuffled = list(names)
    random.shuffle(shuffled)
    a, b = parse_stack("+".join(names)), parse_stack(" + ".join(shuffled))
    assert a.parts == b.parts
    assert a.canonical == b.canonical
    assert a.method().parts == b.method().parts


def test_fedavg_is_what_everything_stands_on():
    assert parse_stack("fedavg+dbe").parts == parse_stack("dbe").parts
    assert parse_stack("fedavg+dbe").canonical == parse_stack("dbe+fedavg").canonical == "dbe"
    assert parse_stack("fedavg").canonical == "fedavg"


@pytest.mark.parametrize("text", ["scaffold+dbe", "fedprox+dbe", "moon+dbe", "fedgen+dbe", "fedper+mr", "fedrep+mr", "fedbabu+mr",
                                  "ditto+mr", "fedfomo+mr", "fedprox+fedfm", "fednova+fedfm", "moon+fedfm", "fedavg+mixup+fedbr",
                                  "fedbr+fedcm",
                                  "fedbr+fedntd", "fedfa+mixup", "lfd+fedfm"])
def test_published_combinations(text):
    parse_stack(text).method()


@pytest.mark.parametrize("text", ["fedntd+mixup", "fedper+fedgen", "fedrep+fedgen", "local+fedavgm", "local+feddyn", "local+fednova",
                                  "local+groupdro", "fedfomo+fedavgm", "fedfomo+feddyn", "fedfomo+fednova", "fedfomo+groupdro",
                                  "lfd+fedbabu", "fedrep+fedbabu", "union+dbe", "union+ditto", "union+fedfomo", "local+fedfomo"])
def test_combinations_that_must_be_refused(text):
    with pytest.raises(RefusedCombination) as refusal:
        parse_stack(text).method()
    said = str(refusal.value)
    assert "cannot be combined" in said
    parts = [{p.name for p in parse_stack(name).parts} for name in text.split("+")]
    assert all(any(part in said for part in owner) for owner in parts)


# ---- options ---------------------------------------------------------------------------------------------------------

def test_options_in_brackets_and_from_settings():
    assert named("fedprox(mu=0.3)")["prox"].mu == 0.3
    assert named("fedprox", {"prox.mu": "0.4"})["prox"].mu == 0.4
    assert named("fedprox", {"fedprox.mu": 0.5})["prox"].mu == 0.5
    assert named("prox(mu=1)")["prox"].mu == 1.0
    assert named("fedprox(mu=0.3)", {"prox.mu": 0.4})["prox"].mu == 0.4          # the command line has the last word


def test_brackets_have_the_last_word_over_the_preset_they_stand_behind():
    """FedMix's refusals advise form=naive: typed behind its name, too."""
    assert named("fedmix(form=naive)") == named("naivemix") == named("fedmix", {"mix.form": "naive"})
    parse_stack("fedmix(form=naive)+fedsam").method()
    assert named("naivemix+fedmix(form=naive)") == named("fedmix(form=naive)+naivemix") == named("naivemix")
    with pytest.raises(ConfigError, match=r"mix\.form is set twice"):
        parse_stack("fedmix+mix(form=naive)")


def test_presets_forward_their_options():
    assert named("dbe", {"dbe.kappa": 5})["mr"].kappa == 5
    assert named("scaffold+dbe(kappa=7, mu=0.5)")["mr"].kappa == 7
    assert named("scaffold+dbe(kappa=7, mu=0.5)")["mr"].momentum == 0.5
    both = named("dbe", {"dbe.at": "neck"})
    assert (both["mr"].at, both["prbm"].at) == ("neck", "neck")
    lfd = named("lfd", {"lfd.tau": 0.2})
    assert (lfd["cosine"].tau, lfd["drift"].tau) == (0.2, 0.2)


def test_a_choice_named_none_needs_no_quotes():
    assert named("debias(projection=none)")["debias"].projection == "none"
    assert named("fedbr(projection=none)") == named("fedbr(projection='none')") == named("fedbr", {"fedbr.projection": "none"})
    assert named("ffa(sharing=none)")["ffa"].sharing == "none"
    with pytest.raises(ConfigError, match=r"'pseudo' option of debias must be one of rsm, mixture. Got 'none' instead"):
        named("fedbr(pseudo=none)")


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_forwarded_option_exists(preset):
    for targets in PRESETS[preset].options.values():
        for target in targets:
            part, option = target.split(".")
            assert part in PRESETS[preset].parts
            assert option in PARTS[part].__dataclass_fields__


@pytest.mark.parametrize(("text", "values", "message"), [
    ("fedproxx", {}, "Unknown method 'fedproxx'. Did you mean 'fedprox'"),
    ("scafold+dbe", {}, "Did you mean 'scaffold'"),
    ("fedprox", {"prox.mo": 1}, "prox has no option 'mo'. Did you mean 'mu'"),
    ("fedprox(mo=1)", {}, "fedprox has no option 'mo'. Did you mean 'mu'"),
    ("dbe", {"dbe.kapa": 1}, "dbe has no option 'kapa'. Did you mean 'kappa'"),
    ("fedavg", {"fedavg.x": 1}, "fedavg has no options"),
    ("fedprox", {"moon.mu": 1}, "'moon' in 'moon.mu' is not in the method 'fedprox'"),
    ("fedprox+dbe", {"fedprix.mu": 1}, "Did you mean 'fedprox'"),
    ("fedprox", {"mu": 1}, "written part.option=value"),
    ("fedprox", {"prox.": 1}, "written part.option=value"),
    ("fedprox", {"prox.mu.x": 1}, "written part.option=value"),
    ("fedprox", {"prox.mu": "strong"}, "'mu' option of prox must be a number"),
    ("fedprox", {"prox.mu": -1}, "'mu' option of prox must be at least 0"),
    ("fedprox(mu=0.1)+prox(mu=0.2)", {}, "prox.mu is set twice: 0.1 by fedprox\\(mu=0.1\\) and 0.2 by prox\\(mu=0.2\\)"),
    ("fedmix+naivemix", {}, "mix.form is set twice: 'fedmix' by the preset fedmix and 'naive' by the preset naivemix"),
    ("moon+moon", {}, "'moon' stands twice in 'moon\\+moon'"),
    ("", {}, "names joined by '\\+'"),
    ("moon+", {}, "names joined by '\\+'"),
    ("moon++dbe", {}, "names joined by '\\+'"),
    ("fedavg,dbe", {}, "stand apart, as in fedavg dbe"),
    ("fedprox(0.1)", {}, "need names"),
    ("fed prox", {}, "must be written name"),
    ("./nowhere.py:Mine", {}, "There is no file './nowhere.py'"),
    ("no.such.module:Mine", {}, "cannot be imported"),
    ("consilience.parts.prox:Prx", {}, "has no class 'Prx'. Did you mean 'Prox'"),
    ("consilience.core.policy:Policy", {}, "is not a part"),
])
def test_mistakes_are_explained(text, values, message):
    with pytest.raises(ConfigError, match=message):
        parse_stack(text, values)


def test_equal_settings_from_two_sides_agree():
    assert named("fedprox(mu=0.1)+prox(mu=0.1)")["prox"].mu == 0.1


def test_tokens_split_outside_brackets():
    assert split_tokens("a(x='1+2')+b([+])+c") == ["a(x='1+2')", "b([+])", "c"]


@given(st.one_of(st.text(max_size=15), st.text(alphabet="fedprox+(mu=0.1),dbe.:[]'", max_size=20)))
@settings(max_examples=80)
def test_any_text_is_parsed_or_refused(text):
    try:
        stack = parse_stack(text)
    except ConfigError:
        return
    assert all(p.name in PARTS for p in stack.parts)


@given(st.dictionaries(st.text(alphabet="dbe.kapmur", max_size=10), st.one_of(st.none(), st.integers(), st.text(max_size=4)), max_size=3))
def test_any_settings_are_taken_or_refused(values):
    with contextlib.suppress(ConfigError):
        parse_stack("dbe+fedprox", values)


# ---- parts from outside ----------------------------------------------------------------------------------------------

MINE = '''
from dataclasses import dataclass
from consilience.core.part import Part
from consilience.options import option

@dataclass(frozen=True)
class Mine(Part):
    """A part of a researcher's own."""
    weight: float = option(1.0, "strength", low=0.0)
    name = "{name}"

    def loss(self, v):
        return 0.0
'''


def test_a_part_from_a_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(MINE.format(name="mine"))
    stack = parse_stack(f"fedprox+{file}:Mine", {"mine.weight": 2})
    assert {p.name: p for p in stack.parts}["mine"].weight == 2.0
    stack.method()


def test_a_part_from_a_file_takes_brackets_and_stays_the_same_class(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(MINE.format(name="mine"))
    first, second = parse_stack(f"{file}:Mine(weight=3)+scaffold"), parse_stack(f"scaffold+{file}:Mine", {"mine.weight": 3})
    assert first.parts == second.parts
    assert first.canonical == second.canonical == f"{file}:Mine+scaffold"


@pytest.mark.parametrize(("hook", "said"), [
    ("    def los(self, v):\n        return 0.0", "'los', which is no hook and would not be called. Did you mean 'loss'"),
    ("    pass", "defines no hook"),
    ("    def tap(self, v, point, x):\n        return x", "defines `tap` but not `points`"),
    ("    other: int\n    def loss(self, v):\n        return 0.0", "The field 'other' of .* has no default"),
])
def test_a_part_that_would_do_nothing_is_refused(tmp_path, hook, said):
    file = tmp_path / "mine.py"
    text = MINE.format(name="mine").replace("    def loss(self, v):\n        return 0.0", hook)
    file.write_text(text if "other" not in hook else text.replace("    weight: float = option(1.0, \"strength\", low=0.0)\n", ""))
    with pytest.raises(ConfigError, match=said):
        parse_stack(f"{file}:Mine")


def test_a_helper_beside_its_hook_may_have_a_similar_name(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(MINE.format(name="mine") + "\n    def losses(self):\n        return 0.0\n")
    parse_stack(f"{file}:Mine").method()


def test_a_file_without_a_class_says_how_to_write_it(tmp_path):
    with pytest.raises(ConfigError, match=r"mine\.py:Mine"):
        parse_stack("fedavg+./mine.py")


def test_a_part_from_a_file_with_a_name_that_is_taken(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(MINE.format(name="prox"))
    with pytest.raises(ConfigError, match="both named 'prox'"):
        parse_stack(f"fedprox+{file}:Mine")


def test_a_file_that_does_not_load(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text("import nothing_of_that_name")
    with pytest.raises(ConfigError, match=r"cannot be loaded: ModuleNotFoundError"):
        parse_stack(f"{file}:Mine")
