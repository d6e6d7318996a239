"""Exported models and predictions: what is written is what was trained."""

from __future__ import annotations

import csv
import io
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import consilience
from consilience import rng
from consilience.errors import ConfigError, DataError
from consilience.models import make
from consilience.runs.export import export, load_exported, write_onnx
from consilience.runs.reload import open_run
from consilience.runs.use import ServedModule, open_finished, predict, predictions_csv, served


def test_a_plain_state_dict_loads_strictly(trained, tmp_path, monkeypatch):
    card = export(trained("fedavg"), tmp_path / "m.safetensors")
    assert card["state"] == {"file": "m.safetensors", "strict": True, "replaced_by_the_method": [], "left_out": []}
    assert card["personal"] is card["shared"] is None
    assert (card["model"]["factory"], card["model"]["sample"], card["model"]["classes"]) == ("mlp", [6], 3)
    assert card == json.loads((tmp_path / "m.json").read_text())
    module = make("mlp", sample=(6,), classes=3, key=rng.key(9)).module
    module.load_state_dict(load_file(tmp_path / "m.safetensors"), strict=True)
    run = open_run(trained("fedavg"))
    for k, v in module.state_dict().items():
        assert torch.equal(v, {**run.federation.model["params"], **run.federation.model["buffers"]}[k])
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    assert len(card["load"]) == 5
    exec("\n".join(card["load"]), names)                        # the five lines do what they say
    x = run.data.x[:7]
    assert torch.equal(names["module"](x), module.eval()(x))


def test_a_clients_model_with_its_personal_tensors(trained, tmp_path):
    """DBE by hand: logits = head(body(x) + shift), with the shift of the file beside the state dict."""
    at = trained("dbe")
    run = open_run(at)
    name = run.data.clients[2].name
    card = export(at, tmp_path / "m.safetensors", client=name)
    assert card["personal"] == {"file": "m.personal.safetensors", "tensors": {"prbm/shift": [run.federation.spec.width]}}
    module = make("mlp", sample=(6,), classes=3, key=rng.key(0)).module.eval()
    module.load_state_dict(load_file(tmp_path / "m.safetensors"), strict=True)
    shift = load_file(tmp_path / "m.personal.safetensors")["prbm/shift"]
    rows = run.data.clients[2].test
    x = run.data.x[rows]
    *body, head = list(module)
    hidden = x
    for stage in body:
        hidden = stage(hidden)
    loaded = load_exported(tmp_path / "m.safetensors")
    torch.testing.assert_close(loaded(loaded.prepare(x)), head(hidden + shift))
    right = (loaded(loaded.prepare(x)).argmax(1) == run.data.y[rows]).double().mean().item()
    assert right == run.records[-1]["personalised"]["per_client"][name]


@pytest.mark.parametrize("method", ["fedavg", "dbe", "fedper", "fedbabu", "ditto", "local", "fedfomo", "fedfm", "lfd", "dann", "union",
                                    "fedproto", "pfedme", "apple"])
@pytest.mark.parametrize("which", ["final", "best"])
def test_an_exported_client_model_scores_what_the_record_says(trained, tmp_path, method, which):
    at = trained(method)
    run = open_finished(at, which)
    record = next(r for r in run.records if r["round"] == run.federation.round_number)
    if which == "best":
        assert record["validation"]["accuracy"] == max(r["validation"]["accuracy"] for r in run.records if r["validation"])
    client = run.data.clients[1]
    card = export(at, tmp_path / "m.safetensors", client=client.name, which=which)
    assert card["round"] == record["round"]
    loaded = load_exported(tmp_path / "m.safetensors")
    logits = loaded(loaded.prepare(run.data.x[client.test]))
    assert torch.equal(logits, served(run, client.name).logits(run.data.x[client.test]))
    scores = record["personalised"]["per_client"]
    assert (logits.argmax(1) == run.data.y[client.test]).double().mean().item() == scores[client.name]


def test_a_replaced_head_is_said(trained, tmp_path):
    card = export(trained("lfd"), tmp_path / "m.safetensors")
    assert not card["state"]["strict"]
    assert card["state"]["replaced_by_the_method"] == ["head"]
    assert "load_exported" in "\n".join(card["load"])


