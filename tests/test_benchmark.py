"""The benchmark: arithmetic against closed forms, contestants against each other, and what a question may cost.

Costs are counted, not timed: an image is looked at once whatever is asked about it, and more questions cost more in a
straight line.
"""

import json
import math
import runpy
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

from tiny import ROOT, pack, random_ids, random_pixels, tiny_config
from traffic_vlm.benchmark.contestants import CONTESTANTS, NO, TINY_SIZES, YES, Ours, Setup, Sizes
from traffic_vlm.benchmark.memory import measure, measure_here
from traffic_vlm.benchmark.parts import OURS, PARTS, TOWER, Bench
from traffic_vlm.benchmark.report import GOALS, environment, judge, seconds
from traffic_vlm.benchmark.timing import Timings, alternate, count_flops, fit_line, record_kernels
from traffic_vlm.benchmark.works import PROMPT, TINY_AMOUNTS, Work, ask_about
from traffic_vlm.scoring_traffic_vlm import MAX_CHUNK_TOKENS


SETUP = Setup(str(ROOT), sizes=TINY_SIZES)
LENGTH = 6  # tokens of a question
CHUNK = MAX_CHUNK_TOKENS // LENGTH  # questions that one pass of the decoder takes


# What a question may cost


def packed(count: int) -> dict[str, torch.Tensor]:
    return pack([random_ids(LENGTH, seed=number) for number in range(count)])


def flops(model, count: int, **image) -> int:
    return count_flops(lambda: model.score_yes_no(**packed(count), **image))


@pytest.mark.parametrize("count", [1, 16, 200])
def test_the_tower_runs_once_whatever_is_asked(model, count):
    seen = []
    handle = model.model.vision_tower.register_forward_hook(lambda tower, args, output: seen.append(len(args[0])))
    try:
        [scores] = model.score_yes_no(**packed(count), pixel_values=random_pixels(1))
    finally:
        handle.remove()
    assert len(scores) == count
    assert seen == [1]


@pytest.mark.parametrize("count", [1, 16, 200])
def test_pixels_cost_one_look_more_than_encoded_images(model, count):
    pixels = random_pixels(1)
    encoded = model.encode_images(pixels)
    look = count_flops(lambda: model.encode_images(pixels))
    assert flops(model, count, pixel_values=pixels) - flops(model, count, encoded_images=encoded) == look


def test_a_look_is_the_tower_the_projector_and_the_keys_and_values_of_each_layer(model):
    pixels, text = random_pixels(1), model.config.text_config
    tower = count_flops(lambda: model.model.vision_tower(pixels))
    projector = 2 * 196 * model.config.vision_config.hidden_size * text.hidden_size
    one_layer = 2 * 196 * text.hidden_size * (2 * text.num_key_value_heads * text.head_dim)
    look = count_flops(lambda: model.encode_images(pixels))
    assert look == tower + projector + text.num_hidden_layers * one_layer


def test_full_chunks_cost_the_same_each(model):
    pixels = random_pixels(1)
    one, two, three = (flops(model, chunks * CHUNK, pixel_values=pixels) for chunks in (1, 2, 3))
    assert three - two == two - one
    assert one - (two - one) == count_flops(lambda: model.encode_images(pixels))


def test_images_cost_the_same_each(model):
    text = packed(2)

    def cost(images: int) -> int:
        rows = {name: tensor.expand(images, -1) for name, tensor in text.items()}
        return count_flops(lambda: model.score_yes_no(**rows, pixel_values=random_pixels(images)))

    assert cost(3) == 3 * cost(1)


# Counting and timing


def test_flops_of_a_matrix_product_and_of_attention():
    left, right = torch.ones(5, 7), torch.ones(7, 11)
    assert count_flops(lambda: left @ right) == 2 * 5 * 7 * 11
    query = torch.ones(2, 3, 5, 8)  # its fused form on a CPU is one that the counter does not know
    attend = torch.nn.functional.scaled_dot_product_attention
    assert count_flops(lambda: attend(query, query, query)) == 2 * 2 * (2 * 3) * 5 * 5 * 8


def test_recorded_kernels_do_the_same_work_again():
    left, right = torch.ones(5, 7), torch.ones(11, 7)
    kernels = record_kernels(lambda: (left @ right.T).relu())
    assert len(kernels.calls) == 2, "a product and a relu, but no view"
    assert count_flops(kernels.replay) == 2 * 5 * 7 * 11


