"""Names from papers: each is a stack of parts with that paper's settings, and forwards options to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Preset:
    """`options` names the preset's own options and the parts' options they set; those not named reach the only part."""

    name: str
    parts: tuple[str, ...]
    idea: str
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)       # part -> settings
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)          # option -> ("part.option", …)


_LIST = (
    Preset("local", ("local",), "Every client trains alone; nothing of the model travels."),
    Preset("union", ("union",), "Centralised training on the pooled data of all clients."),
    Preset("fedavg", (), "Average the clients' models after local training; what every other name stands on."),
    Preset("fedavgm", ("avgm",), "FedAvg with momentum on the server."),
    Preset("fedprox", ("prox",), "FedAvg with a pull towards the received model."),
    Preset("fednova", ("nova",), "FedAvg with changes normalised by the steps made."),
    Preset("scaffold", ("scaffold",), "Control variates against client drift."),
    Preset("feddyn", ("dyn",), "Dynamic regularisation that makes local optima agree with the global one."),
    Preset("fedcm", ("cm",), "The server's last direction mixed into every local step."),
    Preset("moon", ("moon",), "Features near the global model's and away from the client's previous ones."),
    Preset("mixup", ("mixup",), "Mix the samples and labels of a batch."),
    Preset("manifold_mixup", ("manifold_mixup",), "Mix the features and labels of a batch at a layer drawn in every step."),
    Preset("mixstyle", ("mixstyle",), "Samples of a batch lend each other the mean and deviation of their channels."),
    Preset("moex", ("moex",), "Samples of a batch exchange the moments of their features, and some of their labels."),
    Preset("fedmix", ("mix",), "Mix every batch with averages of other clients' samples, to first order in the averages.",
           settings={"mix": {"form": "fedmix"}}),                        # said, so that naivemix beside it is refused
    Preset("naivemix", ("mix",), "Mix every batch with averages of other clients' samples.", settings={"mix": {"form": "naive"}}),
    Preset("dann", ("dann",), "Features that do not tell which client they come from."),
    Preset("vhl", ("vhl",), "Virtual images, the same everywhere, to which features of each class are drawn."),
    Preset("ditto", ("ditto",), "A personal model beside the global one."),
    Preset("perfedavg", ("maml",), "A start from which one step on a client's own samples goes far."),
    Preset("apfl", ("apfl",), "A personal model mixed with the shared one, by a weight that adapts."),
    Preset("pfedme", ("moreau",), "Personal models held near a global one, which follows them."),
    Preset("fedntd", ("ntd",), "Distil the received model's not-true classes."),
    Preset("feddecorr", ("decorr",), "Features whose dimensions do not repeat each other."),
    Preset("fedsam", ("sam",), "Sharpness-aware local steps."),
    Preset("fedrobust", ("affine",), "Inputs changed to the model's disadvantage, by an affine map of each client's own."),
    Preset("harmofl", ("amplitude", "sam"), "Images with the same mean amplitudes everywhere, and steps from perturbed weights.",
           options={"alpha": ("sam.rho",), "low": ("amplitude.low",)}),
    Preset("fedbn", ("bn",), "Normalisation layers stay on the clients."),
    Preset("groupdro", ("dro",), "Clients with higher loss weigh more."),
    Preset("fedper", ("per",), "A head of one's own, trained jointly."),
    Preset("fedrep", ("rep",), "A head of one's own, trained before the shared base."),
    Preset("fedrod", ("rod",), "One balanced head for all clients, and a personal one on top of it."),
    Preset("fedbabu", ("babu",), "A frozen random head; fine-tuning before use."),
    Preset("fedgen", ("gen",), "A feature generator trained against the clients' heads."),
    Preset("fedfomo", ("fomo",), "Each client mixes the models that help it."),
    Preset("apple", ("apple",), "Each client learns how to mix all clients' models."),
    Preset("fedproto", ("local", "proto"), "Clients share prototypes of the classes, not models.",
           options={"weight": ("proto.weight",), "collect": ("proto.collect",), "aggregation": ("proto.aggregation",)}),
    Preset("fedbr", ("debias",), "Pseudo-data with uniform labels and a min-max contrast."),
    Preset("lfd", ("cosine", "drift"), "A cosine head with margin, and labels against the client's own drift.",
           options={"tau": ("cosine.tau", "drift.tau"), "margin": ("drift.margin",), "weight": ("drift.weight",),
                    "first": ("drift.first",), "margin_in_reg": ("drift.margin_in_reg",), "drift_tau": ("drift.drift_tau",),
                    "init": ("cosine.init",)}),
    Preset("fedfm", ("anchors",), "Match features to class anchors that all clients share."),
    Preset("fedfa", ("ffa",), "Jitter feature statistics by their spread over samples and clients."),
    Preset("dbe", ("prbm", "mr"), "A personal bias vector, and a mean that all clients agree on.",
           options={"at": ("prbm.at", "mr.at"), "kappa": ("mr.kappa",), "mu": ("mr.momentum",), "momentum": ("mr.momentum",),
                    "init_mean": ("mr.init_mean",), "init_epochs": ("mr.init_epochs",), "half": ("mr.half",),
                    "bias_correct": ("mr.bias_correct",), "noise_scale": ("mr.noise_scale",), "noise_mix": ("mr.noise_mix",)}),
)
PRESETS: dict[str, Preset] = {p.name: p for p in _LIST}
