"""Labels for many images: plans, parts, broken input, and runs that are killed and go on.

LABEL_KILLS=20 pytest tests/test_label.py -k killed      # more kills than the tests take time for
"""

import contextlib
import importlib.util
import io
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time

import numpy as np
import pytest
from PIL import Image

from tiny import ROOT, save_folder, tiny_model


pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
fsspec = pytest.importorskip("fsspec")

from traffic_vlm.serving import cluster as cluster_module  # noqa: E402
from traffic_vlm.serving import labelling  # noqa: E402
from traffic_vlm.serving.answerer import Answerer  # noqa: E402
from traffic_vlm.serving.labelling import Job, LabelError, Labeller, Output, list_input, parts_to_do  # noqa: E402
from traffic_vlm.serving.pictures import open_picture  # noqa: E402


QUESTIONS = ("Is there a car?", "What color is the traffic light?")
KILLS = int(os.environ.get("LABEL_KILLS", "1"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_folder(tiny_model(), tmp_path_factory.mktemp("model")))


def content(seed: int, size=(40, 30)) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "png")
    return stream.getvalue()


def write_images(folder, count: int):
    folder.mkdir()
    for number in range(count):
        (folder / f"{number:03d}.png").write_bytes(content(number))
    return folder


def write_tar(path, contents: dict[str, bytes], mode: str = "w"):
    with tarfile.open(path, mode) as tar:
        for name, data in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def label_here(job: Job, folder, batch_size: int = 4) -> list[dict]:
    """All parts by one actor without Ray; what they said of themselves."""
    output = Output(str(folder))
    labeller = Labeller(job, str(folder), batch_size, "cpu")
    return [labeller(row) for row in parts_to_do(output.open_plan(job), output.done())]


def read(folder) -> list[dict]:
    return pq.read_table(folder).to_pylist()


def test_labels_are_those_of_the_answerer(model, tmp_path):
    images = write_images(tmp_path / "in", 7)
    said = label_here(Job(str(images), QUESTIONS, model, images_per_part=3), tmp_path / "out")
    assert said == [{"part": n, "images": count, "errors": 0, "problem": ""} for n, count in enumerate((3, 3, 1))]
    rows = read(tmp_path / "out")
    assert [row["key"] for row in rows[::2]] == [str(path) for path in sorted(images.iterdir())]
    assert [row["question"] for row in rows] == [*QUESTIONS] * 7 and {row["error"] for row in rows} == {None}
    answerer = Answerer(model, "cpu")
    told = answerer([Image.open(path) for path in sorted(images.iterdir())], [QUESTIONS] * 7)
    for row, answer in zip(rows, [answer for one in told for answer in one]):
        expected = answer.probability if answer.yes_probability is None else answer.yes_probability
        assert row["answer"] == answer.answer and row["probability"] == pytest.approx(expected, abs=1e-4)


def test_parquet_and_tars_give_the_same_labels(model, tmp_path):
    contents = {f"{number}.png": content(number) for number in range(5)}
    inputs = {"images": tmp_path / "images", "parquet": tmp_path / "in.parquet", "tars": tmp_path / "tars"}
    inputs["images"].mkdir()
    inputs["tars"].mkdir()
    for name, data in contents.items():
        (inputs["images"] / name).write_bytes(data)
    structs = [{"bytes": data, "path": name} for name, data in contents.items()]
    pq.write_table(pa.table({"picture": structs, "id": range(5)}), inputs["parquet"], row_group_size=2)
    halves = list(contents.items())
    write_tar(inputs["tars"] / "a.tar", dict(halves[:2]) | {"0.json": b"{}"})
    write_tar(inputs["tars"] / "b.tar.gz", dict(halves[2:]), "w:gz")
    found = {}
    for name, path in inputs.items():
        job = Job(str(path), QUESTIONS, model, column="picture", key_column="id")
        said = label_here(job, tmp_path / f"out-{name}")
        found[name] = read(tmp_path / f"out-{name}")
        assert [one["images"] for one in said] == {"images": [5], "parquet": [2, 2, 1], "tars": [2, 3]}[name]
    assert [row["key"] for row in found["parquet"][::2]] == [*"01234"]
    assert found["tars"][0]["key"] == f"{inputs['tars'] / 'a.tar'}#0.png"
    for other in ("parquet", "tars"):
        for row, same in zip(found["images"], found[other], strict=True):
            assert row["answer"] == same["answer"] and row["probability"] == pytest.approx(same["probability"])