def test_runs_take_turns():
    order = []
    runs = {name: lambda name=name: order.append(name) for name in "ab"}
    timings = alternate(runs, rounds=4, warm_up=2)
    assert order == list("aabb") + list("ab") * 4
    assert [len(seconds) for seconds in timings.seconds.values()] == [4, 4]


def test_slow_runs_have_fewer_rounds():
    timings = alternate({"slow": lambda: time.sleep(0.01)}, rounds=50, max_seconds=0)
    assert len(timings.seconds["slow"]) == 3
    assert timings.median("slow") >= 0.01


def test_a_run_may_fail():
    def bad():
        raise ZeroDivisionError("in /tmp/some/kernel.cpp:3\nand much more")

    runs = {"good": lambda: None, "bad": bad}
    with pytest.raises(ZeroDivisionError):
        alternate(runs, rounds=1)
    figures = alternate(runs, rounds=1, errors=ZeroDivisionError).to_dict("good")
    assert figures["bad"] == {"error": "ZeroDivisionError: in kernel.cpp:3"}
    assert figures["good"]["ratio"] == 1


def test_ratios_are_those_of_medians():
    timings = Timings({"ours": [2.0, 1.0, 30.0], "peer": [4.0, 60.0, 6.0]})
    assert timings.ratio("peer", "ours") == 3
    figures = timings.to_dict("ours")
    assert figures["peer"] == {"seconds": 6, "quartiles": [5, 33], "rounds": 3, "ratio": 3}
    assert "ratio" not in timings.to_dict("nobody")["peer"]


def test_lines():
    line = fit_line([1, 2, 4], [5.0, 7.0, 11.0])
    assert line == pytest.approx({"slope": 2, "intercept": 3, "r_squared": 1})
    # Of (0, 0), (1, 1), (2, 0) the line is flat at 1/3, and explains nothing.
    assert fit_line([0, 1, 2], [0, 1, 0]) == pytest.approx({"slope": 0, "intercept": 1 / 3, "r_squared": 0})
    with pytest.raises(ValueError, match="two different points"):
        fit_line([3, 3], [1, 2])


# Contestants


def test_questions_are_of_known_words(processor):
    [questions] = ask_about(1, 256)
    assert len(questions) == 256 and len(set(questions)) == 110
    assert not processor.unknown_words([*questions, PROMPT])


@pytest.fixture(scope="module")
def contestants():
    return {name: build(SETUP) for name, build in CONTESTANTS.items()}


@pytest.mark.parametrize("name", CONTESTANTS)
def test_answers_do_not_depend_on_the_other_questions(contestants, name):
    questions, pixels = ask_about(2, 5), SETUP.pixels(2)
    together = contestants[name].yes_no(pixels, questions)()
    assert together.shape == (10,) and ((together > 0) & (together < 1)).all()
    alone = contestants[name].yes_no(pixels[1:], [questions[1][2:3]])()
    torch.testing.assert_close(together[7:8], alone, atol=1e-5, rtol=0)


def test_sharing_the_image_changes_no_answer(contestants):
    plain, once = (
        contestants[name].yes_no(SETUP.pixels(2), ask_about(2, 3)) for name in CONTESTANTS if "PaliGemma" in name
    )
    torch.testing.assert_close(plain(), once())
    assert count_flops(once) < count_flops(plain)


def test_blip_reads_what_it_would_generate(contestants):
    blip = contestants["BLIP-VQA"]
    inputs = blip.prompt(SETUP.pixels(1), "Is there a car?")
    made = blip.model.generate(**inputs, max_new_tokens=1, output_logits=True, return_dict_in_generate=True)
    expected = made.logits[0][:, [NO, YES]].softmax(-1)[:, 1]
    torch.testing.assert_close(blip.yes_no(SETUP.pixels(1), [["Is there a car?"]])(), expected)


@pytest.mark.parametrize("name", CONTESTANTS)
def test_generation_gives_as_many_tokens_as_asked(contestants, name):
    inputs = contestants[name].prompt(SETUP.pixels(1), PROMPT)
    tokens = contestants[name].generation(SETUP.pixels(1), PROMPT, 4)()
    prompt = 1 if name == "BLIP-VQA" else inputs["input_ids"].shape[1]  # its decoder begins with a start token
    assert tokens.shape == (1, prompt + 4)


