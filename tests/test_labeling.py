"""Labels for many images: the plan, parts, broken input, and runs that are killed and continued."""

import contextlib
import importlib.util
import io
import os
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import tracemalloc

import numpy as np
import psutil
import pytest
from PIL import Image

from tiny import ROOT, save_folder, tiny_model


pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
fsspec = pytest.importorskip("fsspec")

from traffic_vlm.files import DataError  # noqa: E402
from traffic_vlm.serving import labeling  # noqa: E402
from traffic_vlm.serving.labeling import Labeler, LabelFolder, LabelOptions, list_input, missing_parts  # noqa: E402
from traffic_vlm.serving.options import ModelOptions  # noqa: E402
from traffic_vlm.serving.pictures import open_picture  # noqa: E402


QUESTIONS = ["Is there a car?", "What is ahead?"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_folder(tiny_model(), tmp_path_factory.mktemp("model")))


def encoded_image(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "png")
    return stream.getvalue()


def write_images(folder, count: int):
    folder.mkdir()
    for index in range(count):
        (folder / f"{index:03d}.png").write_bytes(encoded_image(index))
    return folder


def write_tar(path, contents: dict[str, bytes], mode: str = "w"):
    with tarfile.open(path, mode) as tar:
        for name, data in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def write_parquet(path, count: int):
    pq.write_table(pa.table({"image": [encoded_image(index) for index in range(count)]}), path, row_group_size=2)
    return path


def label_options(output_dir, model="nowhere", ask=QUESTIONS[:1], **options) -> LabelOptions:
    return LabelOptions(ask=ask, output_dir=str(output_dir), model=model, device="cpu", threads=1, **options)


def run_here(source, output_dir, model, ask=QUESTIONS[:1], **options) -> list[dict]:
    """Label the missing parts without Ray; what each part reports."""
    options = label_options(output_dir, model, ask, batch_size=2, **options)
    folder = LabelFolder(options.output_dir)
    plan = folder.open_plan(options.job(str(source)), options.images_per_part)
    parts = missing_parts(plan, folder.find_done(options.ask)[0])
    return [Labeler(options).process(files) for files in parts]


def report(part: int, images: int, errors: int = 0) -> dict:
    return {"part": part, "images": images, "errors": errors, "problem": "", "warnings": set()}


def read(folder) -> list[dict]:
    return pq.read_table(folder).to_pylist()


def without_numbers(rows: list[dict]) -> list[dict]:
    """Rows of labels without their numbers, which depend slightly on what is in the same pass."""
    return [{name: value for name, value in row.items() if name not in ("score", "p_yes")} for row in rows]


def test_labels_are_the_items_of_the_pipeline(model, tmp_path):
    images = write_images(tmp_path / "in", 7)
    reports = run_here(images, tmp_path / "out", model, QUESTIONS, images_per_part=3)
    assert reports == [report(0, 3), report(1, 3), report(2, 1)]
    rows, paths = read(tmp_path / "out"), sorted(images.iterdir())
    assert [row["key"] for row in rows] == [str(path) for path in paths for _ in QUESTIONS]
    answers = ModelOptions(model, "cpu").load()([str(path) for path in paths], QUESTIONS)
    for row, item in zip(rows, [item for image in answers for item in image], strict=True):
        assert list(row) == ["key", "question", "answer", "score", "p_yes", "problem"]
        assert (row["question"], row["answer"], row["problem"]) == (item["question"], item["answer"], None)
        for name in ("score", "p_yes"):
            assert row[name] == pytest.approx(item[name], abs=1e-4)


def test_an_answer_with_a_problem_is_a_row_with_it(model, tmp_path, monkeypatch):
    """It is not asked again: the answer would be the same."""
    monkeypatch.setattr("traffic_vlm.question_traffic_vlm.MIN_SCORE", 1.0)
    images = write_images(tmp_path / "in", 1)
    for reports in ([report(0, 1, 1)], []):
        assert run_here(images, tmp_path / "out", model, ["What color is the traffic light?"]) == reports
    [row] = read(tmp_path / "out")
    assert row["answer"] is row["score"] is None and "the likeliest of a color" in row["problem"]


