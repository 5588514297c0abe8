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
    (folder / "data").mkdir(parents=True)
    for split in splits:
        Dataset.from_dict(columns).to_parquet(str(folder / "data" / f"{split}-00000.parquet"))
    return folder


def write_images(folder):
    folder.mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(folder / "1.png")
    line = {"file_name": "1.png", "questions": ["Is there a car?"], "answers": ["yes"]}
    (folder / "metadata.jsonl").write_text(json.dumps(line))
    return folder


def test_rows_of_folders(tmp_path, columns):
    folder = write(tmp_path / "set", columns, "val")
    assert load_rows([folder])["image_id"] == columns["image_id"]
    assert load_rows([folder], prefer="train")["image_id"] == columns["image_id"]  # it has no such split
    assert len(load_rows([folder, folder], split="val")) == 12
    drawn = load_rows([folder], max_images=3)["image_id"]
    assert len(set(drawn)) == 3 and drawn == load_rows([folder], max_images=3)["image_id"]
    evenly = select_evenly(load_rows([folder]), 2)["image_id"]
    assert evenly == [columns["image_id"][0], columns["image_id"][3]]
    assert select_evenly(list("abcdef"), 3) == ["a", "c", "e"]
    assert select_evenly("abc", 5) == "abc"


def test_training_prefers_its_split(tmp_path, columns):
    folder = write(tmp_path / "mine", columns, "train")
    few = {name: values[:2] for name, values in columns.items()}
    Dataset.from_dict(few).to_parquet(str(folder / "data/val-00000.parquet"))
    assert len(load_rows([folder], prefer="train")) == 6
    assert len(load_rows([folder], split="val", prefer="train")) == 2


def test_hand_written_questions_get_defaults(tmp_path):
    folders = [write_images(tmp_path / drive / "val") for drive in ("drive1", "drive2")]
    rows = load_rows(folders)
    assert rows["source"] == ["drive1/val", "drive2/val"]
    assert load_rows(folders[:1] * 2)["source"] == ["val", "val"]
    assert {**rows[0], "image": None} == {
        "image": None,
        "questions": ["Is there a car?"],
        "answers": ["yes"],
        "question_types": ["own"],
        "categories": ["own"],
        "question_ids": ["Is there a car?"],
        "source": "drive1/val",
        "image_id": "0",
    }
    deep = [tmp_path / name for name in ("drive1/frames/val", "drive2/frames/val", "other")]
    assert source_names(deep) == ["drive1/frames/val", "drive2/frames/val", "other"]


GOOD = (["Is there a car?"], ["yes"])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([GOOD, (["Is there a car?", "Is it night?"], ["yes"])], r":2 \(2.png\): 2 questions have 1 answers"),
        ([GOOD, (None, ["yes"])], r":2 \(2.png\): questions must be a list of texts, got None"),
        ([GOOD, (["Is there a car?"], [None])], r":2 \(2.png\): answers must be a list of texts, got \[None\]"),
        ([(["Is it night?"], [3])], r":1 \(1.png\): answers must be a list of texts, got \[3\]"),
        ([(["Is it night?"], "yes")], r":1 \(1.png\): answers must be a list of texts, got 'yes'"),
        ([("Is it night?", ["yes"])], r":1 \(1.png\): questions must be a list of texts, got 'Is it night"),
        ([GOOD, (["Is it night?"], [True])], r":2 \(2.png\): answers must be a list of texts, got \[True\]"),
        ("[1]\n", ":1: is not a JSON object"),
        ("\n{'a': 1}", ":2: is not valid JSON: Expecting property name"),
        (b"\xff", "metadata.jsonl: cannot be read: .*can't decode byte"),
        ("", "the dataset has no rows"),
        (
            '{"file_name": "7.png", "questions": [], "answers": []}\n' * 2,
            "2 images cannot be found: .*:1: image '7.png'",
        ),
        ('{"file_name": "x.gif", "questions": [], "answers": []}', r"image 'x.gif' may be x.bmp or x.png"),
    ],
)
def test_a_wrong_line_of_own_questions_is_named(tmp_path, rows, message):
    for name in ("1.png", "2.png", "x.png", "x.bmp"):
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    if isinstance(rows, list):
        rows = "\n".join(
            json.dumps({"file_name": f"{i}.png", "questions": questions, "answers": answers})
            for i, (questions, answers) in enumerate(rows, start=1)
        )
    (tmp_path / "metadata.jsonl").write_bytes(rows if isinstance(rows, bytes) else rows.encode())
    with pytest.raises(DataError, match=message) as caught:
        load_rows([tmp_path])
    assert "\n" not in str(caught.value)


