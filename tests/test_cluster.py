"""What a process that holds a model asks of a cluster."""

import os
from types import SimpleNamespace

import pytest

from traffic_vlm.serving.cluster import load_ray, share_machines, start_ray


def node(alive=True, **resources):
    return {"Alive": alive, "Resources": {name: float(number) for name, number in resources.items()}}


@pytest.mark.parametrize(
    "nodes, device, threads, expected",
    [
        ([node(CPU=8)], None, 2, ({"num_cpus": 2}, 4)),
        ([node(CPU=5), node(CPU=3), node(CPU=64, alive=False)], None, 2, ({"num_cpus": 2}, 3)),  # none spans two
        ([node(CPU=1)], "cpu", 4, ({"num_cpus": 1}, 1)),
        ([node(CPU=1), node(CPU=4)], None, 4, ({"num_cpus": 4}, 1)),
        ([node(CPU=8, GPU=2), node(CPU=8)], None, 2, ({"num_gpus": 1}, 2)),
        ([node(CPU=8, GPU=2)], "cpu", 2, ({"num_cpus": 2}, 4)),
    ],
)
def test_processes_share_the_machines(nodes, device, threads, expected):
    assert share_machines(nodes, device, threads) == expected


def test_processes_share_a_gpu():
    nodes = [node(CPU=8, GPU=1), node(CPU=8, GPU=1)]
    assert share_machines(nodes, None, 2, wanted=1) == ({"num_gpus": 1}, 2)
    assert share_machines(nodes, "cuda", 2, wanted=3) == ({"num_gpus": 0.5}, 4)


@pytest.mark.parametrize("own", [None, "7"])
def test_ray_serve_has_time_to_start(monkeypatch, own):
    pytest.importorskip("ray")
    name = "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"
    monkeypatch.setenv(name, own or "")
    if own is None:
        monkeypatch.delenv(name)
    load_ray("testing")
    assert os.environ[name] == (own or "20")  # what the user has set stays


def test_ray_that_does_not_start_is_said():
    def init(**options):
        raise Exception("The current node timed out during startup.")

    for address, place in ((None, "on this machine"), ("ray://host:10001", "at ray://host:10001")):
        with pytest.raises(OSError, match=f"Ray does not start {place}: The current node timed out") as error:
            start_ray(SimpleNamespace(init=init), address)
        assert ("needs RAY_AUTH_MODE=token" in str(error.value)) == (address is not None)


@pytest.mark.parametrize("broken, starts", [(2, True), (3, False)])
def test_a_connection_that_the_cluster_breaks_off_is_tried_again(broken, starts):
    said = [ConnectionAbortedError("Starting Ray client server failed.")] * broken + [None]

    def init(**options):
        if (error := said.pop(0)) is not None:
            raise error

    if starts:
        start_ray(SimpleNamespace(init=init), "ray://host:10001")
        assert not said
    else:
        with pytest.raises(OSError, match="at ray://host:10001: Starting Ray client server failed"):
            start_ray(SimpleNamespace(init=init), "ray://host:10001")


def test_what_is_not_there_is_said():
    with pytest.raises(ValueError, match="--device cuda: the machines have no GPU"):
        share_machines([node(CPU=8)], "cuda", 2)
    with pytest.raises(ValueError, match="no CPU core"):
        share_machines([node(CPU=8, alive=False)], None, 2)
