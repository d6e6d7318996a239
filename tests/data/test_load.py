"""From a name to clients: parts, pools, test sets, saved splits, vocabularies."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consilience.data import Dataset, from_arrays, load, save_split
from consilience.data.load import cut, fingerprint_of
from consilience.data.sources import make
from consilience.data.text import TextDataset, apply_vocabulary, number_words, tokens, training_vocabulary
from consilience.errors import ConfigError, DataError


def toy(n: int = 100, test: int = 20) -> Dataset:
    """Sample i holds i; the last `test` rows are the published test set."""
    return from_arrays(torch.arange(n, dtype=torch.float32)[:, None], torch.arange(n) % 4, test=torch.arange(n) >= n - test)


def owned(data):
    return torch.cat([torch.cat(c[1:]) for c in data.clients])


def test_digits_in_one_line():
    data = load("digits")
    assert data.population == 10
    assert owned(data).sort().values.tolist() == list(range(1797))
    assert data.description["split"].startswith("dirichlet(alpha=0.1")
    assert data.description["hash"] == data.split_hash()
    assert json.loads(json.dumps(data.description)) == data.description
    x, _ = data.transform(data.x[:4], data.y[:4], None)
    assert x.dtype == torch.float32


def test_same_seed_same_split_other_seed_other_split():
    assert load("digits").split_hash() == load("digits").split_hash()
    assert load("digits", seed=1).split_hash() != load("digits").split_hash()


def test_pools_and_test_sets():
    train = load(toy(), "iid", 4)
    assert owned(train).sort().values.tolist() == list(range(80))           # the published test set belongs to nobody
    assert len(train.test) == 0
    whole = load(toy(), "iid", 4, pool="all")
    assert owned(whole).sort().values.tolist() == list(range(100))
    one = load(toy(), "iid", 4, test="global", validation=0.2)
    assert one.test.tolist() == list(range(80, 100))
    # 20 rows per client: ⌊0.2 · 20⌋ = 4 validate, the other 16 train.
    assert [[len(r) for r in c[1:]] for c in one.clients] == [[16, 4, 0]] * 4
    both = load(toy(), "iid", 4, test="both")
    assert len(both.test) == 20
    assert [[len(r) for r in c[1:]] for c in both.clients] == [[15, 0, 5]] * 4


def test_fractions_round_down_and_test_takes_the_rest():
    # 7 rows: ⌊0.75 · 7⌋ = 5, ⌊0.1 · 7⌋ = 0, the rest 2.
    assert [len(p) for p in cut(torch.arange(7), 0.75, 0.1)] == [5, 0, 2]
    assert [len(p) for p in cut(torch.arange(7), 0.8, 0.2)] == [6, 1, 0]        # nothing is left for a test part
    assert [len(p) for p in cut(torch.arange(10), 0.7, 0.1)] == [7, 1, 2]       # 0.7 · 10 is 7, not 6.999…
    assert [len(p) for p in cut(torch.arange(1), 0.1, 0.0)] == [1, 0, 0]        # someone with rows trains


@settings(max_examples=100, deadline=None)
@given(n=st.integers(0, 60), train=st.one_of(st.none(), st.floats(0, 1)), validation=st.floats(0, 1))
def test_parts_are_disjoint_and_complete(n, train, validation):
    if train is not None and train + validation > 1:
        validation = 1 - train
    parts = cut(torch.arange(n), train, validation)
    assert torch.cat(parts).sort().values.tolist() == list(range(n))


def test_parts_of_a_client_do_not_depend_on_the_others():
    """Keyed by the client's number: with the same rows, client 0 is cut alike whatever the fractions of a third client's data."""
    few, many = toy(80, 0), toy(80, 0)
    group = torch.arange(80) // 20
    few = dataclasses.replace(few, groups={"g": group.clamp(max=2)}, group_names={})
    many = dataclasses.replace(many, groups={"g": group}, group_names={})
    a, b = load(few, "by_group"), load(many, "by_group")
    assert torch.equal(a.clients[0].train, b.clients[0].train)


@pytest.mark.parametrize(("arguments", "words"), [
    ({"test": "globl"}, "Did you mean 'global'"),
    ({"test": "global", "pool": "all"}, "pool='train'"),
    ({"pool": "none"}, "must be one of train, all"),
    ({"train": 1.5}, "fraction from 0 to 1"),
    ({"train": 0.8, "validation": 0.3}, "more than 1"),
    ({"test": "global", "train": 0.5}, "must add up to 1"),
    ({"test": "published"}, "no published parts"),
    ({"split": "dirichlet(alpha=0)"}, "above 0"),
    ({"split": "dirichle"}, "Did you mean 'dirichlet'"),
    ({"shift": "rotate"}, "rotation"),
])
def test_settings_that_make_no_sense(arguments, words):
    with pytest.raises(ConfigError) as error:
        load(toy(), clients=2, **arguments)
    assert words in str(error.value)


def test_global_test_needs_a_published_test_set():
    with pytest.raises(ConfigError, match="no published test set"):
        load("digits", test="global")


def test_synthetic_follows_the_number_of_clients():
    assert [c.name for c in load("synthetic", clients=3).clients] == ["0", "1", "2"]
    assert load("synthetic", clients=3).description["source"] == "synthetic(clients=3)"
    assert load("synthetic", "iid", 3).description["source"] == "synthetic"


def test_shift_is_applied_and_recorded():
    plain, turned = load("digits", "iid", 4), load("digits", "iid", 4, shift="rotation(step=90)")
    assert plain.split_hash() == turned.split_hash()
    first, second = plain.clients[0].train, plain.clients[1].train
    assert torch.equal(plain.x[first], turned.x[first])             # client 0 is turned by 0 degrees
    assert not torch.equal(plain.x[second], turned.x[second])
    assert turned.description["shift"].startswith("rotation(step=90")


def test_masks_move_with_their_images():
    x = torch.randint(0, 255, (8, 3, 6, 6), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    y = (x[:, 0] > 100).to(torch.uint8)
    data = load(Dataset("seg", x, y, 2, task="segmentation"), "iid", 2, shift="rotation(start=90, step=0)")
    assert not torch.equal(data.y, y)
    assert torch.equal(data.y, (data.x[:, 0] > 100).to(torch.uint8))


# Saved splits.

def test_a_saved_split_comes_back(tmp_path):
    data = load("digits", "dirichlet(alpha=0.3)", 5, 7, validation=0.1, shift="rotation(step=30)")
    save_split(data, tmp_path / "split.json")
    again = load("digits", split_file=tmp_path / "split.json")
    assert again.split_hash() == data.split_hash()
    assert torch.equal(again.x, data.x)                 # the shift is applied again, from the recorded seed
    assert again.description["split"] == data.description["split"]
    assert again.description["split_file"] == "split.json"


def test_a_split_file_that_does_not_fit(tmp_path):
    path = tmp_path / "split.json"
    with pytest.raises(DataError, match="does not exist"):
        load("digits", split_file=path)
    save_split(load(toy(), "iid", 2), path)
    with pytest.raises(DataError, match="divides 'arrays', not 'digits'"):
        load("digits", split_file=path)
    with pytest.raises(DataError, match="fingerprint"):
        load(toy(104), split_file=path)
    document = json.loads(path.read_text())
    document["clients"][0]["train"][0], document["clients"][1]["train"][0] = (document["clients"][1]["train"][0],
                                                                              document["clients"][0]["train"][0])
    path.write_text(json.dumps(document))
    with pytest.raises(DataError, match="was changed"):
        load(toy(), split_file=path)
    path.write_text("{}")
    with pytest.raises(DataError, match="not a split"):
        load(toy(), split_file=path)
    path.write_text("[1,")
    with pytest.raises(DataError, match="JSON"):
        load(toy(), split_file=path)


def test_fingerprint_sees_every_change():
    base = toy()
    changed = base.x.clone()
    changed[50, 0] += 1
    others = [dataclasses.replace(base, x=changed), dataclasses.replace(base, y=base.y.roll(1)),
              dataclasses.replace(base, x=base.x.double())]
    assert len({fingerprint_of(d) for d in [base, *others]}) == 4
    assert fingerprint_of(toy()) == fingerprint_of(base)


# Text.

def test_tokens():
    assert tokens('It\'s "News": Dr. A, (b)!') == ["it", "'", "s", "news", "dr", ".", "a", ",", "(", "b", ")", "!"]
    assert tokens("one;two<br />three") == ["one", "two", "three"]


def test_numbers_are_cut_and_padded():
    x, words = number_words(["b a b", "c b a a"], 3)
    assert x.tolist() == [[1, 2, 1], [3, 1, 2]]
    assert words == ("b", "a", "c")
    assert number_words(["a"], 3)[0].tolist() == [[1, 0, 0]]


def test_vocabulary_is_of_training_rows_only(written):
    dataset = make("ag_news").read(written("ag_news"))
    data = load(dataset, "iid", 4, train=0.5)
    training = torch.cat([c.train for c in data.clients])
    held = {w for row in dataset.x[training].tolist() for w in row if w}
    about = data.description["vocabulary"]
    assert about["size"] == 2 + len(held)
    elsewhere = torch.cat([c.test for c in data.clients])
    unseen = [(i, j) for i in elsewhere.tolist() for j, w in enumerate(dataset.x[i].tolist()) if w and w not in held]
    assert unseen
    assert all(data.x[i, j] == 1 for i, j in unseen)            # unknown
    assert (data.x[training] != 1).all()
    assert ((data.x == 0) == (dataset.x == 0)).all()            # padding stays
    assert int(data.x.max()) == about["size"] - 1


def test_numbers_go_by_count_then_by_letter(written):
    dataset = make("ag_news(tokens=5)").read(written("ag_news"))
    order = [dataset.words[n - 1] for n in training_vocabulary(dataset, torch.arange(80))]
    # Every training text starts 'title train it ' s': five words, 80 times each.
    assert order == ["'", "it", "s", "title", "train"]
    x, about = apply_vocabulary(dataset, torch.arange(80))
    assert x[0].tolist() == [5, 6, 3, 2, 4]
    assert x[80].tolist() == [5, 1, 3, 2, 4]                    # 'test' is not in the training rows
    assert about["size"] == 7
    rare = dataclasses.replace(dataset, min_count=81)
    assert apply_vocabulary(rare, torch.arange(80))[1]["size"] == 2


def test_characters_have_a_vocabulary(written):
    data = load("davis", "iid", 2, data_dir=written("davis"))
    assert data.description["vocabulary"]["size"] > int(data.x.max())


def test_a_federation_is_shown_in_a_line():
    """What a notebook prints of it: no tensors."""
    shown = repr(load("digits", "iid", clients=4, hold_out=["client3"], validation=0.1))
    assert shown.startswith("<FederatedData: digits, 1,797 samples of 1 × 8 × 8, 10 classes; 3 clients by iid")
    assert ", 1 more held out: " in shown
    assert [word.split(" ")[1] for word in shown.rpartition(": ")[2].rstrip(">").split(", ")] == ["train", "validation", "test"]


def test_a_data_set_is_shown_in_a_line():
    assert repr(make("digits").read(None)).startswith("<Dataset: digits, 1,797 samples of 1 × 8 × 8, 10 classes")
    assert repr(from_arrays(torch.zeros(3, 2), [0, 1, 1], ["a", "a", "b"])).endswith("3 samples of 2, 2 classes, groups client>")
    words = TextDataset("notes", torch.zeros(5, 7, dtype=torch.int64), torch.zeros(5, dtype=torch.int64), 2, words=("a", "b"))
    assert repr(words) == "<Dataset: notes, 5 samples of 7, 2 classes>"
