"""Ray: its settings, and what a process asks of the machines."""

import os
from types import SimpleNamespace

import pytest

from traffic_vlm.serving.cluster import load_ray, share_machines, start_ray


def node(alive=True, **resources):
    return {"Alive": alive, "Resources": {name: float(amount) for name, amount in resources.items()}}


@pytest.mark.parametrize(
    "nodes, device, threads, wanted, expected",
    [
        ([node(CPU=8)], None, 2, 0, ({"num_cpus": 2}, 4)),
        ([node(CPU=5), node(CPU=3), node(CPU=64, alive=False)], None, 2, 0, ({"num_cpus": 2}, 3)),  # none spans two
        ([node(CPU=1)], "cpu", 4, 0, ({"num_cpus": 1}, 1)),
        ([node(CPU=8, GPU=2), node(CPU=8)], None, 2, 0, ({"num_gpus": 1}, 2)),
        ([node(CPU=8, GPU=2)], "cpu", 2, 0, ({"num_cpus": 2}, 4)),
        ([node(CPU=8, GPU=1), node(CPU=8, GPU=1)], "cuda", 2, 3, ({"num_gpus": 0.5}, 4)),
    ],
)
def test_processes_share_the_machines(nodes, device, threads, wanted, expected):
    assert share_machines(nodes, device, threads, wanted) == expected


def test_missing_machines_are_an_error():
    with pytest.raises(ValueError, match="--device cuda: the machines have no GPU"):
        share_machines([node(CPU=8)], "cuda", 2)
    with pytest.raises(ValueError, match="no CPU core"):
        share_machines([node(CPU=8, alive=False)], None, 2)


def test_only_ray_on_this_machine_gets_a_token_of_its_own_and_the_loopback_address(monkeypatch):
    pytest.importorskip("ray")
    settings = []
    for address in (None, None, "auto"):
        monkeypatch.setattr(os, "environ", {})
        load_ray(address)
        settings.append([os.environ.get(f"RAY_{name}") for name in ("AUTH_MODE", "ENABLE_WINDOWS_OR_OSX_CLUSTER")])
        settings[-1].append(os.environ.get("RAY_AUTH_TOKEN"))
    first, second, cluster = settings
    assert first[:2] == second[:2] == ["token", "0"] and len(first[2]) == 64 and first[2] != second[2]
    assert cluster == [None, None, None]
    monkeypatch.setattr(os, "environ", {"RAY_AUTH_MODE": "disabled"})
    load_ray(None)
    assert os.environ["RAY_AUTH_MODE"] == "disabled"


def test_why_ray_does_not_start_is_said():
    def init(**options):
        raise Exception("timed out")

    with pytest.raises(OSError, match=r"at ray://host:10001: timed out .* needs RAY_AUTH_MODE=token"):
        start_ray(SimpleNamespace(init=init), "ray://host:10001")
    with pytest.raises(OSError, match=r"Ray does not start on this machine: timed out$"):
        start_ray(SimpleNamespace(init=init), None)
