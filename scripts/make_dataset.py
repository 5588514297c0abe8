"""Make a dataset of images with true questions and answers that `datasets.load_dataset(folder)` loads.

    python scripts/make_dataset.py --source synthetic --num_images 1000 --output_dir runs/synthetic
    python scripts/make_dataset.py --source camvid=/data/camvid synthetic --num_images 300 --output_dir runs/mix
    python scripts/make_dataset.py --source highway=DATA/highway --scene_labels DATA/scene_labels --output_dir runs/hw
    python scripts/make_dataset.py --source /data/city --output_dir runs/mine    # with data.yaml, COCO or Pascal VOC
    python scripts/make_dataset.py --source my_map.json=/data/mine --split val --output_dir runs/mine_val

A source is "synthetic"; NAME=FOLDER, where NAME is a file of data/formats/mappings or the path of your own mapping; or
a FOLDER, for which a mapping is drafted next to --output_dir. --num_images is the maximum for each of them.
--output_dir must not exist; a run that is stopped leaves nothing. report.json has the counts and all problems.
"""

import sys

from traffic_vlm.common.options import option_parser
from traffic_vlm.data.datasets import TRAIN, DatasetOptions, make_dataset
from traffic_vlm.scripts import command


@command("data")
def main() -> None:
    [options] = option_parser([DatasetOptions], __doc__).parse_args_into_dataclasses()
    report = make_dataset(options)
    print(f"images: {report['images']}, stored questions: {report['questions'].total()} (none in split {TRAIN})")
    for question_type, count in report["questions"].most_common():
        print(f"  {question_type:<14}{count:>8}")
    for name in ("skipped", "left_out"):
        for reason, count in report[name].most_common():
            print(f"  {name.replace('_', ' ')}: {reason} ({count})")
    for advice in report["advice"]:
        print(f"  to do: {advice}")
    print(f"wrote {options.output_dir}; report.json has the counts and all problems")


if __name__ == "__main__":
    sys.exit(main())
