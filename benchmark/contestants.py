"""The models that are compared, of the same widths and depths, each used as its own users use it.

All are built from classes of `transformers` with random weights, which compute as fast as trained ones. A contestant
takes pixels [I,3,H,W] and questions as text and gives runs: functions without arguments that do a work once, with
everything prepared that a user would keep at hand (pixels, token ids, the optimizer).

The peers answer a question in a row of a batch, with the image beside or inside it, as their processors lay them out.
Rows are padded, and as many as `ROWS_AT_ONCE` or `Sizes.training_rows` go in one pass. None computes more than it
must: no cache where nothing is generated, logits only of the token that is read, no tiling of the image.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import (
    BlipConfig,
    BlipForQuestionAnswering,
    CompileConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
)
from transformers.models.blip.modeling_blip_text import BlipTextLMHeadModel

from ..configuration_traffic_vlm import TrafficVLMConfig
from ..modeling_traffic_vlm import TrafficVLMForConditionalGeneration
from ..processing_traffic_vlm import TrafficVLMProcessor
from .timing import Run


PAD, START, END, YES, NO = 0, 2, 3, 4, 5  # ids of our vocabulary, which the peers share
IMAGE, NEWLINE, FAKE, GLOBAL, USER, ASSISTANT, COLON, END_OF_TURN = range(500, 508)  # and those they need besides
VOCABULARY = 512
ROWS_AT_ONCE = 64
IGNORED = -100

Questions = Sequence[Sequence[str]]  # for each image its questions


@dataclass(frozen=True)
class Sizes:
    """Widths and depths that all contestants share; the defaults are those of the small model.

    Attributes:
        vision_width, vision_feed_forward, vision_layers, vision_heads: the tower of patches.
        own_tower: fields of `TrafficVLMVisionConfig` for the tower of convolutions, beside its defaults.
        width, feed_forward, layers, heads, key_value_heads, head_dim: the text decoder.
        image_size: side of the images in pixels; patches are 16 × 16.
        training_rows: rows that a peer takes at once in a training step; gradients of several passes add up.
    """

    vision_width: int = 768
    vision_feed_forward: int = 3072
    vision_layers: int = 3
    vision_heads: int = 12
    own_tower: dict[str, Any] = field(default_factory=dict)
    width: int = 512
    feed_forward: int = 2048
    layers: int = 4
    heads: int = 8
    key_value_heads: int = 2
    head_dim: int = 64
    image_size: int = 224
    training_rows: int = 32

    @property
    def image_tokens(self) -> int:
        return (self.image_size // 16) ** 2

    def vision(self, **names: str) -> dict[str, Any]:
        """Fields that the vision configurations of all peers have under the same names."""
        return {
            "hidden_size": self.vision_width,
            "intermediate_size": self.vision_feed_forward,
            "num_hidden_layers": self.vision_layers,
            "num_attention_heads": self.vision_heads,
            "image_size": self.image_size,
            "patch_size": 16,
        } | names

    def text(self, **fields: Any) -> dict[str, Any]:
        """Fields that the text configurations of all contestants have under the same names."""
        return {
            "hidden_size": self.width,
            "intermediate_size": self.feed_forward,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "vocab_size": VOCABULARY,
            "pad_token_id": PAD,
            "bos_token_id": START,
            "eos_token_id": END,
        } | fields

    def grouped(self) -> dict[str, int]:
        """Fields of grouped-query attention."""
        return {"num_key_value_heads": self.key_value_heads, "head_dim": self.head_dim}


TINY_SIZES = Sizes(
    vision_width=32,
    vision_feed_forward=64,
    vision_layers=1,
    vision_heads=2,
    own_tower={
        "conv_widths": [4, 4, 4, 8, 8, 16],
        "conv_depths": [1, 1, 1, 1],
        "conv_kernel_sizes": [3, 3, 3, 3],
        "conv_strides": [2, 2, 2, 2],
    },
    width=32,
    feed_forward=64,
    layers=2,
    heads=4,
    key_value_heads=2,
    head_dim=8,
    image_size=64,
    training_rows=4,
)


@dataclass(frozen=True)
class Setup:
    """Where and in which numbers a contestant computes.

    Attributes:
        processor: folder of our processor, whose token ids all contestants read.
        device, dtype: weights and inputs lie there and are such. Training keeps float32 weights, and computes in
            dtype by autocast.
    """

    processor: str
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    sizes: Sizes = field(default_factory=Sizes)
    training: bool = False

    @property
    def name(self) -> str:
        return f"{self.device} {str(self.dtype).removeprefix('torch.')}"

    @property
    def weight_dtype(self) -> torch.dtype:
        return torch.float32 if self.training else self.dtype

    def pixels(self, images: int) -> torch.Tensor:
        """Random images [I,3,H,W], as a processor would have made them."""
        size = self.sizes.image_size
        pixels = torch.randn(images, 3, size, size, generator=torch.Generator().manual_seed(0))
        return pixels.to(self.device, self.weight_dtype)


@cache
def load_processor(folder: str) -> TrafficVLMProcessor:
    return TrafficVLMProcessor.from_pretrained(Path(folder))


class Contestant:
    """A model, and how it is used."""

    name = ""
    model_class: Any = None
    compiles = True  # its step of generation, with a static cache

    def __init__(self, setup: Setup):
        self.setup = setup
        torch.manual_seed(0)
        self.model = self.model_class(self.config(setup.sizes)).to(setup.device, setup.weight_dtype).eval()

    def config(self, sizes: Sizes) -> Any:
        raise NotImplementedError

    def yes_no(self, pixels: torch.Tensor, questions: Questions) -> Run:
        """A run that gives P(yes) of every question, [N] in order."""
        raise NotImplementedError

    def prompt(self, pixels: torch.Tensor, question: str) -> dict[str, torch.Tensor]:
        """What `generate` takes for one question about one image."""
        raise NotImplementedError

    def training_batches(
        self, pixels: torch.Tensor, questions: Questions, answers: Questions
    ) -> list[dict[str, torch.Tensor]]:
        """What `forward` takes for questions with answers; the gradients of all batches make one step."""
        raise NotImplementedError

    def forward(self, batch: dict[str, torch.Tensor]) -> Any:
        return self.model(**batch)

    def generation(self, pixels: torch.Tensor, question: str, tokens: int, **options: Any) -> Run:
        """A run that greedily generates exactly so many tokens; `options` are those of `generate`."""
        length = {"min_new_tokens": tokens, "max_new_tokens": tokens, "do_sample": False}
        inputs = self.prompt(pixels, question) | length | options
        return lambda: self.model.generate(**inputs)

    def compiled_generation(self, pixels: torch.Tensor, question: str, tokens: int) -> Run:
        """As `generation`, with a static cache and the step of a token compiled, in the library's own way."""
        if self.setup.device == "cpu":
            compile_config = CompileConfig(mode="default")  # the library's default is for CUDA graphs
            compile_config._compile_all_devices = True  # without this the library compiles for GPUs only
        else:
            compile_config = CompileConfig()
        options = {"cache_implementation": "static", "compile_config": compile_config}
        return self.generation(pixels, question, tokens, **options)

    def training(self, pixels: torch.Tensor, questions: Questions, answers: Questions) -> Run:
        """A run that makes one step of AdamW on all questions, and gives the loss."""
        batches = self.training_batches(pixels, questions, answers)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        reduced = self.setup.dtype != torch.float32
        autocast = torch.autocast(self.setup.device.split(":")[0], torch.bfloat16, enabled=reduced)
        self.model.train()

        def step() -> torch.Tensor:
            loss = torch.zeros((), device=self.setup.device)
            with torch.enable_grad():
                for batch in batches:
                    with autocast:
                        part = self.forward(batch).loss / len(batches)
                    part.backward()
                    loss += part.detach()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of questions: `[SOS] words ?`."""
        return load_processor(self.setup.processor)(text=list(texts))["input_ids"]

    def to_device(self, **tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: tensor.to(self.setup.device) for name, tensor in tensors.items()}


class Ours(Contestant):
    """This project's model: an image is encoded once, its questions are packed in one row."""

    name = "ours"
    model_class = TrafficVLMForConditionalGeneration

    def config(self, sizes: Sizes) -> TrafficVLMConfig:
        return TrafficVLMConfig(self.vision(sizes), sizes.text(vocab_size=500) | sizes.grouped())

    def vision(self, sizes: Sizes) -> dict[str, Any]:
        fields = ("vision_width", "vision_feed_forward", "vision_heads")
        names = ("hidden_size", "intermediate_size", "num_attention_heads")
        shared = {name: getattr(sizes, field) for name, field in zip(names, fields)}
        return shared | {"image_size": sizes.image_size} | sizes.own_tower

    def process(self, text: Any, **options: Any) -> dict[str, torch.Tensor]:
        inputs = load_processor(self.setup.processor)(text=text, return_tensors="pt", **options)
        return self.to_device(**inputs)

    def yes_no(self, pixels: torch.Tensor, questions: Questions) -> Run:
        return self.yes_no_about({"pixel_values": pixels}, questions)

    def yes_no_about(self, image: dict[str, Any], questions: Questions) -> Run:
        """As `yes_no`, about `pixel_values` or `encoded_images`."""
        inputs = self.process([list(row) for row in questions], packed=True) | image
        return lambda: torch.cat(self.model.score_yes_no(**inputs))

    def prompt(self, pixels: torch.Tensor, question: str) -> dict[str, Any]:
        return self.process(question) | {"pixel_values": pixels}

    def training_batches(self, pixels: torch.Tensor, questions: Questions, answers: Questions) -> list[dict[str, Any]]:
        """One batch: an image a row, with all its questions and answers."""
        texts = {"text": [list(row) for row in questions], "suffix": [list(row) for row in answers]}
        return [self.process(**texts, packed=True) | {"pixel_values": pixels}]