def test_thresholds_add_a_column_and_belong_to_the_job(model, tmp_path):
    images, path = write_images(tmp_path / "in", 2), tmp_path / "thresholds.json"
    path.write_text('{"default": {"threshold": 0.00001, "band": [0, 1]}}')
    run_here(images, tmp_path / "out", model, thresholds=str(path))
    run_here(images, tmp_path / "plain", model)
    for row, plain in zip(read(tmp_path / "out"), read(tmp_path / "plain"), strict=True):
        assert row["p_yes"] == row["score"] == plain["p_yes"] and "not_sure" not in plain
        assert (row["answer"], row["not_sure"]) == ("yes", True)
    path.write_text('{"default": {"threshold": 0.6}}')
    with pytest.raises(DataError, match="another job: thresholds"):
        run_here(images, tmp_path / "out", model, thresholds=str(path))
    with pytest.raises(DataError, match=r"region None, now '0,0,0\.5,1'"):
        run_here(images, tmp_path / "out", model, region="0,0,0.5,1")
    with pytest.raises(ValueError, match="region 0,0,2,1: x, y, width and height are fractions"):
        label_options(tmp_path / "new", region="0,0,2,1")
    with pytest.raises(DataError, match="cannot be read"):
        label_options(tmp_path / "new", thresholds="")


def test_a_region_is_asked_about_alone(model, tmp_path):
    images = write_images(tmp_path / "in", 1)
    run_here(images, tmp_path / "out", model, region="0,0,0.5,1")
    [expected] = ModelOptions(model, "cpu").load()(Image.open(images / "000.png").crop((0, 0, 20, 30)), QUESTIONS[0])
    assert read(tmp_path / "out")[0]["p_yes"] == pytest.approx(expected["p_yes"], abs=1e-5)


def test_parquet_and_tars_give_the_same_labels_as_files(model, tmp_path):
    contents = {f"{index}.png": encoded_image(index) for index in range(5)}
    sources = {"files": tmp_path / "files", "parquet": tmp_path / "in.parquet", "tars": tmp_path / "tars"}
    sources["files"].mkdir()
    sources["tars"].mkdir()
    for name, data in contents.items():
        (sources["files"] / name).write_bytes(data)
    structs = [{"bytes": data, "path": name} for name, data in contents.items()]
    pq.write_table(pa.table({"picture": structs, "id": range(5)}), sources["parquet"], row_group_size=2)
    items = list(contents.items())
    write_tar(sources["tars"] / "a.tar", dict(items[:2]) | {"0.json": b"{}"})
    write_tar(sources["tars"] / "b.tar.gz", dict(items[2:]), "w:gz")
    labels = {}
    for name, source in sources.items():
        reports = run_here(source, tmp_path / name / "out", model, QUESTIONS, column="picture", key_column="id")
        assert [one["images"] for one in reports] == {"files": [5], "parquet": [2, 2, 1], "tars": [2, 3]}[name]
        labels[name] = read(tmp_path / name / "out")
    assert [row["key"] for row in labels["parquet"][::2]] == [*"01234"]
    assert labels["tars"][0]["key"] == f"{sources['tars'] / 'a.tar'}#0.png"
    for other in ("parquet", "tars"):
        for row, same in zip(labels["files"], labels[other], strict=True):
            assert row["answer"] == same["answer"] and row["score"] == pytest.approx(same["score"])


def test_without_a_key_column_rows_have_the_file_and_their_number(model, tmp_path):
    path = write_parquet(tmp_path / "in.parquet", 3)
    run_here(path, tmp_path / "out", model)
    assert [row["key"] for row in read(tmp_path / "out")] == [f"{path}#{index}" for index in range(3)]


def test_broken_images_are_rows_with_an_error(model, tmp_path):
    images = write_images(tmp_path / "in", 2)
    (images / "text.png").write_text("no image")
    (images / "cut.png").write_bytes(encoded_image(2)[:500])
    frame = Image.new("RGB", (8, 8))
    frame.save(images / "frames.webp", save_all=True, append_images=[Image.new("RGB", (8, 8), "red")])
    assert run_here(images, tmp_path / "out", model) == [report(0, 5, errors=3)]
    errors = {row["key"].rpartition("/")[2]: row["problem"] for row in read(tmp_path / "out")}
    assert {name for name, error in errors.items() if error} == {"text.png", "cut.png", "frames.webp"}
    assert all(name in error for name, error in errors.items() if error)


