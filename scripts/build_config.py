"""Write config.json, decision.json and generation_config.json of the small model.

    python scripts/build_config.py                     # into the repository root
    python scripts/build_config.py --output /tmp/files

The temperature of P(yes) that config.json holds already is kept: it belongs to the weights.
"""

import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from transformers import GenerationConfig, HfArgumentParser

from traffic_vlm.configuration_traffic_vlm import TrafficVLMConfig
from traffic_vlm.generation_traffic_vlm import MAX_NEW_TOKENS


ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Arguments:
    output: Path = field(default=ROOT, metadata={"help": "folder to write to"})


def build(output: Path, temperature: float = 1.0) -> None:
    """Write the files to a temporary folder and move them to `output` when they are complete."""
    config = TrafficVLMConfig(yes_no_temperature=temperature, architectures=["TrafficVLMForConditionalGeneration"])
    text = config.text_config
    ids = {name: getattr(text, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    generation = GenerationConfig(**ids, max_new_tokens=MAX_NEW_TOKENS)
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output) as folder:
        config.save_pretrained(folder)
        generation.save_pretrained(folder)
        for path in Path(folder).iterdir():
            path.replace(output / path.name)


def main() -> None:
    arguments = Arguments(**vars(HfArgumentParser(Arguments).parse_args()))
    path = arguments.output / "config.json"
    temperature = json.loads(path.read_text())["yes_no_temperature"] if path.exists() else 1.0
    build(arguments.output, temperature)
    print(f"wrote config.json, decision.json and generation_config.json to {arguments.output}")


if __name__ == "__main__":
    main()
