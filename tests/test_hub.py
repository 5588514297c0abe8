"""Which files are uploaded to the Hub, the checks before the upload, and its errors."""

import ast
import shutil
import sys

import pytest

from tiny import ROOT, new_process, tiny_model
from traffic_vlm.training.publish import MARK, publish, write_card


CODE = {path.name for path in ROOT.glob("*_traffic_vlm.py")}
EXPECTED = CODE | {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
EXPECTED |= {"processor_config.json", "chat_template.jinja", "model.safetensors", "README.md", "LICENSE"}
CARD = (
    "---\nlicense: mit\nlibrary_name: transformers\npipeline_tag: image-text-to-text\ntags: [traffic]\n---\n# Mine\n"
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, processor):
    """A tiny model with a card, beside files of a training run."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model(yes_no_temperature=1.6).save_pretrained(folder)
    processor.save_pretrained(folder)
    (folder / "README.md").write_text(CARD)
    for name in ("checkpoint-5/model.safetensors", "checkpoint-5/optimizer.pt", "runs/events", "training_args.bin"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"of a training run")
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of the saved model that a test may damage."""
    return shutil.copytree(saved, tmp_path / "model")


def test_the_script_uploads_the_listed_files_in_one_commit(saved, hub, run_script, capsys, monkeypatch):
    monkeypatch.setattr("traffic_vlm.training.publish.check_loading", lambda staged: None)  # it starts a process
    run_script("push_to_hub.py", "me/model", "--model", saved, "--dry-run")
    printed = capsys.readouterr().out
    assert f"{(saved / 'model.safetensors').stat().st_size:,}  model.safetensors" in printed
    assert "nothing was uploaded" in printed and not hub.mock_calls
    run_script("push_to_hub.py", "me/model", "--model", saved, "--private")
    [(repo_id, files)] = hub.commits
    assert (repo_id, files.keys()) == ("me/model", EXPECTED)
    assert files["model.safetensors"] == (saved / "model.safetensors").read_bytes()
    assert hub.is_private == {"me/model": True}
    assert "uploaded: https://huggingface.co/me/model/commit/1" in capsys.readouterr().out


def test_licenses_docs_and_the_head_are_uploaded_with_the_model(hub, monkeypatch):
    monkeypatch.setattr("traffic_vlm.training.publish.check_loading", lambda staged: None)
    publish(ROOT, "me/ours")
    [(_, files)] = hub.commits
    assert {*EXPECTED, "LICENSE_WEIGHTS.md", "docs/benchmark.md", "training_head.safetensors"} <= files.keys()
    assert not any(name.startswith(("tests/", "training/")) for name in files)


def test_a_license_is_not_guessed_and_a_hand_written_card_is_kept(tmp_path):
    for base in (None, "somebody/traffic-vlm"):
        write_card(tmp_path / "new", base, ["runs/a", "runs/b"], 20, "Better.")
        card = (tmp_path / "new" / "README.md").read_text()
        assert "not-chosen-yet" in card and MARK in card
        assert ("Trained from scratch on `a`, `b`, 20 steps" in card) == (base is None)
    (tmp_path / "new" / "README.md").write_text(CARD)
    write_card(tmp_path / "new", None, ["runs/a"], 20, "Better.")
    assert (tmp_path / "new" / "README.md").read_text() == CARD


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("README.md", CARD, "# Mine", "README.md: there is no model card with a license"),
        pytest.param(
            *("config.json", '"num_hidden_layers": 2', '"num_hidden_layers": 3'),
            "does not load in a new process: .*model.safetensors does not fit config.json: missing_keys .*layers.2",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_incomplete_or_invalid_folder_is_not_uploaded(name, old, new, message, folder, hub):
    (folder / name).write_text((folder / name).read_text().replace(old, new))
    with pytest.raises(ValueError, match=f"(?s){message}"):
        publish(folder, "me/model")
    assert not hub.mock_calls


def test_a_public_repository_is_refused_where_a_private_one_is_asked_for(saved, hub, monkeypatch):
    monkeypatch.setattr("traffic_vlm.training.publish.check_loading", lambda staged: None)
    hub.is_private["me/model"] = False
    with pytest.raises(ValueError, match="me/model exists and is public; nothing was uploaded"):
        publish(saved, "me/model", private=True)
    assert not hub.commits


@pytest.mark.slow
def test_the_app_of_a_space_needs_no_installed_package(tmp_path):
    shutil.copytree(ROOT, tmp_path / "space", ignore=shutil.ignore_patterns(".*", "__pycache__", "runs"))
    code = """
        import runpy
        sys.meta_path[:] = [finder for finder in sys.meta_path if "Editable" not in repr(finder)]
        del sys.modules["traffic_vlm"]
        runpy.run_path("app.py")
        import traffic_vlm.serving.page
        print(traffic_vlm.serving.page.__file__)
    """
    assert new_process(code, tmp_path / "space").strip() == str(tmp_path / "space" / "serving" / "page.py")


# The code that the Hub runs


def test_code_imports_only_what_users_of_transformers_have():
    """The library copies files that it finds by `from .module import Name`, and knows no other form."""
    allowed = sys.stdlib_module_names | {"torch", "transformers", "tokenizers", "numpy", "PIL"}
    allowed |= {"httpx"}  # comes with transformers
    allowed |= {"pillow_heif"}  # is tried, and may be missing: see test_repository
    for name in sorted(CODE):
        for node in ast.walk(ast.parse((ROOT / name).read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1 and f"{node.module}.py" in CODE, f"{name}:{node.lineno}"
            elif isinstance(node, ast.Import | ast.ImportFrom):
                modules = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
                assert {module.partition(".")[0] for module in modules} <= allowed, f"{name}:{node.lineno}"