@pytest.mark.parametrize("suffix, mode", [("tar", "w"), ("tar.gz", "w:gz")])
def test_a_truncated_tar_keeps_the_images_before_the_end(model, tmp_path, suffix, mode):
    contents = {f"{index}.png": encoded_image(index) for index in range(6)}
    path = write_tar(tmp_path / f"in.{suffix}", contents, mode)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    reports = run_here(path, tmp_path / "out", model)
    *rows, last = read(tmp_path / "out")
    assert reports == [report(0, len(rows) + 1, errors=1)] and 1 <= len(rows) <= 4
    assert not any(row["problem"] for row in rows) and last["key"] == str(path) and last["problem"]


def test_large_members_of_a_tar_are_errors_and_are_not_read(model, tmp_path):
    path, size = tmp_path / "in.tar.gz", labeling.MAX_BYTES + 1
    with tarfile.open(path, "w:gz", compresslevel=1) as tar, open("/dev/zero", "rb") as zeros:
        for name, length, content in (
            ("a.png", len(encoded_image(0)), io.BytesIO(encoded_image(0))),
            ("large.png", size, zeros),
            ("b.png", len(encoded_image(1)), io.BytesIO(encoded_image(1))),
        ):
            member = tarfile.TarInfo(name)
            member.size = length
            tar.addfile(member, content)
    assert path.stat().st_size < size / 100
    tracemalloc.start()
    reports = run_here(path, tmp_path / "out", model)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert reports == [report(0, 3, errors=1)] and peak < size / 4
    errors = {row["key"].rpartition("#")[2]: row["problem"] for row in read(tmp_path / "out")}
    assert errors == {
        "a.png": None,
        "large.png": f"large.png has {size:,} bytes; at most 200,000,000 are read.",
        "b.png": None,
    }


@pytest.mark.parametrize("kind", ["name", "name as an attribute", "map of a sparse file", "many names"])
def test_a_member_of_a_tar_with_huge_headers_is_an_error(model, tmp_path, kind):
    member, content = tarfile.TarInfo("b.png"), encoded_image(1)
    if kind.startswith("name"):
        member.name = "b" * labeling.MAX_HEADERS + ".png"
    if kind == "map of a sparse file":
        member.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}
        content = b"200000\n" + b"0\n" * 400_000
    member.size = len(content)
    tar_format = tarfile.GNU_FORMAT if kind == "name" else tarfile.PAX_FORMAT
    with tarfile.open(write_tar(tmp_path / "in.tar", {"a.png": encoded_image(0)}), "a", format=tar_format) as tar:
        if kind == "many names":
            for _ in range(1000):
                header = tarfile.TarInfo("header")
                header.type, header.size = tarfile.GNUTYPE_LONGNAME, 2
                tar.addfile(header, io.BytesIO(b"a\0"))
        tar.addfile(member, io.BytesIO(content))
    assert run_here(tmp_path / "in.tar", tmp_path / "out", model) == [report(0, 2, errors=1)]
    good, bad = read(tmp_path / "out")
    assert good["problem"] is None and bad["key"] == str(tmp_path / "in.tar")
    assert bad["problem"] == "its headers have more than 200,000 bytes"


def test_headers_of_a_tar_do_not_fill_the_memory(tmp_path):
    with tarfile.open(tmp_path / "in.tar.gz", "w:gz", compresslevel=1) as tar:
        for index in range(300):
            header = tarfile.TarInfo("header")
            header.type, header.size = tarfile.XGLTYPE, 90_012  # with a value that holds for all that follow
            tar.addfile(header, io.BytesIO(b"90012 k%03d=%s\n" % (index, b"x" * 90_000)))
            tar.addfile(tarfile.TarInfo(f"{index}.png"))
    tracemalloc.start()
    files = [{"kind": "tar", "path": str(tmp_path / "in.tar.gz")}]
    assert len(list(labeling.read_part(files, label_options("out")))) == 300
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5_000_000


def test_a_tar_with_another_compression_is_an_error(model, tmp_path):
    """tarfile would decompress the rest of the file again and again, here and in a tar.gz."""
    path = write_tar(tmp_path / "in.tar", {f"{index}.png": encoded_image(index) for index in range(2)}, "w:bz2")
    assert run_here(path, tmp_path / "out", model) == [report(0, 1, errors=1)]
    assert read(tmp_path / "out")[0]["key"] == str(path)


