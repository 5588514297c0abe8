"""Write processor_config.json, chat_template.jinja and decision_template.jinja of the processor.

    python scripts/build_processor.py                     # into the repository root
    python scripts/build_processor.py --output /tmp/files

The tokenizer is read from the repository root, so scripts/build_tokenizer.py comes first.
"""

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from transformers import HfArgumentParser, SiglipImageProcessorPil

from traffic_vlm.processing_traffic_vlm import TrafficVLMProcessor
from traffic_vlm.tokenization_traffic_vlm import TrafficVLMTokenizer


ROOT = Path(__file__).resolve().parent.parent
FILES = ("processor_config.json", "chat_template.jinja", "decision_template.jinja")


@dataclass
class Arguments:
    output: Path = field(default=ROOT, metadata={"help": "folder to write to"})


def build(output: Path) -> None:
    """The whole picture is squeezed to 224 x 224 (bicubic, no crop), and its pixels lie in -1..1."""
    image_processor = SiglipImageProcessorPil(size={"height": 224, "width": 224})
    processor = TrafficVLMProcessor(image_processor, TrafficVLMTokenizer.from_pretrained(ROOT))
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        processor.save_pretrained(folder)
        for name in FILES:
            shutil.copyfile(Path(folder, name), output / name)


def main() -> None:
    arguments = Arguments(**vars(HfArgumentParser(Arguments).parse_args()))
    build(arguments.output)
    print(f"wrote {', '.join(FILES)} to {arguments.output}")


if __name__ == "__main__":
    main()
