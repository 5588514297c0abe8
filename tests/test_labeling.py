"""Labels for many images: what is read, what is written, and runs that are refused, killed and repeated."""

import io
import os
import re
import tarfile
import time

import numpy as np
import pytest
from PIL import Image

from tiny import save_folder, start_process, tiny_model


pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("ray")

from pyarrow.fs import LocalFileSystem  # noqa: E402

from traffic_vlm.common.files import DataError  # noqa: E402
from traffic_vlm.serving.cluster import load_ray, start_ray  # noqa: E402
from traffic_vlm.serving.labeling import (  # noqa: E402
    Labeler,
    LabelFolder,
    LabelOptions,
    label,
    list_files,
    read_blocks,
    without_labels,
)
from traffic_vlm.serving.options import ModelOptions  # noqa: E402


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
OTHERS = {"1.json": b"{}", "._1.png": b"", "words.txt": b""}  # no images


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


def label_files(paths, output_dir, model, ask=QUESTIONS[:1], **options) -> None:
    """Label image files without Ray, in one block as Ray reads it."""
    asked = label_options(output_dir, model, ask, **options)
    block = pa.table({"bytes": [path.read_bytes() for path in paths], "path": list(map(str, paths))})
    LabelFolder(asked.output_dir).write(Labeler(asked, "image")(block), asked.shared())


def read(folder) -> dict[str, list[dict]]:
    """The rows of each image, by the last part of its key."""
    found: dict[str, list[dict]] = {}
    for row in pq.read_table(folder).to_pylist():
        found.setdefault(os.path.basename(row["key"]).rpartition("#")[2], []).append(row)
    return found


# What is written


def test_labels_are_the_items_of_the_pipeline_and_datasets_and_pandas_read_them(model, tmp_path):
    datasets, pandas = pytest.importorskip("datasets"), pytest.importorskip("pandas")
    images, output = write_images(tmp_path / "in", CONTENTS | {"bad.png": b""}), tmp_path / "out"
    label_files(sorted(images.iterdir()), output, model, QUESTIONS)
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
    label_files([images / "0.png"], tmp_path / "out", model, thresholds=str(path), region="0,0,0.5,1")
    [row] = read(tmp_path / "out")["0.png"]
    [expected] = ModelOptions(model, "cpu", min_score=0).load()(
        Image.open(images / "0.png").crop((0, 0, 20, 30)), QUESTIONS[0]
    )
    assert row["p_yes"] == pytest.approx(expected["p_yes"], abs=1e-5)
    assert (row["answer"], row["not_sure"]) == ("yes", True)


def test_bad_images_have_a_problem_and_the_others_are_labeled(model, tmp_path):
    cut = {"cut.png": encoded_image(1)[:500], "text.png": b"text", "empty.png": b"", "good.png": encoded_image(0)}
    images = write_images(tmp_path / "in", cut)
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    frames[0].save(images / "animated.webp", save_all=True, append_images=frames[1:])
    paths = sorted(images.iterdir())
    label_files(paths, tmp_path / "out", model, QUESTIONS)
    labels = read(tmp_path / "out")
    assert len(labels) == 5
    for name, rows in labels.items():
        assert len(rows) == len(QUESTIONS)
        assert all(row["problem"] is None if name == "good.png" else name in row["problem"] for row in rows)
    block = pa.table({"image": [encoded_image(0), None], "path": ["a.parquet"] * 2})
    labels = Labeler(label_options(tmp_path / "none", model), "parquet")(block)
    assert labels["problem"].to_pylist() == [None, "this row has no image"]


def test_a_folder_that_cannot_be_written_is_an_error(model, tmp_path):
    (tmp_path / "out").write_text("in the way of the folder")
    with pytest.raises(OSError, match="out"):
        label_files([*write_images(tmp_path / "in").iterdir()], tmp_path / "out", model)


def test_a_tar_without_images_has_no_labels(model, tmp_path):
    block = pa.table({"__key__": ["words"], "txt": [b"a"], "path": ["/a.tar"]})
    assert Labeler(label_options(tmp_path / "out", model), "tar")(block).num_rows == 0


# What is read