def test_a_key_that_is_not_utf8_is_a_row_with_an_error(model, tmp_path):
    keys = pa.array([b"a", b"\xff"]).view(pa.string())
    pq.write_table(pa.table({"image": [encoded_image(0)] * 2, "id": keys}), tmp_path / "in.parquet", row_group_size=1)
    reports = run_here(tmp_path / "in.parquet", tmp_path / "out", model, key_column="id")
    assert reports == [report(0, 1), report(1, 1, errors=1)]


def test_large_files_are_errors(model, tmp_path, monkeypatch):
    images = write_images(tmp_path / "in", 2)
    (images / "000.png").write_bytes(encoded_image(0) + bytes(10_000))
    monkeypatch.setattr(labeling, "MAX_BYTES", 9_000)
    monkeypatch.setattr(labeling, "LARGE", 1)  # what waits for decoding is labeled as well
    assert run_here(images, tmp_path / "out", model) == [report(0, 2, errors=1)]
    assert read(tmp_path / "out")[0]["problem"] == "000.png has more than 9,000 bytes."
    write_tar(tmp_path / "in.tar", {f"{index}.png": encoded_image(index) for index in range(5)})
    assert run_here(tmp_path / "in.tar", tmp_path / "tar", model) == [report(0, 5)]


@pytest.mark.parametrize("glob", ["", "/*.png", "/*"])
def test_links_out_of_the_source_and_fifos_are_refused(tmp_path, glob):
    images, outside = write_images(tmp_path / "in", 2), write_images(tmp_path / "outside", 1)
    source = f"{images}{glob}"
    (images / "inside.png").symlink_to(images / "000.png")
    (tmp_path / "link").symlink_to(images)  # the source itself may be a link
    assert len(list_input(source)[1]) == len(list_input(f"{tmp_path / 'link'}{glob}")[1]) == 3
    (images / "other.png").symlink_to(outside / "000.png")
    with pytest.raises(DataError, match=r"other\.png leads to .*outside/000\.png, which is outside of"):
        list_input(source)
    (images / "other.png").unlink()
    os.mkfifo(images / "fifo.png")
    with pytest.raises(DataError, match=r"fifo\.png is not a regular file"):
        list_input(source)
    (images / "fifo.png").unlink()
    (images / "gone.png").symlink_to(images / "nothing.png")
    assert len(list_input(source)[1]) == 4  # a missing file is an error of its row


def test_a_damaged_row_group_is_a_row_with_an_error(model, tmp_path):
    path = write_parquet(tmp_path / "in.parquet", 4)
    damaged = bytearray(path.read_bytes())
    damaged[4:44] = b"\xff" * 40  # the header of the first page
    path.write_bytes(damaged)
    assert run_here(path, tmp_path / "out", model) == [report(0, 1, errors=1), report(1, 2)]
    assert [bool(row["problem"]) for row in read(tmp_path / "out")] == [True, False, False]


def test_a_second_run_labels_missing_parts_and_new_images(model, tmp_path):
    images, output = write_images(tmp_path / "in", 4), tmp_path / "out"
    run_here(images, output, model, images_per_part=2)
    (output / "part-000001.parquet").unlink()
    before = (output / "part-000000.parquet").stat().st_mtime_ns
    (images / "000-new.png").write_bytes(encoded_image(9))  # before those that the plan has
    assert run_here(images, output, model, images_per_part=3) == [report(1, 2), report(2, 1)]
    assert (output / "part-000000.parquet").stat().st_mtime_ns == before
    assert {row["key"] for row in read(output)} == {str(path) for path in images.iterdir()}
    assert len(read(output)) == 5 and run_here(images, output, model) == []


