"""Dataset folders: splits, sources and defaults, and a clear error for each folder that cannot be used."""

import json
from pathlib import Path

import pytest
from datasets import Dataset
from PIL import Image

from traffic_vlm.common.files import DataError
from traffic_vlm.data.datasets import FEATURES, load_rows, select_evenly, source_names, synthetic_rows


@pytest.fixture(scope="module")
def rows():
    made = synthetic_rows(first_seed=900, num_images=6, questions_per_image=4)
    return Dataset.from_dict({name: [row[name] for row in made] for name in FEATURES})


def write(folder: Path, **splits: Dataset) -> Path:
    """Write Parquet files as make_dataset does."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    for split, part in splits.items():
        part.to_parquet(str(folder / "data" / f"{split}-00000.parquet"))
    return folder


def line(name="1.png", questions=("Is there a car?",), answers=("yes",)) -> str:
    return json.dumps({"file_name": name, "questions": questions, "answers": answers}, ensure_ascii=False)


def write_own(folder: Path, *names: str, text: str | bytes | None = None, metadata="metadata.jsonl") -> Path:
    """Write small images of these names, and a list of questions with a line for each."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(folder / name)
    text = "\n".join(map(line, names)) if text is None else text
    (folder / metadata).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


# Folders of make_dataset


def test_rows_of_folders(tmp_path, rows):
    folder, ids = write(tmp_path / "test [1]*?", val=rows), rows["image_id"]  # a name with all that patterns have
    assert load_rows([folder])["image_id"] == ids
    assert load_rows([folder], prefer="train")["image_id"] == ids  # it has no such split
    with pytest.raises(DataError, match="a folder is given twice"):
        load_rows([folder, folder / "data" / ".."])
    drawn = load_rows([folder], max_images=3)["image_id"]
    assert len(set(drawn)) == 3 and drawn == load_rows([folder], max_images=3)["image_id"]
    for i in range(2):  # two files of another split, with the names that `push_to_hub` gives
        rows.select([2 * i, 2 * i + 1]).to_parquet(str(folder / f"data/train-0000{i}-of-00002.parquet"))
    assert load_rows([folder], prefer="train")["image_id"] == ids[:4]
    assert load_rows([folder], "val", prefer="train")["image_id"] == ids


def test_rows_are_selected_at_equal_distances(rows):
    assert select_evenly(rows, 2)["image_id"] == rows["image_id"][::3]
    assert select_evenly(list("abcdef"), 3) == ["a", "c", "e"] and select_evenly("abc", 5) == "abc"


def with_answers(rows: Dataset, answers: list[str]) -> Dataset:
    """Rows of one's own: without a scene, and each with these answers."""
    return rows.select_columns(["image", "questions"]).add_column("answers", [answers] * len(rows))


@pytest.mark.parametrize(
    ("splits", "change", "split", "message"),
    [
        (None, None, None, "no such dataset folder"),
        ((), None, None, "has neither data/"),
        (("torn",), None, None, "the dataset cannot be read"),
        (("val",), lambda rows: rows.select([]), None, "the dataset (has no rows|cannot be read: .*no data)"),
        (("val",), lambda rows: rows.remove_columns("image"), None, "has no column image"),
        (("train", "val"), lambda rows: rows, None, "has the splits train, val; --split"),
        (("val",), lambda rows: rows, "test", "has no split 'test', only val"),
        (("val",), lambda rows: with_answers(rows, ["yes"] * 9), None, r"row 1: \d questions have 9 answers"),
    ],
)
def test_bad_folders_are_refused_in_one_line(tmp_path, rows, splits, change, split, message):
    folder = tmp_path / "bad"
    if splits == ("torn",):
        write(folder)
        (folder / "data/torn-00000.parquet").write_bytes(b"PAR1 and then nothing")
    elif splits is not None:
        write(folder, **{name: change(rows) for name in splits})
    with pytest.raises(DataError, match=rf"^[^\n]*{message}[^\n]*$"):
        load_rows([folder], split=split)


