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
        ([GOOD, (["Is there a car?", "Is it night?"], ["yes"])], r"row 2 \(2.png\): 2 questions have 1 answers"),
        ([GOOD, (None, ["yes"])], r"row 2 \(2.png\): questions must be a list of texts, got None"),
        ([GOOD, (["Is there a car?"], [None])], r"row 2 \(2.png\): answers must be a list of texts, got \[None\]"),
        ([(["Is it night?"], [3])], r"row 1 \(1.png\): answers must be a list of texts, got \[3\]"),
        ([(["Is it night?"], "yes")], r"row 1 \(1.png\): answers must be a list of texts, got 'yes'"),
        ([("Is it night?", ["yes"])], r"row 1 \(1.png\): questions must be a list of texts, got 'Is it night"),
        ([GOOD, (["Is it night?"], [True])], "in row 1"),  # the message of `datasets`, which counts from 0
    ],
)
def test_own_questions_need_as_many_answers_which_are_texts(tmp_path, rows, message):
    lines = []
    for i, (questions, answers) in enumerate(rows, start=1):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{i}.png")
        lines.append(json.dumps({"file_name": f"{i}.png", "questions": questions, "answers": answers}))
    (tmp_path / "metadata.jsonl").write_text("\n".join(lines))
    with pytest.raises(DataError, match=message):
        load_rows([tmp_path])


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
