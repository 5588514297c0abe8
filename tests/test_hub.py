"""What goes to the Hub and what comes back, against a stand-in for the Hub; and what must not go there."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import textwrap

import huggingface_hub
import pytest
import torch

from hub_stand_in import TOKEN, VANISH, HubStandIn
from tiny import ROOT, random_ids, random_pixels, tiny_model
from traffic_vlm.publishing import hub as publishing
from traffic_vlm.publishing.hub import PublishError, publish, push, stage


SCRIPT = ROOT / "scripts" / "push_to_hub.py"
CODE = {path.name for path in ROOT.glob("*_traffic_vlm.py")}
JSON = {"config.json", "generation_config.json", "decision.json"}
JSON |= {"tokenizer.json", "tokenizer_config.json", "processor_config.json"}
TEMPLATES = {"chat_template.jinja", "decision_template.jinja"}
EXPECTED = CODE | JSON | TEMPLATES | {"model.safetensors", "README.md", "LICENSE"}
CARD = (
    "---\nlicense: mit\nlibrary_name: transformers\npipeline_tag: image-text-to-text\ntags: [traffic]\n---\n# Mine\n"
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, processor):
    """A tiny model as training leaves it, among what must not go up."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model(yes_no_temperature=1.6).save_pretrained(folder)
    processor.save_pretrained(folder)
    (folder / "README.md").write_text(CARD)
    for name in ("checkpoint-5/model.safetensors", "checkpoint-5/optimizer.pt", "runs/events", "training_args.bin"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"left by a training run")
    return folder


