"""Ask questions about very many images, and write Parquet files of labels, on one machine or many.

    python scripts/label.py frames/ --ask "Is there a pedestrian?" --ask "Is there a bus?" --output_dir runs/labels
    python scripts/label.py s3://bucket/tars --ask "Is it raining?" --output_dir s3://bucket/labels --address auto
    python scripts/label.py frames.parquet --column image --key_column id --ask "Is it night?" --output_dir runs/labels

INPUT is a folder of images, of WebDataset tars, or of Parquet files with a column of images, on this machine or at a
URL of S3, GCS or HDFS; or a text file with the path of an image in each line. The output folder gets
part-*.parquet with a row for each image and question; docs/scale.md explains the columns, and clusters.

The same command labels what has no labels yet: after it was stopped or killed, and when INPUT has new images. The exit
status is 0, even if some images have problems (their number is printed); 2 if a file cannot be read or written: mend
or remove it, and start again.
"""

import sys

from traffic_vlm.common.options import option_parser, silence_libraries
from traffic_vlm.scripts import command


@command("scale")
def main() -> None:
    from traffic_vlm.serving.labeling import LabelOptions, label

    silence_libraries()
    parser = option_parser([LabelOptions], __doc__)
    parser.add_argument("input", metavar="INPUT", help="images, tars or Parquet files: a folder, a file or a list.txt")
    options, arguments = parser.parse_args_into_dataclasses()
    label(arguments.input, options)


if __name__ == "__main__":
    sys.exit(main())
