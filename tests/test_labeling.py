"""Labels for many images: what is read, what is written, and runs that are refused, killed and repeated."""

import io
import os
import re
import tarfile

import pytest

from tiny import close_to, count_calls, locating_model, png, save_folder, tiny_model


pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("ray")

from pyarrow.fs import LocalFileSystem  # noqa: E402

from traffic_vlm.common.files import DataError  # noqa: E402
from traffic_vlm.serving.cluster import running_ray  # noqa: E402
from traffic_vlm.serving.labeling import (  # noqa: E402
    Labeler,
    LabelFolder,
    LabelOptions,
    label,
    list_files,
    prepare,
    read_blocks,
)
from traffic_vlm.serving.options import ModelOptions  # noqa: E402


QUESTIONS = ["Is there a car?", "What is ahead?"]


CONTENTS = {f"{index}.png": png(index) for index in range(5)}
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


def block_of(paths) -> pa.Table:
    """Image files as Ray reads them."""
    return pa.table({"bytes": [path.read_bytes() for path in paths], "path": list(map(str, paths))})


def label_files(paths, output_dir, model, ask=QUESTIONS[:1], **options) -> None:
    """Label image files without Ray, in one block."""
    asked = label_options(output_dir, model, ask, **options)
    LabelFolder(asked.output_dir, prepare(asked)).write(Labeler(asked, "image")(block_of(paths)))


def rows_of(folder) -> list[dict]:
    """The rows of all label files in order, with numbers that may differ as they do in other passes."""
    rows = sorted(pq.read_table(folder).to_pylist(), key=lambda row: (row["key"], row["question"]))
    return list(map(close_to, rows))


# What is written


def test_labels_are_the_items_of_the_pipeline_and_datasets_and_pandas_read_them(saved_model, tmp_path):
    datasets, pandas = pytest.importorskip("datasets"), pytest.importorskip("pandas")
    images, output = write_images(tmp_path / "in"), tmp_path / "out"
    label_files(sorted(images.iterdir()), output, saved_model, QUESTIONS)
    (output / ".left by a killed process.tmp").write_bytes(b"PAR1")
    paths = [str(images / name) for name in CONTENTS]
    answers = ModelOptions(saved_model, "cpu", min_score=0).load()(paths, QUESTIONS)
    other = dict.fromkeys(("problem", "not_sure", "objects", "caption"))
    expected = [{"key": path} | item | other for path, items in zip(paths, answers) for item in items]
    assert expected == rows_of(output)
    rows = pq.read_table(output).to_pylist()
    loaded = datasets.load_dataset("parquet", data_dir=str(output), cache_dir=str(tmp_path / "cache"))
    assert loaded["train"].to_list() == rows
    assert list(pandas.read_parquet(output)["key"]) == [row["key"] for row in rows]


def test_objects_and_captions_are_those_of_the_pipeline_and_each_image_is_encoded_once(tmp_path):
    model = str(save_folder(locating_model(), tmp_path / "model"))
    contents = {"a.png": png(0), "b.png": b"text", "c.png": png(1)}
    paths = sorted(write_images(tmp_path / "in", contents).iterdir())
    asked = label_options(tmp_path / "out", model, QUESTIONS, locate=["car"], describe=True)
    labeler = Labeler(asked, "image")
    passes = count_calls(labeler.pipe.model.model.vision_tower)
    a, _, b, _, c, again = labeler(block_of(paths)).to_pylist()
    assert passes == [1, 1] and b["objects"] is b["caption"] is None  # batches of two
    assert (c["objects"], c["caption"]) == (again["objects"], again["caption"])
    for path, row in ((paths[0], a), (paths[2], c)):
        for name in ("box", "point"):
            expected = [pytest.approx(found[name], abs=0.2) for found in labeler.pipe.locate(path, "car")]
            assert expected and [found[name] for found in row["objects"]] == expected
        assert row["caption"] == labeler.pipe.describe(path)["caption"]
    assert prepare(asked)["locate"] == ["car"]
    with pytest.raises(ValueError, match="locate knows: bus, car; got 'zebra'"):
        prepare(label_options(tmp_path / "out", model, locate=["zebra"]))


def test_bad_images_have_a_problem_and_the_others_are_labeled(saved_model, tmp_path):
    contents = {"cut.png": png(1)[:500], "empty.png": b"", "good.png": png(0), "text.png": b"text"}
    label_files(sorted(write_images(tmp_path / "in", contents).iterdir()), tmp_path / "out", saved_model, QUESTIONS)
    rows = rows_of(tmp_path / "out")
    assert [os.path.basename(row["key"]) for row in rows[::2]] == [*contents]
    for row in rows:
        name = os.path.basename(row["key"])
        assert row["problem"] is None if name == "good.png" else name in row["problem"]
    block = pa.table({"image": [png(0), None], "path": ["a.parquet"] * 2})
    labels = Labeler(label_options(tmp_path / "none", saved_model), "parquet")(block)
    assert labels["problem"].to_pylist() == [None, "this row has no image"]
    assert [key.rsplit("/", 1)[-1] for key in labels["key"].to_pylist()] == ["a.parquet#0", "a.parquet#1"]


# What is read


def test_other_files_are_left_out_and_counted(tmp_path):
    write_images(tmp_path / "in", {"a.png": b"", "B.JPG": b"", "a.json": b"", ".a.png": b""})
    for folder in (".ipynb_checkpoints", "__MACOSX", "day [1]"):
        write_images(tmp_path / "in" / folder, {"b.png": b""})
    kind, files, left_out = list_files(str(tmp_path / "in"))
    assert kind == "image" and [os.path.basename(file) for file in files] == ["B.JPG", "a.png", "b.png"]
    assert left_out.endswith("1 .json") and list_files(f"file://{tmp_path}/in")[1] == files
    assert list_files(files[2])[1] == files[2:]
    (tmp_path / "list.txt").write_text(f"in/a.png\n\nin/a.png\n{tmp_path}/in/B.JPG\n")
    assert list_files(str(tmp_path / "list.txt"))[1] == [str(tmp_path / "in" / name) for name in ("a.png", "B.JPG")]