def test_what_a_method_attached_is_left_out(trained, tmp_path):
    card = export(trained("dann"), tmp_path / "m.safetensors")
    assert card["state"]["strict"]
    assert all(k.startswith("dann.") for k in card["state"]["left_out"])
    assert card["state"]["left_out"]


def test_what_belongs_to_the_model_goes_with_it(tmp_path):
    """HarmoFL's amplitudes are the model's first layer: the loaded model gives the scores of the run, without them it would not."""
    consilience.run("harmofl(low=0.2)", out=tmp_path / "r", data="digits", split="iid", clients=3, model="digits_cnn", rounds=1, epochs=1,
                    batch=64, lr=0.1, seed=0)
    run = open_run(tmp_path / "r")
    card = export(tmp_path / "r", tmp_path / "m.safetensors")
    assert card["state"]["strict"]
    assert card["personal"] is None
    assert card["shared"] == {"file": "m.shared.safetensors", "tensors": {"amplitude/amplitude": [1, 3, 3]}}
    assert "load_exported" in "\n".join(card["load"])
    loaded = load_exported(tmp_path / "m.safetensors")
    x = run.data.x[run.data.clients[0].train[:20]]
    assert torch.equal(loaded(loaded.prepare(x)), served(run).logits(loaded.prepare(x)))
    module = make("digits_cnn", sample=(1, 8, 8), classes=10, key=rng.key(0)).module.eval()
    module.load_state_dict(load_file(tmp_path / "m.safetensors"), strict=True)
    assert not torch.allclose(module(loaded.prepare(x)), loaded(loaded.prepare(x)), atol=1e-3)


def test_equal_exports_are_equal_bytes_and_the_run_is_untouched(trained, tmp_path):
    at = trained("dbe")
    before = {p: p.read_bytes() for p in at.rglob("*") if p.is_file()}
    client = open_run(at).data.clients[0].name
    for place in ("a", "b"):
        export(at, tmp_path / place / "m.safetensors", client=client)
    files = lambda place: {p.name: p.read_bytes() for p in (tmp_path / place).iterdir()}
    assert files("a") == files("b")
    assert {p: p.read_bytes() for p in at.rglob("*") if p.is_file()} == before


def test_refusals(trained, tmp_path, tiny):
    to = tmp_path / "m.safetensors"
    with pytest.raises(ConfigError, match=r"no global model.*--client"):
        export(trained("local"), to)
    with pytest.raises(ConfigError, match="Unknown client"):
        export(trained("dbe"), to, client="nobody")
    with pytest.raises(ConfigError, match=r"\.safetensors"):
        export(trained("dbe"), tmp_path / "m.pt")
    with pytest.raises(ConfigError, match="final"):
        export(trained("dbe"), to, which="finl")
    consilience.run("fedavg", out=tmp_path / "r", **{**tiny, "validation": None, "rounds": 1})
    with pytest.raises(ConfigError, match="validation"):
        export(tmp_path / "r", to, which="best")
    (tmp_path / "r" / "done").unlink()
    with pytest.raises(ConfigError, match="consilience resume"):
        export(tmp_path / "r", to)
    assert not to.exists()


def test_onnx(trained, tmp_path):
    pytest.importorskip("onnx")
    from onnx.reference import ReferenceEvaluator
    run = open_run(trained("dbe"))
    name = run.data.clients[0].name
    export(trained("dbe"), tmp_path / "m.safetensors", client=name, onnx=tmp_path / "m.onnx")
    x = run.data.x[:5]                                               # another number of samples than it was traced with
    got = ReferenceEvaluator(str(tmp_path / "m.onnx")).run(None, {"input": x.numpy()})[0]
    np.testing.assert_allclose(got, served(run, name).logits(x).numpy(), rtol=1e-5, atol=1e-6)


