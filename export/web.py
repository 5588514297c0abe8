"""The model as a page that runs in the browser: a folder of static files, for any file server.

    index.html, page.js, traffic_vlm.js, style.css, worker.js   web/, as it is
    page.json                                                   sizes, token ids, example questions, files to load
    README.md                                                   with the metadata of a static Space
    pinned/model-DIGEST/                                        graphs, tokenizer, and the Python rules of questions
    pinned/onnxruntime-web-VERSION/ and others                  JavaScript libraries, fetched by npm

A file under pinned/ never changes, because its folder is named after its content: browsers need not ask for it again.
"""

import hashlib
import json
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..common.files import ROOT, new_folder
from ..common.image_files import MAX_PIXELS
from ..configuration_traffic_vlm import height_and_width, token_grid
from ..data.scene import CLASSES, class_words
from .onnx import OPSET, export_settings, load, make_graphs, save_onnx, store_in_less


EXAMPLES = [ROOT / "docs" / f"{name}.jpg" for name in ("crossing", "night", "truck")]
RULES = ("question_traffic_vlm.py", "common/answers.py", "export/asking.py")
ORT, ORT_FILES = "onnxruntime-web@1.30.0", "dist/ort-wasm-simd-threaded"
# Name → package of npm, and the files of it that the page loads. package.json names the license.
LIBRARIES: dict[str, tuple[str, list[str]]] = {
    "wasm": (ORT, ["dist/ort.wasm.min.mjs", f"{ORT_FILES}.mjs", f"{ORT_FILES}.wasm"]),
    "webgpu": (ORT, ["dist/ort.webgpu.min.mjs", f"{ORT_FILES}.asyncify.mjs", f"{ORT_FILES}.asyncify.wasm"]),
    "tokenizers": ("@huggingface/tokenizers@0.2.0", ["dist/tokenizers.min.mjs"]),
    "python": (
        "pyodide@314.0.7",
        ["pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json"],
    ),
}


def fetch_libraries(folder: Path) -> dict[str, dict[str, int]]:
    """Library → file → its size in bytes, after writing the libraries into folders like `pyodide-314.0.7`.

    npm compares each package with the digest in its registry, and caches it.

    Raises:
        ValueError: npm is missing, or cannot fetch a package.
    """
    npm = shutil.which("npm")
    if npm is None:
        raise ValueError("the page needs JavaScript libraries, which npm fetches: install Node.js, which has npm")
    sizes: dict[str, dict[str, int]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for library, (package, files) in LIBRARIES.items():
            command = [npm, "pack", "--silent", "--prefer-offline", package]
            done = subprocess.run(command, cwd=temporary, capture_output=True, text=True)
            if done.returncode:
                raise ValueError(f"npm cannot fetch {package}: {(done.stderr or done.stdout).strip()[-500:]}")
            name = package.rpartition("/")[2].replace("@", "-")
            with tarfile.open(Path(temporary, done.stdout.split()[-1])) as archive:
                for file in (*files, "package.json"):
                    path = folder / name / file
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(archive.extractfile(f"package/{file}").read())  # type: ignore[union-attr]
            sizes[library] = {f"{name}/{file}": (folder / name / file).stat().st_size for file in files}
    return sizes


def pixels_graph(about: Mapping[str, Any]) -> Any:
    """An ONNX model: image [H,W,4] of any size, opaque RGBA in uint8 as a canvas has it → pixel_values [1,3,h,w].

    Browsers resize in different ways. The graph resizes as Pillow's bicubic filter does; levels, of 255, differ by 1
    at most.

    Args:
        about: what `export_settings` returns.
    """
    from onnx import checker, parser

    height, width = about["image_size"]
    mean, std = (", ".join(str(float(value)) for value in about[name]) for name in ("mean", "std"))
    model = parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": {OPSET}]>
        pixels (uint8[height, width, 4] image) => (float[1, 3, {height}, {width}] pixel_values)
        <int64[1] zero = {{0}}, int64[1] two = {{2}}, int64[1] three = {{3}},
         int64[4] size = {{1, 3, {height}, {width}}}, float factor = {{{about["rescale_factor"]}}},
         float[1, 3, 1, 1] mean = {{{mean}}}, float[1, 3, 1, 1] std = {{{std}}}>
        {{
            opaque = Slice(image, zero, three, two)
            planes = Transpose<perm = [2, 0, 1]>(opaque)
            batch = Unsqueeze(planes, zero)
            resized = Resize<mode = "cubic", antialias = 1, exclude_outside = 1, cubic_coeff_a = -0.5>(batch, , , size)
            levels = Cast<to = 1>(resized)
            scaled = Mul(levels, factor)
            centered = Sub(scaled, mean)
            pixel_values = Div(centered, std)
        }}
    """)
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
    """Write the graphs, the tokenizer and the rules of questions into a folder."""
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
        ValueError, OSError: the folder exists; the model cannot be used; or npm is missing or fails.
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
        "kinds": list(processor.rules.examples.values()),
        "known_nouns": processor.rules.known_nouns(processor.taught_words),
        "examples": [f"examples/{path.name}" for path in EXAMPLES],
    }