@pytest.mark.parametrize("where", ["{}/out", "memory://{}/out"])
@pytest.mark.parametrize("count", [0, 2])
def test_two_runs_at_once_cannot_plan_different_images_as_one_part(model, tmp_path, monkeypatch, count, where):
    images, output = write_images(tmp_path / "in", count), where.format(tmp_path)
    if count:
        run_here(images, output, model)
    extend_plan = labeling.extend_plan

    def extend_while_another_run_does(*args):
        monkeypatch.setattr(labeling, "extend_plan", extend_plan)
        (images / "first.png").write_bytes(encoded_image(8))
        plan = extend_plan(*args)
        (images / "second.png").write_bytes(encoded_image(9))
        assert run_here(images, output, model) == [report(bool(count), 2)]
        return plan

    monkeypatch.setattr(labeling, "extend_plan", extend_while_another_run_does)
    with pytest.raises(OSError, match="another run has just planned the same images"):
        run_here(images, output, model)
    (images / "third.png").write_bytes(encoded_image(10))
    assert run_here(images, output, model) == [report(1 + bool(count), 1)]
    folder = LabelFolder(output)
    keys = [key for part in folder.parts() for key in folder.read(part)["key"].to_pylist()]
    assert sorted(keys) == sorted(str(path) for path in images.iterdir())


def test_parts_of_another_run_do_not_count_as_done(model, tmp_path, monkeypatch):
    images, output = write_images(tmp_path / "in", 3), tmp_path / "out"
    run_here(images, output, model, images_per_part=1)
    (output / "part-000001.parquet").rename(output / "part-000003.parquet")

    def load_ray(address):
        raise OSError("there is work to do")

    monkeypatch.setattr(labeling, "load_ray", load_ray)
    with pytest.raises(OSError, match="there is work to do"):
        labeling.label(str(images), label_options(output, model, images_per_part=1))


@pytest.mark.parametrize(
    "name, message",
    [("_plan", "remove it"), ("part-000000.parquet", "Remove it, and its images are labeled again")],
)
def test_a_damaged_file_of_an_earlier_run_is_named(model, tmp_path, name, message):
    images, output = write_images(tmp_path / "in", 2), tmp_path / "out"
    run_here(images, output, model)
    os.truncate(output / name, 100)
    with pytest.raises(DataError, match=f"out/{name}: is damaged: .* {message}"):
        run_here(images, output, model)


def test_questions_can_be_added_and_corrected(model, tmp_path):
    """A part of a run that was stopped has the question with the typo; its answers stay."""
    images, output = write_images(tmp_path / "in", 4), tmp_path / "out"
    run_here(images, output, model, ["Is there a card?"], images_per_part=2)
    (output / "part-000001.parquet").unlink()
    assert run_here(images, output, model, QUESTIONS, images_per_part=2) == [report(0, 2), report(1, 2)]
    assert run_here(images, output, model, QUESTIONS) == []
    rows, paths = read(output), sorted(map(str, images.iterdir()))
    asked = {key: [row["question"] for row in rows if row["key"] == key] for key in paths}
    assert [asked[path] for path in paths] == [["Is there a card?", *QUESTIONS]] * 2 + [QUESTIONS] * 2
    run_here(images, tmp_path / "at once", model, QUESTIONS)
    kept = [row for row in rows if row["question"] in QUESTIONS]
    assert without_numbers(kept) == without_numbers(read(tmp_path / "at once"))
    assert LabelFolder(str(output)).find_done(QUESTIONS) == ({0, 1}, {"Is there a card?"})


def test_images_with_the_same_key_keep_their_own_answers(model, tmp_path):
    table = pa.table({"image": [encoded_image(0), b"", encoded_image(2)], "id": ["same"] * 3})
    pq.write_table(table, tmp_path / "in.parquet")
    for ask in (QUESTIONS[:1], QUESTIONS):
        run_here(tmp_path / "in.parquet", tmp_path / "out", model, ask, key_column="id")
    run_here(tmp_path / "in.parquet", tmp_path / "at once", model, QUESTIONS, key_column="id")
    rows, expected = read(tmp_path / "out"), read(tmp_path / "at once")
    assert without_numbers(rows) == without_numbers(expected)
    assert [row["score"] for row in rows] == pytest.approx([row["score"] for row in expected], abs=1e-4)


def test_a_parquet_file_with_other_row_groups_than_planned_is_refused(model, tmp_path):
    path = write_parquet(tmp_path / "in.parquet", 4)
    run_here(path, tmp_path / "out", model)
    write_parquet(path, 5)
    with pytest.raises(DataError, match="has 3 row groups, but 2 when its labels began"):
        run_here(path, tmp_path / "out", model)


