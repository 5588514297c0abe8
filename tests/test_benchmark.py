"""The benchmark: each model does its whole workload, the models have the same size, and the report adds up."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from tiny import TINY_TEXT, TINY_TOWER
from traffic_vlm.configuration_traffic_vlm import TrafficVLMConfig
from traffic_vlm.scripts import benchmark as script


VISION = TINY_TOWER | {"hidden_size": 32, "image_size": 64}
CONFIG = TrafficVLMConfig(VISION, TINY_TEXT)
PIXELS = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def models(processor):
    return {name: build(CONFIG, processor) for name, build in script.MODELS.items()}


def test_questions_contain_known_words_only(processor):
    questions = script.make_questions(110)
    assert len(set(questions)) == 110
    assert not processor.unknown_words([*questions, script.OPEN_QUESTION])


def test_models_have_the_same_size(processor):
    with torch.device("meta"):
        models = [build(TrafficVLMConfig(), processor, device="meta") for build in script.MODELS.values()]
    counts = [model.model.num_parameters() for model in models]
    assert counts == pytest.approx([counts[0]] * 3, rel=0.05)


@pytest.mark.parametrize("name", script.MODELS)
def test_an_answer_does_not_depend_on_the_other_questions(models, name):
    questions = script.make_questions(40)
    together = models[name].yes_no_run(PIXELS, questions)()
    alone = models[name].yes_no_run(PIXELS, questions[2:3])()
    assert together.shape == (40,)
    torch.testing.assert_close(together[2:3], alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", script.MODELS)
def test_exactly_new_tokens_are_generated(models, name):
    prompt = models[name].prompt(PIXELS, script.OPEN_QUESTION)
    tokens = script.generate_run(models[name].model, prompt, 4)()
    assert tokens.shape == (1, prompt["input_ids"].shape[1] + 4)


def test_runs_are_timed_in_turns():
    order = []
    runs = {name: lambda name=name: order.append(name) or torch.ones(300, 300).exp() for name in "ab"}
    times = script.time_in_turns(runs, min_run_time=0.001)
    turns = [name for i, name in enumerate(order) if i == 0 or name != order[i - 1]]
    assert turns == ["a", "b"] * (1 + script.ROUNDS), "a warm-up and all rounds"
    assert all(seconds > 0 for seconds in times.values())


def run_script(monkeypatch, *options) -> None:
    monkeypatch.setattr("sys.argv", ["benchmark.py", *map(str, options)])
    script.main()


def tiny_report(folder, processor, **options) -> dict:
    found = script.Options(folder, dtype="float32", min_run_time=0.001, **options)
    return script.run_benchmark(found, CONFIG, CONFIG, processor)


def test_a_report_is_written(tmp_path, processor):
    tiny_report(tmp_path, processor, workloads=["questions", "generate"], questions=[1, 3], new_tokens=2)
    report = json.loads((tmp_path / "report.json").read_text())
    assert list(report["workloads"]) == ["1 image, 1 question", "1 image, 3 questions", "2 tokens"]
    for models in report["workloads"].values():
        assert list(models) == ["TrafficVLM", "PaliGemma", "Idefics3"]
        for model in models.values():
            assert model["ratio"] == pytest.approx(model["seconds"] / models["TrafficVLM"]["seconds"])
    text = (tmp_path / "report.md").read_text()
    assert "| 1 image, 3 questions | " in text and text.count(", 1.00 |") >= 3


@pytest.mark.slow
def test_the_step_of_a_token_is_compiled(tmp_path, processor):
    torch._dynamo.utils.counters.clear()
    tiny_report(tmp_path, processor, workloads=["compiled"], new_tokens=4)
    assert "| 4 tokens, compiled TrafficVLM | " in (tmp_path / "report.md").read_text()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


def test_an_earlier_report_is_kept(tmp_path, monkeypatch):
    (tmp_path / "report.json").write_text("{}")
    with pytest.raises(SystemExit, match="already holds a report"):
        run_script(monkeypatch, "--output_dir", tmp_path)
    assert (tmp_path / "report.json").read_text() == "{}"


@pytest.mark.parametrize(
    "options, message",
    [
        (["--workloads", "questions", "speed"], "--workloads must be among questions, .*; got speed"),
        (["--questions", "4", "0"], "--questions must be at least 1"),
        (["--threads", "0"], "--threads must be at least 1; got 0"),
        (["--min_run_time", "0"], "--min_run_time must be positive; got 0"),
    ],
)
def test_bad_options_are_named(tmp_path, monkeypatch, options, message):
    with pytest.raises(SystemExit, match=message):
        run_script(monkeypatch, "--output_dir", tmp_path / "out", *options)
    assert not (tmp_path / "out").exists()


def test_a_running_service_is_measured():
    bodies = []

    class Busy(BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(503 if len(bodies) == 1 else 200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Busy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        options = script.ServiceOptions(url, clients=3, questions=2, long_callers=1, in_words=True, seconds=0.5)
        clients, long_callers = script.measure_service(options)
        server.shutdown()
    assert {len(body["questions"]) for body in bodies} == {2, 64}
    assert len({body["image"] for body in bodies}) == len(bodies), "no image is sent twice"
    assert clients.startswith("clients: ") and long_callers.startswith("long callers: ")
    assert sum("errors {503: 1}" in line for line in (clients, long_callers)) == 1


def test_a_service_that_does_not_answer_is_an_error():
    options = script.ServiceOptions("http://127.0.0.1:9", clients=1, seconds=0.1)
    assert "errors {0: " in script.measure_service(options)[0]
