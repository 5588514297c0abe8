"""The worked example docs/how_it_works.ipynb: its cells run, and show what its text says."""

import json

import pytest
import torch

from tiny import ROOT


NOTEBOOK = ROOT / "docs" / "how_it_works.ipynb"
CELLS = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]
OUTPUTS = [output for cell in CELLS for output in cell.get("outputs", ())]
PRINTED = "".join("".join(output.get("text", ())) for output in OUTPUTS)  # stored in the file


@pytest.fixture(scope="module")
def names():
    """The variables of the notebook after all cells have run."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("Agg")
    variables: dict = {}
    state = torch.get_rng_state()
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():  # restores gradients, which a cell turns off
        patch.chdir(NOTEBOOK.parent)
        for index, code in enumerate(CODE):
            exec(compile(code, f"code cell {index}", "exec"), variables)
    torch.set_rng_state(state)
    pyplot.close("all")
    return variables


def test_scores_depend_on_the_difference_of_positions_only(names):
    scores = names["scores"]
    assert scores[10, 8] == pytest.approx(scores[3, 1], abs=1e-6)
    assert scores[102, 100] == pytest.approx(scores[3, 1], abs=1e-6)
    assert abs(scores[3, 1] - scores[3, 2]) > 0.1 and abs(scores[3, 1] - scores[1, 3]) > 0.1


def test_attention_by_hand_is_that_of_the_module(names):
    assert names["attention_error"] < 1e-4 < names["by_hand"].abs().max()
    assert names["absorbed_error"] < 1e-9 < names["with_keys"].abs().max()


def test_the_cache_grows_by_one_word_a_step_and_changes_no_logits(names):
    steps, prompt = names["steps"], names["prompt"]["input_ids"].shape[1]
    for index, (offset, length, text_bytes, image_bytes) in enumerate(steps):
        assert (offset, length) == (0 if index == 0 else prompt + index - 1, prompt + index)
        # 4 layers, keys and values, 2 heads of size 64, 4 bytes
        assert text_bytes == length * names["bytes_a_word"] == length * 4 * 2 * 2 * 64 * 4
        assert image_bytes == 154 * 4 * 2 * 2 * 64 * 4
    assert len(steps) > 2 and names["cache_error"] < 1e-3 and names["same_words"]
    generated = names["model"].generate(**names["prompt"], do_sample=False)[0, prompt:]
    assert names["sentence"] == names["processor"].decode(generated, skip_special_tokens=True)


def test_each_word_has_a_map(names):
    assert names["maps"].shape == (len(names["tokens"]), 12, 12)
    assert ((names["maps"].sum((1, 2)) > 0.9) & (names["maps"].sum((1, 2)) < 1)).all()  # the rest reads counts
    pedestrian = names["maps"][names["tokens"].index("pedestrian")]
    assert pedestrian.argmax() % 12 >= 8  # the pedestrian is on the right


def test_stored_outputs_belong_to_these_cells(names):
    """Lines of the code may have moved since; concepts, files and names may not."""
    assert names["sentence"] in PRINTED and str(names["numbers_a_word"]) in PRINTED
    stored = {line[:29].strip(): line[29:].split() for line in PRINTED.splitlines() if ".py:" in line}
    assert stored.keys() == names["places"].keys()
    for concept, (file, name, line) in names["places"].items():
        assert stored[concept][0] == name and stored[concept][1].split(":")[0] == file
        # The line of the definition, or of a decorator above it.
        assert name.rsplit(".", 1)[-1] in "".join((ROOT / file).read_text("utf-8").splitlines()[line - 1 : line + 2])