def test_a_file_name_that_is_not_utf8_is_labeled(model, tmp_path):
    images = write_images(tmp_path / "in", 1)
    (images / os.fsdecode(b"caf\xe9.png")).write_bytes(encoded_image(1))
    (images / os.fsdecode(b"torn\xff.png")).write_bytes(b"")
    tars = tmp_path / "tars"
    tars.mkdir()
    write_tar(tars / os.fsdecode(b"t\xe9.tar"), {os.fsdecode(b"n\xe9.png"): encoded_image(1)})
    for _ in range(2):
        run_here(images, tmp_path / "out", model)
    labels = {row["key"]: row["problem"] for row in read(tmp_path / "out")}
    assert [key.rpartition("/")[2] for key in labels] == ["000.png", r"caf\xe9.png", r"torn\xff.png"]
    assert [bool(error) for error in labels.values()] == [False, False, True]
    assert run_here(tars, tmp_path / "from tar", model) == [report(0, 1)]
    assert read(tmp_path / "from tar")[0]["key"].endswith(r"t\xe9.tar#n\xe9.png")


def test_a_file_that_could_not_be_written_does_not_appear(tmp_path, monkeypatch):
    folder = LabelFolder(str(tmp_path))

    def write_half(table, file, **options):
        file.write(b"PAR1")
        raise OSError("disk full")

    monkeypatch.setattr(pq, "write_table", write_half)
    with pytest.raises(OSError, match="disk full"):
        folder.write(pa.table({"a": [1]}), "part-000000.parquet")
    assert folder.parts() == [] and [path.suffix for path in tmp_path.iterdir()] == [".tmp"]
    folder.remove_temporary_files()
    assert not list(tmp_path.iterdir())


def test_a_folder_of_another_job_is_refused(model, tmp_path):
    images, folder = write_images(tmp_path / "in", 2), LabelFolder(str(tmp_path / "out"))

    job = label_options(folder.path, model).job(str(images))
    folder.open_plan(job, 10)
    with pytest.raises(DataError, match=r"another job: column 'image', now 'picture'\. Choose another folder"):
        folder.open_plan(job | {"column": "picture"}, 10)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/part-000000.parquet").write_bytes(b"")
    with pytest.raises(DataError, match="holds labels, but not their plan"):
        LabelFolder(str(tmp_path / "other")).open_plan(job, 10)


def test_other_weights_in_the_same_model_folder_are_another_job(tmp_path):
    weights, images = tmp_path / "weights", write_images(tmp_path / "in", 2)
    weights.mkdir()
    for name in ("model.safetensors", "config.json", "README.md"):
        (weights / name).write_text("one")
    options, folder = label_options(tmp_path / "out", str(weights)), LabelFolder(str(tmp_path / "out"))
    plan = folder.open_plan(options.job(str(images)), 10)
    (weights / "README.md").write_text("two")
    assert folder.open_plan(options.job(str(images)), 10).equals(plan)
    for name in ("model.safetensors", "config.json"):
        (weights / name).write_text("two")
        with pytest.raises(DataError, match="another job: weights"):
            folder.open_plan(options.job(str(images)), 10)
        (weights / name).write_text("one")


def test_input_and_output_can_be_on_another_file_system(model):
    fs = fsspec.filesystem("memory")
    fs.pipe({f"/frames/{index}.png": encoded_image(index) for index in range(3)})
    assert list_input("memory://frames") == ("image", [f"memory:///frames/{index}.png" for index in range(3)])
    assert list_input("memory://frames/[12].png")[1] == [f"memory:///frames/{index}.png" for index in (1, 2)]
    assert run_here("memory://frames", "memory://labels", model) == [report(0, 3)]
    names = [name.rpartition("/")[2] for name in fs.find("/labels")]
    assert names == ["_plan", "part-000000.parquet"]
    assert run_here("memory://frames", "memory://labels", model, QUESTIONS) == [report(0, 3)]
    assert [len(fs.glob("/labels/*.parquet")), len(fs.glob("/labels/*"))] == [1, 2]


