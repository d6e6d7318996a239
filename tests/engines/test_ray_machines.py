"""A Ray cluster of two machines, one of which is lost. Both are processes of this machine, with a scheduler and a store each."""

from __future__ import annotations

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'consilience[ray]'")

from ray.cluster_utils import Cluster as Machines

from consilience.engines.ray import Cluster, Crew, Ray
from consilience.parts.scaffold import Scaffold
from consilience.testing import differences, run_tiny, tiny_federation

pytestmark = pytest.mark.federation


def test_a_lost_machine_costs_time_alone(monkeypatch):
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    machines = Machines(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        second = machines.add_node(num_cpus=1)
        machines.wait_for_nodes()
        monkeypatch.setenv("RAY_ADDRESS", machines.address)
        there = Cluster.connect()
        assert there.described() == f"the Ray cluster at {machines.address} (2 machines, 2 cores)"
        assert not there.embedded
        crew = Crew(there, there.plan(4, None))
        fed = tiny_federation([Scaffold()], engine=Ray.with_crew(crew))
        fed.round()
        while not all(hand.ready for hand in crew.hands):
            fed.round()
        assert len(crew.machines) == 2
        machines.remove_node(second, allow_graceful=False)
        fed.round()
        fed.round()
        assert crew.restarts == 1
        assert not differences(fed, run_tiny([Scaffold()], rounds=fed.round_number))
        crew.close()
        there.close()
    finally:
        machines.shutdown()