def test_other_files_are_left_out_and_counted(tmp_path):
    write_images(tmp_path / "in", {"a.png": b"", "B.JPG": b"", "a.json": b"", ".a.png": b""})
    for folder in (".ipynb_checkpoints", "__MACOSX", "day [1]"):
        write_images(tmp_path / "in" / folder, {"b.png": b""})
    (tmp_path / "in/gone.png").symlink_to(tmp_path / "nothing.png")
    os.mkfifo(tmp_path / "in/fifo.png")  # would block
    kind, files, left_out = list_files(str(tmp_path / "in"))
    assert kind == "image" and [os.path.basename(file) for file in files] == ["B.JPG", "a.png", "b.png"]
    assert left_out.endswith("1 .json") and list_files(f"file://{tmp_path}/in")[1] == files
    assert list_files(str(tmp_path / "in/*"))[1] == list_files(str(tmp_path / "in/**"))[1] == files
    assert list_files(str(tmp_path / "in/day [1]"))[1] == list_files(str(tmp_path / "in/day [1]/*"))[1] == files[2:]
    assert len(list_files(str(tmp_path / "in/__MACOSX"))[1]) == 1  # asked for by its name
    (tmp_path / "list.txt").write_text(f"in/a.png\n\nin/a.png\n{tmp_path}/in/B.JPG\n")
    assert list_files(str(tmp_path / "list.txt"))[1] == [str(tmp_path / "in" / name) for name in ("a.png", "B.JPG")]


def test_input_that_cannot_be_labeled_is_refused(model, tmp_path):
    (tmp_path / "empty").mkdir()
    write_tar(write_images(tmp_path / "mixed", {"a.png": b""}) / "b.tar")
    for source, message in {
        str(tmp_path / "missing"): "missing: must hold images",
        str(tmp_path / "empty"): "must hold images, .*; found none",
        str(tmp_path / "mixed"): "found 1 of kind image, 1 of kind tar",
        "carrier-pigeon://a": "there is no such file system",
    }.items():
        with pytest.raises(DataError, match=message):
            label(source, label_options(tmp_path / "out", model))
    with pytest.raises(DataError, match="--address ray://host: run the command on a machine of the cluster"):
        label_options(tmp_path / "out", model, address="ray://host")
    assert not (tmp_path / "out").exists()


# The next run


def test_the_next_run_leaves_out_what_has_labels(model, tmp_path):
    images, folder = sorted(write_images(tmp_path / "in").iterdir()), LabelFolder(str(tmp_path / "out"))
    names = list(map(str, images))
    assert without_labels("image", names, "", folder) == names  # there is no folder yet
    label_files(images[:3], tmp_path / "out", model)
    assert without_labels("image", names, "", folder) == names[3:]
    assert without_labels("image", names, "s3://", folder) == names  # others of the same path
    block = pa.table({"image": [encoded_image(0)], "path": ["/a.parquet"]})
    folder.write(Labeler(label_options(tmp_path / "out", model), "parquet")(block), {})
    assert without_labels("parquet", ["/a.parquet", "/b.parquet"], "", folder) == ["/b.parquet"]


def test_labels_with_other_options_are_refused(model, tmp_path):
    images, output, thresholds = write_images(tmp_path / "in"), tmp_path / "out", tmp_path / "thresholds.json"
    thresholds.write_text('{"default": {"threshold": 0.6}}')
    label_files(sorted(images.iterdir()), output, model, QUESTIONS)
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
            label(str(images), label_options(output, **({"model": model, "ask": QUESTIONS} | options)))
    label(str(images), label_options(output, model, QUESTIONS[::-1], batch_size=1))  # nothing is left to do