def test_a_glob_lists_each_image_once(tmp_path):
    (tmp_path / "a/b").mkdir(parents=True)
    for name in ("a/x.png", "a/b/y.png"):
        (tmp_path / name).write_bytes(encoded_image(0))
    expected = [str(tmp_path / name) for name in ("a/b/y.png", "a/x.png")]
    for source in (tmp_path, tmp_path / "**", tmp_path / "a*", tmp_path / "*/**"):
        assert list_input(str(source))[1] == expected, source
    (tmp_path / "a").rename(tmp_path / "a[1]")
    assert len(list_input(str(tmp_path / "a[1]"))[1]) == 2


def test_after_a_network_error_the_part_is_not_done(model, tmp_path, monkeypatch):
    fsspec.filesystem("memory").pipe({f"/far/{index}.png": encoded_image(index) for index in range(3)})
    with monkeypatch.context() as patch:

        def read_file(path):
            raise TimeoutError("connection lost")

        patch.setattr(labeling, "read_file", read_file)
        [failed] = run_here("memory://far", tmp_path / "out", model)
    assert failed["problem"].endswith("connection lost") and not failed["images"]
    assert run_here("memory://far", tmp_path / "out", model) == [report(0, 3)]


def test_guessed_pixels_are_reported_once(model, tmp_path, capsys):
    images = write_images(tmp_path / "in", 3)
    for i in range(3):
        Image.fromarray(np.full((40, 60), 4000, np.uint16)).save(images / f"12_bit_{i}.png")
    results = run_here(images, tmp_path / "out", model, images_per_part=2)
    assert len(results) == 3
    labeling.report_progress(results, 3, 0)
    assert capsys.readouterr().err.count("pixels of at most 4095 are read as 0..4095") == 1


def test_a_missing_disk_leaves_the_part_undone_but_a_missing_file_is_an_error_row(model, tmp_path):
    images, output = write_images(tmp_path / "in", 3), tmp_path / "out"
    options = label_options(output, model)
    plan = LabelFolder(str(output)).open_plan(options.job(str(images)), 10)
    images.rename(tmp_path / "away")  # while the run goes on
    [failed] = [Labeler(options).process(files) for files in missing_parts(plan, set())]
    assert "No such file" in failed["problem"] and LabelFolder(str(output)).parts() == []
    with pytest.raises(DataError, match=r"found none|cannot be listed"):
        run_here(images, output, model)
    (tmp_path / "away").rename(images)
    (images / "001.png").unlink()
    assert run_here(images, output, model) == [report(0, 3, errors=1)]
    assert ["No such file" in (row["problem"] or "") for row in read(output / "part-000000.parquet")] == [0, 1, 0]


def test_input_that_cannot_be_labeled_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    write_tar(write_images(tmp_path / "mixed", 1) / "b.tar", {})
    (tmp_path / "broken.parquet").write_bytes(b"nothing")
    pq.write_table(pa.table({"picture": [b""]}), tmp_path / "other.parquet")
    for name, message in {
        "missing": "missing: (cannot be listed|must hold)",
        "empty": "must hold images, .*; found none",
        "mixed": "found 1 of kind image, 1 of kind tar",
        "broken.parquet": "cannot be read as Parquet",
        "other.parquet": "has no column 'image'; its columns are picture",
    }.items():
        with pytest.raises(DataError, match=message):
            job = label_options("out").job(str(tmp_path / name))
            labeling.extend_plan(labeling.PLAN_SCHEMA.empty_table(), job, 10)


def test_an_image_is_the_same_from_bytes_and_from_a_file(tmp_path):
    (tmp_path / "a.png").write_bytes(encoded_image(1))
    assert open_picture(encoded_image(1)).tobytes() == open_picture(tmp_path / "a.png").tobytes()
    with pytest.raises(ValueError, match="the image is no image that can be read"):
        open_picture(b"")


def test_only_the_first_image_of_a_phone_photograph_is_read(tmp_path):
    images = [Image.new("RGB", (16, 8), color) for color in ("red", "blue")]
    images[0].save(tmp_path / "a.jpg", "mpo", save_all=True, append_images=images[1:])
    assert open_picture(tmp_path / "a.jpg").getpixel((3, 3))[0] > 200


# The command

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")


