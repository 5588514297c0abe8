"""Labels for many images: what is read, what is written, and runs that are refused, killed and repeated."""

import contextlib
import io
import json
import os
import re
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

from tiny import save_folder, start_process, tiny_model


pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
fsspec = pytest.importorskip("fsspec")
pytest.importorskip("ray")

from traffic_vlm.files import DataError  # noqa: E402
from traffic_vlm.serving import stored_images  # noqa: E402
from traffic_vlm.serving.labeling import (  # noqa: E402
    Labeler,
    LabelOptions,
    Part,
    find_parts,
    label,
    show_progress,
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
    return LabelOptions(ask=ask, output_dir=str(output_dir), model=model, device="cpu", min_score=0, **options)


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


def test_labels_are_the_items_of_the_pipeline_and_datasets_and_pandas_read_them(model, tmp_path):
    datasets, pandas = pytest.importorskip("datasets"), pytest.importorskip("pandas")
    images, output = write_images(tmp_path / "in", CONTENTS | {"bad.png": b""}), tmp_path / "out"
    assert run_here(images, output, model, QUESTIONS) == [report(3), report(3, bad=1)]
    (output / ".left by a killed process.tmp").write_bytes(b"PAR1")
    rows = pq.read_table(output).to_pylist()
    labels = read(output)
    assert len(rows) == 6 * len(QUESTIONS) and labels.pop("bad.png")[0]["problem"]
    assert labels.keys() == CONTENTS.keys()
    expected = ModelOptions(model, "cpu", min_score=0).load()([str(images / name) for name in labels], QUESTIONS)
    for (name, found), items in zip(labels.items(), expected, strict=True):
        for row, item in zip(found, items, strict=True):
            item |= {"key": str(images / name), "problem": None}
            assert row == {name: pytest.approx(v, abs=1e-4) if isinstance(v, float) else v for name, v in item.items()}
    loaded = datasets.load_dataset("parquet", data_dir=str(output), cache_dir=str(tmp_path / "cache"))
    assert loaded["train"].to_list() == rows
    frame = pandas.read_parquet(output)
    assert list(frame["key"]) == [row["key"] for row in rows] and frame["problem"].notna().sum() == len(QUESTIONS)


def test_thresholds_and_a_region_are_those_of_the_pipeline(model, tmp_path):
    images, path = write_images(tmp_path / "in"), tmp_path / "thresholds.json"
    path.write_text('{"default": {"threshold": 0.00001, "band": [0, 1]}}')
    run_here(images, tmp_path / "out", model, thresholds=str(path), region="0,0,0.5,1")
    [row] = read(tmp_path / "out")["0.png"]
    [expected] = ModelOptions(model, "cpu", min_score=0).load()(
        Image.open(images / "0.png").crop((0, 0, 20, 30)), QUESTIONS[0]
    )
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
    os.mkfifo(images / "fifo.png")  # would block
    assert sum(one["bad"] for one in run_here(images, tmp_path / "out", model, QUESTIONS)) == 7
    found = problems(tmp_path / "out")
    assert found.pop("good.png") is None and "No such file" in found.pop("gone.png")
    assert found.pop("large.png") == "large.png has more than 5,000 bytes."
    assert found["fifo.png"] == "fifo.png is not a regular file"
    assert len(found) == 5 and all(name in problem for name, problem in found.items())
    write_tar(tmp_path / "in.tar", {"a/good.png": encoded_image(0), "large.png": bytes(6_000), "._good.png": b""})
    assert run_here(tmp_path / "in.tar", tmp_path / "of tar", model) == [report(2, bad=1)]
    pq.write_table(pa.table({"image": [encoded_image(0), None, b"text"]}), tmp_path / "in.parquet")
    assert run_here(tmp_path / "in.parquet", tmp_path / "of parquet", model) == [report(3, bad=2)]


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


def test_the_next_run_labels_what_has_no_labels(model, tmp_path):
    images, output = write_images(tmp_path / "in"), tmp_path / "out"
    run_here(images, output, model)
    parts = {path.name: path.stat().st_mtime_ns for path in output.iterdir()}
    write_images(images, {name: encoded_image(9) for name in ("00.png", "3a.png", "9.png", "99.png")})
    assert run_here(images, output, model) == [report(3), report(1)]  # new images in new parts
    assert parts.items() <= {path.name: path.stat().st_mtime_ns for path in output.iterdir()}.items()
    labels = read(output)
    assert labels.keys() == {path.name for path in images.iterdir()}
    assert all(len(rows) == 1 for rows in labels.values())
    for name in parts.keys() - {".options.json"}:
        (output / name).unlink()
    (output / ".of a killed writer.tmp").write_bytes(b"PAR1")
    (output / "of the user.tmp").touch()
    run_here(images, output, model)
    (output / "of the user.tmp").unlink()  # still there, but not Parquet
    assert read(output).keys() == labels.keys() and not (output / ".of a killed writer.tmp").exists()
    assert run_here(images, output, model) == []


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


def test_foreign_and_damaged_files_are_named(model, tmp_path):
    images, output = write_images(tmp_path / "in"), tmp_path / "out"
    run_here(images, output, model)
    pq.write_table(pa.table({"a": [1]}), output / "other.parquet")
    with pytest.raises(DataError, match=r"out/other\.parquet: holds no labels\. Remove it"):
        run_here(images, output, model)
    (output / "other.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"out/other\.parquet: is damaged: .*Remove it"):
        run_here(images, output, model)
    for damaged in ("", "[1]"):
        (output / ".options.json").write_text(damaged)
        with pytest.raises(DataError, match=r"out/\.options\.json is damaged \(.+\): choose another --output_dir"):
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


def test_the_progress_counts_images_and_says_once_what_was_guessed(capsys):
    reports = [report(2) | {"notes": "pixels are guessed"}, report(1, bad=1) | {"notes": "pixels are guessed"}]
    parts = [Part("image", ["a", "b"], 2), Part("image", ["c"], 1)]
    assert show_progress([*reports, report(0) | {"failure": "no network"}], parts, 7) == 1
    messages = capsys.readouterr().err
    assert messages.count("pixels are guessed") == messages.count("no network") == 1
    assert "7/7" in messages and "images/s" in messages and "1 with a problem" in messages


# The command


def arguments(images, output_dir, model, *options) -> list[str]:
    asked = [part for question in QUESTIONS for part in ("--ask", question)]
    runtime = ["--device", "cpu", "--threads", "1", "--batch_size", "2", "--images_per_part", "2", *options]
    return [str(images), *asked, "--output_dir", str(output_dir), "--model", model, *runtime]


def test_bad_questions_are_refused_before_anything_is_written(model, tmp_path):
    images = write_images(tmp_path / "in")
    for question, message in {
        " ": "the question '' has no word",
        "Is there not a bus?": "'Is there not a bus?': the model does not understand 'not'",
        "Is there a zeppelin?": "'Is there a zeppelin?': the model does not know zeppelin",
    }.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            label(str(images), label_options(tmp_path / "out", model, [*QUESTIONS, question]))
    assert not (tmp_path / "out").exists()


def wait_for(condition, run: subprocess.Popen):
    """The first true value of a condition, while a command runs."""
    while not (value := condition()):
        assert run.poll() is None, run.communicate()[1]
        time.sleep(0.02)
    return value


@contextlib.contextmanager
def cluster():
    """The address of a Ray cluster for clients outside of it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:  # a short path, as it holds sockets
        options = ["--port=0", f"--ray-client-server-port={port}", f"--temp-dir={folder}", "--include-dashboard=false"]
        head = [os.path.join(os.path.dirname(sys.executable), "ray"), "start", "--head", "--block", "--num-cpus=2"]
        with subprocess.Popen([*head, *options], env=os.environ | {"RAY_AUTH_MODE": "disabled"}, **silent) as process:
            while process.poll() is None:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                time.sleep(0.1)
            yield f"ray://127.0.0.1:{port}"
            process.kill()  # its children end with it; a polite end takes half a minute


@pytest.mark.slow
def test_a_killed_run_is_continued_by_a_cluster_and_each_image_is_labeled_once(model, tmp_path, capsys):
    contents = {f"{index:03d}.png": encoded_image(index) for index in range(59)} | {"broken.png": b"no image"}
    images, output = write_images(tmp_path / "in", contents), tmp_path / "out"
    with start_process("label.py", *arguments(images, output, model, "--actors", "1")) as run:
        wait_for(lambda: len(list(output.glob("*.parquet"))) > 3, run)
        run.send_signal(signal.SIGKILL)
        printed = run.communicate()[1]
    assert "ray" not in printed.lower() and "images/s" in printed
    assert len(list(output.glob("*.parquet"))) < 30
    with cluster() as address:
        environment = {"RAY_AUTH_MODE": "disabled"}
        run = start_process("label.py", *arguments(images, output, model, "--address", address), env=environment)
        _, printed = run.communicate(timeout=300)
    assert run.returncode == 0 and "60/60" in printed, printed
    label(str(images), label_options(output, model, QUESTIONS, images_per_part=2))
    assert "is labeled" in capsys.readouterr().err
    labels = read(output)
    assert labels.keys() == contents.keys() and all(len(rows) == len(QUESTIONS) for rows in labels.values())
    assert [name for name, problem in problems(output).items() if problem] == ["broken.png"]
    assert not list(output.glob(".*.tmp"))
