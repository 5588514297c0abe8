"""The JavaScript libraries of the page, which npm fetches: ONNX Runtime, a tokenizer, and Python for the questions."""

import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path


ORT = "dist/ort-wasm-simd-threaded"
# Name → package of npm, its version, and the files of it that the page loads. package.json names the license.
LIBRARIES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "wasm": ("onnxruntime-web", "1.30.0", ("dist/ort.wasm.min.mjs", f"{ORT}.mjs", f"{ORT}.wasm")),
    "webgpu": (
        "onnxruntime-web",
        "1.30.0",
        ("dist/ort.webgpu.min.mjs", f"{ORT}.asyncify.mjs", f"{ORT}.asyncify.wasm"),
    ),
    "tokenizers": ("@huggingface/tokenizers", "0.2.0", ("dist/tokenizers.min.mjs",)),
    "python": (
        "pyodide",
        "314.0.7",
        ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json"),
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
        for library, (package, version, files) in LIBRARIES.items():
            command = [npm, "pack", "--silent", "--prefer-offline", f"{package}@{version}"]
            done = subprocess.run(command, cwd=temporary, capture_output=True, text=True)
            if done.returncode:
                reason = (done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}")[-500:]
                raise ValueError(f"npm cannot fetch {package} {version}: {reason}")
            name = f"{package.rpartition('/')[2]}-{version}"
            with tarfile.open(Path(temporary, done.stdout.split()[-1])) as archive:
                for file in (*files, "package.json"):
                    path = folder / name / file
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(archive.extractfile(f"package/{file}").read())  # type: ignore[union-attr]
            sizes[library] = {f"{name}/{file}": (folder / name / file).stat().st_size for file in files}
    return sizes