@needs_ray
@pytest.mark.parametrize(
    "options, message",
    [
        (["--ask", " "], "the question '' has no word"),
        (["--ask", "Is there not a bus?"], "'Is there not a bus?': the model does not understand 'not'"),
        (["--ask", "Is there a zeppelin?"], "'Is there a zeppelin?': the model does not know zeppelin"),
        (["--model", "nowhere"], "nowhere"),
        (["--actors", "0"], "--actors must be above 0, got 0"),
    ],
)
def test_the_command_refuses_bad_options_before_it_writes(model, tmp_path, monkeypatch, capsys, options, message):
    spec = importlib.util.spec_from_file_location("label_script", ROOT / "scripts/label.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(sys, "argv", command(write_images(tmp_path / "in", 1), tmp_path / "out", model, *options)[1:])
    assert script.main() == 2 and message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def command(images, output_dir, model, *options) -> list[str]:
    asked = [part for question in QUESTIONS for part in ("--ask", question)]
    paths = [str(images), *asked, "--output_dir", str(output_dir), "--model", model]
    runtime = ["--device", "cpu", "--threads", "1", "--batch_size", "2", "--images_per_part", "2", *options]
    return [sys.executable, str(ROOT / "scripts/label.py"), *paths, *runtime]


def start(*arguments) -> subprocess.Popen:
    return subprocess.Popen(command(*arguments), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


def wait_for(condition, run: subprocess.Popen):
    """The first true value of a condition, while a command runs."""
    while not (value := condition()):
        assert run.poll() is None, run.communicate()[1]
        time.sleep(0.02)
    return value


def workers(run: subprocess.Popen) -> list[psutil.Process]:
    """The Ray actors that a command has started."""
    found = []
    for process in psutil.Process(run.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended
            found += [process] if "ray::Labeler" in " ".join(process.cmdline()) else []
    return found


@needs_ray
@pytest.mark.slow
def test_a_killed_run_continues_and_labels_each_image_once(model, tmp_path):
    images, output, parts = write_images(tmp_path / "in", 119), tmp_path / "out", 60
    (images / "broken.png").write_text("no image")
    folder = LabelFolder(str(output))
    run = start(images, output, model, "--actors", "1")
    wait_for(lambda: len(folder.parts()) > 5, run)
    run.kill()
    run.communicate()
    assert len(folder.parts()) < parts
    again = start(images, output, model, "--actors", "1")
    for worker in wait_for(lambda: workers(again), again):
        worker.kill()  # Ray starts another one
    messages = again.communicate(timeout=300)[1]
    assert again.returncode == 0, messages
    names = {"_plan"} | {f"part-{part:06d}.parquet" for part in range(parts)}
    assert {path.name for path in output.iterdir()} == names
    rows = read(output)
    assert len({(row["key"], row["question"]) for row in rows}) == len(rows) == 2 * parts * len(QUESTIONS)
    assert {row["key"].rpartition("/")[2] for row in rows if row["problem"]} == {"broken.png"}
    (images / "broken.png").write_bytes(encoded_image(0))
    for message in ("1 images, 0 with a problem", f"all {parts} parts are labeled"):
        last = subprocess.run(command(images, output, model), capture_output=True, text=True, timeout=120)
        assert message in last.stderr and last.returncode == 0, last.stderr
    assert not any(row["problem"] for row in read(output))


@pytest.fixture
def cluster(monkeypatch):
    """The address of a cluster that this process is not part of."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:  # a short path, as it holds sockets
        options = ["--port=0", f"--ray-client-server-port={port}", f"--temp-dir={folder}", "--include-dashboard=false"]
        head = [os.path.join(os.path.dirname(sys.executable), "ray"), "start", "--head", "--block", "--num-cpus=2"]
        with subprocess.Popen([*head, *options], stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT) as process:
            while process.poll() is None:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                time.sleep(0.1)
            yield f"ray://127.0.0.1:{port}"
            process.kill()  # its children end with it; a polite end takes half a minute


@needs_ray
@pytest.mark.slow
def test_a_cluster_labels_for_a_client_outside_of_it(model, tmp_path, cluster):
    run = start(write_images(tmp_path / "in", 5), tmp_path / "out", model, "--address", cluster)
    messages = run.communicate(timeout=300)[1]
    assert run.returncode == 0 and "3/3" in messages and "5 images, 0 with a problem" in messages, messages
    assert len(read(tmp_path / "out")) == 5 * len(QUESTIONS)
