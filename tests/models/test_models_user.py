"""A user's own module by the path of what makes it."""

from __future__ import annotations

import pytest
import torch

from consilience import rng
from consilience.core.layout import Layout
from consilience.errors import ConfigError
from consilience.models import make, parse_taps

SOURCE = '''
from torch import nn

class Net(nn.Sequential):
    def __init__(self, classes, width=4):
        super().__init__()
        self.add_module("layer1", nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)))
        self.add_module("flatten", nn.Flatten())
        self.add_module("classifier", nn.Linear(width * 16, classes))

def ten():
    return Net(10)

def number():
    return 3

def needs_more(classes, depth):
    return Net(classes)
'''
TAPS = "head=classifier, stages=layer1"


@pytest.fixture
def path(tmp_path, monkeypatch):
    (tmp_path / "a_users_net.py").write_text(SOURCE)
    (tmp_path / "a_broken_net.py").write_text("import there_is_no_such_package")
    monkeypatch.chdir(tmp_path)
    return "a_users_net"


def build(text: str, taps: str | None = TAPS, classes: int = 5):
    return make(text, sample=(1, 8, 8), classes=classes, key=rng.key(0, "model"), taps=taps)


def test_a_class_of_the_working_directory_with_settings(path):
    built = build(f"{path}:Net(width=6)")
    assert built.layout == Layout(head="classifier", stages=("layer1",))
    assert built.module.layer1[0].out_channels == 6
    assert built.module(torch.zeros(2, 1, 8, 8)).shape == (2, 5)


def test_its_initial_values_come_from_the_key_too(path):
    torch.manual_seed(1)
    first = build(f"{path}:Net").module.classifier.weight
    torch.manual_seed(2)
    assert torch.equal(first, build(f"{path}:Net").module.classifier.weight)


@pytest.mark.parametrize(("factory", "taps", "words"), [
    ("Net", None, ["taps", "layer1", "classifier  Linear"]),
    ("Net", "head=clasifier", ["'clasifier'", "'classifier'"]),
    ("Nett", TAPS, ["Unknown factory", "'Net'"]),
    ("Net(widths=3)", TAPS, ["widths"]),
    ("ten", TAPS, ["(10,)", "5 classes"]),
    ("number", TAPS, ["torch.nn.Module", "int"]),
    ("needs_more", TAPS, ["depth", "sample, classes, vocabulary"]),
])
def test_what_does_not_fit_is_said(path, factory, taps, words):
    with pytest.raises(ConfigError) as error:
        build(f"{path}:{factory}", taps)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_modules_that_are_absent_or_fail(path):
    with pytest.raises(ConfigError, match="no Python module 'nowhere'"):
        build("nowhere.net:make")
    with pytest.raises(ConfigError, match="there_is_no_such_package"):
        build("a_broken_net:make")


def test_taps():
    assert parse_taps(None) is None
    assert parse_taps("head=fc,stages=a+b.1,extractor=a+b,header=p") == Layout("fc", ("a", "b.1"), ("a", "b"), ("p",))
    for text, word in (("stages=a", "head"), ("head=a+b", "one module"), ("heads=a", "'head'"), ("head", "role=module"),
                       ("head=a,head=b", "twice")):
        with pytest.raises(ConfigError, match=word):
            parse_taps(text)
