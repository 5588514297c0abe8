"""Fixtures shared by all tests. Nothing here touches the network."""

import os


os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import runpy
import shutil
import signal
import sys
from logging import NOTSET, disable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import create_autospec

import pytest
import torch
from filelock import FileLock
from huggingface_hub import HfApi
from hypothesis import settings
from transformers.utils import logging

from tiny import ROOT, TINY_TOWER, save_folder, tiny_decoder, tiny_model, tiny_processor


HANDLERS = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
settings.register_profile("test", max_examples=50)
settings.register_profile("fuzz", max_examples=5000)  # `make fuzz`
settings.load_profile("test")


@pytest.fixture(autouse=True)
def one_thread_and_own_signals():
    """Undo what commands set: threads, which change sums, and handlers of signals, which workers of a pool inherit."""
    torch.set_num_threads(1)
    yield
    for number, handler in HANDLERS.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def model():
    """A tiny full model; tests must not change it."""
    return tiny_model()


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory):
    """The folder of the tiny model; tests must not change it."""
    return str(save_folder(tiny_model(), tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="session")
def decoder():
    """A tiny decoder with cross-attention to tokens of width 24; tests must not change it."""
    return tiny_decoder()


@pytest.fixture(scope="session")
def start(tmp_path_factory):
    """A folder to train from: a tiny model of 64 pixels, and the project's processor; tests must not change it."""
    vision = TINY_TOWER | {"model_type": "traffic_vlm_vision", "image_size": 64}
    return save_folder(tiny_model(text={"hidden_dropout": 0.1}, vision=vision), tmp_path_factory.mktemp("start"))


@pytest.fixture(scope="session")
def processor():
    return tiny_processor()


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    """(folder of a tiny model, folder of its graphs), exported once for all workers; tests must not change them."""
    from traffic_vlm.export.onnx import export

    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, graphs = base / "exported model", base / "graphs"
    with FileLock(base / "export.lock"):
        if not graphs.exists():
            vision = {"model_type": "traffic_vlm_vision", "located": {"bus": 0.0, "car": 0.0}} | TINY_TOWER
            model = tiny_model(seed=1, text={"yes_bias": 0.4}, vision=vision, yes_no_temperature=1.7)
            folder.mkdir(exist_ok=True)
            export(save_folder(model, folder), graphs)
    return folder, graphs


@pytest.fixture
def run_script(monkeypatch):
    """A function that runs a script of the repository in this process, with these arguments.

    It raises SystemExit if the script ends with another exit status than `status`.
    """

    def run(name, *arguments, status=0):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])  # as Python does, for a script
        verbosity, ended = logging.get_verbosity(), None
        try:
            runpy.run_path(str(ROOT / "scripts" / name), run_name="__main__")
        except SystemExit as end:
            ended = end.code
            if (ended or 0) != status:
                raise
        finally:  # scripts silence the library
            logging.set_verbosity(verbosity)
            logging.enable_progress_bar()
            disable(NOTSET)
        assert (ended or 0) == status

    return run


@pytest.fixture(scope="module")
def browser():
    """Chromium without a window; its camera shows a moving test picture."""
    playwright = pytest.importorskip("playwright.sync_api")
    options = ["--no-sandbox", "--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
    with playwright.sync_playwright() as manager:
        found = shutil.which("chromium") or shutil.which("google-chrome")
        try:
            browser = manager.chromium.launch(executable_path=found, args=options)
        except playwright.Error as error:
            pytest.skip(f"needs Chromium: {str(error).splitlines()[0]}")
        yield browser
        browser.close()


@pytest.fixture
def hub(monkeypatch):
    """Replaces `HfApi` in `traffic_vlm.training.publish`: `hub.commits` lists (repository, {path: content})."""
    api = create_autospec(HfApi, instance=True)
    api.commits, api.is_private = [], {}

    def create_repo(repo_id, *, private=None, exist_ok=False):
        repo_id = repo_id if "/" in repo_id else f"me/{repo_id}"
        api.is_private.setdefault(repo_id, bool(private))
        return SimpleNamespace(repo_id=repo_id)

    def upload_folder(*, repo_id, folder_path):
        paths = [path for path in Path(folder_path).rglob("*") if path.is_file()]
        api.commits.append((repo_id, {path.relative_to(folder_path).as_posix(): path.read_bytes() for path in paths}))
        return SimpleNamespace(commit_url=f"https://huggingface.co/{repo_id}/commit/1")

    api.create_repo.side_effect = create_repo
    api.upload_folder.side_effect = upload_folder
    api.repo_info.side_effect = lambda repo_id: SimpleNamespace(private=api.is_private[repo_id])
    monkeypatch.setattr("traffic_vlm.training.publish.HfApi", lambda token: api)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    return api
