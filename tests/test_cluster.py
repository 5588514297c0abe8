"""Ray: its settings, and what a process asks of the machines."""

import os

import pytest

from traffic_vlm.serving.cluster import load_ray, share_machines


@pytest.mark.parametrize(
    "available, device, threads, expected",
    [
        ({"CPU": 8.0}, None, 2, ({"num_cpus": 2}, 4)),
        ({"CPU": 1.0}, "cpu", 4, ({"num_cpus": 1}, 1)),
        ({"CPU": 16.0, "GPU": 2.0}, None, 2, ({"num_gpus": 1}, 2)),
        ({"CPU": 8.0, "GPU": 2.0}, "cpu", 2, ({"num_cpus": 2}, 4)),
    ],
)
def test_processes_share_the_machines(available, device, threads, expected):
    assert share_machines(available, device, threads) == expected


def test_a_missing_gpu_is_an_error():
    with pytest.raises(ValueError, match="--device cuda: the machines have no GPU"):
        share_machines({"CPU": 8.0}, "cuda", 2)


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
