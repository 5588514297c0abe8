"""Dataset folders: splits, sources and defaults, and a clear error for each folder that cannot be used."""

import json

import pytest
from datasets import Dataset
from PIL import Image

from traffic_vlm.data.dataset import FEATURES, synthetic_rows
from traffic_vlm.data.folders import load_rows, select_evenly, source_names
from traffic_vlm.files import DataError


@pytest.fixture(scope="module")
def columns():
    made = synthetic_rows(first_seed=900, num_images=6, questions_per_image=4)
    return {name: [row[name] for row in made] for name in FEATURES}


def write(folder, columns, *splits):
    """Write Parquet files as make_dataset does."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    for split in splits:
        Dataset.from_dict(columns).to_parquet(str(folder / "data" / f"{split}-00000.parquet"))
    return folder


def row(name="1.png", questions=("Is there a car?",), answers=("yes",)):
    return json.dumps({"file_name": name, "questions": questions, "answers": answers}, ensure_ascii=False)


def write_own(folder, *names, text=None):
    """Write small images of these names, and a metadata.jsonl with a line for each."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(folder / name)
    text = "\n".join(map(row, names)) if text is None else text
    (folder / "metadata.jsonl").write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def test_rows_of_folders(tmp_path, columns):
    folder = write(tmp_path / "set", columns, "val")
    assert load_rows([folder])["image_id"] == columns["image_id"]
    assert load_rows([folder], prefer="train")["image_id"] == columns["image_id"]  # it has no such split
    assert len(load_rows([folder, folder], split="val")) == 12
    drawn = load_rows([folder], max_images=3)["image_id"]
    assert len(set(drawn)) == 3 and drawn == load_rows([folder], max_images=3)["image_id"]
    assert select_evenly(load_rows([folder]), 2)["image_id"] == columns["image_id"][::3]
    assert select_evenly(list("abcdef"), 3) == ["a", "c", "e"] and select_evenly("abc", 5) == "abc"
    write(folder, {name: values[:2] for name, values in columns.items()}, "train")
    assert len(load_rows([folder], prefer="train")) == 2 and len(load_rows([folder], "val", prefer="train")) == 6


def test_parquet_files_in_folders_of_any_name(tmp_path, columns):
    folder = write(tmp_path / "test [1]*?", columns)
    for i in range(2):
        few = Dataset.from_dict(columns).select(range(3 * i, 3 * i + 3))
        few.to_parquet(str(folder / f"data/train-0000{i}-of-00002.parquet"))
    assert load_rows([folder])["image_id"] == columns["image_id"]


def test_own_questions_get_defaults(tmp_path):
    folders = [write_own(tmp_path / drive / "val", "1.png") for drive in ("drive1", "drive2")]
    rows = load_rows(folders)
    text, own = ["Is there a car?"], ["own"]
    expected = {"questions": text, "answers": ["yes"], "question_types": own, "categories": own, "question_ids": text}
    assert {**rows[0], "image": 0} == expected | {"image": 0, "source": "drive1/val", "image_id": "0"}
    assert rows["source"] == ["drive1/val", "drive2/val"] and load_rows(folders[:1] * 2)["source"] == ["val"] * 2
    deep = [tmp_path / name for name in ("drive1/frames/val", "drive2/frames/val", "other")]
    assert source_names(deep) == ["drive1/frames/val", "drive2/frames/val", "other"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{row()}\n{row('2.png', ['A?', 'B?'])}", r":2 \(2.png\): 2 questions have 1 answers"),
        *[
            (f"\n{row('2.png', **{column: value})}", rf":2 \(2.png\): {column} must be a list of texts, got {found}")
            for column, value, found in [
                ("questions", None, "None"),
                ("questions", "Is it night?", "'Is it night"),
                ("answers", [None], r"\[None\]"),
            ]
        ],
        ("[1]\n", ":1: is not a JSON object"),
        ("\n{'a': 1}", ":2: is not valid JSON: Expecting property name"),
        (b"\xff", "metadata.jsonl: cannot be read: .*can't decode byte"),
        ("", "the dataset has no rows"),
        (f"{row('7.png')}\n{row('7.png')}", "2 images cannot be found: .*:1: image '7.png' is missing"),
        (row("x.gif"), r"image 'x.gif' may be x.bmp or x.png"),
    ],
)
def test_a_wrong_line_of_own_questions_is_named(tmp_path, text, message):
    with pytest.raises(DataError, match=message) as caught:
        load_rows([write_own(tmp_path, "1.png", "2.png", "x.png", "x.bmp", text=text)])
    assert "\n" not in str(caught.value)