@pytest.mark.parametrize("name", [name for name in CONTESTANTS if "once" not in name])
def test_steps_train_on_all_questions(name):
    contestant = CONTESTANTS[name](Setup(str(ROOT), dtype=torch.bfloat16, sizes=TINY_SIZES, training=True))
    assert contestant.model.dtype == torch.float32
    step = Work("train", images=2, questions=3).prepare(contestant)
    before = [weight.clone() for weight in contestant.model.parameters()]
    assert float(step()) == pytest.approx(math.log(500), abs=0.5)
    assert any(not torch.equal(a, b) for a, b in zip(before, contestant.model.parameters()))


def test_a_step_of_a_peer_is_that_of_all_its_rows_at_once():
    texts = ask_about(2, 3), [["yes", "no", "yes"]] * 2
    losses = []
    for rows in (2, 6):
        setup = Setup(str(ROOT), sizes=Sizes(**(vars(TINY_SIZES) | {"training_rows": rows})), training=True)
        contestant = CONTESTANTS["PaliGemma"](setup)
        losses.append(float(contestant.training(setup.pixels(2), *texts)()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_our_default_is_the_small_model():
    config = Ours.__new__(Ours).config(Sizes())
    plain = tiny_config().__class__()
    assert config.vision_config.to_dict() == plain.vision_config.to_dict()
    assert config.text_config.to_dict() == plain.text_config.to_dict()


# Memory, parts and the report


def test_memory_of_a_large_tensor_is_seen():
    class Large:
        def __init__(self, setup):
            self.setup = setup

        def yes_no(self, pixels, questions):
            return lambda: torch.ones(len(questions[0]), 1_000_000).sum()

    CONTESTANTS["large"] = Large
    try:
        [figures] = measure_here("large", SETUP, [Work("yes_no", questions=40)])
    finally:
        del CONTESTANTS["large"]
    assert figures["peak"] - figures["before"] == pytest.approx(160e6, rel=0.2)


def test_memory_is_measured_in_a_process_of_its_own():
    small, large = measure(OURS, SETUP, [Work("yes_no"), Work("yes_no", images=2)])
    assert small["peak"] >= small["before"] > 0 and large["peak"] > 0


@pytest.mark.parametrize(
    "status, error, message", [(1, RuntimeError, "ours: OSError: nowhere"), (-9, MemoryError, "ours: .* by signal 9")]
)
def test_a_process_that_fails_is_named(monkeypatch, status, error, message):
    ended = subprocess.CompletedProcess([], status, b"", b"Traceback\nOSError: nowhere\n")
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **options: ended)
    with pytest.raises(error, match=message):
        measure(OURS, SETUP, [Work("yes_no")])


def test_cache_bytes_follow_the_heads():
    sizes, amounts = TINY_SIZES, TINY_AMOUNTS
    figures = PARTS["cache_bytes"](Bench(SETUP, amounts, say=lambda title: None))
    assert list(figures) == ["4", "2", "1"]
    for heads, one in figures.items():
        per_token = 2 * sizes.layers * int(heads) * sizes.head_dim * 4
        assert one["text"] == amounts.cache_tokens * per_token
        assert one["image"] == sizes.image_tokens * per_token
        assert one["together"] == one["text"] + one["image"]


def test_goals():
    runs = {OURS: {"seconds": 3.0}, TOWER: {"seconds": 2.0}, "PaliGemma": {"seconds": 42.0, "ratio": 14.0}}
    rows = {row["work"]: row for row in judge({"questions": {"16": runs}})}
    assert len(rows) == len(GOALS) == 9
    row = {"goal": 16, "at_least": 12, "work": "1 image, 16 yes/no"}
    assert rows["1 image, 16 yes/no"] == row | {"value": 14, "met": "at least"}
    passes = rows["16 yes/no, in passes of the vision tower alone"]
    assert (passes["value"], passes["met"]) == (1.5, "goal")
    assert rows["1 image, 1 yes/no"]["value"] is rows["1 image, 1 yes/no"]["met"] is None
    assert [goal.reached(value) for goal in GOALS[2:3] for value in (1.4, 1.6, 2.0, 2.1)] == [
        "goal",
        "at least",
        "at least",
        "no",
    ]


@pytest.mark.parametrize("value, text", [(2.5, "2.5 s"), (0.01234, "12.3 ms"), (5e-5, "50 µs"), (-0.002, "-2 ms")])
def test_seconds_are_readable(value, text):
    assert seconds(value) == text


def test_the_machine_is_named():
    machine = environment()
    assert machine["torch"] == torch.__version__ and machine["threads"] == torch.get_num_threads() and machine["cpu"]


def run_script(monkeypatch, *options) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("datasets")
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "--processor", str(ROOT), *map(str, options)])
    runpy.run_path(str(ROOT / "scripts" / "benchmark.py"), run_name="__main__")