@pytest.fixture(scope="module")
def staged(tmp_path_factory, saved):
    folder = tmp_path_factory.mktemp("staged")
    stage(saved, folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of the saved model, to be spoilt."""
    return shutil.copytree(saved, tmp_path / "model")


@pytest.fixture
def hub(monkeypatch):
    """A stand-in that this process talks to; second tries come without waiting."""
    with HubStandIn() as server:
        for name, value in (("ENDPOINT", server.url), ("HF_HUB_OFFLINE", False), ("HF_HUB_DISABLE_XET", True)):
            monkeypatch.setattr(huggingface_hub.constants, name, value)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr("time.sleep", lambda seconds: None)
        yield server


@pytest.fixture
def no_loading(monkeypatch):
    """Leave out the check that takes a fresh process."""
    monkeypatch.setattr(publishing, "check_loading", lambda staged: [])


def run_script(monkeypatch, *arguments) -> int:
    """The exit status of the script, run in this process."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return end.value.code


def edit(path, **fields) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_what_was_pushed_is_what_loads(saved, tmp_path):
    ids, pixels = random_ids(2, 5), random_pixels(2)
    with torch.no_grad():
        expected = tiny_model(yes_no_temperature=1.6)(ids, pixels).logits
    torch.save({"ids": ids, "pixels": pixels, "expected": expected}, tmp_path / "case.pt")
    code = """
        import torch
        from transformers import AutoModel, AutoProcessor
        case, name = torch.load("case.pt"), "me/traffic-vlm"
        model = AutoModel.from_pretrained(name, trust_remote_code=True)
        with torch.no_grad():
            logits = model(case["ids"], case["pixels"]).logits
        torch.testing.assert_close(logits, case["expected"])  # sums may round otherwise in another process
        processor = AutoProcessor.from_pretrained(name, trust_remote_code=True)
        text = processor(text="Is there a car?", return_tensors="pt")["input_ids"]
        print(type(model).__name__, type(processor).__name__, model.config.yes_no_temperature, text.shape[1])
    """
    with HubStandIn() as server:
        environment = os.environ | server.environment(tmp_path / "home")
        command = [sys.executable, SCRIPT, "me/traffic-vlm", "--model", saved, "--private"]
        pushed = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert pushed.returncode == 0, pushed.stderr[-4000:]
        repo = server.repos["me/traffic-vlm"]
        assert repo.private
        assert [len(commit.files) for commit in repo.branches["main"]] == [
            0,
            len(EXPECTED),
        ]  # one commit after the first
        assert repo.files().keys() == EXPECTED
        assert f"pushed: {server.url}/me/traffic-vlm/commit/{repo.find('main').oid}" in pushed.stdout
        environment = {name: value for name, value in environment.items() if name != "PYTHONPATH"}
        hide = "import sys; sys.modules['traffic_vlm'] = None\n"
        command = [sys.executable, "-c", hide + textwrap.dedent(code)]
        loaded = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert loaded.returncode == 0, loaded.stderr[-4000:]
    assert loaded.stdout.split() == ["TrafficVLMForConditionalGeneration", "TrafficVLMProcessor", "1.6", "6"]


def test_dry_run_lists_and_checks_but_uploads_nothing(saved, hub, tmp_path, monkeypatch, capsys):
    status = run_script(monkeypatch, "me/model", "--model", saved, "--dry-run", "--output", tmp_path / "kept")
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert not hub.requests
    assert {path.name for path in (tmp_path / "kept").iterdir()} == EXPECTED
    assert f"{(saved / 'model.safetensors').stat().st_size:,}  model.safetensors" in printed
    auto_map = json.loads((saved / "config.json").read_text())["auto_map"]
    for name in (*auto_map, "imports of the code", "metadata of the card", "an answer about a blank image"):
        assert f"ok    {name}" in printed
    assert "FAIL" not in printed
    assert "nothing was uploaded" in printed


def test_card_and_licence_of_the_repository_go_with_a_model_without_its_own(folder, tmp_path):
    (folder / "README.md").unlink()
    stage(folder, tmp_path / "staged")
    assert (tmp_path / "staged" / "README.md").read_bytes() == (ROOT / "README.md").read_bytes()
    assert (tmp_path / "staged" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert (tmp_path / "staged" / "LICENSE_WEIGHTS.md").is_file()  # named by the card
    [outcome] = publishing.check_card(tmp_path / "staged")
    assert not outcome.problem  # with the pictures that it shows
    for name in ("docs/benchmark.md", "docs/benchmark_questions.png"):  # a page that it links to, and its picture
        assert (tmp_path / "staged" / name).is_file()


def test_pages_and_pictures_that_a_card_links_to_go_up_and_nothing_else(folder, tmp_path):
    (folder / "docs").mkdir()
    for name in ("own.md", "docs/shown.png", "docs/not_linked.png", "docs/as html.png", "it's.png", "train.py"):
        (folder / name).write_text("")
    (folder / "docs/page.md").write_text("[back](../README.md#use), ![a](shown.png), [b](../own.md), [c](../../d.md)")
    links = "[page](docs/page.md#top) [page](docs/page.md) [code](train.py) [site](https://a.org/x.md) [root](/y.md)"
    links += '\n<img width="9" src="docs/as%20html.png"> ![d](it\'s.png)\n```\n[not a link](docs/nowhere.png)\n```\n'
    (folder / "README.md").write_text(CARD + links)
    stage(folder, tmp_path / "staged")
    staged = {path.relative_to(tmp_path / "staged").as_posix() for path in publishing.list_files(tmp_path / "staged")}
    assert staged == EXPECTED | {"docs/page.md", "docs/shown.png", "docs/as html.png", "it's.png", "own.md"}
    assert not publishing.check_card(tmp_path / "staged")[0].problem


@pytest.mark.parametrize(
    "name, said",
    [
        ("-model.safetensors", "model.safetensors is missing in"),
        ("-tokenizer.json", "tokenizer.json is missing in"),
        ("pytorch_model.bin", "weights must be in one model.safetensors, but there are also: pytorch_model.bin"),
        ("model-00001-of-00002.safetensors", "there are also: model-00001-of-00002.safetensors"),
    ],
)
def test_missing_files_and_other_weights_are_named(name, said, folder, hub):
    if name.startswith("-"):
        (folder / name[1:]).unlink()
    else:
        (folder / name).write_bytes(b"weights")
    with pytest.raises(PublishError, match=said):
        publish(folder, "me/model")
    assert not hub.requests


@pytest.mark.parametrize(
    "card, said",
    [
        ("# No metadata\n", "license is missing; library_name is missing; pipeline_tag is missing; tags is missing"),
        (CARD.replace("license: mit", "license: [mit"), "metadata of the card: .*parsing"),
        (CARD.replace("mit", "Apache 2.0"), "license must be an identifier .* got 'Apache 2.0'"),
        (CARD.replace("mit", "other"), "license: other needs a license_name"),
        (CARD.replace("[traffic]", "traffic"), "tags must be a list of words"),
        (CARD.replace("transformers", "keras"), "library_name must be transformers, got 'keras'"),
        (CARD + "![a scene](docs/scene.png)\n", "it names files that are not there: docs/scene.png"),
        (CARD.replace("mit\n", 'mit\nlicense_link: "MINE.md"\n'), "it names files that are not there: MINE.md"),
    ],
)
def test_a_card_that_the_hub_could_not_use_stops_the_push(card, said, folder, hub, no_loading):
    (folder / "README.md").write_text(card)
    with pytest.raises(PublishError, match=said):
        publish(folder, "me/model")
    assert not hub.requests


@pytest.mark.parametrize(
    "line, said",
    [
        ("import pandas.core", "masking_traffic_vlm.py:1 imports pandas.core; allowed are torch"),
        ("from traffic_vlm.data import scene", "imports traffic_vlm.data; allowed"),
        ("from .data.scene import Scene", "must import siblings as `from .module import Name`"),
        ("from . import vision_traffic_vlm", "must import siblings as"),
        ("from .elsewhere import Name", "imports elsewhere, which is not there"),
        ("def (", "masking_traffic_vlm.py is not valid Python"),
    ],
)
def test_imports_that_others_could_not_follow_are_named(line, said, staged, tmp_path):
    shutil.copy(staged / "README.md", tmp_path)
    (tmp_path / "masking_traffic_vlm.py").write_text(f"{line}\n")
    [outcome] = publishing.check_imports(tmp_path)
    assert said in outcome.problem


def test_all_that_is_wrong_is_said_at_once(folder, hub, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    auto_map = config["auto_map"] | {"AutoModel": "modeling_traffic_vlm.NoSuchModel"}
    del auto_map["AutoProcessor"]
    edit(folder / "config.json", auto_map=auto_map, text_config=config["text_config"] | {"num_hidden_layers": 3})
    edit(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["missing.Name", None]})
    edit(folder / "processor_config.json", auto_map={})
    (folder / "README.md").write_text(CARD.replace("license: mit\n", ""))
    code = tmp_path / "code"
    code.mkdir()
    for name in (*CODE, "LICENSE"):
        shutil.copy(ROOT / name, code)
    with (code / "masking_traffic_vlm.py").open("a") as file:
        file.write("\n\ntry:\n    import pandas\nexcept ImportError:\n    pass\n")
    lines = []
    with pytest.raises(PublishError) as error:
        publish(folder, "me/model", code_folder=code, report=lines.append)
    expected = [
        "imports of the code: masking_traffic_vlm.py:.* imports pandas",
        "metadata of the card: license is missing",
        "AutoProcessor: auto_map does not name it",
        "AutoModel loads: .*NoSuchModel",
        "AutoModelForImageTextToText loads: .*weights are not those of .*layers[.]2",
        "AutoTokenizer loads: .*missing",
    ]
    for said in expected:
        assert sum(bool(re.match(said, problem)) for problem in error.value.problems) == 1, (said, str(error.value))
    assert sum(line.startswith("FAIL") for line in lines) == len(error.value.problems)
    assert not hub.requests


@pytest.mark.parametrize(
    "fault, said",
    [
        ({"POST /api/repos/create": 401}, "the Hub answered 401 .*hf auth login"),
        ({"POST /api/repos/create": 500}, "the Hub answered 500"),
        ({"/preupload/": 403}, "the Hub answered 403 .*hf auth login"),
        ({"PUT /large/": 500}, "the Hub answered 500 [(]a fault of the stand-in[)]$"),
        ({"/validate-yaml": 400}, "Invalid metadata in README.md"),
        ({"PUT /large/": VANISH}, "pushing to me/model failed: .*the same command may be given again"),
        ({"/commit/": 500}, "the Hub answered 500"),
        ({"/commit/": VANISH}, "pushing to me/model failed: .*the same command may be given again"),
    ],
    ids=str,
)
def test_a_hub_that_fails_leaves_one_message_and_nothing_public(fault, said, staged, hub):
    hub.faults = fault
    with pytest.raises(PublishError, match=said) as error:
        push(staged, "me/model")
    assert "\n" not in str(error.value)
    assert all(not repo.files() for repo in hub.repos.values())


def test_the_script_fails_with_one_line(saved, hub, no_loading, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    for arguments, said in (
        (["me/model"], "the Hub answered 401"),
        (["no such/name!"], "Repo id"),
        (["me/model", "--output", saved], "must be an empty folder"),
        (["me/model", "--model", saved / "nowhere"], "there is no model folder"),
    ):
        assert run_script(monkeypatch, "--model", saved, *arguments) == 1
        error = capsys.readouterr().err.strip()
        assert said in error
        assert "Traceback" not in error
    assert not hub.repos


def test_offline_is_said(staged, hub, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(PublishError, match="unset HF_HUB_OFFLINE"):
        push(staged, "me/model")


def test_private_is_not_put_where_all_can_read(staged, hub):
    push(staged, "me/model")
    with pytest.raises(PublishError, match="me/model is there already and is public: nothing was uploaded"):
        push(staged, "me/model", private=True)
    assert len(hub.repos["me/model"].branches["main"]) == 2


def test_a_branch_and_a_second_push(staged, hub):
    address = push(staged, "model", revision="try-2")  # a name alone is in one's own account
    repo = hub.repos["me/model"]
    assert address.endswith(repo.find("try-2").oid)
    assert repo.files("try-2").keys() == EXPECTED
    assert not repo.files("main")
    assert push(staged, "me/model", revision="try-2") == address  # nothing changed: no second commit
