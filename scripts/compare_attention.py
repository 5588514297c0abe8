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
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch

from traffic_vlm.cache_traffic_vlm import TrafficVLMCache
from traffic_vlm.configuration_traffic_vlm import TrafficVLMTextConfig
from traffic_vlm.modeling_traffic_vlm import TrafficVLMForCausalLM
from traffic_vlm.tokenization_traffic_vlm import TrafficVLMTokenizer
from traffic_vlm.utils import atomic_write, atomic_write_text, load_weights, option_parser


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
IMAGE_TOKENS, QUESTION_TOKENS, QUESTIONS = 196, 10, 16
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
    rounds: int = field(default=15, metadata={"help": "speed and cache: times that each measurement is repeated"})
    memory_gb: float = field(default=5.0, metadata={"help": "sizes: memory for what grows with the batch, in GB"})

    def __post_init__(self) -> None:
        if unknown := set(self.parts) - set(PARTS):
            raise ValueError(f"--parts must be of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
        for name in ("seeds", "steps", "batch_size", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1, got {getattr(self, name)}")


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


def saved_bytes(run: Callable[[], torch.Tensor], weights: set[int]) -> int:
    """Bytes that the forward pass `run` keeps for the backward pass, without the tensors at addresses `weights`."""
    found: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = run()  # holds the saved tensors, so that no address is used twice
    del output
    return sum(found.values())


def measure_sizes(variant: str, memory_gb: float) -> dict[str, float]:
    decoder = make_decoder(variant).train()
    cache = cache_bytes(decoder, LENGTHS[0])
    weights = {parameter.untyped_storage().data_ptr() for parameter in decoder.parameters()}
    training = saved_bytes(lambda: training_loss(decoder), weights) / TRAINING_IMAGES
    full = cache_bytes(decoder, LENGTHS[1])
    return {
        "parameters": sum(parameter.numel() for parameter in decoder.parameters()),
        "text_bytes": cache["text"],
        "image_bytes": cache["image"],
        "numbers_a_token_and_layer": cache["text"] // (4 * LENGTHS[0] * decoder.config.num_hidden_layers),
        "sequences": int(memory_gb * 1e9 // (full["text"] + full["image"])),
        "training_bytes": int(training),
        "training_images": int(memory_gb * 1e9 // training),
    }


def training_loss(decoder: TrafficVLMForCausalLM) -> torch.Tensor:
    """The loss of TRAINING_IMAGES rows, each with QUESTIONS packed questions about its image."""
    image = torch.randn(TRAINING_IMAGES, IMAGE_TOKENS, decoder.config.encoder_hidden_size)
    columns = torch.arange(QUESTIONS * QUESTION_TOKENS).repeat(TRAINING_IMAGES, 1)
    ids = random_ids(*columns.shape)
    packed = {"position_ids": columns % QUESTION_TOKENS, "segment_ids": columns // QUESTION_TOKENS + 1}
    return decoder(ids, encoder_hidden_states=image, labels=ids, use_cache=False, **packed).loss


# --- speed ---


def take_turns(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The median time of each run in milliseconds. The runs take turns, so a busy moment hits all of them."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(rounds + 2):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if index >= 2:  # after two rounds to warm up
                times[name].append(time.perf_counter() - start)
    return {name: 1000 * float(np.median(values)) for name, values in times.items()}


def step_run(decoder: TrafficVLMForCausalLM, length: int) -> Callable[[], None]:
    """Ten decoding steps with `length` tokens in the cache, which are removed again."""
    cache = fill_cache(decoder.eval(), length)

    @torch.inference_mode()
    def run() -> None:
        for _ in range(10):
            decoder(random_ids(1, 1), past_key_values=cache)
            cache.crop(-1)

    return run


def measure_speed(rounds: int) -> dict[str, dict[str, float]]:
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
        times = take_turns({name: step_run(decoder, length) for name, decoder in decoders.items()}, rounds)
        found[f"step, {length} tokens"] = {name: value / 10 for name, value in times.items()}
    for title, run in (("16 questions", ask), ("training step", train)):
        found[title] = take_turns({name: partial(run, name) for name in VARIANTS}, rounds)
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


def measure_cache(folder: str, rounds: int) -> list[dict[str, Any]]:
    """Milliseconds to generate LENGTHS tokens with and without the cache of text; the image is encoded before."""
    all_threads, rows = torch.get_num_threads(), []
    for dtype in DTYPES:
        if dtype == torch.bfloat16 and torch.backends.cpu.get_cpu_capability() == "AVX2":
            print("cache: left out in bfloat16, which is over a hundred times slower than float32 on this CPU")
            continue
        model = load_weights(folder, dtype=dtype).eval().fuse_for_inference()
        image = model.encode_images(torch.zeros(1, 3, 224, 224, dtype=dtype))
        for threads in sorted({1, all_threads}):
            torch.set_num_threads(threads)
            for length in LENGTHS:
                runs = {name: partial(generate, model, image, length, name == "with") for name in ("with", "without")}
                row = {"dtype": str(dtype).removeprefix("torch."), "threads": threads, "tokens": length}
                rows.append(row | take_turns(runs, min(rounds, 5)))
                print(f"cache: {rows[-1]}", flush=True)
        torch.set_num_threads(all_threads)
    return rows


def generate(model: Any, image: Any, length: int, use_cache: bool) -> torch.Tensor:
    start = torch.full((1, 1), model.config.text_config.bos_token_id)
    options = {"max_new_tokens": length, "min_new_tokens": length, "do_sample": False}
    return model.generate(start, encoded_images=image, use_cache=use_cache, **options)


# --- report ---


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def to_markdown(found: dict[str, Any]) -> str:
    """Tables of the parts that were measured, each under its title."""
    parts = []
    if sizes := found.get("sizes"):
        header = ["attention", "parameters, M", "numbers a token and layer", "text, 50 tokens, KB", "one image, KB"]
        header += [
            "both",
            f"sequences in {found['memory_gb']:g} GB",
            f"training images in {found['memory_gb']:g} GB",
        ]
        rows = []
        for name, row in sizes.items():
            both = row["text_bytes"] + row["image_bytes"]
            kilobytes = [f"{value / 1000:,.0f}" for value in (row["text_bytes"], row["image_bytes"], both)]
            counts = [f"{row['sequences']:,}", f"{row['training_images']:,}"]
            parameters = f"{row['parameters'] / 1e6:.2f}"
            rows.append([name, parameters, str(row["numbers_a_token_and_layer"]), *kilobytes, *counts])
        parts.append("## Sizes\n\n" + table(header, rows))
    if speed := found.get("speed"):
        rows = [
            [name, *(f"{times[name] / times[OURS]:.2f} ({times[name]:.1f} ms)" for times in speed.values())]
            for name in VARIANTS
        ]
        parts.append("## Speed\n\n" + table(["attention", *speed], rows))
    if learning := found.get("learning"):
        rows = []
        for name, curves in learning.items():
            finals = [np.array([curve[key][-1] for curve in curves]) for key in ("accuracy", "loss")]
            cells = [f"{values.mean():.3f} ± {standard_error(values):.3f}" for values in finals]
            rows.append([name, *cells, ", ".join(first_step(curve) for curve in curves)])
        header = ["attention", "accuracy at the end", "loss at the end", "steps to an accuracy of 0.9, by seed"]
        parts.append("## Learning\n\n" + table(header, rows))
    if cache := found.get("cache"):
        rows = [
            [row["dtype"], str(row["threads"]), str(row["tokens"]), f"{row['without'] / row['with']:.1f}"]
            + [f"{row[key]:.0f} ms" for key in ("with", "without")]
            for row in cache
        ]
        header = ["dtype", "threads", "tokens", "speed-up", "with the cache", "without"]
        parts.append("## Cache\n\n" + table(header, rows))
    return "\n".join(parts)


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
        "sizes": lambda: {name: measure_sizes(name, arguments.memory_gb) for name in VARIANTS},
        "speed": lambda: measure_speed(arguments.rounds),
        "learning": lambda: learn_all(arguments),
        "cache": lambda: measure_cache(arguments.model, arguments.rounds),
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
