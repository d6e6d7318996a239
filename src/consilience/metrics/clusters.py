"""How well features fall into classes: normalised mutual information of k-means clusters, and the silhouette."""

from __future__ import annotations

import numpy as np
import torch.nn.functional as F
from torch import Tensor


def k_means(features: Tensor, clusters: int, seed: int = 0) -> np.ndarray:
    """Cluster numbers by scikit-learn's k-means with ten starts."""
    from sklearn.cluster import KMeans
    x = features.double().numpy()
    clusters = min(clusters, len(np.unique(x, axis=0)))
    return KMeans(clusters, n_init=10, random_state=seed).fit_predict(x)


def nmi(features: Tensor, y: Tensor, classes: int, seed: int = 0, normalise: bool = False) -> float | None:
    """Normalised mutual information between the labels and k-means clusters, as many as there are classes."""
    if len(y) < 2:
        return None
    from sklearn.metrics import normalized_mutual_info_score
    return float(normalized_mutual_info_score(y.numpy(), k_means(_scaled(features, normalise), classes, seed)))


def silhouette(features: Tensor, y: Tensor, classes: int, assignment: str = "labels", seed: int = 0, normalise: bool = False
               ) -> float | None:
    """Mean silhouette of the features grouped by label, or by k-means. None where there are not 2 to n − 1 groups."""
    from sklearn.metrics import silhouette_score
    features = _scaled(features, normalise)
    if len(y) < 2:
        return None
    groups = y.numpy() if assignment == "labels" else k_means(features, classes, seed)
    if not 2 <= len(np.unique(groups)) <= len(groups) - 1:
        return None
    return float(silhouette_score(features.double().numpy(), groups))


def _scaled(features: Tensor, normalise: bool) -> Tensor:
    """Rows of length one, or as they are."""
    return F.normalize(features.double(), dim=1) if normalise else features
