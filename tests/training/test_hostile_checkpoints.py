"""Files of a checkpoint that somebody changed: refused by name in one sentence, and no code in them runs."""

import io
import json
import os
import pickle
import shutil

import pytest
import torch
from saved import index_of, path_of
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from upsnb.errors import ConfigError, RunError
from upsnb.runs import checkpoint_index, handle
from upsnb.training import checkpoint


class Code:
    """Its unpickling would run a command."""

    def __reduce__(self):
        return os.system, ("touch executed",)


def replace(folder, file, data):
    """Exchange a file of the latest checkpoint, with a checksum that is right."""
    path = path_of(folder, 4) / file
    path.write_bytes(data)
    index = index_of(folder)
    index["checkpoints"]["step-00000004"]["files"][file] = checkpoint_index.digest(path)
    (folder / "checkpoints" / checkpoint_index.INDEX).write_text(json.dumps(index))


def torch_bytes(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def contents(folder, change):
    """The latest checkpoint's table of contents after `change`, as bytes."""
    metadata = pickle.loads((path_of(folder, 4) / ".metadata").read_bytes())
    change(metadata)
    return pickle.dumps(metadata)


def as_bytes_entry(metadata):
    metadata.state_dict_metadata["weights"] = BytesStorageMetadata()


def with_code(metadata):
    metadata.planner_data = Code()


def elsewhere(metadata):
    for info in metadata.storage_data.values():
        info.relative_path = "../../secret"


def of_length(length):
    def change(metadata):
        for info in metadata.storage_data.values():
            info.offset, info.length = 0, length

    return change


def of_size(metadata):
    for entry in metadata.state_dict_metadata.values():
        entry.size = torch.Size([10**12])


@pytest.mark.parametrize("change", (as_bytes_entry, with_code, elsewhere, of_size))
def test_malicious_contents_are_refused_by_name_and_run_no_code(folder, monkeypatch, change):
    monkeypatch.chdir(folder)
    (folder / "secret").write_bytes(torch_bytes(torch.zeros(64)))
    replace(folder, "__0_0.distcp", torch_bytes(Code()))
    replace(folder, ".metadata", contents(folder, change))
    with pytest.raises(RunError, match=r"step-00000004/\.metadata: not a table of contents"):
        checkpoint.load(folder)
    assert not (folder / "executed").exists()


@pytest.mark.parametrize("data", (pickle.dumps(Code()), b"", b"\x80\x04.", pickle.dumps({"weights": 1})))
def test_what_is_no_table_of_contents_is_refused_by_name(folder, monkeypatch, data):
    monkeypatch.chdir(folder)
    replace(folder, ".metadata", data)
    with pytest.raises(RunError, match=r"step-00000004/\.metadata: not a table of contents"):
        checkpoint.load(folder)
    assert not (folder / "executed").exists()


@pytest.mark.parametrize(
    "data", (torch_bytes(Code()), torch_bytes({"weights": Code()}), pickle.dumps(Code()) + bytes(999))
)
def test_a_malicious_shard_is_refused_by_name_and_runs_no_code(folder, monkeypatch, data):
    monkeypatch.chdir(folder)
    replace(folder, "__0_0.distcp", data)
    replace(folder, ".metadata", contents(folder, of_length(len(data))))
    with pytest.raises(RunError, match="step-00000004/__0_0.distcp: not a shard of tensors"):
        checkpoint.load(folder)
    assert not (folder / "executed").exists()


def test_contents_that_change_the_classes_they_are_made_of_are_refused(folder):
    module, name = Metadata.__module__, Metadata.__name__
    code = (
        f"c{module}\n{name}\n(N}}X\x05\x00\x00\x00stuckK\x01stb.".encode()
    )  # setattr(Metadata, "stuck", 1), says pickle's own
    replace(folder, ".metadata", b"\x80\x02" + code)
    with pytest.raises(RunError, match="it changes Metadata itself"):
        checkpoint.load(folder)
    assert not hasattr(Metadata, "stuck")


@pytest.mark.parametrize("text", ["", "[1]", "{", "[" * 10**5, '{"a": {"$float": "x"}}', "\xff"])
def test_plain_data_that_are_none_are_refused_in_one_sentence(folder, text):
    replace(folder, "state.json", text.encode("latin-1"))
    index = index_of(folder)
    for role in checkpoint_index.ROLES:
        index[role] = "step-00000004"
    (folder / "checkpoints" / checkpoint_index.INDEX).write_text(json.dumps(index))
    with pytest.raises(RunError, match=r"step-00000004/state.json: .* -> start the run anew"):
        checkpoint.load(folder)


@pytest.mark.parametrize(
    "config", ["", "[1", "format: 9", "format: 1\nlatent: {dimm: 3}", "format: 1\ntraining: {batch_size: x}"]
)
def test_a_checkpoint_whose_config_is_broken_is_passed_over_for_the_one_before(folder, config):
    state = json.loads((path_of(folder, 4) / "state.json").read_text())
    replace(folder, "state.json", json.dumps({**state, "config": config}).encode())
    found = checkpoint.load(folder)
    assert found["name"] != "step-00000004" and found["step"] < 4
    (damage,) = found["passed_over"]
    assert damage.startswith("step-00000004/1 problem in the config in state.json ") and "\n" not in damage


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index.pop("checkpoints"),
        lambda index: index.update(latest="step-00000009"),
        lambda index: index.update(latest=["step-00000004"]),
        lambda index: index["checkpoints"].update({"../../x": index["checkpoints"]["step-00000004"]}),
        lambda index: index["checkpoints"]["step-00000004"].pop("step"),
        lambda index: index["checkpoints"]["step-00000004"]["files"].update({"../../secret": {"bytes": 1}}),
        lambda index: index["checkpoints"]["step-00000004"]["files"].update({"state.json": 3}),
    ],
)
def test_an_index_that_names_what_no_checkpoint_is_is_refused(folder, change):
    index = index_of(folder)
    change(index)
    (folder / "checkpoints" / checkpoint_index.INDEX).write_text(json.dumps(index))
    with pytest.raises(RunError, match="-> start in a new folder"):
        checkpoint.load(folder)
    assert not checkpoint_index.is_there(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.pop("setup"),
        lambda state: state.pop("config"),
        lambda state: state.update(config="[1"),
        lambda state: state["specs"]["darcy"].pop("tokens"),
        lambda state: state["specs"]["darcy"].update(grid_shape=[32, 32]),
        lambda state: state["specs"]["darcy"].update(input_mean="x"),
        lambda state: state.update(position=3),
        lambda state: state["position"].update(step="x"),
        lambda state: state["position"].update(unknown=1),
        lambda state: state["setup"].update(plateau={}),
        lambda state: state["setup"].update(ema=3),
    ],
)
def test_a_state_that_was_changed_is_refused_in_one_sentence(tiny_config, train_here, trained, tmp_path, change):
    folder = shutil.copytree(trained, tmp_path / "run")
    (path,) = (folder / "checkpoints").glob("step-*/state.json")
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    index = index_of(folder)
    index["checkpoints"][path.parent.name]["files"]["state.json"] = checkpoint_index.digest(path)
    (folder / "checkpoints" / checkpoint_index.INDEX).write_text(json.dumps(index))
    refused = 0
    for use in (
        lambda: handle.Run(folder).load_model(),
        lambda: train_here(tiny_config(("darcy",), **{"training.ema_decay": 0.9, "checkpoint.resume": True}), folder),
    ):
        try:
            use()
        except (RunError, ConfigError) as error:
            refused += 1
            assert "->" in str(error) or isinstance(error, ConfigError)
    assert refused