def test_the_script_writes_a_report(tmp_path, monkeypatch, capsys):
    parts = ["questions", "images", "generate", "train", "load", "cached", "cache_bytes", "split", "rate"]
    options = ["--quick", "--dtype", "float32", "--device", "cpu", "--repeats", 1]
    run_script(monkeypatch, "--output_dir", tmp_path / "out", *options, "--only", *parts)
    assert "report.md" in capsys.readouterr().out
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"report.json", "report.md", "questions.png", "generate.png", "cached.png"}
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert set(report) == {"environment", "options", "sizes", "settings"}
    setting = report["settings"]["cpu float32"]
    assert set(setting["figures"]) == {"amounts", *parts}
    for count in ("1", "16"):
        runs = setting["figures"]["questions"][count]
        assert set(runs) == {*CONTESTANTS, TOWER}
        for run in runs.values():
            assert run["ratio"] == pytest.approx(run["seconds"] / runs[OURS]["seconds"])
        assert runs[OURS]["flops"] > runs[TOWER]["flops"] > 0
    assert [row["work"] for row in setting["goals"] if row["value"] is None] == [
        goal.work for goal in GOALS if "compiled" in goal.work
    ]
    parted = setting["figures"]["split"]["1 × 16 questions"]
    assert parted["vision"] + parted["decoder"] + parted["overhead"] == pytest.approx(parted["whole"])
    text = (tmp_path / "out" / "report.md").read_text()
    assert "say nothing about speed" in text and "| 1 image, 16 yes/no |" in text and "(questions.png)" in text


def test_an_earlier_report_is_kept(tmp_path, monkeypatch):
    (tmp_path / "report.json").write_text("{}")
    with pytest.raises(SystemExit, match="holds a report already"):
        run_script(monkeypatch, "--output_dir", tmp_path, "--quick")
    assert (tmp_path / "report.json").read_text() == "{}"


def test_exported_graphs_take_turns_with_the_model():
    for name in ("onnx", "onnxruntime", "onnxscript"):
        pytest.importorskip(name)
    figures = PARTS["onnx"](Bench(SETUP, TINY_AMOUNTS, rounds=1, say=lambda title: None))
    assert list(figures) == ["1", "16"]
    for runs in figures.values():
        assert list(runs) == [OURS, "ONNX Runtime", "ONNX Runtime, int8"]
        assert all(run["ratio"] == pytest.approx(run["seconds"] / runs[OURS]["seconds"]) for run in runs.values())
    half = replace(SETUP, dtype=torch.bfloat16)
    assert PARTS["onnx"](Bench(half, TINY_AMOUNTS, say=lambda title: None)) == {}


def test_growth_is_fitted(monkeypatch):
    peaks = iter([[{"before": 1, "peak": 10 * number} for number in range(3)]] * 2)
    monkeypatch.setattr("traffic_vlm.benchmark.parts.measure", lambda *arguments: next(peaks))
    figures = PARTS["growth"](Bench(SETUP, TINY_AMOUNTS, rounds=1, say=lambda title: None))
    for name, numbers in (("questions", [1, 4, 8]), ("images", [1, 2, 3])):
        assert figures[name]["numbers"] == numbers
        assert figures[name]["lines"]["flops"]["r_squared"] > 0.99
        assert len(figures[name]["points"]["seconds"]) == 3


@pytest.mark.parametrize(
    "options, message",
    [
        (["--only", "questions", "speed"], "--only must be of questions, .*, got speed"),
        (["--dtype", "float8"], "--dtype must be of float32, bfloat16, got float8"),
        (["--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["--threads", "0"], "--threads must be at least 1, got 0"),
        (["--processor", "nowhere"], "--processor must be the folder of the model repository"),
    ],
)
def test_bad_options_are_named(tmp_path, monkeypatch, options, message):
    with pytest.raises(SystemExit, match=message):
        run_script(monkeypatch, "--output_dir", tmp_path / "out", *options)
    assert not (tmp_path / "out").exists()
