"""The command serve.py: its port, the ports and the token of Ray, and replicas that die."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import psutil
import pytest
from starlette.testclient import TestClient

from tiny import ROOT, save_folder, tiny_model


httpx = pytest.importorskip("httpx")
ray = pytest.importorskip("ray")
pytest.importorskip("ray.serve")
grpc = pytest.importorskip("grpc")

from traffic_vlm.scripts.serve import HEALTH, main, reserve_port  # noqa: E402
from traffic_vlm.serving.proxy import UnavailableMiddleware  # noqa: E402


IMAGE = (ROOT / "docs/example.jpg").read_bytes()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_port_in_use_is_refused():
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as Ray Serve's proxy does
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        for host in ("127.0.0.1", "0.0.0.0"):
            with pytest.raises(OSError, match=rf"--host {host} --port {port}: \[Errno \d+\] Address already in use"):
                reserve_port(host, port)
    for host, port, message in (("203.0.113.7", 8000, "Cannot assign"), ("127.0.0.1", 65536, "must be 0-65535")):
        with pytest.raises(OSError, match=f"--host {host} --port {port}: .*{message}"):
            reserve_port(host, port)


def test_of_two_servers_that_start_together_only_one_gets_the_port():
    port = free_port()
    with reserve_port("127.0.0.1", port), pytest.raises(OSError, match="Address already in use"):
        reserve_port("127.0.0.1", port)
    reserve_port("127.0.0.1", port).close()


def test_the_port_of_a_server_that_has_just_ended_is_free():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            server.accept()[0].close()  # the side that closes first keeps the connection for a minute
    reserve_port("127.0.0.1", port).close()


def test_a_request_without_a_response_gets_503():
    async def lost(scope, receive, send):
        return None

    response = TestClient(UnavailableMiddleware(lost)).get("/")
    assert response.status_code == 503 and response.headers["retry-after"] == "5"
    assert "was stopped before it could answer" in response.json()["detail"]

    async def complete(scope, receive, send):
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    assert TestClient(UnavailableMiddleware(complete)).get("/").status_code == 204


@pytest.mark.parametrize(
    ("options", "running", "message"),
    [
        (["--max_waiting", "0"], [], "--max_waiting must be above 0, got 0"),
        (["--replicas", "9"], [], "--replicas 9: there is room for 1"),
        ([], ["traffic_vlm"], "--address auto: the cluster already runs the application traffic_vlm"),
    ],
)
def test_a_refused_start_leaves_the_services_of_a_cluster_alone(monkeypatch, capsys, options, running, message):
    calls = []
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": 2}}])
    for name in ("start", "run", "delete", "shutdown"):
        monkeypatch.setattr(ray.serve, name, lambda *_, name=name, **__: calls.append(name))
    monkeypatch.setattr(threading, "Event", None)  # what a server that has started waits for
    monkeypatch.setattr(ray.serve, "status", lambda: SimpleNamespace(applications=dict.fromkeys(running)))
    monkeypatch.setattr(sys, "argv", ["serve.py", "--address", "auto", *options])
    assert main() == 2 and message in capsys.readouterr().err and not calls


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A running service: its command line, its URL, its processes, and the statuses of /healthz until it ran.

    It must end quietly, and leave no files.
    """
    model, port = str(save_folder(tiny_model(), tmp_path_factory.mktemp("model"))), free_port()
    options = ["--model", model, "--port", str(port), "--device", "cpu", "--threads", "1"]
    arguments, url = [sys.executable, str(ROOT / "scripts/serve.py"), *options], f"http://127.0.0.1:{port}"
    folder = tempfile.mkdtemp(prefix="t")  # short: Ray's sockets have paths of at most 107 characters
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(arguments, env=environment | {"RAY_TMPDIR": folder}, **pipes)
    try:
        statuses, line = set(), ThreadPoolExecutor(1).submit(process.stdout.readline)
        while not line.done():
            with contextlib.suppress(httpx.TransportError):
                statuses.add(httpx.get(f"{url}/healthz", timeout=30).status_code)
            time.sleep(0.2)
        assert "serving on" in line.result(), process.communicate()[1]
        yield arguments, url, lambda: psutil.Process(process.pid).children(recursive=True), statuses
        process.terminate()
        lines = "".join(process.communicate(timeout=60)).splitlines()
        expected = ("Set ray log level", "A worker died")  # the latter about the replica that a test kills
        assert process.returncode == 0 and not [line for line in lines if not any(one in line for one in expected)]
        os.rmdir(folder)  # Ray's own folder in it is gone
    finally:
        process.kill()


def ask(url: str, path: str = "answer", question: str = "Is there a car?") -> httpx.Response:
    files, data = {"image": ("a.jpg", IMAGE)}, {"questions": [question]}
    return httpx.post(f"{url}/v1/{path}", files=files, data=data, timeout=90)


@pytest.mark.slow
def test_the_command_serves(server):
    _, url, _, statuses = server
    assert 503 in statuses and statuses <= {503, 200, 404}
    time.sleep(1.1)  # the health of the service is cached for a second
    assert httpx.get(f"{url}/healthz").json() == {"status": "ok"}
    assert [answer["question"] for answer in ask(url).json()["answers"]] == ["Is there a car?"]
    assert ask(url, "generate", "What is ahead?").text.count("data: ") > 1


@pytest.mark.slow
def test_a_second_server_on_the_port_ends_with_an_error(server):
    arguments, url, *_ = server
    second = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert second.returncode == 2 and "Address already in use" in second.stderr
    assert ask(url).status_code == 200


@pytest.mark.slow
def test_ray_listens_on_this_machine_only_and_asks_for_a_token(server):
    listening = [
        (process.name(), connection.laddr)
        for process in server[2]()
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    others = {address for _, address in listening if address.ip.removeprefix("::ffff:") != "127.0.0.1"}
    open_to_all = [one for one in listening if one[1] in others]
    # Ray Serve has no setting for the ports of the two replicas: the service and /healthz.
    assert len(open_to_all) == 2 and all("ServeReplica" in name for name, _ in open_to_all)
    [gcs] = {address.port for name, address in listening if "gcs_server" in name}
    for port, method in (
        *((address.port, "ray.serve.ASGIService/HandleRequest") for _, address in open_to_all),
        (gcs, "ray.rpc.InternalKVGcsService/InternalKVGet"),
    ):
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel, pytest.raises(grpc.RpcError) as refused:
            channel.unary_unary(f"/{method}")(b"", timeout=20)
        assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED, method


@pytest.mark.slow
def test_requests_of_a_killed_replica_get_503_and_later_ones_are_answered(server):
    _, url, processes, _ = server
    replicas = [process for process in processes() if "ServeReplica" in "".join(process.cmdline())]
    # Not "health": the title of a replica's process names the method that it runs, such as check_health.
    [replica] = [process for process in replicas if HEALTH not in "".join(process.cmdline())]
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as connection:
        head = "POST /v1/answer HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"
        connection.sendall(head.encode() + b"{")  # the replica waits for the rest
        time.sleep(2)
        replica.kill()
        connection.settimeout(60)
        assert connection.recv(20) == b"HTTP/1.1 503 Service"
    assert ask(url).status_code == 200