def test_rows_without_a_key_are_named_by_file_and_number(model, tmp_path):
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"image": [content(number) for number in range(3)]}), path, row_group_size=2)
    label_here(Job(str(path), QUESTIONS[:1], model), tmp_path / "out")
    assert [row["key"] for row in read(tmp_path / "out")] == [f"{path}#{number}" for number in range(3)]


def test_what_is_broken_is_a_row_with_its_error(model, tmp_path, monkeypatch):
    monkeypatch.setattr(open_picture, "__defaults__", ("", 10_000))
    images = write_images(tmp_path / "in", 3)
    (images / "1.png").write_text("no image")
    (images / "2.png").write_bytes(content(2)[:500])
    (images / "3.png").write_bytes(content(3, (200, 200)))
    frame = Image.new("RGB", (8, 8))
    frame.save(images / "4.webp", save_all=True, append_images=[Image.new("RGB", (8, 8), "red")])
    [said] = label_here(Job(str(images), QUESTIONS[:1], model), tmp_path / "out", batch_size=2)
    assert said == {"part": 0, "images": 7, "errors": 4, "problem": ""}
    errors = {row["key"].rpartition("/")[2]: row["error"] for row in read(tmp_path / "out")}
    assert [name for name, error in errors.items() if error is None] == ["000.png", "001.png", "002.png"]
    assert errors["1.png"] == "1.png is no image that can be read." == errors["2.png"].replace("2", "1")
    assert "200 × 200 pixels; at most 10,000" in errors["3.png"] and "is animated" in errors["4.webp"]


@pytest.mark.parametrize("compressed", [False, True])
def test_of_a_file_that_breaks_off_the_beginning_is_kept(model, tmp_path, compressed):
    contents = {f"{number}.png": content(number) for number in range(6)}
    path = write_tar(tmp_path / f"in.tar{'.gz' * compressed}", contents, "w:gz" if compressed else "w")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    [said] = label_here(Job(str(path), QUESTIONS[:1], model), tmp_path / "out")
    rows = read(tmp_path / "out")
    assert said == {"part": 0, "images": len(rows), "errors": 1, "problem": ""} and 2 <= len(rows) <= 5
    assert [row["error"] for row in rows[:-1]] == [None] * (len(rows) - 1)
    assert rows[-1]["key"] == str(path) and rows[-1]["error"]


def test_a_damaged_row_group_is_a_row_with_its_error(model, tmp_path):
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"image": [content(number) for number in range(4)]}), path, row_group_size=2)
    damaged = bytearray(path.read_bytes())
    damaged[4:44] = b"\xff" * 40  # the header of the first page
    path.write_bytes(damaged)
    said = label_here(Job(str(path), QUESTIONS[:1], model), tmp_path / "out")
    assert [(one["images"], one["errors"], one["problem"]) for one in said] == [(1, 1, ""), (2, 0, "")]
    broken, *others = read(tmp_path / "out")
    assert broken["key"] == str(path) and "header" in broken["error"]
    assert [row["error"] for row in others] == [None, None]


def test_a_finished_part_is_not_done_again(model, tmp_path):
    job = Job(str(write_images(tmp_path / "in", 4)), QUESTIONS[:1], model, images_per_part=2)
    label_here(job, tmp_path / "out")
    (tmp_path / "out/part-000001.parquet").unlink()
    before = (tmp_path / "out/part-000000.parquet").stat().st_mtime_ns
    (tmp_path / "in/new.png").write_bytes(content(9))  # the plan does not hold it
    assert [said["part"] for said in label_here(job, tmp_path / "out")] == [1]
    assert (tmp_path / "out/part-000000.parquet").stat().st_mtime_ns == before
    assert len(read(tmp_path / "out")) == 4 and label_here(job, tmp_path / "out") == []
    row = parts_to_do(Output(str(tmp_path / "out")).open_plan(job), set())[0]
    assert Labeller(job, str(tmp_path / "out"), 4, "cpu")(row) == {"part": 0, "images": 0, "errors": 0, "problem": ""}


