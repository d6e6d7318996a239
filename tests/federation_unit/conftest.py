"""Fast tests of what people touch of a federation. Nothing is started here; tests/federation does that."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra 'flower'")