def test_onnx_of_a_bfloat16_run_is_float32(tmp_path):
    """The same weights, without the rounding to eight bits: 2⁻⁸ a layer apart, three layers with weights."""
    pytest.importorskip("onnx")
    from onnx.reference import ReferenceEvaluator
    consilience.run("fedavg", out=tmp_path / "r", data="digits", split="iid", clients=3, model="digits_cnn", rounds=1, epochs=1, batch=64,
                    lr=0.01, precision="bfloat16", seed=0)
    export(tmp_path / "r", tmp_path / "m.safetensors", onnx=tmp_path / "m.onnx")
    model = served(open_run(tmp_path / "r"))
    x = torch.linspace(-1, 1, 3 * 64).reshape(3, 1, 8, 8)
    got = ReferenceEvaluator(str(tmp_path / "m.onnx")).run(None, {"input": x.numpy()})[0]
    assert model.federation.program.network.half
    want = model.logits(x).numpy()
    assert not np.array_equal(got, want)
    np.testing.assert_allclose(got, want, atol=0.05 * np.abs(want).max())


@pytest.mark.parametrize(("error", "said"), [(AttributeError("'Tensor' object has no attribute 'bit_length'\nmore"), "bit_length'$"),
                                             (RuntimeError("no such operator"), "no such operator"), (KeyError(), "KeyError")])
def test_a_model_that_onnx_cannot_hold(trained, tmp_path, monkeypatch, error, said):
    """Exporters fail in many ways; each is told in one line, and no half-written file is left."""
    pytest.importorskip("onnx")

    def fail(*args, **settings):
        raise error
    monkeypatch.setattr(torch.onnx, "export", fail)
    with pytest.raises(ConfigError, match=f"^This model cannot be written as ONNX: .*{said}"):
        export(trained("fedavg"), tmp_path / "m.safetensors", onnx=tmp_path / "m.onnx")
    assert not (tmp_path / "m.onnx").exists()


def test_what_onnx_has_no_operator_for(trained, tmp_path, capfd):
    pytest.importorskip("onnx")

    class Odd(ServedModule):
        def forward(self, x):
            return torch.special.bessel_j0(x)
    with pytest.raises(ConfigError, match=r"cannot be written as ONNX: .*bessel_j0"):
        write_onnx(Odd(served(open_run(trained("fedavg")))), torch.zeros(2, 6), tmp_path / "m.onnx")
    assert capfd.readouterr().out == ""                              # the graph, which the exporter prints, goes elsewhere


def test_onnx_without_the_package_names_the_extra(trained, tmp_path, monkeypatch):
    import sys
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ConfigError, match=r"consilience\[onnx\]"):
        export(trained("fedavg"), tmp_path / "m.safetensors", onnx=tmp_path / "m.onnx")


# ---- predictions ---------------------------------------------------------------------------------------------------

def test_predictions_are_the_models(trained, tiny):
    at = trained("fedavg")
    document = predict(at, tiny["data"])
    run = open_run(at)
    expected = served(run).logits(run.data.x).softmax(1)
    assert document["samples"] == 160
    assert document["classes"] == ["0", "1", "2"]
    got = torch.tensor([list(r["probabilities"].values()) for r in document["predictions"]])
    torch.testing.assert_close(got, expected)
    assert [r["class"] for r in document["predictions"]] == [str(i) for i in expected.argmax(1).tolist()]
    assert document["accuracy"] == (expected.argmax(1) == run.data.y).double().mean().item()
    rows = list(csv.DictReader(io.StringIO(predictions_csv(document))))
    assert set(rows[0]) == {"row", "label", "class", "p_0", "p_1", "p_2"}
    assert len(rows) == 160
    assert all(float(rows[3][f"p_{i}"]) == pytest.approx(float(expected[3, i]), rel=1e-5) for i in range(3))


def test_predictions_for_arrays_and_by_client(trained, tmp_path):
    run = open_run(trained("dbe"))
    name = run.data.clients[3].name
    np.savez(tmp_path / "new.npz", x=run.data.x[:11].numpy(), y=run.data.y[:11].numpy())
    document = predict(trained("dbe"), f"arrays(path='{tmp_path / 'new.npz'}', classes=3)", client=name)
    assert [int(r["class"]) for r in document["predictions"]] == served(run, name).logits(run.data.x[:11]).argmax(1).tolist()
    assert document["client"] == name