class OursWithPatches(Ours):
    """The same decoder on the tower that the peers have, so that what the decoder gains is seen alone."""

    name = "ours, patch tower"

    def vision(self, sizes: Sizes) -> dict[str, Any]:
        return sizes.vision(model_type="siglip_vision_model")


class Peer(Contestant):
    """A model that answers one question in a row: what is the same for all of them."""

    pads_left = True

    def row(self, question: list[int]) -> list[int]:
        """The prompt of a question, as the model's own processor lays it out."""
        raise NotImplementedError

    def extra(self, prompts: list[list[int]], answers: list[list[int]]) -> dict[str, torch.Tensor]:
        """Inputs besides ids, mask, labels and pixels."""
        return {}

    def place_pixels(self, pixels: torch.Tensor) -> torch.Tensor:
        """Pixels [B,3,H,W] of the rows in the shape that the model takes."""
        return pixels

    def batches(
        self, pixels: torch.Tensor, questions: Questions, rows_at_once: int, answers: Questions | None = None
    ) -> list[dict[str, torch.Tensor]]:
        images = torch.tensor([number for number, row in enumerate(questions) for _ in row])
        prompts = [self.row(ids) for ids in self.tokenize([question for row in questions for question in row])]
        replies = [[YES if answer == "yes" else NO, END] for row in answers or [] for answer in row]
        batches = []
        for start in range(0, len(prompts), rows_at_once):
            chosen = slice(start, start + rows_at_once)
            batch = self.inputs(prompts[chosen], replies[chosen])
            batch["pixel_values"] = self.place_pixels(pixels[images[chosen].to(pixels.device)])
            batches.append(batch)
        return batches

    def inputs(self, prompts: list[list[int]], answers: list[list[int]]) -> dict[str, torch.Tensor]:
        """Padded ids and their mask, and with answers the labels."""
        texts = [prompt + answer for prompt, answer in zip(prompts, answers)] if answers else prompts
        tensors = {"input_ids": self.pad(texts, PAD), "attention_mask": self.pad([[1] * len(t) for t in texts], 0)}
        if answers:
            labels = [[IGNORED] * len(prompt) + answer for prompt, answer in zip(prompts, answers)]
            tensors["labels"] = self.pad(labels, IGNORED)
        return self.to_device(**tensors, **self.extra(prompts, answers))

    def pad(self, rows: list[list[int]], filler: int) -> torch.Tensor:
        width = max(map(len, rows))
        fills = [[filler] * (width - len(row)) for row in rows]
        return torch.tensor([fill + row if self.pads_left else row + fill for fill, row in zip(fills, rows)])

    def score(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """P(yes) [B] from the logits of the answer's first token, the only ones that are computed."""
        logits = self.model(**batch, use_cache=False, logits_to_keep=1).logits[:, -1]
        return logits[:, [NO, YES]].float().softmax(-1)[:, 1]

    def yes_no(self, pixels: torch.Tensor, questions: Questions) -> Run:
        batches = self.batches(pixels, questions, ROWS_AT_ONCE)
        return torch.no_grad()(lambda: torch.cat([self.score(batch) for batch in batches]))

    def prompt(self, pixels: torch.Tensor, question: str) -> dict[str, torch.Tensor]:
        return self.batches(pixels, [[question]], 1)[0]

    def training_batches(
        self, pixels: torch.Tensor, questions: Questions, answers: Questions
    ) -> list[dict[str, torch.Tensor]]:
        return self.batches(pixels, questions, self.setup.sizes.training_rows, answers)


class PaliGemma(Peer):
    """SigLIP tower, linear projector, Gemma decoder: the image's 196 tokens stand in the prompt before the question.

    The prompt is `<image>*196 <bos> question \\n`. Image and question see each other in both directions, which
    `token_type_ids` of 0 say, as the processor gives them; answers are causal (1).
    """

    name = "PaliGemma"
    model_class = PaliGemmaForConditionalGeneration

    def config(self, sizes: Sizes) -> PaliGemmaConfig:
        return PaliGemmaConfig(
            vision_config=sizes.vision(model_type="siglip_vision_model") | {"vision_use_head": False},
            text_config=sizes.text(model_type="gemma") | sizes.grouped(),
            image_token_index=IMAGE,
            projection_dim=sizes.width,
            hidden_size=sizes.width,
        )

    def row(self, question: list[int]) -> list[int]:
        return [IMAGE] * self.setup.sizes.image_tokens + [*question, NEWLINE]

    def extra(self, prompts: list[list[int]], answers: list[list[int]]) -> dict[str, torch.Tensor]:
        types = [
            [0] * len(prompt) + [1] * len(answer) for prompt, answer in zip(prompts, answers or [[]] * len(prompts))
        ]
        return {"token_type_ids": self.pad(types, 0)}


class PaliGemmaImageOnce(PaliGemma):
    """The same for a user who goes further than its documentation: the tower looks at each image once.

    Its features are put in the rows' embeddings by hand. The decoder still reads them in every row; because image and
    question see each other, its keys and values cannot be shared among questions.
    """

    name = "PaliGemma, image once"

    def yes_no(self, pixels: torch.Tensor, questions: Questions) -> Run:
        batches = self.batches(pixels, questions, ROWS_AT_ONCE)
        images = torch.tensor([number for number, row in enumerate(questions) for _ in row], device=pixels.device)
        for batch in batches:
            del batch["pixel_values"]

        @torch.no_grad()
        def run() -> torch.Tensor:
            inner = self.model.model
            features = inner.multi_modal_projector(inner.vision_tower(pixels).last_hidden_state)
            return torch.cat([self.score_with(b, features[i]) for b, i in zip(batches, images.split(ROWS_AT_ONCE))])

        return run

    def score_with(self, batch: dict[str, torch.Tensor], features: torch.Tensor) -> torch.Tensor:
        others = {name: tensor for name, tensor in batch.items() if name != "input_ids"}
        embeddings = self.model.get_input_embeddings()(batch["input_ids"])
        embeddings[batch["input_ids"] == IMAGE] = features.flatten(0, 1).to(embeddings)
        return self.score({"inputs_embeds": embeddings} | others)


class Idefics3(Peer):
    """SigLIP tower, pixel shuffle, Llama decoder: the shape of Idefics3 and SmolVLM. 49 image tokens in the prompt.

    The prompt is `<bos>User:<fake><global-img><image>*49<fake>question<end_of_utterance>\\nAssistant:`. Four patches
    make a token (`scale_factor` 2). The image is not cut into tiles: at 224 pixels there is nothing to gain from it.
    """

    name = "Idefics3 / SmolVLM"
    model_class = Idefics3ForConditionalGeneration
    SCALE = 2

    def config(self, sizes: Sizes) -> Idefics3Config:
        return Idefics3Config(
            vision_config=sizes.vision(model_type="idefics3_vision"),
            text_config=sizes.text(model_type="llama", tie_word_embeddings=True) | sizes.grouped(),
            image_token_id=IMAGE,
            scale_factor=self.SCALE,
            tie_word_embeddings=True,
            pad_token_id=PAD,
        )

    def row(self, question: list[int]) -> list[int]:
        image = [FAKE, GLOBAL, *[IMAGE] * (self.setup.sizes.image_tokens // self.SCALE**2), FAKE]
        return [START, USER, COLON, *image, *question[1:], END_OF_TURN, NEWLINE, ASSISTANT, COLON]

    def place_pixels(self, pixels: torch.Tensor) -> torch.Tensor:
        return pixels[:, None]  # one image a row


class BlipQuestionAnswering(BlipForQuestionAnswering):
    """BLIP-VQA whose text is narrower than its vision tower.

    The library's decoder takes the question's states to be as wide as the image's; this one is as wide as they are.
    """

    def __init__(self, config: BlipConfig):
        super().__init__(config)
        decoder = deepcopy(config.text_config)
        decoder.encoder_hidden_size = decoder.hidden_size
        self.text_decoder = BlipTextLMHeadModel(decoder)
        self.post_init()


class Blip(Peer):
    """BLIP-VQA: a question encoder reads the image by cross-attention, an answer decoder the encoder's states.

    Encoder and decoder have the depth of our decoder each, and full multi-head attention, as BLIP has no other. P(yes)
    is read from the logits of the answer's first token: `generate` with one token, without the loop around it.
    """

    name = "BLIP-VQA"
    model_class = BlipQuestionAnswering
    compiles = False  # the compiled step reads beyond its cache, and ends the process (transformers 5.23, torch 2.13)
    pads_left = False

    def config(self, sizes: Sizes) -> BlipConfig:
        text = sizes.text(sep_token_id=END, max_position_embeddings=128)
        return BlipConfig(text_config=text, vision_config=sizes.vision())

    def row(self, question: list[int]) -> list[int]:
        return [*question, END]

    def inputs(self, prompts: list[list[int]], answers: list[list[int]]) -> dict[str, torch.Tensor]:
        """The answers stand in `labels` alone, after a start token, and none needs padding."""
        tensors = super().inputs(prompts, [])
        labels = self.to_device(labels=torch.tensor([[START, *answer] for answer in answers])) if answers else {}
        return tensors | labels

    def forward(self, batch: dict[str, torch.Tensor]) -> Any:
        with torch.device(self.setup.device):  # its forward makes a mask on the default device
            return self.model(**batch)

    def score(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        image = self.model.vision_model(batch["pixel_values"]).last_hidden_state
        image_mask = torch.ones(image.shape[:2], dtype=torch.long, device=image.device)
        mask = batch["attention_mask"]
        about = {"encoder_hidden_states": image, "encoder_attention_mask": image_mask}
        question = self.model.text_encoder(batch["input_ids"], attention_mask=mask, **about).last_hidden_state
        start = torch.full((len(question), 1), START, device=question.device)
        about = {"encoder_hidden_states": question, "encoder_attention_mask": mask}
        logits = self.model.text_decoder(start, **about, use_cache=False).logits[:, -1]
        return logits[:, [NO, YES]].float().softmax(-1)[:, 1]


CONTESTANTS: dict[str, type[Contestant]] = {
    one.name: one for one in (Ours, OursWithPatches, PaliGemma, PaliGemmaImageOnce, Blip, Idefics3)
}
