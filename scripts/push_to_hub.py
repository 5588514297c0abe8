"""Upload a model to the Hugging Face Hub: weights, processor, code and model card.

    python scripts/push_to_hub.py me/traffic-vlm --dry_run     # list the files and check them; takes seconds on a CPU
    python scripts/push_to_hub.py me/traffic-vlm
    python scripts/push_to_hub.py me/my-streets --model runs/tuned --private

Log in first with `hf auth login`, or set HF_TOKEN. A model folder has a model card (README.md), and may have LICENSE
files and docs/. Before the upload the folder is loaded in a new process and answers a question.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from traffic_vlm.common.files import ROOT
from traffic_vlm.common.options import option, option_parser
from traffic_vlm.scripts import command
from traffic_vlm.training.publish import publish


@dataclass
class PublishOptions:
    model: Path = option(ROOT, "model folder")
    dry_run: bool = option(False, "list and check the files, but upload nothing")
    private: bool = option(False, "make the repository private; refuse a public one")


@command("train")
def main() -> None:
    parser = option_parser([PublishOptions], __doc__)
    parser.add_argument("repo_id", help="name on the Hub: user/name, or a name in your own account")
    options = parser.parse_args()
    url = publish(options.model, options.repo_id, options.dry_run, private=options.private or None)
    print(f"uploaded: {url}" if url else "dry run: nothing was uploaded")


if __name__ == "__main__":
    sys.exit(main())
