"""Ray: its settings, and what a process asks of the machines."""

import pytest

from traffic_vlm.serving.cluster import share_machines


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
