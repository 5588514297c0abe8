"""Compare multi-head, grouped-query, multi-query and multi-head latent attention in the text decoder.

    python scripts/compare_attention.py --output_dir runs/attention
    python scripts/compare_attention.py --output_dir runs/attention --parts learning --steps 200 --seeds 1

Writes attention.json, attention.md with tables, and plots. The parts are

- sizes: parameters, bytes of the cache, and what fits into a given memory (computed);
- speed: one decoding step with a cache, a pass over 16 questions, a training step; the variants take turns;
- learning: held-out accuracy over equal steps, at half the width of the decoder, on image tokens that tell category
  and color of each patch; one file for each variant and seed, so a stopped run goes on where it was;
- cache: generation with and without the cache of text, by the weights of --model.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch

from traffic_vlm.cache_traffic_vlm import TrafficVLMCache
from traffic_vlm.configuration_traffic_vlm import TrafficVLMTextConfig
from traffic_vlm.evaluation.markdown import table
from traffic_vlm.files import atomic_write, atomic_write_text
from traffic_vlm.loading import load_weights
from traffic_vlm.modeling_traffic_vlm import TrafficVLMForCausalLM, is_bfloat16_slow
from traffic_vlm.options import option_parser
from traffic_vlm.scripts.benchmark import generate_run, time_in_turns
from traffic_vlm.scripts.measure_memory import activation_bytes
from traffic_vlm.tokenization_traffic_vlm import TrafficVLMTokenizer


matplotlib.use("Agg")
import matplotlib.pyplot as plt


ROOT = Path(__file__).resolve().parent.parent
PARTS = ("sizes", "speed", "learning", "cache")
VARIANTS: dict[str, dict[str, int]] = {
    "MHA": {"num_key_value_heads": 8},
    "GQA 8/2": {"num_key_value_heads": 2},
    "MQA": {"num_key_value_heads": 1},
    "MLA 128+32": {"kv_latent_size": 128, "rope_head_dim": 32},
    "MLA 128+32, image 128": {"kv_latent_size": 128, "rope_head_dim": 32, "image_latent_size": 128},
}
OURS = "GQA 8/2"
IMAGE_TOKENS, QUESTION_TOKENS, QUESTIONS = 256, 10, 16
TRAINING_IMAGES = 4  # of a training step, each with QUESTIONS packed questions
LENGTHS = (50, 120)
DTYPES = (torch.float32, torch.bfloat16)
CATEGORIES = ["car", "bus", "truck", "van", "bicycle", "motorcycle", "train", "person"]
COLORS = ["red", "green", "blue", "white", "black", "yellow", "gray", "orange"]
SIDE = 6  # patches in a row of the images of the learning part
EVALUATE_EVERY, TEST_QUESTIONS = 10, 256


@dataclass
class Arguments:
    output_dir: Path = field(metadata={"help": "folder to write to"})
    parts: list[str] = field(default_factory=lambda: list(PARTS), metadata={"help": f"some of {', '.join(PARTS)}"})
    model: str = field(default=str(ROOT), metadata={"help": "model folder for the part 'cache'"})
    seeds: int = field(default=3, metadata={"help": "learning: runs of each variant"})
    steps: int = field(default=250, metadata={"help": "learning: steps of a run"})
    batch_size: int = field(default=32, metadata={"help": "learning: questions of a step, each about its own image"})
    min_run_time: float = field(default=0.5, metadata={"help": "speed and cache: minimum seconds of each turn"})
    memory_gb: float = field(default=5.0, metadata={"help": "sizes: memory for what grows with the batch, in GB"})

    def __post_init__(self) -> None:
        if unknown := set(self.parts) - set(PARTS):
            raise ValueError(f"--parts must be of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
        for name in ("seeds", "steps", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1, got {getattr(self, name)}")
        if self.min_run_time <= 0:
            raise ValueError(f"--min_run_time must be above 0, got {self.min_run_time}")


def make_decoder(variant: str, seed: int = 0, shrink: int = 1) -> TrafficVLMForCausalLM:
    """A decoder with random weights; `shrink` divides all widths. The heads of latents and RoPE shrink, too."""
    fields = {"hidden_size": 512, "intermediate_size": 2048, "head_dim": 64, "encoder_hidden_size": 512}
    fields = {name: size // shrink for name, size in fields.items()}
    sizes = {
        name: size if name == "num_key_value_heads" else size // shrink for name, size in VARIANTS[variant].items()
    }
    torch.manual_seed(seed)
    return TrafficVLMForCausalLM(TrafficVLMTextConfig(**fields, **sizes, hidden_dropout=0.0))


# --- sizes ---


def cache_bytes(decoder: TrafficVLMForCausalLM, tokens: int) -> dict[str, int]:
    """Bytes of the cache after a pass over one image and `tokens` tokens: "text" and "image"."""
    cache: Any = fill_cache(decoder, tokens)
    text = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    image = sum(key.nbytes + value.nbytes for key, value in cache.image_key_values)
    return {"text": text, "image": image}


@torch.no_grad()
def fill_cache(decoder: TrafficVLMForCausalLM, tokens: int) -> TrafficVLMCache:
    cache = TrafficVLMCache(config=decoder.config)
    image = torch.randn(1, IMAGE_TOKENS, decoder.config.encoder_hidden_size)
    decoder(random_ids(1, tokens), encoder_hidden_states=image, past_key_values=cache)
    return cache


def random_ids(*shape: int) -> torch.Tensor:
    return torch.randint(6, 500, shape, generator=torch.Generator().manual_seed(0))


def measure_sizes(variant: str) -> dict[str, float]:
    decoder = make_decoder(variant).train()
    cache = cache_bytes(decoder, LENGTHS[0])
    training = activation_bytes(decoder, lambda: training_loss(decoder))[0] / TRAINING_IMAGES
    full = cache_bytes(decoder, LENGTHS[1])
    return {
        "parameters": sum(parameter.numel() for parameter in decoder.parameters()),
        "text_bytes": cache["text"],
        "image_bytes": cache["image"],
        "numbers_a_token_and_layer": cache["text"] // (4 * LENGTHS[0] * decoder.config.num_hidden_layers),
        "sequence_bytes": full["text"] + full["image"],
        "training_bytes": int(training),
    }


def training_loss(decoder: TrafficVLMForCausalLM) -> torch.Tensor:
    """The loss of TRAINING_IMAGES rows, each with QUESTIONS packed questions about its image."""
    image = torch.randn(TRAINING_IMAGES, IMAGE_TOKENS, decoder.config.encoder_hidden_size)
    columns = torch.arange(QUESTIONS * QUESTION_TOKENS).repeat(TRAINING_IMAGES, 1)
    ids = random_ids(*columns.shape)
    packed = {"position_ids": columns % QUESTION_TOKENS, "segment_ids": columns // QUESTION_TOKENS + 1}
    return decoder(ids, encoder_hidden_states=image, labels=ids, use_cache=False, **packed).loss


# --- speed ---


def milliseconds(runs: Mapping[str, Callable[[], Any]], min_run_time: float) -> dict[str, float]:
    """The median time of each run. The runs take turns, so a busy moment hits all of them."""
    return {name: 1000 * seconds for name, seconds in time_in_turns(runs, min_run_time).items()}


def step_run(decoder: TrafficVLMForCausalLM, length: int) -> Callable[[], None]:
    """Ten decoding steps with `length` tokens in the cache, which are removed again."""
    cache = fill_cache(decoder.eval(), length)

    @torch.inference_mode()
    def run() -> None:
        for _ in range(10):
            decoder(random_ids(1, 1), past_key_values=cache)
            cache.crop(-1)

    return run


def measure_speed(min_run_time: float) -> dict[str, dict[str, float]]:
    """Milliseconds of each variant by workload."""
    decoders = {name: make_decoder(name) for name in VARIANTS}
    optimizers = {name: torch.optim.AdamW(decoder.parameters(), fused=True) for name, decoder in decoders.items()}
    image = torch.randn(1, IMAGE_TOKENS, 512)
    projected = {name: decoder.model.project_image_tokens(image) for name, decoder in decoders.items()}

    @torch.inference_mode()
    def ask(name: str) -> None:
        cache = TrafficVLMCache(config=decoders[name].config)
        shared = [tuple(x.expand(QUESTIONS, -1, -1, -1) for x in key_value) for key_value in projected[name]]
        cache.set_image(tuple(shared), None)
        decoders[name].eval()(random_ids(QUESTIONS, QUESTION_TOKENS), past_key_values=cache)

    def train(name: str) -> None:
        training_loss(decoders[name].train()).backward()
        optimizers[name].step()
        optimizers[name].zero_grad()

    found = {}
    for length in LENGTHS:
        times = milliseconds({name: step_run(decoder, length) for name, decoder in decoders.items()}, min_run_time)
        found[f"step, {length} tokens"] = {name: value / 10 for name, value in times.items()}
    for title, run in (("16 questions", ask), ("training step", train)):
        found[title] = milliseconds({name: partial(run, name) for name in VARIANTS}, min_run_time)
    return found


# --- learning ---


class Scenes:
    """Random images of SIDE × SIDE patches, and questions "What color is the car?" about them.

    Each category is on one patch, in a random color. An image token is the sum of fixed random vectors for its
    position, and for the category and color on it.
    """

    def __init__(self, width: int, seed: int):
        self.generator = torch.Generator().manual_seed(seed)
        fixed = torch.Generator().manual_seed(0)
        self.positions = torch.randn(SIDE * SIDE, width, generator=fixed)
        self.categories = torch.randn(len(CATEGORIES), width, generator=fixed)
        self.colors = torch.randn(len(COLORS), width, generator=fixed)
        tokenizer = TrafficVLMTokenizer.from_pretrained(ROOT)
        self.questions = torch.tensor(tokenizer([f"What color is the {name}?" for name in CATEGORIES])["input_ids"])
        self.answers = torch.tensor(tokenizer.convert_tokens_to_ids(COLORS))

    def batch(self, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Questions [N,L], image tokens [N,P,C], and ids of the answers [N]."""
        count = len(CATEGORIES)
        patches = torch.rand(size, SIDE * SIDE, generator=self.generator).argsort(1)[:, :count]  # of each category
        colors = torch.randint(len(COLORS), (size, count), generator=self.generator)
        tokens = self.positions.repeat(size, 1, 1)
        objects = self.categories + self.colors[colors]  # [N,categories,C]
        tokens.scatter_add_(1, patches[..., None].expand_as(objects), objects)
        asked = torch.randint(count, (size,), generator=self.generator)
        return self.questions[asked], tokens, self.answers[colors[torch.arange(size), asked]]


