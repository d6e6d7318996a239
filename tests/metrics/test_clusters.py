"""NMI and silhouette are scikit-learn's, on what METHODS.md 3.7 says."""

from __future__ import annotations

import pytest
import torch
from sklearn.cluster import KMeans
from sklearn.metrics import normalized_mutual_info_score, silhouette_score

from consilience import rng
from consilience.metrics.clusters import nmi, silhouette

Y = torch.arange(90) % 3
X = rng.normal(rng.key(0, "x"), (90, 4)) + 1.5 * torch.nn.functional.one_hot(Y, 4)


def test_equal_to_scikit_learn():
    clusters = KMeans(3, n_init=10, random_state=5).fit_predict(X.double().numpy())
    assert nmi(X, Y, 3, seed=5) == pytest.approx(normalized_mutual_info_score(Y.numpy(), clusters))
    assert silhouette(X, Y, 3) == pytest.approx(silhouette_score(X.double().numpy(), Y.numpy()))
    assert silhouette(X, Y, 3, "k-means", seed=5) == pytest.approx(silhouette_score(X.double().numpy(), clusters))
    rows = torch.nn.functional.normalize(X.double(), dim=1).numpy()
    assert silhouette(X, Y, 3, normalise=True) == pytest.approx(silhouette_score(rows, Y.numpy()))


def test_clean_clusters_and_degenerate_ones():
    far = torch.nn.functional.one_hot(Y, 3).float() * 100 + 0.01 * X[:, :3]
    assert nmi(far, Y, 3) == pytest.approx(1.0)
    assert silhouette(far, Y, 3) > 0.99
    assert silhouette(X, torch.zeros(90, dtype=torch.int64), 3) is None        # one group
    assert silhouette(X[:3], torch.arange(3), 3) is None                       # every sample a group of its own
    assert nmi(torch.zeros(6, 2), torch.arange(6) % 2, 2) == pytest.approx(0.0)   # one point: one cluster
