"""The model as a page that runs in the browser: a folder of static files, for any file server.

    index.html, page.js, traffic_vlm.js, style.css, worker.js   web/, as it is
    page.json                                                   sizes, token ids, suggested questions, files to load
    README.md                                                   with the metadata of a static Space
    pinned/model-DIGEST/                                        graphs, tokenizer, and the Python rules of questions
    pinned/onnxruntime-web-VERSION/ and others                  JavaScript libraries, fetched by npm

A file under pinned/ never changes, because its folder is named after its content: browsers need not ask for it again.
"""

import hashlib
import json
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..common.files import ROOT, new_folder
from ..common.image_files import MAX_PIXELS
from ..configuration_traffic_vlm import height_and_width, token_grid
from ..data.scene import CLASSES, class_words
from ..data.suggestions import suggest_questions
from .libraries import fetch_libraries
from .onnx import OPSET, export_settings, load, make_graphs, save_onnx, store_in_less


EXAMPLES = [ROOT / "docs" / f"{name}.jpg" for name in ("crossing", "night", "truck")]
RULES = ("question_traffic_vlm.py", "common/answers.py", "export/asking.py")
RESIZING = {2: "linear", 3: "cubic"}  # Pillow's filters → modes of the operator


def pixels_graph(about: Mapping[str, Any]) -> Any:
    """An ONNX model: image [H,W,4] of any size, opaque RGBA in uint8 as a canvas has it → pixel_values [1,3,h,w].

    Browsers resize in different ways. The graph resizes as Pillow does; levels, of 255, differ by 1 at most.

    Args:
        about: what `export_settings` returns.

    Raises:
        ValueError: the model's images are resized by a filter that ONNX does not have.
    """
    from onnx import TensorProto, checker, helper, numpy_helper

    if about["resample"] not in RESIZING:
        raise ValueError(f"resample={about['resample']}: the browser can resize by the filters {[*RESIZING]} only")
    size = about["image_size"]
    constants: dict[str, Any] = {name: np.array([value]) for name, value in (("zero", 0), ("three", 3), ("two", 2))}
    constants["size"] = np.array([1, 3, *size])
    constants["factor"] = np.float32(about["rescale_factor"])
    constants |= {name: np.array(about[name], np.float32).reshape(1, 3, 1, 1) for name in ("mean", "std")}
    resizing = {"mode": RESIZING[about["resample"]], "antialias": 1, "exclude_outside": 1, "cubic_coeff_a": -0.5}
    steps: list[tuple[str, list[str], dict[str, Any]]] = [
        ("Slice", ["image", "zero", "three", "two"], {}),  # without alpha
        ("Transpose", ["0"], {"perm": [2, 0, 1]}),
        ("Unsqueeze", ["1", "zero"], {}),
        ("Resize", ["2", "", "", "size"], resizing),
        ("Cast", ["3"], {"to": TensorProto.FLOAT}),
        ("Mul", ["4", "factor"], {}),
        ("Sub", ["5", "mean"], {}),
        ("Div", ["6", "std"], {}),
    ]
    names = [*map(str, range(len(steps) - 1)), "pixel_values"]
    graph = helper.make_graph(
        [helper.make_node(kind, inputs, [name], **more) for name, (kind, inputs, more) in zip(names, steps)],
        "pixels",
        [helper.make_tensor_value_info("image", TensorProto.UINT8, ["height", "width", 4])],
        [helper.make_tensor_value_info("pixel_values", TensorProto.FLOAT, [1, 3, *size])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)
    checker.check_model(model)
    return model


def browser_tokenizer(content: str) -> dict[str, Any]:
    """The content of a tokenizer.json for the JavaScript library, which has no vocabularies of whole words.

    A WordPiece vocabulary without word pieces does the same. Special tokens in a question become ordinary words.
    """
    tokenizer = json.loads(content)
    tokenizer["model"] |= {"type": "WordPiece", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    tokenizer["added_tokens"] = [token for token in tokenizer["added_tokens"] if not token["special"]]
    return tokenizer


def write_model(model: Any, processor: Any, folder: Path) -> None:
    """Write the graphs, the tokenizer and the rules of questions into a folder. Raises what `pixels_graph` does."""
    import onnx

    onnx.save(pixels_graph(export_settings(model, processor)), folder / "pixels.onnx")
    graphs = make_graphs(model)
    for name in ("vision", "decode"):
        save_onnx(graphs[name], folder / f"{name}.onnx")
        store_in_less(folder / f"{name}.onnx")
    tokenizer = browser_tokenizer(processor.tokenizer.backend_tokenizer.to_str())
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with zipfile.ZipFile(folder / "rules.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name in RULES:  # with the same time in each export, so that the same rules have the same digest
            archive.writestr(zipfile.ZipInfo(f"traffic_vlm/{name}"), (ROOT / name).read_bytes())


def export_page(model_folder: Path, output_dir: Path, image_size: tuple[int, int] | None = None) -> list[Path]:
    """The files of the page of a model, in a new folder, which appears when it is complete.

    Its graphs read images of (height, width) `image_size`, by default the model's.

    Raises:
        ValueError, OSError: the folder exists; the model cannot be used; npm is missing or fails; or the browser
            cannot resize images as the model needs it.
        ModuleNotFoundError: a package is missing.
    """
    with new_folder(output_dir) as folder:
        model, processor = load(model_folder, image_size)
        pinned = folder / "pinned"
        files = fetch_libraries(pinned)
        weights = pinned / "model"
        weights.mkdir()
        write_model(model, processor, weights)
        digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(weights.iterdir()))).hexdigest()[:12]
        weights = weights.rename(pinned / f"model-{digest}")
        files["model"] = {f"{weights.name}/{path.name}": path.stat().st_size for path in sorted(weights.iterdir())}

        shutil.copytree(ROOT / "web", folder, dirs_exist_ok=True)
        (folder / "examples").mkdir()
        for path in EXAMPLES:
            shutil.copy(path, folder / "examples")
        for path in (model_folder if (model_folder / "README.md").is_file() else ROOT).glob("LICENSE*"):
            shutil.copy(path, folder)
        (folder / "page.json").write_text(json.dumps(page_data(model, processor) | {"files": files}))
    return sorted(path for path in output_dir.rglob("*") if path.is_file())


def page_data(model: Any, processor: Any) -> dict[str, Any]:
    """The content of page.json, apart from its "files": for each library and the model, path under pinned/ → bytes."""
    vision = model.config.vision_config
    return {
        "model": export_settings(model, processor),
        "grid": token_grid(vision, *height_and_width(vision.image_size)),  # of an attention map
        "max_pixels": MAX_PIXELS,
        "nouns": sorted({word for label in CLASSES for word in class_words(label)}),
        "suggested": suggest_questions(processor),
        "kinds": list(processor.rules.examples.values()),
        "known_nouns": processor.rules.known_nouns(processor.taught_words),
        "examples": [f"examples/{path.name}" for path in EXAMPLES],
    }
