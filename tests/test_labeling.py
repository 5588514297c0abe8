"""Labels for many images: what is read, what is written, and runs that are refused, killed and repeated."""

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import warnings

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from tiny import save_folder, start_process, tiny_model


pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
fsspec = pytest.importorskip("fsspec")
pytest.importorskip("ray")

from traffic_vlm.files import DataError  # noqa: E402
from traffic_vlm.serving import stored_images  # noqa: E402
from traffic_vlm.serving.cluster import load_ray, start_ray  # noqa: E402
from traffic_vlm.serving.labeling import (  # noqa: E402
    Labeler,
    LabelOptions,
    Part,
    find_parts,
    label,
    show_progress,
    weights_digest,
)
from traffic_vlm.serving.options import ModelOptions  # noqa: E402
from traffic_vlm.serving.stored_images import list_input  # noqa: E402


QUESTIONS = ["Is there a car?", "What is ahead?"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_folder(tiny_model(), tmp_path_factory.mktemp("model")))


def encoded_image(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "png")
    return stream.getvalue()


CONTENTS = {f"{index}.png": encoded_image(index) for index in range(5)}


def write_images(folder, contents=CONTENTS):
    folder.mkdir(exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return folder


def write_tar(path, contents=CONTENTS, mode: str = "w"):
    with tarfile.open(path, mode) as tar:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def label_options(output_dir, model, ask=QUESTIONS[:1], **options) -> LabelOptions:
    options = {"images_per_part": 3, "batch_size": 2, "threads": 1} | options
    return LabelOptions(ask=ask, output_dir=str(output_dir), model=model, device="cpu", **options)


def run_here(source, output_dir, model, ask=QUESTIONS[:1], **options) -> list[dict]:
    """Label the missing parts without Ray; what each part reports."""
    options = label_options(output_dir, model, ask, **options)
    parts, _ = find_parts(str(source), options)
    return [Labeler(options)({"part": json.dumps(part)}) for part in parts]


def report(images: int, bad: int = 0) -> dict:
    return {"images": images, "bad": bad, "failure": "", "notes": ""}


def read(folder) -> dict[str, list[dict]]:
    """The rows of each image, by the last part of its key."""
    rows = pq.read_table(folder).to_pylist()
    found = {os.path.basename(row["key"]).rpartition("#")[2]: [] for row in rows}
    for row in rows:
        found[os.path.basename(row["key"]).rpartition("#")[2]].append(row)
    return found


def problems(folder) -> dict[str, str | None]:
    return {name: rows[0]["problem"] for name, rows in read(folder).items()}


# What is written


def test_labels_are_the_items_of_the_pipeline(model, tmp_path):
    images = write_images(tmp_path / "in")
    assert run_here(images, tmp_path / "out", model, QUESTIONS) == [report(3), report(2)]
    labels = read(tmp_path / "out")
    assert labels.keys() == CONTENTS.keys()
    expected = ModelOptions(model, "cpu").load()([str(images / name) for name in labels], QUESTIONS)
    for (name, rows), items in zip(labels.items(), expected, strict=True):
        for row, item in zip(rows, items, strict=True):
            assert list(row) == ["key", "question", "answer", "score", "p_yes", "problem"]
            assert (row["key"], row["problem"]) == (str(images / name), None)
            assert (row["question"], row["answer"]) == (item["question"], item["answer"])
            for number in ("score", "p_yes"):
                assert row[number] == pytest.approx(item[number], abs=1e-4)


def test_datasets_and_pandas_read_the_folder(model, tmp_path):
    datasets, pandas = pytest.importorskip("datasets"), pytest.importorskip("pandas")
    images, output = write_images(tmp_path / "in", CONTENTS | {"bad.png": b""}), tmp_path / "out"
    run_here(images, output, model, QUESTIONS)
    (output / ".left by a killed process.tmp").write_bytes(b"PAR1")
    rows = pq.read_table(output).to_pylist()
    assert len(rows) == 6 * len(QUESTIONS)
    loaded = datasets.load_dataset("parquet", data_dir=str(output), cache_dir=str(tmp_path / "cache"))
    assert loaded["train"].to_list() == rows
    frame = pandas.read_parquet(output)
    assert list(frame["key"]) == [row["key"] for row in rows] and frame["problem"].notna().sum() == len(QUESTIONS)


def test_thresholds_and_a_region_are_those_of_the_pipeline(model, tmp_path):
    images, path = write_images(tmp_path / "in"), tmp_path / "thresholds.json"
    path.write_text('{"default": {"threshold": 0.00001, "band": [0, 1]}}')
    run_here(images, tmp_path / "out", model, thresholds=str(path), region="0,0,0.5,1")
    [row] = read(tmp_path / "out")["0.png"]
    [expected] = ModelOptions(model, "cpu").load()(Image.open(images / "0.png").crop((0, 0, 20, 30)), QUESTIONS[0])
    assert row["p_yes"] == pytest.approx(expected["p_yes"], abs=1e-5)
    assert (row["answer"], row["not_sure"]) == ("yes", True)


# What is read


def test_each_kind_of_input_gives_the_same_labels(model, tmp_path):
    images = write_images(tmp_path / "images [1]")
    (tmp_path / "list.txt").write_text(
        "\n".join(["images [1]/0.png", "", *(str(images / f"{i}.png") for i in range(5))])
    )
    (tmp_path / "tars").mkdir()
    write_tar(tmp_path / "tars/a.tar", {name: CONTENTS[name] for name in ("0.png", "1.png")} | {"0.json": b"{}"})
    write_tar(tmp_path / "tars/b.tar.gz", {name: CONTENTS[name] for name in ("2.png", "3.png", "4.png")}, "w:gz")
    structs = [{"bytes": content, "path": None} for content in CONTENTS.values()]
    table = {"picture": structs, "image": [*CONTENTS.values()], "id": [*CONTENTS]}
    pq.write_table(pa.table(table), tmp_path / "in.parquet", row_group_size=2)
    for number, (source, counts) in enumerate(
        {
            str(images): [3, 2],
            str(tmp_path / "images*" / "*.png"): [3, 2],
            str(tmp_path / "list.txt"): [3, 2],
            str(tmp_path / "tars"): [2, 3],
            str(tmp_path / "in.parquet"): [2, 2, 1],
        }.items()
    ):
        output = tmp_path / f"out{number}"
        reports = run_here(source, output, model, QUESTIONS, column="picture", key_column="id")
        assert reports == [report(count) for count in counts], source
        labels, expected = read(output), read(tmp_path / "out0")
        assert labels.keys() == CONTENTS.keys()
        for name in CONTENTS:
            for row, same in zip(labels[name], expected[name], strict=True):
                assert row["answer"] == same["answer"] and row["score"] == pytest.approx(same["score"], abs=1e-4)
    run_here(tmp_path / "in.parquet", tmp_path / "numbered", model)
    assert read(tmp_path / "numbered").keys() == set("01234")


def test_input_and_labels_can_be_on_another_file_system(model):
    fs = fsspec.filesystem("memory")
    fs.pipe({f"/far/{name}": content for name, content in CONTENTS.items()} | {"/far/list.txt": b"0.png\n1.png\n"})
    assert run_here("memory://far/*.png", "memory://labels", model) == [report(3), report(2)]
    assert run_here("memory://far/*.png", "memory://labels", model) == []
    assert len(fs.ls("/labels")) == 3 and len(fs.glob("/labels/part-*.parquet")) == 2
    assert run_here("memory://far/list.txt", "memory://labels of a list", model) == [report(2)]


def test_bad_images_have_a_problem_and_the_others_are_labeled(model, tmp_path, monkeypatch):
    monkeypatch.setattr(stored_images, "MAX_BYTES", 5_000)
    images = write_images(tmp_path / "in", {"good.png": encoded_image(0), "text.png": b"text", "empty.png": b""})
    (images / "cut.png").write_bytes(encoded_image(1)[:500])
    (images / "large.png").write_bytes(encoded_image(2) + bytes(5_000))
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    frames[0].save(images / "animated.webp", save_all=True, append_images=frames[1:])
    (images / "gone.png").symlink_to(images / "nothing.png")
    assert sum(one["bad"] for one in run_here(images, tmp_path / "out", model, QUESTIONS)) == 6
    found = problems(tmp_path / "out")
    assert found.pop("good.png") is None and "No such file" in found.pop("gone.png")
    assert found.pop("large.png") == "large.png has more than 5,000 bytes."
    assert len(found) == 4 and all(name in problem for name, problem in found.items())
    write_tar(tmp_path / "in.tar", {"a/good.png": encoded_image(0), "large.png": bytes(6_000), "._good.png": b""})
    assert run_here(tmp_path / "in.tar", tmp_path / "of tar", model) == [report(2, bad=1)]
    pq.write_table(pa.table({"image": [encoded_image(0), None, b"text"]}), tmp_path / "in.parquet")
    assert run_here(tmp_path / "in.parquet", tmp_path / "of parquet", model) == [report(3, bad=2)]
    color = ["What color is the traffic light?"]
    monkeypatch.setattr("traffic_vlm.question_traffic_vlm.MIN_SCORE", 1.0)
    assert run_here(images / "good.png", tmp_path / "of color", model, color) == [report(1, bad=1)]
    assert "the likeliest of a color of a traffic light" in problems(tmp_path / "of color")["good.png"]


def test_what_precedes_a_damage_is_labeled(model, tmp_path):
    for name, mode in (("in.tar", "w"), ("in.tar.gz", "w:gz")):
        path, output = write_tar(tmp_path / name, CONTENTS, mode), tmp_path / f"labels of {name}"
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        [reported] = run_here(path, output, model)
        *before, last = problems(output).items()
        assert before and not any(problem for _, problem in before) and last[0] == name and last[1]
        assert reported == report(len(before) + 1, bad=1)
    assert run_here(write_tar(tmp_path / "empty.tar", {}), tmp_path / "of nothing", model) == [report(1, bad=1)]
    pq.write_table(pa.table({"image": [*CONTENTS.values()][:4]}), tmp_path / "in.parquet", row_group_size=2)
    damaged = bytearray((tmp_path / "in.parquet").read_bytes())
    damaged[4:44] = b"\xff" * 40  # the header of the first page
    (tmp_path / "in.parquet").write_bytes(damaged)
    assert run_here(tmp_path / "in.parquet", tmp_path / "out", model) == [report(1, bad=1), report(2)]


def test_names_that_are_not_utf8_are_labeled(model, tmp_path):
    images = write_images(tmp_path / "in", {os.fsdecode(b"caf\xe9.png"): encoded_image(0)})
    (images / os.fsdecode(b"torn\xff.png")).write_bytes(b"")
    assert run_here(images, tmp_path / "out", model) == [report(2, bad=1)]
    assert run_here(images, tmp_path / "out", model) == []
    assert [*problems(tmp_path / "out")] == [r"caf\xe9.png", r"torn\xff.png"]


def test_other_files_are_left_out_and_counted(tmp_path):
    write_images(tmp_path / "in", {"a.png": b"", "B.JPG": b"", "a.json": b"", ".a.png": b""})
    for folder in (".ipynb_checkpoints", "__MACOSX", "day 1"):
        write_images(tmp_path / "in" / folder, {"b.png": b""})
    kind, files, left_out = list_input(str(tmp_path / "in"))
    assert kind == "image" and [os.path.basename(file) for file in files] == ["B.JPG", "a.png", "b.png"]
    assert left_out == "files left out: 3 hidden, 1 .json"
    assert list_input(str(tmp_path / "in/**"))[1] == files
    assert len(list_input(str(tmp_path / "in/__MACOSX"))[1]) == 1  # asked for by its name


def test_input_that_cannot_be_labeled_is_refused(model, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.txt").write_text("\n")
    write_tar(write_images(tmp_path / "mixed", {"a.png": b""}) / "b.tar")
    (tmp_path / "broken.parquet").write_bytes(b"nothing")
    pq.write_table(pa.table({"picture": [b""]}), tmp_path / "other.parquet")
    for name, message in {
        "missing": "missing: must hold images",
        "empty": "must hold images, .*; found none",
        "empty.txt": "lists no images",
        "mixed": "found 1 of kind image, 1 of kind tar",
        "broken.parquet": "cannot be read as Parquet",
        "other.parquet": "has no column 'image'; its columns are picture",
    }.items():
        with pytest.raises(DataError, match=message):
            run_here(tmp_path / name, tmp_path / "out", model)
    assert not (tmp_path / "out").exists()


# The next run


def test_the_next_run_labels_new_images_in_new_parts(model, tmp_path):
    images, output = write_images(tmp_path / "in"), tmp_path / "out"
    run_here(images, output, model)
    before = {path.name: path.stat().st_mtime_ns for path in output.iterdir()}
    write_images(images, {name: encoded_image(9) for name in ("00.png", "3a.png", "9.png", "99.png")})
    assert run_here(images, output, model) == [report(3), report(1)]
    assert before.items() <= {path.name: path.stat().st_mtime_ns for path in output.iterdir()}.items()
    labels = read(output)
    assert labels.keys() == {path.name for path in images.iterdir()} and all(
        len(rows) == 1 for rows in labels.values()
    )
    assert run_here(images, output, model) == []


def test_a_missing_part_is_labeled_in_a_file_of_the_same_name(model, tmp_path):
    images, output = write_images(tmp_path / "in"), tmp_path / "out"
    run_here(images, output, model, images_per_part=1)
    names = sorted(path.name for path in output.iterdir())
    for name in names[1:4]:
        (output / name).unlink()
    (output / ".of a killed writer.tmp").write_bytes(b"PAR1")
    assert run_here(images, output, model, images_per_part=1) == [report(1)] * 3
    assert sorted(path.name for path in output.iterdir()) == names


def test_labels_with_other_options_are_refused(model, tmp_path):
    images, output, thresholds = write_images(tmp_path / "in"), tmp_path / "out", tmp_path / "thresholds.json"
    thresholds.write_text('{"default": {"threshold": 0.6}}')
    run_here(images, output, model, QUESTIONS)
    assert run_here(images, output, model, QUESTIONS[::-1], batch_size=1) == []
    other_model = save_folder(tiny_model(seed=1), tmp_path / "other model")
    for options, message in (
        ({"ask": QUESTIONS[:1]}, r"questions \['Is there a car\?', 'What is ahead\?'\], now \['Is there a car\?'\]"),
        ({"model": str(other_model)}, "weights '.*', now '.*'"),
        ({"region": "0,0,0.5,1"}, "region None, now '0,0,0.5,1'"),
        ({"thresholds": str(thresholds)}, "thresholds None, now '.*'"),
        ({"bf16": True}, "bf16 False, now True"),
    ):
        message = rf"out has labels of another run \({message}\): choose another --output_dir$"
        with pytest.raises(DataError, match=message):
            run_here(images, output, **({"model": model, "ask": QUESTIONS} | options))
    with pytest.raises(DataError, match=r"input '.*in', now '.*0\.png'"):
        run_here(images / "0.png", output, model, QUESTIONS)
    assert len(read(output)) == 5


def test_labels_of_an_adapter_depend_on_it_and_on_its_base(tmp_path):
    peft = pytest.importorskip("peft")
    digests = set()
    for seed, scale in ((0, 1), (0, 2), (1, 2)):
        base = tiny_model(seed=seed)
        base.name_or_path = str(save_folder(base, tmp_path / "base"))  # the name in adapter_config.json stays
        torch.manual_seed(0)
        adapter = peft.get_peft_model(base, peft.LoraConfig(r=2, lora_alpha=scale, target_modules=["q_proj"]))
        adapter.save_pretrained(tmp_path / "adapter")
        digests |= {weights_digest(str(tmp_path / "adapter")), weights_digest(base.name_or_path)}
    assert len(digests) == 5


def test_foreign_and_damaged_files_are_named(model, tmp_path):
    images, output = write_images(tmp_path / "in"), tmp_path / "out"
    run_here(images, output, model)
    pq.write_table(pa.table({"a": [1]}), output / "other.parquet")
    with pytest.raises(DataError, match=r"out/other\.parquet: holds no labels\. Remove it"):
        run_here(images, output, model)
    (output / "other.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"out/other\.parquet: is damaged: .*Remove it"):
        run_here(images, output, model)
    (output / ".options.json").unlink()
    with pytest.raises(DataError, match="out has other Parquet files: choose another --output_dir"):
        run_here(images, output, model)


def test_a_full_disk_leaves_the_part_for_the_next_run(model, tmp_path, monkeypatch):
    images, output = write_images(tmp_path / "in"), tmp_path / "out"
    find_parts(str(images), label_options(output, model))
    with monkeypatch.context() as patch:

        def write_half(self, path, content, **options):
            with open(path, "wb") as file:
                file.write(content[:10])
            raise OSError(28, "No space left on device")

        patch.setattr(fsspec.implementations.local.LocalFileSystem, "pipe_file", write_half)
        assert all("No space left" in one["failure"] for one in run_here(images, output, model))
    assert run_here(images, output, model) == [report(3), report(2)]
    assert len(list(output.iterdir())) == 3


def test_a_disk_that_is_gone_leaves_the_part_for_the_next_run(model, tmp_path):
    images, options = write_images(tmp_path / "in"), label_options(tmp_path / "out", model)
    parts, _ = find_parts(str(images), options)
    images.rename(tmp_path / "away")  # while the run goes on
    assert all("No such file" in Labeler(options)({"part": json.dumps(part)})["failure"] for part in parts)
    (tmp_path / "away").rename(images)
    assert run_here(images, tmp_path / "out", model) == [report(3), report(2)]


def test_the_progress_counts_images_and_says_once_what_was_guessed(capsys):
    reports = [report(2) | {"notes": "pixels are guessed"}, report(1, bad=1) | {"notes": "pixels are guessed"}]
    parts = [Part("image", ["a", "b"], 2), Part("image", ["c"], 1)]
    assert show_progress([*reports, report(0) | {"failure": "no network"}], parts, 7) == 1
    messages = capsys.readouterr().err
    assert messages.count("pixels are guessed") == messages.count("no network") == 1
    assert "7/7" in messages and "images/s" in messages and "1 with a problem" in messages
    show_progress([report(30), report(10)], [Part("tar", ["a"], 0)] * 2, 0)
    assert "40/40" in capsys.readouterr().err


def test_guessed_pixels_are_reported(model, tmp_path):
    images = write_images(tmp_path / "in", {})
    Image.fromarray(np.full((40, 60), 4000, np.uint16)).save(images / "12_bit.png")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        [reported] = run_here(images, tmp_path / "out", model)
    assert "pixels of at most 4095 are read as 0..4095" in reported["notes"]


# The command


def arguments(images, output_dir, model, *options) -> list[str]:
    asked = [part for question in QUESTIONS for part in ("--ask", question)]
    runtime = ["--device", "cpu", "--threads", "1", "--batch_size", "2", "--images_per_part", "2", *options]
    return [str(images), *asked, "--output_dir", str(output_dir), "--model", model, *runtime]


@pytest.mark.parametrize(
    "options, message",
    [
        (["--ask", " "], "the question '' has no word"),
        (["--ask", "Is there not a bus?"], "'Is there not a bus?': the model does not understand 'not'"),
        (["--ask", "Is there a zeppelin?"], "'Is there a zeppelin?': the model does not know zeppelin"),
    ],
)
def test_bad_questions_are_refused_before_anything_is_written(model, tmp_path, run_script, capsys, options, message):
    images = write_images(tmp_path / "in")
    run_script("label.py", *arguments(images, tmp_path / "out", model, *options), status=2)
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def ray():
    """Ray on this machine, which `label` uses if it runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", os.environ.get("RAY_AUTH_MODE", "disabled"))  # other tests have imported Ray
        ray = load_ray(None)
        start_ray(ray, None)
        yield ray
        ray.shutdown()


def wait_for(condition, run: subprocess.Popen):
    """The first true value of a condition, while a command runs."""
    while not (value := condition()):
        assert run.poll() is None, run.communicate()[1]
        time.sleep(0.02)
    return value


def actors(run: subprocess.Popen) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(run.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended
            found += [process] if "ray::MapWorker" in " ".join(process.cmdline()) else []
    return found


@pytest.mark.slow
def test_a_killed_run_continues_and_labels_each_image_once(model, tmp_path, ray, capsys):
    contents = {f"{index:03d}.png": encoded_image(index) for index in range(119)} | {"broken.png": b"no image"}
    images, output = write_images(tmp_path / "in", contents), tmp_path / "out"
    with start_process("label.py", *arguments(images, output, model, "--actors", "1")) as run:
        wait_for(lambda: len(list(output.glob("*.parquet"))) > 3, run)
        for actor in actors(run):
            actor.kill()  # Ray starts another one
        so_far = len(list(output.glob("*.parquet")))
        wait_for(lambda: len(list(output.glob("*.parquet"))) > so_far + 3, run)
        run.send_signal(signal.SIGKILL)
        printed = run.communicate()[1]
    assert "ray" not in printed.lower() and "images/s" in printed
    assert len(list(output.glob("*.parquet"))) < 60
    for message in ("120/120", "is labeled"):
        label(str(images), label_options(output, model, QUESTIONS, images_per_part=2))
        assert message in capsys.readouterr().err
    labels = read(output)
    assert labels.keys() == contents.keys() and all(len(rows) == len(QUESTIONS) for rows in labels.values())
    assert [name for name, problem in problems(output).items() if problem] == ["broken.png"]
    assert not list(output.glob(".*.tmp"))


@pytest.mark.slow
def test_a_cluster_labels_for_a_client_outside_of_it(model, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"RAY_AUTH_MODE": "disabled"}
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:  # a short path, as it holds sockets
        options = ["--port=0", f"--ray-client-server-port={port}", f"--temp-dir={folder}", "--include-dashboard=false"]
        head = [os.path.join(os.path.dirname(sys.executable), "ray"), "start", "--head", "--block", "--num-cpus=2"]
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
        with subprocess.Popen([*head, *options], env=environment, **silent) as cluster:
            while cluster.poll() is None:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                time.sleep(0.1)
            given = arguments(
                write_images(tmp_path / "in"), tmp_path / "out", model, "--address", f"ray://127.0.0.1:{port}"
            )
            run = start_process("label.py", *given, env=environment)
            _, printed = run.communicate(timeout=300)
            cluster.kill()  # its children end with it; a polite end takes half a minute
    assert run.returncode == 0 and "5/5" in printed, printed
    assert len(read(tmp_path / "out")) == 5
