"""The command serve.py: refused starts, the port, the processes that it starts, and how it ends."""

import os
import signal
import socket
import subprocess
import tempfile
from types import SimpleNamespace

import psutil
import pytest

from tiny import ROOT, load_script, save_folder, start_process, tiny_model


httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi_offline")
ray = pytest.importorskip("ray")
pytest.importorskip("ray.serve")
grpc = pytest.importorskip("grpc")

from traffic_vlm.serving.deployment import hold_port  # noqa: E402


IMAGE = (ROOT / "docs/example.jpg").read_bytes()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def listener(host: str, port: int = 0) -> socket.socket:
    """A server that shares its port, as Ray Serve's proxy does."""
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    server.bind((host, port))
    server.listen()
    return server


def test_of_two_servers_only_one_gets_the_port():
    in_use = r"\[Errno \d+\] Address already in use"
    port = free_port()
    with hold_port("127.0.0.1", port), pytest.raises(OSError, match=in_use):
        hold_port("127.0.0.1", port)  # started together: none listens yet
    with hold_port("127.0.0.1", port), listener("127.0.0.1", port) as server:
        for host in ("127.0.0.1", "0.0.0.0"):
            with pytest.raises(OSError, match=f"--host {host} --port {port}: {in_use}"):
                hold_port(host, port)
        with socket.create_connection(("127.0.0.1", port)):
            server.accept()[0].close()  # the side that closes first keeps the connection for a minute
    hold_port("127.0.0.1", port).close()


@pytest.mark.parametrize(
    ("options", "running", "message"),
    [
        (["--replicas", "9"], [], "--replicas 9: there is room for 1"),
        ([], ["traffic_vlm"], "--address auto: the cluster already runs the application traffic_vlm"),
    ],
)
def test_a_refused_start_leaves_services_of_a_cluster_alone(
    monkeypatch, run_script, capsys, options, running, message
):
    calls = []
    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": 2}}])
    for name in ("start", "run", "delete", "shutdown"):
        monkeypatch.setattr(ray.serve, name, lambda *_, name=name, **__: calls.append(name))
    monkeypatch.setattr(ray.serve, "status", lambda: SimpleNamespace(applications=dict.fromkeys(running)))
    run_script("serve.py", "--address", "auto", *options, status=2)
    assert message in capsys.readouterr().err and not calls


def test_an_empty_key_and_a_full_disk_end_the_start(monkeypatch, run_script, capsys):
    def no_room(**_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", no_room)
    run_script("serve.py", "--port", free_port(), status=2)
    assert "No space left on device" in capsys.readouterr().err
    monkeypatch.setenv("TRAFFIC_VLM_API_KEY", "")
    run_script("serve.py", status=2)
    assert "TRAFFIC_VLM_API_KEY is set, but empty" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_both_signals_end_the_command_also_as_a_background_job(number):
    """Shells let background jobs ignore SIGINT, and Ray replaces handlers."""
    signal.signal(number, signal.SIG_IGN)
    load_script("serve").handle_signals()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(number)


class Server:
    """A running service with a tiny model."""

    def __init__(self, model: str):
        port, self.folder = free_port(), tempfile.mkdtemp(prefix="t")  # short: paths of sockets have 107 characters
        self.url = f"http://127.0.0.1:{port}"
        options = ["--model", model, "--port", port, "--device", "cpu", "--threads", "1"]
        environment = {"RAY_TMPDIR": self.folder}
        self.process = start_process("serve.py", *options, env=environment, stderr=subprocess.STDOUT)
        self.first_line = self.process.stdout.readline()

    def processes(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def replicas(self) -> list[psutil.Process]:
        return [process for process in self.processes() if "ServeReplica" in "".join(process.cmdline())]

    def ask(self, question: str = "Is there a car?") -> httpx.Response:
        files, data = {"image": ("a.jpg", IMAGE)}, {"questions": [question]}
        return httpx.post(f"{self.url}/v1/answer", files=files, data=data, timeout=90)


def check_that_only_the_replica_imports_torch(server):
    assert httpx.get(f"{server.url}/healthz").json() == {"status": "ok"}
    assert [answer["question"] for answer in server.ask().json()["answers"]] == ["Is there a car?"]
    with_torch = [p.pid for p in server.processes() if any("libtorch" in one.path for one in p.memory_maps())]
    assert with_torch == [replica.pid for replica in server.replicas()]


def check_that_ray_listens_on_this_machine_only_and_asks_for_a_token(server):
    listening = [
        (process.name(), connection.laddr)
        for process in server.processes()
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    # Ray Serve has no setting for the port of a replica.
    [(name, of_replica)] = [one for one in listening if one[1].ip.removeprefix("::ffff:") != "127.0.0.1"]
    [gcs] = {address.port for name, address in listening if "gcs_server" in name}
    assert "ServeReplica" in name
    for port, method in (
        (of_replica.port, "ray.serve.ASGIService/HandleRequest"),
        (gcs, "ray.rpc.InternalKVGcsService/InternalKVGet"),
    ):
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel, pytest.raises(grpc.RpcError) as refused:
            channel.unary_unary(f"/{method}")(b"", timeout=20)
        assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED, method


def check_that_a_signal_stops_the_service_and_nothing_is_left(server):
    started = server.processes()
    server.process.send_signal(signal.SIGTERM)
    output = server.process.communicate(timeout=60)[0].splitlines()
    assert server.process.returncode == 0 and output[-1] == "stopped"
    psutil.wait_procs(started, timeout=10)
    assert not [process for process in started if process.is_running()] and not os.listdir(server.folder)
    os.rmdir(server.folder)


@pytest.mark.slow
def test_the_command_serves_until_a_signal(tmp_path):
    """One test, as several could run in different processes, each with a service."""
    server = Server(str(save_folder(tiny_model(), tmp_path / "model")))
    try:
        assert server.first_line.startswith(f"serving on {server.url}"), server.process.communicate()[0]
        check_that_only_the_replica_imports_torch(server)
        check_that_ray_listens_on_this_machine_only_and_asks_for_a_token(server)
        check_that_a_signal_stops_the_service_and_nothing_is_left(server)
    finally:
        server.process.kill()