def test_input_that_cannot_be_labeled_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "list.txt").write_text("\n \n")
    write_tar(write_images(tmp_path / "mixed", {"a.png": b""}) / "b.tar")
    for source, message in {
        str(tmp_path / "missing"): "missing: must hold images",
        str(tmp_path / "empty"): "must hold images, .*; found none",
        str(tmp_path / "list.txt"): "list.txt lists no image",
        str(tmp_path / "mixed"): "found image and tar",
    }.items():
        with pytest.raises(ValueError, match=message):
            list_files(source)


def test_bad_questions_are_refused(saved_model, tmp_path):
    for question, message in {
        " ": "the question '' has no word",
        "Is there not a bus?": "'Is there not a bus?': the model does not understand 'not'",
        "Is there a zeppelin?": "'Is there a zeppelin?': the model does not know 'zeppelin'",
    }.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            prepare(label_options(tmp_path / "out", saved_model, [*QUESTIONS, question]))


# The next run


def test_the_next_run_leaves_out_what_has_labels(saved_model, tmp_path):
    images = sorted(write_images(tmp_path / "in").iterdir())
    label_files(images[:3], tmp_path / "out", saved_model)
    assert LabelFolder(str(tmp_path / "out"), {}).labeled == set(map(str, images[:3]))
    label_files(images[3:], tmp_path / "out", saved_model)
    label(str(tmp_path / "in"), label_options(tmp_path / "out", saved_model, batch_size=1))  # nothing is left to do


def test_labels_with_other_options_are_refused(saved_model, tmp_path):
    images, output, thresholds = write_images(tmp_path / "in"), tmp_path / "out", tmp_path / "thresholds.json"
    thresholds.write_text('{"default": {"threshold": 0.6}}')
    label_files(sorted(images.iterdir()), output, saved_model, QUESTIONS)
    other_model = save_folder(tiny_model(seed=1), tmp_path / "other model")
    for options, message in (
        ({"ask": QUESTIONS[:1]}, r"questions \['Is there a car\?', 'What is ahead\?'\], now \['Is there a car\?'\]"),
        ({"model": str(other_model)}, "weights '.*', now '.*'"),
        ({"region": "0,0,0.5,1"}, "region None, now '0,0,0.5,1'"),
        ({"answer_untaught": True}, "answer_untaught False, now True"),
        ({"thresholds": str(thresholds)}, "thresholds None, now '.*'"),
    ):
        message = rf"out has labels of another run \({message}\): choose another --output_dir$"
        with pytest.raises(DataError, match=message):
            label(str(images), label_options(output, **({"model": saved_model, "ask": QUESTIONS} | options)))
    with pytest.raises(DataError, match="newer None, now 1"):  # labels of older code
        LabelFolder(str(output), {"newer": 1})
    foreign = output / "part-0.parquet"
    for write in (lambda: pq.write_table(pa.table({"a": [1]}), foreign), lambda: foreign.write_bytes(b"PAR1")):
        write()
        with pytest.raises(DataError, match=r"part-0\.parquet is no file of labels, or damaged; choose another"):
            LabelFolder(str(output), {})


# The command


@pytest.fixture(scope="module")
def ray():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")  # this process has imported Ray without a token
        patch.setenv("RAY_worker_niceness", "0")  # as in `start_process`
        with running_ray(None) as ray:
            yield ray


@pytest.mark.slow
def test_each_kind_of_input_gives_the_same_labels_and_its_keys(saved_model, tmp_path, ray):
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
    in_tars = ["a.tar#0.png", "a.tar#1.png", *(f"b.tar.gz#{name}" for name in (*rest, "c/bad.png"))]
    in_tables = [f"a.parquet#{row}" for row in range(4)] + ["b.parquet#0", "b.parquet#1"]
    expected = []
    for source, keys, options in (
        (images, [f"{images}/{name}" for name in contents], {}),
        (tars, [f"{tars}/{name}" for name in in_tars], {}),
        (tables, [*contents], {"column": "picture", "key_column": "id"}),
        (tables, [f"{tables}/{name}" for name in in_tables], {"column": "picture"}),
    ):
        asked = label_options(tmp_path / "out", saved_model, QUESTIONS, **options)
        kind, files, _ = list_files(str(source))
        blocks = read_blocks(kind, files, 2, LocalFileSystem(), asked)
        labeler = Labeler(asked, kind)
        labels = [labeler(block) for block in blocks.iter_batches(batch_size=None, batch_format="pyarrow")]
        assert len(labels) == 2
        rows = pa.concat_tables(labels).to_pylist()
        assert {row["file"] for row in rows} == set(files)
        found = {(row["key"], row["question"]): (row["answer"], row["problem"] is None) for row in rows}
        answers = [found[key, question] for key in keys for question in QUESTIONS]
        expected = expected or answers
        assert len(rows) == 12 and answers == expected and [good for _, good in answers] == [True] * 10 + [False] * 2
    with pytest.raises(DataError, match="has no column 'image'; its columns are picture, id"):
        read_blocks("parquet", files, 2, LocalFileSystem(), label_options(tmp_path / "out", saved_model))
    with pytest.raises(DataError, match="a column 'path' cannot be read"):
        read_blocks("parquet", files, 2, LocalFileSystem(), label_options("out", saved_model, key_column="path"))
