"""Why Flower's SecAgg+ is not used: what its shipped code lets a server do, shown on that code.

Each test holds as long as the weakness is there. One that fails says that Flower has mended it: then read docs/privacy.md again.
"""

from __future__ import annotations

import importlib
import io
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")
pytest.importorskip("Crypto")

from flwr.app import ConfigRecord
from flwr.common import ndarrays_to_parameters
from flwr.common.secure_aggregation.crypto.shamir import combine_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
from flwr.supercore.primitives.asymmetric import bytes_to_private_key, bytes_to_public_key, generate_key_pairs

client: Any = importlib.import_module("flwr.client.mod.secure_aggregation.secaggplus_mod")      # the function has its name, too
MODULUS, RANGE, BOUND = 2**32, 2**22, 8.0


def test_pairwise_masks_have_28_bits() -> None:
    """A shared key is 44 characters of base64, folded by exclusive or into one 32-bit word. Characters are below 128, so that the
    highest bit of every byte is 0; and the word alone seeds NumPy's generator.
    """
    for _ in range(40):
        (mine, _), (_, theirs) = generate_key_pairs(), generate_key_pairs()
        key = generate_shared_key(mine, theirs)
        word = 0
        for i in range(0, len(key), 4):
            word ^= int.from_bytes(key[i: i + 4], "little")
        assert word & 0x80808080 == 0
        mask = pseudo_rand_gen(key, MODULUS, [(5,)])[0]
        assert np.array_equal(mask, np.random.RandomState(word).randint(0, MODULUS - 1, 5, dtype=np.int64))


def test_a_server_that_asks_for_both_kinds_of_shares_reads_one_site() -> None:
    """Three sites, threshold 2. In the last step the server names site 0 as present and as lost; every site hands over its share of site
    0's own mask and of its key, and the server takes both masks off site 0's vector.
    """
    nodes = [11, 22, 33]
    states = {n: client.SecAggPlusState() for n in nodes}
    setup = {"sample_num": 3, "share_num": 3, "threshold": 2, "clipping_range": BOUND, "target_range": RANGE, "mod_range": MODULUS,
             "max_weight": 1.0}
    keys: dict[int, Any] = {}
    for n, state in states.items():
        state.nid = n
        said = client._setup(state, ConfigRecord(_as_asked(setup)))
        keys[n] = [said[client.Key.PUBLIC_KEY_1], said[client.Key.PUBLIC_KEY_2]]
    sent = {n: client._share_keys(states[n], ConfigRecord({str(m): keys[m] for m in nodes})) for n in nodes}
    secret = {n: np.linspace(-1, 1, 6).reshape(2, 3) + i for i, n in enumerate(nodes)}
    masked: dict[int, list[np.ndarray]] = {}
    for n in nodes:
        post = [(m, c) for m in nodes for to, c in zip(sent[m][client.Key.DESTINATION_LIST], sent[m][client.Key.CIPHERTEXT_LIST])
                if to == n]
        forwarded = ConfigRecord({client.Key.SOURCE_LIST: [m for m, _ in post], client.Key.CIPHERTEXT_LIST: [c for _, c in post]})
        out = client._collect_masked_vectors(states[n], forwarded, 1, ndarrays_to_parameters([secret[n]]))
        masked[n] = [_read(b) for b in out[client.Key.MASKED_PARAMETERS]]
    asked = ConfigRecord({client.Key.ACTIVE_NODE_ID_LIST: nodes, client.Key.DEAD_NODE_ID_LIST: [11]})
    own, key = [], []
    for n in nodes:
        shares = client._unmask(states[n], asked)[client.Key.SHARE_LIST]         # no objection
        own.append(shares[0])
        key.append(shares[3])
    shapes = [a.shape for a in masked[11]]
    plain = _minus(masked[11], pseudo_rand_gen(combine_shares(own), MODULUS, shapes))
    sk1 = bytes_to_private_key(combine_shares(key))
    for other in (22, 33):
        mask = pseudo_rand_gen(generate_shared_key(sk1, bytes_to_public_key(keys[other][0])), MODULUS, shapes)
        plain = _minus(plain, mask) if other < 11 else _minus(plain, [-m for m in mask])
    vector = (plain[1] % MODULUS) * (2 * BOUND / RANGE) - BOUND
    np.testing.assert_allclose(vector, secret[11], atol=2 * BOUND / RANGE)


def _as_asked(setup: dict[str, Any]) -> dict[str, Any]:
    names = {"sample_num": client.Key.SAMPLE_NUMBER, "share_num": client.Key.SHARE_NUMBER, "threshold": client.Key.THRESHOLD,
             "clipping_range": client.Key.CLIPPING_RANGE, "target_range": client.Key.TARGET_RANGE, "mod_range": client.Key.MOD_RANGE,
             "max_weight": client.Key.MAX_WEIGHT}
    return {names[k]: v for k, v in setup.items()}


def _read(raw: bytes) -> np.ndarray:
    return np.load(io.BytesIO(raw), allow_pickle=False)


def _minus(a: list[np.ndarray], b: list[np.ndarray]) -> list[np.ndarray]:
    return [(x.astype(np.int64) - y) % MODULUS for x, y in zip(a, b)]


def test_its_server_side_takes_another_context_than_a_server_app_gets() -> None:
    """The workflow is written for the older strategies; a ServerApp of today gets a plain Context and is refused."""
    from flwr.app import Context, RecordDict
    from flwr.server.workflow import SecAggPlusWorkflow
    with pytest.raises(TypeError, match="Expect a LegacyContext"):
        SecAggPlusWorkflow(3, 2)(None, Context(0, 0, {}, RecordDict(), {}))      # type: ignore[arg-type]