# Questions of one's own


def test_own_questions_get_defaults_and_the_names_of_their_folders(tmp_path):
    folders = [write_own(tmp_path / drive / "val", "1.png") for drive in ("drive1", "drive2")]
    rows = load_rows(folders)
    text, own = ["Is there a car?"], ["own"]
    expected = {"questions": text, "answers": ["yes"], "question_types": own, "categories": own, "question_ids": text}
    assert {**rows[0], "image": 0} == expected | {"image": 0, "source": "drive1/val", "image_id": "1.png"}
    assert rows["source"] == ["drive1/val", "drive2/val"] and load_rows(folders[:1])["source"] == ["val"]
    numbers = write_own(tmp_path / "numbers", "1.png", text=line(answers=[".5!"]))
    assert load_rows([numbers])["answers"] == [[".5"]]  # of what is typed, only the end is removed
    deep = [tmp_path / name for name in ("drive1/frames/val", "drive2/frames/val", "other")]
    assert source_names(deep) == ["drive1/frames/val", "drive2/frames/val", "other"]


NAMES = ["test_drive/1.png", "2.train.png", "dev/3.JPG", "evaluation.png"]
LINES = "\r\n".join(line(f".\\{name}", ["Is it\u2028night?"]) for name in NAMES)
CSV = "\n".join(["file_name,questions,answers", *(f'{name},"[""Is it\u2028night?""]",yes.' for name in NAMES)])


@pytest.mark.parametrize(("metadata", "text"), [("metadata.jsonl", LINES), ("metadata.csv", CSV)])
def test_all_own_questions_are_read_whatever_the_names(tmp_path, capsys, metadata, text):
    text = b"\xef\xbb\xbf" + text.encode()
    folder = write_own(tmp_path / "my [1] test*", *NAMES, "left_out.png", text=text, metadata=metadata)
    rows = load_rows([folder], prefer="train")
    assert rows["questions"] == [["Is it\u2028night?"]] * 4 and rows["answers"] == [["yes"]] * 4
    assert [one["image"].size for one in rows] == [(8, 8)] * 4
    said = capsys.readouterr().err
    assert f"{folder}: images with questions by {metadata}: 4; without a line, and left out: 1" in said


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
    ("text", "message"),
    [
        (f"{line()}\n{line('2.png', ['A?', 'B?'])}", r":2 \(2.png\): 2 questions have 1 answers"),
        (line(questions=None), r":1 \(1.png\): questions must be a list of texts that are not empty, got None"),
        (line(questions="Is it night?"), r":1 \(1.png\): questions must be a list of texts that .* got 'Is it"),
        (line(answers=["."]), r":1 \(1.png\): answers must be a list of texts that are not empty, got \['.'\]"),
        ("[1]\n", ":1: is not a JSON object"),
        ('{"image": "1.png", "questions": []}', ":1: has no file_name, only image, questions"),
        ("\n{'a': 1}", ":2: is not valid JSON: Expecting property name"),
        (b"\xff", "metadata.jsonl: cannot be read: .*can't decode byte"),
        ("", "the dataset has no rows"),
        (f"{line('7.png')}\n{line('7.png')}", "cannot read 2 of its images: .*:1: image '7.png' is missing"),
        (line("x.gif"), r"image 'x.gif' may be x.bmp or x.png"),
        (line("torn.jpg"), r"cannot read 1 of its images: torn\.jpg is damaged"),
    ],
)
def test_a_wrong_line_of_own_questions_is_named_before_the_run(tmp_path, text, message):
    folder = write_own(tmp_path, "1.png", "2.png", "x.png", "x.bmp", text=text)
    Image.effect_noise((60, 60), 90).convert("RGB").save(folder / "torn.jpg")
    (folder / "torn.jpg").write_bytes((folder / "torn.jpg").read_bytes()[:1000])
    with pytest.raises(DataError, match=rf"^[^\n]*{message}[^\n]*$"):
        load_rows([folder])
