"""Write the JSON and Jinja files that make this repository loadable, from the code and the word list.

    python scripts/build_files.py                              # into the repository; takes seconds on a CPU
    python scripts/build_files.py --output_dir runs/files

The files are config.json, generation_config.json, and those of the tokenizer and the processor. Temperatures, scores
of located objects and the dtype in config.json, and the taught words in processor_config.json, belong to the weights
and are kept.
"""

import sys
import tempfile
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

from transformers import GenerationConfig, SiglipImageProcessorPil

from traffic_vlm.common.files import ROOT
from traffic_vlm.common.options import option, option_parser
from traffic_vlm.configuration_traffic_vlm import TrafficVLMConfig
from traffic_vlm.data.grammar import question_rules
from traffic_vlm.generation_traffic_vlm import MAX_NEW_TOKENS
from traffic_vlm.processing_traffic_vlm import TrafficVLMProcessor
from traffic_vlm.scripts import command
from traffic_vlm.tokenization_traffic_vlm import TrafficVLMTokenizer


FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("processor_config.json", "chat_template.jinja"),
)


@dataclass
class BuildOptions:
    output_dir: Path = option(ROOT, "folder to write the files to")


def make_tokenizer() -> TrafficVLMTokenizer:
    """The tokenizer of vocabulary.txt, in which lines that start with "# " are comments."""
    lines = (ROOT / "scripts" / "vocabulary.txt").read_text(encoding="utf-8").splitlines()
    words = [word for line in lines if not line.startswith("# ") for word in line.split()]
    return TrafficVLMTokenizer({word: index for index, word in enumerate(words)})


def build(output_dir: Path) -> list[Path]:
    """Write all files atomically; return their paths."""
    shipped, processor = TrafficVLMConfig.from_pretrained(ROOT), TrafficVLMProcessor.from_pretrained(ROOT)
    tokenizer = make_tokenizer()
    kept = {name: getattr(shipped, name) for name in ("yes_no_temperature", "size_temperatures", "dtype")}
    located, bias = {"located": shipped.vision_config.located}, {"yes_bias": shipped.text_config.yes_bias}
    config = TrafficVLMConfig(located, bias, architectures=["TrafficVLMForConditionalGeneration"], **kept)
    token_ids = {name: getattr(config.text_config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    # The whole image is resized to a square (bicubic, no crop); pixels are scaled to [-1, 1].
    size = config.vision_config.image_size
    image_processor = SiglipImageProcessorPil(size={"height": size, "width": size})
    fields = {"taught": processor.taught, "own_questions": processor.own_questions, "questions": question_rules()}
    fields["chat_template"] = (ROOT / "chat_template.jinja").read_text(encoding="utf-8")
    parts = (
        config,
        GenerationConfig(**token_ids, max_new_tokens=MAX_NEW_TOKENS, suppress_tokens=tokenizer.reserved_ids),
        # The processor marks its tokenizer and writes the tokenizer's files too: give it a copy, and write ours last.
        TrafficVLMProcessor(image_processor, deepcopy(tokenizer), **fields),
        tokenizer,
    )
    output_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output_dir) as temporary:
        for part in parts:
            part.save_pretrained(temporary)
        return [(Path(temporary) / name).replace(output_dir / name) for name in FILES]


@command("train")
def main() -> None:
    [options] = option_parser([BuildOptions], __doc__).parse_args_into_dataclasses()
    for path in build(options.output_dir):
        print(path)


if __name__ == "__main__":
    sys.exit(main())
