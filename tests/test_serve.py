"""The command serve.py: refused starts, the port, its share of the machines, and how it ends."""

import signal
import socket
import subprocess

import psutil
import pytest

from tiny import ROOT, free_port, save_folder, start_process, tiny_model


httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")
pytest.importorskip("ray.serve")

from traffic_vlm.serving.cluster import share_machines  # noqa: E402
from traffic_vlm.serving.deployment import check_port  # noqa: E402


def test_a_port_in_use_is_refused_also_if_it_can_be_shared():
    port = free_port()
    check_port("127.0.0.1", port)
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as Ray Serve's proxy
        server.bind(("127.0.0.1", port))
        server.listen()
        for host in ("127.0.0.1", "0.0.0.0"):
            with pytest.raises(OSError, match=rf"--host {host} --port {port}: \[Errno \d+\] Address already in use"):
                check_port(host, port)


def test_an_empty_key_is_refused(monkeypatch, run_script, capsys):
    monkeypatch.setenv("TRAFFIC_VLM_API_KEY", "")
    run_script("serve.py", status=2)
    assert "TRAFFIC_VLM_API_KEY is set, but empty" in capsys.readouterr().err


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
    with pytest.raises(ValueError, match="--device cuda: the machines have no GPU"):
        share_machines({"CPU": 8.0}, "cuda", 2)


@pytest.mark.slow
def test_the_command_serves_until_a_signal(tmp_path):
    """One test, as several could run in different processes, each with a service."""
    port, model = free_port(), save_folder(tiny_model(), tmp_path / "model")
    options = ["--model", model, "--port", port, "--device", "cpu", "--threads", "1", "--root_path", "/traffic"]
    server = start_process("serve.py", *options, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}/traffic"
    try:
        line = server.stdout.readline()
        assert line.startswith(f"serving on {url}"), server.communicate()[0]
        assert httpx.get(f"{url}/healthz").json() == {"status": "ok"}
        assert "'/traffic/openapi.json'" in httpx.get(f"{url}/docs").text
        files, data = {"image": (ROOT / "docs/example.jpg").read_bytes()}, {"questions": "Is there a car?"}
        [answer] = httpx.post(f"{url}/v1/answer", files=files, data=data, timeout=90).json()["answers"]
        assert answer["question"] == "Is there a car?"
        processes = psutil.Process(server.pid).children(recursive=True)
        server.send_signal(signal.SIGTERM)
        assert server.communicate(timeout=60)[0].splitlines()[-1] == "stopped" and server.returncode == 0
        assert not psutil.wait_procs(processes, timeout=10)[1]
    finally:
        server.kill()