def test_files_appear_whole_or_not_at_all(tmp_path, monkeypatch):
    output = Output(str(tmp_path))

    def half(table, file, **options):
        file.write(b"PAR1")
        raise OSError("disk full")

    monkeypatch.setattr(pq, "write_table", half)
    with pytest.raises(OSError, match="disk full"):
        output.write(pa.table({"a": [1]}), output.name(0))
    assert output.done() == set() and [path.suffix for path in tmp_path.iterdir()] == [".tmp"]
    output.remove_drafts()
    assert not list(tmp_path.iterdir())


def test_another_job_does_not_mix_with_the_first(model, tmp_path):
    images, output = write_images(tmp_path / "in", 2), Output(str(tmp_path / "out"))
    output.open_plan(Job(str(images), QUESTIONS, model))
    with pytest.raises(LabelError, match=r"another job: questions \[.*\], now \['Is it raining\?'\]. Choose another"):
        output.open_plan(Job(str(images), ("Is it raining?",), model))
    (tmp_path / "other").mkdir()
    (tmp_path / "other/part-000000.parquet").write_bytes(b"")
    with pytest.raises(LabelError, match="holds labels, but not their plan"):
        Output(str(tmp_path / "other")).open_plan(Job(str(images), QUESTIONS, model))


@pytest.fixture
def weights(tmp_path):
    """A folder that looks like that of a model, as far as a plan looks at it."""
    folder = tmp_path / "weights"
    folder.mkdir()
    for name in ("model.safetensors", "config.json", "README.md"):
        (folder / name).write_text("one")
    return folder


def test_other_weights_under_the_same_name_are_another_job(weights, tmp_path):
    images, output = write_images(tmp_path / "in", 2), Output(str(tmp_path / "out"))

    def job():
        return Job(str(images), QUESTIONS, str(weights), weights=labelling.fingerprint(str(weights)))

    plan = output.open_plan(job())
    (weights / "README.md").write_text("two")
    assert output.open_plan(job()).equals(plan)
    for name in ("model.safetensors", "config.json"):
        (weights / name).write_text("two")
        with pytest.raises(LabelError, match=r"another job: the weights of .* have changed\. Choose"):
            output.open_plan(job())
        (weights / name).write_text("one")
    (weights / "model.safetensors").rename(weights / "other.safetensors")
    with pytest.raises(LabelError, match="have changed"):
        output.open_plan(job())
    described = job().describe()
    del described["weights"]  # as in a plan of an earlier release
    output.write(plan.replace_schema_metadata({"job": json.dumps(described)}), f"{output.path}/{labelling.PLAN}")
    assert output.open_plan(job()).num_rows == 2