def learn(variant: str, seed: int, steps: int, batch_size: int) -> dict[str, list[float]]:
    """Train a decoder of half the width; the held-out accuracy and loss after each EVALUATE_EVERY steps."""
    decoder = make_decoder(variant, seed, shrink=2).train()
    scenes = Scenes(decoder.config.encoder_hidden_size, seed + 1)
    test = Scenes(decoder.config.encoder_hidden_size, 10**6).batch(TEST_QUESTIONS)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 50))

    def answer_logits(questions: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        return decoder(questions, encoder_hidden_states=image, use_cache=False, logits_to_keep=1).logits[:, -1]

    found: dict[str, list[float]] = {"step": [], "loss": [], "accuracy": []}
    for step in range(1, steps + 1):
        questions, image, answers = scenes.batch(batch_size)
        torch.nn.functional.cross_entropy(answer_logits(questions, image), answers).backward()
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % EVALUATE_EVERY == 0 or step == steps:
            questions, image, answers = test
            with torch.no_grad():
                logits = answer_logits(questions, image)
            found["step"].append(step)
            found["loss"].append(float(torch.nn.functional.cross_entropy(logits, answers)))
            found["accuracy"].append(float((logits.argmax(-1) == answers).float().mean()))
    return found


def learn_all(arguments: Arguments) -> dict[str, list[dict[str, list[float]]]]:
    """All runs of the learning part by variant; a run that is on disk is not repeated."""
    found: dict[str, list[dict[str, list[float]]]] = {name: [] for name in VARIANTS}
    for seed in range(arguments.seeds):
        for name in VARIANTS:
            sizes = f"{arguments.steps}_{arguments.batch_size}"
            path = arguments.output_dir / "learning" / f"{name.replace('/', '-')}_{seed}_{sizes}.json"
            if not path.exists():
                start = time.perf_counter()
                curve = learn(name, seed, arguments.steps, arguments.batch_size)
                atomic_write_text(path, json.dumps(curve))
                seconds = time.perf_counter() - start
                print(f"{name}, seed {seed}: accuracy {curve['accuracy'][-1]:.3f}, {seconds:.0f} s", flush=True)
            found[name].append(json.loads(path.read_text()))
    return found


# --- cache ---


def measure_cache(folder: str, min_run_time: float) -> list[dict[str, Any]]:
    """Milliseconds to generate LENGTHS tokens with and without the cache of text; the image is encoded before."""
    all_threads, rows = torch.get_num_threads(), []
    for dtype in DTYPES:
        if dtype == torch.bfloat16 and is_bfloat16_slow(torch.device("cpu")):
            print("cache: left out in bfloat16, which is over a hundred times slower than float32 on this CPU")
            continue
        model = load_weights(folder, dtype=dtype).eval().fuse_for_inference()
        size = model.config.vision_config.image_size
        image = model.encode_images(torch.zeros(1, 3, size, size, dtype=dtype))
        start = torch.full((1, 1), model.config.text_config.bos_token_id)
        for threads in sorted({1, all_threads}):
            torch.set_num_threads(threads)
            for length in LENGTHS:
                inputs = {"input_ids": start, "encoded_images": image}
                runs = {"with": generate_run(model, inputs, length)}
                runs["without"] = generate_run(model, inputs | {"use_cache": False}, length)
                row = {"dtype": str(dtype).removeprefix("torch."), "threads": threads, "tokens": length}
                rows.append(row | milliseconds(runs, min_run_time))
                print(f"cache: {rows[-1]}", flush=True)
        torch.set_num_threads(all_threads)
    return rows


# --- report ---


def to_markdown(found: dict[str, Any]) -> str:
    """Tables of the parts that were measured, each under its title."""
    makers = {"sizes": size_rows, "speed": speed_rows, "learning": learning_rows, "cache": cache_rows}
    parts = []
    for part in PARTS:
        if part in found:
            rows = makers[part](found)
            title = "dtype, threads, tokens" if part == "cache" else "attention"
            parts.append(f"## {part.capitalize()}\n\n{table(title, rows)}\n")
    return "\n".join(parts)


Rows = dict[str, dict[str, str]]  # of a table: {first cell: {heading: cell}}


def size_rows(found: dict[str, Any]) -> Rows:
    memory, size = f"{found['memory_gb']:g} GB", found["memory_gb"] * 1e9
    return {
        name: {
            "parameters, M": f"{row['parameters'] / 1e6:.2f}",
            "numbers a token and layer": str(row["numbers_a_token_and_layer"]),
            "text, 50 tokens, KB": f"{row['text_bytes'] / 1000:,.0f}",
            "one image, KB": f"{row['image_bytes'] / 1000:,.0f}",
            "both": f"{(row['text_bytes'] + row['image_bytes']) / 1000:,.0f}",
            f"sequences in {memory}": f"{size // row['sequence_bytes']:,.0f}",
            f"training images in {memory}": f"{size // row['training_bytes']:,.0f}",
        }
        for name, row in found["sizes"].items()
    }


def speed_rows(found: dict[str, Any]) -> Rows:
    def cell(times: dict[str, float], name: str) -> str:
        return f"{times[name] / times[OURS]:.2f} ({times[name]:.1f} ms)"

    return {name: {run: cell(times, name) for run, times in found["speed"].items()} for name in VARIANTS}


def learning_rows(found: dict[str, Any]) -> Rows:
    rows = {}
    for name, curves in found["learning"].items():
        finals = {key: np.array([curve[key][-1] for curve in curves]) for key in ("accuracy", "loss")}
        rows[name] = {
            f"{key} at the end": f"{values.mean():.3f} ± {standard_error(values):.3f}"
            for key, values in finals.items()
        }
        rows[name]["steps to an accuracy of 0.9, by seed"] = ", ".join(first_step(curve) for curve in curves)
    return rows


def cache_rows(found: dict[str, Any]) -> Rows:
    return {
        f"{row['dtype']}, {row['threads']}, {row['tokens']}": {
            "speed-up": f"{row['without'] / row['with']:.1f}",
            "with the cache": f"{row['with']:.0f} ms",
            "without": f"{row['without']:.0f} ms",
        }
        for row in found["cache"]
    }


def first_step(curve: dict[str, list[float]], accuracy: float = 0.9) -> str:
    """The first evaluated step at which the accuracy is reached, or "–"."""
    return next((str(int(step)) for step, value in zip(curve["step"], curve["accuracy"]) if value >= accuracy), "–")


def standard_error(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else 0.0


def draw_learning(learning: dict[str, list[dict[str, list[float]]]], path: Path) -> None:
    """Held-out accuracy over steps: the mean over seeds, with one standard error."""
    figure, axis = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for name, curves in learning.items():
        values = np.array([curve["accuracy"] for curve in curves])
        errors = [standard_error(column) for column in values.T]
        axis.errorbar(curves[0]["step"], values.mean(0), yerr=errors, label=name, capsize=2, linewidth=1.4)
    axis.set(xlabel="step", ylabel="held-out accuracy", ylim=(0, 1.02))
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    with atomic_write(path) as temporary:
        figure.savefig(temporary, format="png", dpi=110)
    plt.close(figure)


def compare(arguments: Arguments) -> dict[str, Any]:
    """Measure the parts and write the report; parts that an earlier run measured stay in it."""
    path = arguments.output_dir / "attention.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    found |= {"memory_gb": arguments.memory_gb, "threads": torch.get_num_threads()}
    found["cpu"] = torch.backends.cpu.get_cpu_capability()
    measurements: dict[str, Callable[[], Any]] = {
        "sizes": lambda: {name: measure_sizes(name) for name in VARIANTS},
        "speed": lambda: measure_speed(arguments.min_run_time),
        "learning": lambda: learn_all(arguments),
        "cache": lambda: measure_cache(arguments.model, arguments.min_run_time),
    }
    for part in arguments.parts:
        print(f"{part} ...", flush=True)
        found[part] = measurements[part]()
        atomic_write_text(path, json.dumps(found, indent=1))
        atomic_write_text(arguments.output_dir / "attention.md", to_markdown(found))
    if "learning" in found:
        draw_learning(found["learning"], arguments.output_dir / "attention_learning.png")
    print(f"wrote {arguments.output_dir / 'attention.md'}, attention.json and the plot")
    return found


def main() -> None:
    compare(*option_parser((Arguments,), __doc__).parse_args_into_dataclasses())


if __name__ == "__main__":
    main()