def test_labels_are_matched_by_name(tmp_path):
    """Trained on a, b, c; asked about samples called c and d. c is class 2 there and 0 here; d is none of the run's."""
    draw = np.random.default_rng(0)
    centre = {"a": 0.0, "b": 5.0, "c": -5.0, "d": 9.0}

    def table(path, labels):
        lines = ["f,g,label,who"] + [f"{centre[v] + draw.normal() / 9},{draw.normal()},{v},{i % 2}" for i, v in enumerate(labels)]
        path.write_text("\n".join(lines) + "\n")
        return f"table(path='{path}', client='who')"
    consilience.run("fedavg", table(tmp_path / "train.csv", "abc" * 30), out=tmp_path / "r", rounds=20, lr=0.1)
    document = predict(tmp_path / "r", table(tmp_path / "new.csv", "cd" * 5))
    assert document["classes"] == ["a", "b", "c"]
    assert [r["label"] for r in document["predictions"]] == ["c", None] * 5
    assert [r["class"] for r in document["predictions"]][::2] == ["c"] * 5
    assert document["accuracy"] == 1.0


def test_samples_must_fit(trained, tmp_path):
    np.savez(tmp_path / "wide.npz", x=np.zeros((9, 7), np.float32), y=np.arange(9) % 3)
    with pytest.raises(DataError, match=r"\(7,\).*\(6,\)"):
        predict(trained("fedavg"), f"arrays(path='{tmp_path / 'wide.npz'}')")
    with pytest.raises(DataError, match=r"uint8|float32"):
        predict(trained("fedavg"), "digits")


# ---- samples without labels ------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def wards(tmp_path_factory):
    """A run on two wards' tables, and what its global model says of three rows."""
    at = tmp_path_factory.mktemp("wards")
    (at / "wards").mkdir()
    for ward, shift in (("north", 0.0), ("south", 1.0)):
        lines = [f"{i % 7 + shift},{i % 3},{i * 0.1:.1f},{'ill' if i % 3 else 'well'}" for i in range(24)]
        (at / "wards" / f"{ward}.csv").write_text("\n".join(["age,dose,days,outcome", *lines]) + "\n")
    consilience.run("fedavg", f'table(path="{at / "wards"}", label=outcome)', rounds=2, batch=4, out=at / "run")
    (at / "labelled.csv").write_text("age,dose,days,outcome\n3,1,0.5,ill\n6,0,2,well\n1,2,1.5,ill\n")
    said = predict(at / "run", f'table(path="{at / "labelled.csv"}", label=outcome)')
    assert [p["label"] for p in said["predictions"]] == ["ill", "well", "ill"]
    return at, [p["probabilities"] for p in said["predictions"]]


def test_a_card_names_the_columns_of_a_table_and_what_is_done_to_them(wards):
    at, expected = wards
    card = export(at / "run", at / "model.safetensors")
    assert card["input"]["columns"] == ["age", "dose", "days"]
    assert not any("transform" in line for line in card["load"])
    rows = torch.tensor([[3, 1, 0.5], [6, 0, 2], [1, 2, 1.5]])
    model = load_exported(at / "model.safetensors")
    said = torch.softmax(model(model.prepare(rows)), 1)
    assert [list(p.values()) for p in expected] == pytest.approx(said.detach().numpy(), abs=1e-5)
    consilience.run("fedavg", f'table(path="{at / "wards"}", label=outcome)', rounds=1, batch=4, transform="standardise", out=at / "scaled")
    assert "load_exported('scaled.safetensors').prepare(x)" in export(at / "scaled", at / "scaled.safetensors")["load"][-1]


@pytest.mark.parametrize("text", [
    "age,dose,days\n3,1,0.5\n6,0,2\n1,2,1.5\n",                          # no labels
    "days,age,dose\n0.5,3,1\n2,6,0\n1.5,1,2\n",                          # in another order
    "id,days,age,dose\n7,0.5,3,1\n8,2,6,0\n9,1.5,1,2\n",                 # and one column more
    "note,days,age,dose,bp\nfell,0.5,3,1,\n,2,6,0,90\nox,1.5,1,2,\n",    # of words, of gaps
])
def test_a_table_to_predict_needs_no_labels_and_goes_by_the_names_of_its_columns(wards, text):
    at, expected = wards
    (at / "new.csv").write_text(text)
    said = predict(at / "run", f'table(path="{at / "new.csv"}")')
    assert [p["probabilities"] for p in said["predictions"]] == expected
    assert [p["label"] for p in said["predictions"]] == [None] * 3
    assert said["accuracy"] is None