def test_foreign_and_damaged_files_are_named(model, tmp_path):
    images, output = write_images(tmp_path / "in"), tmp_path / "out"
    output.mkdir()
    pq.write_table(pa.table({"a": [1]}), output / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet holds no labels: choose another --output_dir"):
        label(str(images), label_options(output, model))
    (output / "a.parquet").unlink()
    label_files(sorted(images.iterdir()), output, model)
    (output / "z.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"z\.parquet is damaged: .*Remove it"):
        label(str(images), label_options(output, model))


# The command


def test_bad_questions_are_refused_before_anything_is_written(model, tmp_path):
    images = write_images(tmp_path / "in")
    for question, message in {
        " ": "the question '' has no word",
        "Is there not a bus?": "'Is there not a bus?': the model does not understand 'not'",
        "Is there a zeppelin?": "'Is there a zeppelin?': the model does not know 'zeppelin'",
    }.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            label(str(images), label_options(tmp_path / "out", model, [*QUESTIONS, question]))
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def ray():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")  # this process has imported Ray without a token
        patch.setenv("RAY_worker_niceness", "0")  # as in `start_process`
        module = load_ray(None)
        start_ray(module, None)
        yield module
        module.shutdown()


@pytest.mark.slow
def test_each_kind_of_input_gives_the_same_labels_and_its_keys(model, tmp_path, ray):
    contents = CONTENTS | {"bad.png": b"no image"}
    images = write_images(tmp_path / "images [1] #%20", contents)
    tars, tables = tmp_path / "tars", tmp_path / "tables"
    tars.mkdir()
    write_tar(tars / "a.tar", {name: CONTENTS[name] for name in ("0.png", "1.png")} | OTHERS)
    rest = {name: CONTENTS[name] for name in ("2.png", "3.png", "4.png")}
    write_tar(tars / "b.tar.gz", rest | {"c/bad.png": b"no image"}, "w:gz")
    tables.mkdir()
    for name, part in (("a", slice(4)), ("b", slice(4, 6))):
        structs = [{"bytes": content, "path": None} for content in [*contents.values()][part]]
        table = pa.table({"picture": structs, "id": [*contents][part]})
        pq.write_table(table, tables / f"{name}.parquet", row_group_size=2)
    in_tars = [
        "a.tar#0.png",
        "a.tar#1.png",
        *(f"b.tar.gz#{name}" for name in ("2.png", "3.png", "4.png", "c/bad.png")),
    ]
    in_tables = [f"a.parquet#{row}" for row in range(4)] + ["b.parquet#0", "b.parquet#1"]
    expected = []
    for source, keys, options in (
        (images, [f"{images}/{name}" for name in contents], {}),
        (tars, [f"{tars}/{name}" for name in in_tars], {}),
        (tables, [*contents], {"column": "picture", "key_column": "id"}),
        (tables, [f"{tables}/{name}" for name in in_tables], {"column": "picture"}),
    ):
        asked = label_options(tmp_path / "out", model, QUESTIONS, **options)
        kind, files, _ = list_files(str(source))
        blocks = read_blocks(kind, files, 2, 1, LocalFileSystem(), asked)
        labeler = Labeler(asked, kind)
        labels = [labeler(block) for block in blocks.iter_batches(batch_size=None, batch_format="pyarrow")]
        assert len({table["file"][0] for table in labels}) == len(labels) == 2
        rows = pa.concat_tables(labels).to_pylist()
        found = {(row["key"], row["question"]): (row["answer"], row["problem"] is None) for row in rows}
        answers = [found[key, question] for key in keys for question in QUESTIONS]
        expected = expected or answers
        assert len(rows) == 12 and answers == expected and [good for _, good in answers] == [True] * 10 + [False] * 2
    with pytest.raises(DataError, match="has no column 'image'; its columns are picture, id"):
        label(str(tables), label_options(tmp_path / "out", model))


@pytest.mark.slow
def test_a_damaged_tar_ends_the_run(model, tmp_path, ray):
    write_tar(write_images(tmp_path / "in", {}) / "cut.tar")
    os.truncate(tmp_path / "in/cut.tar", 3000)
    with pytest.raises(OSError, match=r"Ray has failed: .*the same command continues"):
        label(str(tmp_path / "in"), label_options(tmp_path / "out", model, actors=1))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_killed_run_is_continued_and_each_image_is_labeled_once(model, tmp_path, ray, capsys):
    contents = {f"{index:03d}.png": encoded_image(index) for index in range(199)} | {"broken.png": b"no image"}
    images, output = write_images(tmp_path / "in", contents), tmp_path / "out"
    command = ["label.py", images, "--output_dir", output, "--model", model, "--device", "cpu", "--threads", "1"]
    command += ["--min_score", "0", "--images_per_part", "1", "--actors", "1"]
    command += ["--address", ray.get_runtime_context().gcs_address]
    with start_process(*command, "--ask", QUESTIONS[0]) as run:
        while not list(output.glob("*.parquet")):
            assert run.poll() is None, run.communicate()[1]
            time.sleep(0.02)
        run.kill()  # not its workers, which end later
    assert len(list(output.glob("*.parquet"))) < len(contents)
    label(str(images), label_options(output, model, images_per_part=50, batch_size=32, actors=1))
    assert "1 with a problem" in capsys.readouterr().err
    label_files(sorted(images.iterdir()), tmp_path / "unbroken", model, batch_size=32)
    labels, unbroken = (
        sorted(pq.read_table(folder).to_pylist(), key=lambda row: (row["key"], row["question"]))
        for folder in (output, tmp_path / "unbroken")
    )
    for row, expected in zip(labels, unbroken, strict=True):
        assert row == {
            name: pytest.approx(value, abs=1e-4) if isinstance(value, float) else value
            for name, value in expected.items()
        }
