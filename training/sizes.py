"""Options that choose the sizes of a new decoder, for training from scratch and for building the JSON files."""

from dataclasses import dataclass, field
from typing import Any

from ..configuration_traffic_vlm import MEDIUM_TEXT


TEXT_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "kv_latent_size"),
)


@dataclass
class SizeOptions:
    medium: bool = field(
        default=False,
        metadata={"help": "the medium decoder, 6 layers of width 768: 60.6 M parameters in place of 18.1"},
    )
    hidden_size: int | None = field(default=None, metadata={"help": "width of the decoder"})
    intermediate_size: int | None = field(default=None, metadata={"help": "width of its feed-forward layers"})
    num_hidden_layers: int | None = field(default=None, metadata={"help": "number of its layers"})
    num_attention_heads: int | None = field(default=None, metadata={"help": "number of its query heads"})
    num_key_value_heads: int | None = field(
        default=None, metadata={"help": "number of its key/value heads: 1 is multi-query attention"}
    )
    kv_latent_size: int | None = field(
        default=None, metadata={"help": "multi-head latent attention with a latent of this size"}
    )

    def text_fields(self) -> dict[str, Any]:
        """Fields of the text configuration that were chosen, by name; {} for the default sizes."""
        given = {name: getattr(self, name) for name in TEXT_SIZES}
        chosen = {name: value for name, value in given.items() if value is not None}
        return (MEDIUM_TEXT if self.medium else {}) | chosen