def test_damaged_images_of_own_questions_are_named_before_the_run(tmp_path):
    lines = []
    for i in range(5):
        Image.effect_noise((60, 60), 90).convert("RGB").save(tmp_path / f"{i}.jpg")
        if i in (1, 3):
            content = (tmp_path / f"{i}.jpg").read_bytes()
            (tmp_path / f"{i}.jpg").write_bytes(content[: len(content) // 2])
        lines.append(json.dumps({"file_name": f"{i}.jpg", "questions": ["Is there a car?"], "answers": ["no"]}))
    (tmp_path / "metadata.jsonl").write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"2 images cannot be read: 1\.jpg is JPEG, but damaged.*; 3\.jpg is JPEG"):
        load_rows([tmp_path])


NAMES = ["test_drive/1.png", "2.train.png", "dev/3.JPG", "evaluation.png"]


@pytest.mark.parametrize("format", ["jsonl", "csv"])
@pytest.mark.parametrize("name", ["own", "test", "my [1] train*"])
def test_all_own_questions_are_read_whatever_the_names(tmp_path, capsys, name, format):
    folder = tmp_path / name
    for image in [*NAMES, "left_out.png"]:
        (folder / image).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(folder / image)
    lines = [{"file_name": f".\\{image}", "questions": ["Is it night?"], "answers": ["yes"]} for image in NAMES]
    text = "\r\n".join(map(json.dumps, lines))
    if format == "csv":
        text = "file_name,questions,answers\n" + "".join(f'{image},"[""Is it night?""]",yes\n' for image in NAMES)
    (folder / f"metadata.{format}").write_bytes(b"\xef\xbb\xbf" + text.encode())
    rows = load_rows([folder], prefer="train")
    assert rows["questions"] == [["Is it night?"]] * 4 and rows["answers"] == [["yes"]] * 4
    assert [row["image"].size for row in rows] == [(8, 8)] * 4
    said = capsys.readouterr().err
    assert f"{folder}: 4 images with questions by metadata.{format}, and 1 images without a line are left out" in said


def test_folders_of_splits_with_own_questions(tmp_path, capsys):
    folder = write_images(tmp_path / "own/train").parent
    write_images(folder / "val")
    assert len(load_rows([folder], prefer="train")) == len(load_rows([folder], split="val")) == 1
    with pytest.raises(DataError, match="has the splits train, val; --split"):
        load_rows([folder])
    write_images(folder / "other")
    write_images(folder / "other/deeper")
    assert len(load_rows([folder], prefer="train")) == 4  # not only splits
    assert "left out" not in capsys.readouterr().err


def test_parquet_files_in_folders_of_any_name(tmp_path, columns):
    folder = write(tmp_path / "test [1]*?", columns)
    few = Dataset.from_dict(columns)
    for i in range(2):
        few.select(range(3 * i, 3 * i + 3)).to_parquet(str(folder / f"data/train-0000{i}-of-00002.parquet"))
    assert load_rows([folder])["image_id"] == columns["image_id"]


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        ("missing", "no such dataset folder"),
        ("empty", "has neither data/"),
        ("torn", "the dataset cannot be read"),
        ("no rows", "the dataset (has no rows|cannot be read: .*no data)"),
        ("no column", "has no column image"),
        ("two splits", "has the splits train, val; --split"),
        ("other split", "has no split 'test', only val"),
    ],
)
def test_bad_folders_are_refused_in_one_line(tmp_path, columns, problem, message):
    folder = tmp_path / "bad"
    if problem != "missing":
        texts = {name: [] if problem == "no rows" else columns[name] for name in columns if name != "image"}
        splits = {"two splits": ("train", "val"), "empty": (), "torn": ()}.get(problem, ("val",))
        write(folder, texts, *splits)
    if problem == "torn":
        (folder / "data/val-00000.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(DataError, match=message) as caught:
        load_rows([folder], split="test" if problem == "other split" else None)
    assert "\n" not in str(caught.value)