def test_the_command_does_not_go_on_with_other_weights(weights, tmp_path, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("label_script", ROOT / "scripts/label.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)

    def stop(*_):  # in place of loading the model, which comes after the plan
        raise OSError("the plan is good")

    monkeypatch.setattr(script, "check_model", stop)
    monkeypatch.setattr(cluster_module, "load_ray", lambda purpose: None)
    images, output = write_images(tmp_path / "in", 2), tmp_path / "out"
    options = ["--ask", "Is there a car?", "--model", weights, "--output", output]
    monkeypatch.setattr(sys, "argv", ["label.py", *map(str, [images, *options])])
    for _ in range(2):
        assert script.main() == 2 and capsys.readouterr().err == "the plan is good\n"
    (weights / "model.safetensors").write_text("two")
    assert script.main() == 2 and f"the weights of {weights} have changed" in capsys.readouterr().err


def test_input_of_another_file_system(model):
    fs = fsspec.filesystem("memory")
    fs.pipe({f"/frames/{number}.png": content(number) for number in range(3)})
    assert list_input("memory://frames") == ("image", [f"memory:///frames/{number}.png" for number in range(3)])
    assert list_input("memory://frames/[12].png")[1] == [f"memory:///frames/{number}.png" for number in (1, 2)]
    said = label_here(Job("memory://frames", QUESTIONS[:1], model), "memory://labels")
    assert said == [{"part": 0, "images": 3, "errors": 0, "problem": ""}]
    assert sorted(name.rpartition("/")[2] for name in fs.ls("/labels", detail=False)) == [
        "_plan.parquet",
        "part-000000.parquet",
    ]


def test_globs_name_each_image_once(tmp_path):
    (tmp_path / "a/b").mkdir(parents=True)
    for name in ("a/x.png", "a/b/y.png"):
        (tmp_path / name).write_bytes(content(0))
    expected = [str(tmp_path / name) for name in ("a/b/y.png", "a/x.png")]
    for source in (tmp_path, tmp_path / "**", tmp_path / "a*", tmp_path / "*/**"):
        assert list_input(str(source))[1] == expected, source
    (tmp_path / "a").rename(tmp_path / "a[1]")
    assert len(list_input(str(tmp_path / "a[1]"))[1]) == 2


def test_a_network_that_fails_leaves_the_part_undone(model, tmp_path, monkeypatch):
    fs = fsspec.filesystem("memory")
    fs.pipe({f"/far/{number}.png": content(number) for number in range(3)})
    job, read_before = Job("memory://far", QUESTIONS[:1], model), labelling.read_file

    def read_file(path):
        if path.endswith("1.png"):
            raise TimeoutError("connection lost")
        return read_before(path)

    monkeypatch.setattr(labelling, "read_file", read_file)
    [said] = label_here(job, tmp_path / "out")
    assert said["problem"].endswith("connection lost") and not said["images"]
    assert Output(str(tmp_path / "out")).done() == set()
    monkeypatch.undo()
    assert label_here(job, tmp_path / "out") == [{"part": 0, "images": 3, "errors": 0, "problem": ""}]


def test_a_disk_that_is_away_leaves_the_part_undone_and_a_file_that_is_gone_is_a_row(model, tmp_path):
    job, output = Job(str(write_images(tmp_path / "in", 3)), QUESTIONS[:1], model), Output(str(tmp_path / "out"))
    output.open_plan(job)
    (tmp_path / "in").rename(tmp_path / "away")
    [said] = label_here(job, tmp_path / "out")
    assert "No such file" in said["problem"] and output.done() == set()
    (tmp_path / "away").rename(tmp_path / "in")
    (tmp_path / "in/001.png").unlink()
    assert label_here(job, tmp_path / "out") == [{"part": 0, "images": 3, "errors": 1, "problem": ""}]
    rows = pq.read_table(tmp_path / "out/part-000000.parquet").to_pylist()
    assert ["No such file" in (row["error"] or "") for row in rows] == [False, True, False]


def test_input_that_cannot_be_labelled(model, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed/a.png").write_bytes(content(0))
    write_tar(tmp_path / "mixed/b.tar", {})
    (tmp_path / "broken.parquet").write_bytes(b"nothing")
    pq.write_table(pa.table({"picture": [b""]}), tmp_path / "other.parquet")
    for name, message in {
        "missing": "missing: (cannot be listed|must hold)",
        "empty": "must hold images, .*; found none",
        "mixed": "found 1 of kind image, 1 of kind tar",
        "broken.parquet": "is no Parquet file that can be read",
        "other.parquet": "has no column 'image'; its columns are picture",
    }.items():
        with pytest.raises(LabelError, match=message):
            Output(str(tmp_path / "out")).open_plan(Job(str(tmp_path / name), QUESTIONS, model))


def test_bytes_of_a_picture_and_its_file_are_the_same(tmp_path):
    (tmp_path / "a.png").write_bytes(content(1))
    assert open_picture(content(1)).tobytes() == open_picture(tmp_path / "a.png").tobytes()
    with pytest.raises(ValueError, match="the image is no image that can be read"):
        open_picture(b"")


def test_of_a_phones_photograph_with_previews_the_first_is_read(tmp_path):
    pictures = [Image.new("RGB", (16, 8), color) for color in ("red", "blue")]
    pictures[0].save(tmp_path / "a.jpg", "mpo", save_all=True, append_images=pictures[1:])
    assert open_picture(tmp_path / "a.jpg").getpixel((3, 3))[0] > 200


# With Ray


needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")


def start(images, output, model, *options) -> subprocess.Popen:
    asked = [part for question in QUESTIONS for part in ("--ask", question)]
    command = [sys.executable, str(ROOT / "scripts/label.py"), str(images), *asked, "--output", str(output)]
    command += ["--model", model, "--device", "cpu", "--threads", "1", "--batch_size", "2", *options]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


def workers(driver: int) -> list[int]:
    """Processes of Ray's actors that belong to a driver."""
    parents, names = {}, {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as stat, open(f"/proc/{entry}/cmdline") as line:
                    parents[int(entry)] = int(stat.read().rpartition(")")[2].split()[1])
                    names[int(entry)] = line.read()
            except OSError:  # it has ended
                continue

    def belongs(process: int) -> bool:
        while process in parents:
            process = parents[process]
            if process == driver:
                return True
        return False

    return [process for process, name in names.items() if "ray::MapWorker" in name and belongs(process)]


PARTS_PER_KILL = 40  # more than are labelled between the moment that is chosen and the kill


def kill(processes: list[int]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):  # ended meanwhile
            os.kill(process, signal.SIGKILL)


@needs_ray
def test_killed_at_any_moment_it_finishes_with_each_image_once(model, tmp_path):
    parts = PARTS_PER_KILL * (KILLS + 1)
    images, output = write_images(tmp_path / "in", 2 * parts - 1), tmp_path / "out"
    (images / "broken.png").write_text("no image")
    options = ("--images_per_part", "2", "--actors", "1")
    dice, labels = random.Random(KILLS), Output(str(output))
    for number in range(KILLS):
        run = start(images, output, model, *options)
        if number % 4 == 2:  # while it starts
            time.sleep(dice.uniform(0, 8))
        else:  # while it works
            goal = dice.uniform(number, number + 0.5) * PARTS_PER_KILL
            while len(labels.done()) < goal and run.poll() is None:
                time.sleep(0.02)
        if number % 2:  # a worker first; the run lives on, with another one
            found = workers(run.pid)
            assert found, "no worker was found, so none was killed"
            kill(found)
            time.sleep(dice.uniform(0, 3))
        assert run.poll() is None, run.communicate()[1]
        run.kill()
        run.communicate()
    assert len(labels.done()) < parts
    last = start(images, output, model, *options)
    while not (found := workers(last.pid)) and last.poll() is None:
        time.sleep(0.1)
    assert found, "no worker was found, so none was killed"
    kill(found)  # this must not stop the run
    told = last.communicate(timeout=300)[1]
    assert last.returncode == 0, told
    assert {path.name for path in output.iterdir()} == {"_plan.parquet"} | {
        f"part-{number:06d}.parquet" for number in range(parts)
    }
    rows = read(output)
    keys = [(row["key"], row["question"]) for row in rows]
    assert len(keys) == len(set(keys)) == 2 * parts * len(QUESTIONS)
    assert {row["key"].rpartition("/")[2] for row in rows if row["error"]} == {"broken.png"}
    again = start(images, output, model, *options)
    assert f"all {parts} parts are labelled" in again.communicate(timeout=120)[1] and again.returncode == 0


@pytest.fixture
def cluster(monkeypatch):
    """The address of a cluster that this process is not part of."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:  # short, as it holds sockets
        options = ["--port=0", f"--ray-client-server-port={port}", f"--temp-dir={folder}", "--include-dashboard=false"]
        command = [os.path.join(os.path.dirname(sys.executable), "ray"), "start", "--head", "--block", "--num-cpus=2"]
        with subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT) as head:
            while head.poll() is None:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                time.sleep(0.1)
            yield f"ray://127.0.0.1:{port}"
            head.kill()  # its processes die with it; to end politely takes half a minute


@needs_ray
def test_a_cluster_labels_for_a_client_outside_of_it(model, tmp_path, cluster):
    images, output = write_images(tmp_path / "in", 5), tmp_path / "out"
    run = start(images, output, model, "--images_per_part", "2", "--address", cluster)
    told = run.communicate(timeout=300)[1]
    assert run.returncode == 0 and "3 of 3 parts, 5 images, 0 broken" in told, told
    assert len(read(output)) == 5 * len(QUESTIONS)


@needs_ray
@pytest.mark.parametrize(
    "options, message",
    [
        (["--ask", " "], "question 3 is empty"),
        (["--device", "cuda"], "the machines have no GPU"),
        (["--model", "nowhere"], "nowhere"),
    ],
)
def test_what_cannot_be_asked_is_said(model, tmp_path, options, message):
    run = start(write_images(tmp_path / "in", 2), tmp_path / "out", model, *options)
    told = run.communicate(timeout=300)[1]
    assert run.returncode == 2 and message in told and "Traceback" not in told, told


def test_the_plan_is_readable(model, tmp_path):
    job = Job(str(write_images(tmp_path / "in", 2)), QUESTIONS, model)
    plan = Output(str(tmp_path / "out")).open_plan(job)
    assert json.loads(plan.schema.metadata[b"job"])["questions"] == list(QUESTIONS)
    assert Output(str(tmp_path / "out")).open_plan(job).equals(plan)