def test_damaged_images_of_own_questions_are_named_before_the_run(tmp_path):
    write_own(tmp_path, *(f"{i}.jpg" for i in range(5)))
    for i in (1, 3):
        Image.effect_noise((60, 60), 90).convert("RGB").save(tmp_path / f"{i}.jpg")
        content = (tmp_path / f"{i}.jpg").read_bytes()
        (tmp_path / f"{i}.jpg").write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=r"2 images cannot be read: 1\.jpg is JPEG, but damaged.*; 3\.jpg is JPEG"):
        load_rows([tmp_path])


NAMES = ["test_drive/1.png", "2.train.png", "dev/3.JPG", "evaluation.png"]


@pytest.mark.parametrize("format", ["jsonl", "csv"])
@pytest.mark.parametrize("name", ["own", "my [1] test*"])
def test_all_own_questions_are_read_whatever_the_names(tmp_path, capsys, name, format):
    text = "\r\n".join(row(f".\\{image}", ["Is it\u2028night?"]) for image in NAMES)
    folder = write_own(tmp_path / name, *NAMES, "left_out.png", text=b"\xef\xbb\xbf" + text.encode())
    if format == "csv":
        lines = [f'{image},"[""Is it\u2028night?""]",yes' for image in NAMES]
        text = "\n".join(["file_name,questions,answers", *lines])
        (folder / "metadata.jsonl").rename(folder / "metadata.csv").write_bytes(b"\xef\xbb\xbf" + text.encode())
    rows = load_rows([folder], prefer="train")
    assert rows["questions"] == [["Is it\u2028night?"]] * 4 and rows["answers"] == [["yes"]] * 4
    assert [one["image"].size for one in rows] == [(8, 8)] * 4
    said = capsys.readouterr().err
    assert f"{folder}: 4 images with questions by metadata.{format}, and 1 images without a line are left out" in said


def test_folders_of_splits_with_own_questions(tmp_path, capsys):
    folder = write_own(tmp_path / "own/train", "1.png").parent
    write_own(folder / "val", "1.png")
    assert len(load_rows([folder], prefer="train")) == len(load_rows([folder], split="val")) == 1
    with pytest.raises(DataError, match="has the splits train, val; --split"):
        load_rows([folder])
    write_own(folder / "other", "1.png")
    write_own(folder / "other/deeper", "1.png")
    assert len(load_rows([folder], prefer="train")) == 4  # not only splits
    assert "left out" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("splits", "lost", "split", "message"),
    [
        (None, (), None, "no such dataset folder"),
        ((), (), None, "has neither data/"),
        (["torn"], (), None, "the dataset cannot be read"),
        (["val"], ("image", "rows"), None, "the dataset (has no rows|cannot be read: .*no data)"),
        (["val"], ("image",), None, "has no column image"),
        (["train", "val"], (), None, "has the splits train, val; --split"),
        (["val"], (), "test", "has no split 'test', only val"),
    ],
)
def test_bad_folders_are_refused_in_one_line(tmp_path, columns, splits, lost, split, message):
    kept = {name: [] if "rows" in lost else columns[name] for name in columns if name not in lost}
    if splits is not None:
        write(tmp_path / "bad", kept, *splits)
    if splits == ["torn"]:
        (tmp_path / "bad/data/torn-00000.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(DataError, match=message) as caught:
        load_rows([tmp_path / "bad"], split=split)
    assert "\n" not in str(caught.value)
