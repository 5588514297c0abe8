"""Near-duplicates: hashes of hand-made images, chains of them, and a part of a dataset that is held back."""

import numpy as np
from datasets import Dataset
from datasets import Image as ImageFeature
from PIL import Image, ImageEnhance

from traffic_vlm.data.near_duplicates import (
    count_repeated,
    difference_hash,
    held_back,
    near_duplicate_groups,
    split_rows,
)


def scene(seed: int) -> Image.Image:
    cells = np.random.default_rng(seed).integers(60, 200, (8, 9), np.uint8)
    return Image.fromarray(cells).resize((288, 256), Image.Resampling.NEAREST).convert("RGB")


def test_the_hash_is_the_sign_of_each_difference_at_any_size_light_and_compression(tmp_path):
    ramp = Image.fromarray(np.tile(np.arange(90, dtype=np.uint8), (80, 1)))
    assert not difference_hash(ramp).any() and difference_hash(ramp.transpose(Image.Transpose.FLIP_LEFT_RIGHT)).all()
    image = scene(0)
    image.save(tmp_path / "a.jpg", quality=40)
    others = [image.resize((144, 128)), ImageEnhance.Brightness(image).enhance(0.7), Image.open(tmp_path / "a.jpg")]
    distances = [int((difference_hash(image) != difference_hash(other)).sum()) for other in others]
    assert max(distances) <= 2 and (difference_hash(image) != difference_hash(scene(1))).sum() > 16


def test_chains_are_one_group():
    """Frames that differ by 8 bits each: the first and the last of five differ by 32. By 9 bits, no two are alike."""
    for step, groups in ((8, [0, 0, 0, 1, 0, 0]), (9, [0, 1, 2, 3, 4, 5])):
        frames = np.arange(64) < step * np.arange(5)[:, None]
        hashes = np.concatenate([frames[::2], ~frames[:1], frames[1::2]])
        assert near_duplicate_groups(hashes).tolist() == groups


def test_whole_groups_are_held_back():
    groups = [0] * 50 + [i // 2 for i in range(2, 52)]  # one of 50 images, 25 of 2
    held = held_back(groups, [0] * 100, 0.1)
    assert len(held) == 10 and held == held_back(groups, [0] * 100, 0.1) != held_back(groups, [0] * 100, 0.1, seed=1)
    chosen = {groups[index] for index in held}
    assert 0 not in chosen and all((groups[i] in chosen) == (i in held) for i in range(100))
    assert held_back([0] * 20, [0] * 20, 0.1) == [] and len(held_back(range(4), [0] * 4, 0.1)) == 1


def test_each_folder_holds_its_part_back():
    """The second folder is one group, an image of which is in the first, too: it would be held back with this one."""
    groups, folders = [*range(20), *[0] * 20], [0] * 20 + [1] * 20
    held = [held_back(groups, folders, 0.1, seed) for seed in range(30)]
    assert all(len(some) == 2 and max(some) < 20 and 0 not in some for some in held)


def datasets_of_pairs() -> Dataset:
    """Two images of each of 20 scenes."""
    images = [image for seed in range(20) for image in (scene(seed), ImageEnhance.Contrast(scene(seed)).enhance(0.8))]
    columns = {"image": images, "scene": [index // 2 for index in range(40)], "source": ["a", "b"] * 20}
    return Dataset.from_dict(columns).cast_column("image", ImageFeature())


def test_no_near_duplicates_stay_on_the_other_side():
    rows = datasets_of_pairs()
    for datasets in ([rows], [rows.select(range(0, 40, 2)), rows.select(range(1, 40, 2))]):  # of one folder, of two
        stay, held, repeated = split_rows(datasets, 0.2)
        assert sum(map(len, stay)) == 32 and sum(map(len, held)) == 8 and not repeated
        assert not {name for part in stay for name in part["scene"]} & {
            name for part in held for name in part["scene"]
        }
    (stay, some), (held, others), repeated = split_rows([rows.select([0, 1] * 10), rows.select(range(20, 40))], 0.1)
    assert (len(stay), len(held), repeated) == (18, 2, 2)  # one group: drawn one by one
    assert (len(some), len(others)) == (18, 2)


def test_repeated_images_are_counted_by_source():
    rows = datasets_of_pairs()
    others = rows.select([0, 3])  # of two scenes, each of which both sources show
    assert count_repeated(rows, others) == {"a": 2, "b": 2} and count_repeated(rows.select([6]), others) == {}