def test_what_a_table_to_predict_lacks_is_said(wards):
    at, _ = wards
    (at / "short.csv").write_text("age,dose,label\n3,1,ill\n")
    with pytest.raises(DataError, match=r"no column 'days', which the run was trained on\. Its columns: age, dose, days"):
        predict(at / "run", f'table(path="{at / "short.csv"}")')
    (at / "typo.csv").write_text("age,dose,days\n3,1,0.5\n")
    with pytest.raises(DataError, match="has no column 'outcome'"):         # a label that is named is expected
        predict(at / "run", f'table(path="{at / "typo.csv"}", label=outcome)')


def test_arrays_to_predict_need_no_labels(wards):
    at, expected = wards
    np.savez(at / "new.npz", x=np.array([[3, 1, 0.5], [6, 0, 2], [1, 2, 1.5]], np.float32))
    said = predict(at / "run", f'arrays(path="{at / "new.npz"}")')
    assert [p["probabilities"] for p in said["predictions"]] == expected
    assert said["accuracy"] is None
    with pytest.raises(DataError, match="must hold the arrays x and y"):
        consilience.data.load(f'arrays(path="{at / "new.npz"}")')


@pytest.fixture(scope="module")
def scans(tmp_path_factory):
    """A run on 8×8 pictures of two classes at two sites, and where they lie."""
    image = pytest.importorskip("PIL.Image")
    at = tmp_path_factory.mktemp("scans")
    for site in ("north", "south"):
        for shade, kind in ((40, "clear"), (200, "spot")):
            (at / "train" / site / kind).mkdir(parents=True)
            for i in range(6):
                image.fromarray(np.full((8, 8), shade + i, np.uint8)).save(at / "train" / site / kind / f"{i}.png")
    consilience.run("fedavg", f'folder(path="{at / "train"}", grey=true)', split="by_group(group=domain)", model="mlp", rounds=3,
                    batch=4, out=at / "run")
    return at


def test_images_to_predict_need_no_class_folders_and_keep_their_names(scans):
    image = pytest.importorskip("PIL.Image")
    (scans / "new" / "spot").mkdir(parents=True)
    (scans / "loose").mkdir()
    for name, shade in (("b.png", 201), ("a.png", 42)):
        image.fromarray(np.full((8, 8), shade, np.uint8)).save(scans / "new" / "spot" / name)
        image.fromarray(np.full((8, 8), shade, np.uint8)).save(scans / "loose" / name)
    in_classes = predict(scans / "run", f'folder(path="{scans / "new"}", grey=true)')
    loose = predict(scans / "run", f'folder(path="{scans / "loose"}", grey=true)')
    assert [p["sample"] for p in in_classes["predictions"]] == ["spot/a.png", "spot/b.png"]
    assert [p["sample"] for p in loose["predictions"]] == ["a.png", "b.png"]
    assert [p["probabilities"] for p in loose["predictions"]] == [p["probabilities"] for p in in_classes["predictions"]]
    assert loose["accuracy"] is None
    lines = list(csv.DictReader(io.StringIO(predictions_csv(loose))))
    assert [(row["sample"], row["row"], row["label"]) for row in lines] == [("a.png", "0", ""), ("b.png", "1", "")]
    with pytest.raises(DataError, match="holds no images in <class>/"):             # to train on they must be labelled
        consilience.data.load(f'folder(path="{scans / "loose"}", grey=true)')


def test_images_beside_class_folders_are_not_guessed_at(scans):
    image = pytest.importorskip("PIL.Image")
    (scans / "both" / "spot").mkdir(parents=True)
    for name in ("a.png", "spot/b.png"):
        image.fromarray(np.full((8, 8), 42, np.uint8)).save(scans / "both" / name)
    with pytest.raises(DataError, match="images beside the folder spot/"):
        predict(scans / "run", f'folder(path="{scans / "both"}", grey=true)')


def test_a_folder_of_runs_is_told_from_a_run(wards):
    at, _ = wards
    with pytest.raises(ConfigError, match=r"holds no run: .* name one of them, as '.*run'"):
        open_run(at)
    with pytest.raises(ConfigError, match=r"holds no run: it has no config\.json\.$"):
        open_run(at / "wards")
