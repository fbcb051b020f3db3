"""The panel as an object: what clicks write, what is shown of the answer, and that the folder alone decides."""

import asyncio
import json
import os
import re
import threading
import time
from types import SimpleNamespace

import ipywidgets
import numpy as np
import pytest
from made_runs import make_event
from test_charts import START, flip_event, say, step_event
from waiting import until

from upsnb import config as configs
from upsnb.runs import cost, handle, processes, runfolder
from upsnb.runs.table import table
from upsnb.widgets import busy_kernel, panel, requests
from upsnb.widgets.panel import Panel

CUDA = {"device": "cuda", "num_devices": 1, "device_name": "a GPU", "device_memory_gib": 80.0, "num_cores": 8}


@pytest.fixture
def browser(monkeypatch):
    """As if somebody sat in front of this kernel; what would be displayed is collected."""
    shown = []

    class Handle:
        def update(self, value):
            shown.append(value)

    def display(value, **options):
        shown.append(value)
        return Handle()

    monkeypatch.setenv("JPY_SESSION_NAME", "test")
    monkeypatch.setattr(panel, "display", display)
    return shown


@pytest.fixture
def folder(tmp_path, tiny_config):
    """A run that is alive as long as this process, as far as its folder tells, with 20 steps behind it."""
    made = runfolder.create(tiny_config(**{"training.device": "auto"}), tmp_path / "run")
    runfolder.update_manifest(made, status="running", supervisor=processes.process_identity(os.getpid()))
    now = runfolder.read_manifest(made)["created"]
    say(made, {**START, "time": now}, *(step_event(k, time=now + k) for k in range(1, 21)))
    return made


def answer(folder, revision: int, overlay: dict, step: int = 21, **changes) -> None:
    """What a trainer leaves once it has obeyed or refused: the manifest first."""
    manifest = runfolder.update_manifest(folder, applied={"revision": revision, "overlay": overlay})
    say(folder, flip_event(revision, step, **{"time": manifest["created"] + step, **changes}))


def control(folder) -> dict:
    return runfolder.read_control(folder).overlay


CHECKPOINTING = {"operator.pdet.use_activation_checkpoint": True}
SWITCHED = {"changes": CHECKPOINTING, "phases": {"activation_checkpointing": True}}


def test_requested_and_applied_are_shown_apart(folder):
    shown = Panel(handle.Run.attach(folder))
    shown.refresh()
    toggle, card = shown._toggles["activation_checkpointing"], shown._cards["activation_checkpointing"]
    assert not toggle.value and "off, as started" in card.value
    toggle.value = True
    assert control(folder) == CHECKPOINTING
    assert toggle.value and "on, requested; now off, as started" in card.value and "requested" in shown._note.value
    answer(folder, 1, CHECKPOINTING, **SWITCHED)
    shown.refresh()
    assert toggle.value and "on since step 21" in card.value and "requested" not in card.value
    assert "applied at step 21" in shown._note.value


def test_a_new_panel_and_a_second_viewer_show_the_same(folder):
    first = Panel(handle.Run.attach(folder))
    first.refresh()
    first._toggles["activation_checkpointing"].value = True
    answer(folder, 1, CHECKPOINTING, **SWITCHED)
    first._toggles["loss_frequency"].value = True  # pending
    second = Panel(handle.Run.attach(folder))
    for each in (first, second):
        each.refresh()
    assert second._toggles["activation_checkpointing"].value and second._toggles["loss_frequency"].value
    assert {n: c.value for n, c in first._cards.items()} == {n: c.value for n, c in second._cards.items()}
    assert first._plots.value == second._plots.value and first._table.value == second._table.value


def test_a_conflict_is_explained_and_not_sent(folder, tiny_config):
    configs.save(tiny_config(**{"training.device": "auto", "optimizer.fused": True}), folder / runfolder.CONFIG)
    shown = Panel(handle.Run.attach(folder))
    shown.refresh()
    toggle, card = shown._toggles["foreach"], shown._cards["foreach"]
    assert ">conflicts with another setting: AdamW is either fused or foreach<" in card.value and not toggle.disabled
    assert 'title="optimizer.foreach: AdamW is either fused or foreach -&gt; switch one of them off"' in card.value
    toggle.value = True
    assert "not sent: optimizer.foreach: AdamW is either fused or foreach" in card.value
    assert not toggle.value and not (folder / runfolder.CONTROL).exists()


def test_the_runs_own_machine_decides_what_can_be_switched(folder):
    shown = Panel(handle.Run.attach(folder))
    shown.refresh()
    assert shown._toggles["optimizer_offload"].disabled, "AdamW steps in host memory already"
    missing = {name for name, toggle in shown._toggles.items() if toggle.disabled}
    assert missing and all("cannot run here: " in shown._cards[name].value for name in missing)
    assert ">cannot run here: FlexAttention has no backward pass on the CPU<" in shown._cards["flex_attention"].value
    assert "set it to sdpa or math" in shown._cards["flex_attention"].value, "the remedy where the pointer rests"
    runfolder.update_manifest(folder, hardware=CUDA)
    elsewhere = Panel(handle.Run.attach(folder))
    elsewhere.refresh()
    assert {name for name, toggle in elsewhere._toggles.items() if toggle.disabled} < missing


def test_what_was_refused_does_not_refuse_the_next_request(folder):
    shown = Panel(handle.Run.attach(folder))
    shown.refresh()
    shown._toggles["activation_checkpointing"].value = True
    answer(folder, 1, {}, applied=False, reason="rank 0: no\n  because", changes={}, phases={})
    shown.refresh()
    assert not shown._toggles["activation_checkpointing"].value and "refused. because" in shown._note.value
    shown._toggles["loss_frequency"].value = True
    assert set(control(folder)) == {"training.inverse_loss_frequency", "training.query_sampling.num_queries"}


def click(shown: Panel, name: str) -> None:
    """Press the button of that name."""
    (button,) = [w for w in shown._widgets() if isinstance(w, ipywidgets.Button) and w.description == name]
    button.click()


def test_only_numbers_that_were_changed_are_sent(folder):
    shown = Panel(handle.Run.attach(folder))
    shown.refresh()
    shown._fields["training.batch_size"].text.value = "4"
    shown._fields["training.query_sampling.num_queries"].text.value = "16"
    shown.refresh()
    assert shown._fields["training.batch_size"].text.value == "4"  # a redraw does not take back what is being typed
    click(shown, "Apply settings")
    assert control(folder) == {"training.batch_size": 4, "training.query_sampling.num_queries": 16}
    shown._fields["training.query_sampling.num_queries"].text.value = "0"
    click(shown, "Apply settings")
    assert control(folder)["training.query_sampling.num_queries"] is None


WRONG = [("-3", "greater than 0"), ("12.5", "whole number"), ("many", "whole number"), ("", "whole number")]


@pytest.mark.parametrize(("typed", "why"), WRONG)
def test_what_is_no_right_number_stays_as_typed_with_its_reason_and_nothing_is_sent(folder, typed, why):
    shown = Panel(handle.Run.attach(folder))
    shown.refresh()
    field = shown._fields["training.batch_size"]
    field.text.value = typed
    shown._fields["training.accum_steps"].text.value = "2"  # right, and not sent without the other
    assert why in field._reason.value and "not applied" in shown._fields["training.accum_steps"]._reason.value
    click(shown, "Apply settings")
    assert field.text.value == typed and why in field._reason.value and "not sent" in shown._note.value
    assert not (folder / runfolder.CONTROL).exists()
    field.text.value = "8"  # as it was
    assert field._reason.value == ""
    click(shown, "Apply settings")
    assert control(folder) == {"training.accum_steps": 2}


@pytest.mark.parametrize("typed", ["0", "-1e-3", "nan", "inf", "1e999", "1e-3x", ""])
def test_a_learning_rate_is_a_positive_number(folder, typed):
    shown = Panel(handle.Run.attach(folder))
    shown.refresh()
    shown._fields["optimizer.lr"].text.value = typed
    click(shown, "Apply settings")
    assert "wrong" in shown._fields["optimizer.lr"]._reason.value and not (folder / runfolder.CONTROL).exists()


def test_a_bold_learning_rate_asks_first(folder):
    shown = Panel(handle.Run.attach(folder))
    shown.refresh()
    running = shown.asking.config.optimizer.lr
    shown._fields["optimizer.lr"].text.value = f"{49 * running:g}"
    click(shown, "Apply settings")
    assert control(folder) == {"optimizer.lr": pytest.approx(49 * running)}
    answer(folder, 1, {})
    shown.refresh()
    shown._fields["optimizer.lr"].text.value = f"{50 * running:g}"
    for said, revision in (("No", 1), ("Yes", 2)):
        click(shown, "Apply settings")
        assert "50 times" in shown._note.value and shown._confirm.layout.visibility == "visible"
        assert runfolder.read_control(folder).revision == 1, "nothing is sent before the answer"
        click(shown, said)
        assert shown._confirm.layout.visibility == "hidden" and runfolder.read_control(folder).revision == revision
    assert control(folder) == {"optimizer.lr": pytest.approx(50 * running)}


def test_the_learning_rate_is_that_of_the_stage_that_trains(tmp_path, tiny_config):
    config = tiny_config(**{"stages.finetune.epochs": 1, "stages.finetune.optimizer.lr": 1e-4})
    folder = runfolder.create(config, tmp_path / "run")
    runfolder.update_manifest(folder, status="running", supervisor=processes.process_identity(os.getpid()))
    now = runfolder.read_manifest(folder)["created"]
    say(folder, {**START, "time": now, "stage": "operator"}, step_event(1, time=now + 1))
    shown = Panel(handle.Run.attach(folder))
    shown.refresh()
    assert shown._fields["optimizer.lr"].text.value == f"{config.optimizer.lr:g}"
    say(folder, {**START, "time": now + 2, "step": 1, "stage": "finetune", "stage_from_step": 1})
    shown.refresh()
    assert shown._fields["optimizer.lr"].text.value == "0.0001"
    shown._fields["optimizer.lr"].text.value = "0.004"
    click(shown, "Apply settings")
    assert "40 times" not in shown._note.value and control(folder) == {"stages.finetune.optimizer.lr": 0.004}


def test_a_cold_flip_asks_first(folder):
    shown = Panel(handle.Run.attach(folder))
    shown.refresh()
    shown._toggles["fsdp2"].value = True
    assert "start again" in shown._note.value and not shown._toggles["fsdp2"].value, "it shows what is"
    click(shown, "No")
    assert not (folder / runfolder.CONTROL).exists()
    shown._toggles["fsdp2"].value = True
    click(shown, "Yes")
    assert control(folder) == {"training.use_fsdp2": True} and shown._toggles["fsdp2"].value
    click(shown, "Back to baseline")  # cold too
    assert "start again" in shown._note.value and runfolder.read_control(folder).revision == 1
    shown._toggles["loss_frequency"].value = True  # another click instead of an answer
    assert shown._question is None and runfolder.read_control(folder).revision == 2


def test_back_to_baseline_drops_every_change(folder):
    shown = Panel(handle.Run.attach(folder))
    shown.refresh()
    shown._toggles["activation_checkpointing"].value = True
    answer(folder, 1, CHECKPOINTING, **SWITCHED)
    shown.refresh()
    click(shown, "Back to baseline")
    assert control(folder) == {} and runfolder.read_control(folder).revision == 2
    assert "off, requested; now on since step 21" in shown._cards["activation_checkpointing"].value


@pytest.mark.parametrize("name", [requests.BASELINE, *requests.FILES])
@pytest.mark.parametrize("hardware", ["cpu", "cpu without bfloat16", "cuda"])
def test_every_preset_that_the_machine_can_run_can_be_asked_of_a_run(folder, name, hardware):
    has_bf16 = hardware != "cpu without bfloat16"
    machine = {**CUDA, "num_devices": 2} if hardware == "cuda" else runfolder.read_manifest(folder)["hardware"]
    runfolder.update_manifest(folder, hardware={**machine, "cpu_has_bf16": has_bf16})
    shown = Panel(handle.Run.attach(folder))
    offered = name in shown._preset.options
    assert offered == (not name.startswith("4gpu" if hardware == "cuda" else ("2gpu", "4gpu")))
    if not offered:
        return
    shown._preset.value = name
    click(shown, "Apply preset")
    if shown._question:  # it takes a relaunch
        click(shown, "Yes")
    assert shown._awaited == (1, name)
    reached = shown.asking.configs()[1]
    assert runfolder.read_control(folder).revision == 1 and reached.data.datasets == shown.asking.config.data.datasets
    if name == "conservative":
        assert reached.training.compile and reached.training.amp == has_bf16
        assert reached.training.cpu_offload_optimizer == (hardware == "cuda")
        assert ("optimizer offload: " in shown._note.value) == (hardware != "cuda")
        assert ("bf16: " in shown._note.value) == (not has_bf16)


def test_clicks_from_many_threads_during_redraws_all_arrive(folder):
    shown = Panel(handle.Run.attach(folder))
    shown.refresh()
    names = ["activation_checkpointing", "loss_frequency", "data_loading", "foreach", "sparse_validation"]
    done = threading.Event()

    def redraw():
        while not done.is_set():
            shown.refresh()

    redrawing = [threading.Thread(target=redraw) for _ in range(2)]
    clicking = [threading.Thread(target=setattr, args=(shown._toggles[name], "value", True)) for name in names]
    for thread in (*redrawing, *clicking):
        thread.start()
    for thread in clicking:
        thread.join()
    done.set()
    for thread in redrawing:
        thread.join()
    wanted = {path: value for name in names for path, value in panel.BY_NAME[name].on.items()}
    assert control(folder) == wanted


@pytest.mark.parametrize("status", ["finished", "failed", "died"])
def test_a_run_that_has_ended_is_shown_and_cannot_be_asked(folder, status):
    cause = None if status == "finished" else "rank 1 was killed by SIGKILL"
    runfolder.update_manifest(folder, status=status, cause=cause)
    shown = Panel(handle.Run.attach(folder))
    shown.refresh()
    assert status in shown._head.value and (cause or "") in shown._head.value
    assert "<svg" in shown._plots.value
    everything = [*shown._toggles.values(), *shown._actions.values(), *shown._askers]
    everything += [field.text for field in shown._fields.values()]
    assert all(widget.disabled for widget in everything)


def test_buttons_write_their_commands(folder):
    shown = Panel(handle.Run.attach(folder))
    shown.refresh()
    click(shown, "Stop")
    assert "Stop" in shown._note.value and not (folder / runfolder.CONTROL).exists(), "it asks first"
    click(shown, "Yes")
    assert runfolder.read_control(folder).command == runfolder.STOP


def test_back_to_best_asks_first_and_says_what_came_of_it(folder):
    shown = Panel(handle.Run.attach(folder))
    shown.refresh()
    assert shown._actions["Back to best"].disabled, "nothing was validated"
    say(folder, make_event("eval", step=15, time=1.0, time_s=7.5, val_nrmse={"waves": 0.3}, best=True))
    shown.refresh()
    click(shown, "Back to best")
    assert "step 15" in shown._note.value and not (folder / runfolder.CONTROL).exists()
    click(shown, "Yes")
    assert runfolder.read_control(folder).asked == {"restore": 1} and "requested" in shown._note.value
    restored = {"kind": "restored", "time": 1.0, "step": 21, "revision": 1, "applied": True, "from_step": 15}
    say(folder, restored)
    shown.refresh()
    assert "back to best: the weights of step 15, at step 21" in shown._note.value
    say(folder, {**restored, "applied": False, "reason": "it is damaged"})
    shown.refresh()
    assert "refused. it is damaged" in shown._note.value


def test_while_a_flip_compiles_the_panel_says_so_and_the_countdown_stands(folder):
    say(folder, {**START, "time_limit_s": 100.0, "step": 20}, step_event(21))
    shown = Panel(handle.Run.attach(folder))
    shown._toggles["activation_checkpointing"].value = True
    assert "compiling" not in shown._head.value + shown._note.value
    left = re.search(r"[^>]* left", shown._head.value)[0]
    line = f"pid=1 step=21 beats=22 first=0 time={time.time() - 70} state=compiling\n"
    (folder / "heartbeat.rank0").write_text(line)
    shown.refresh()
    assert re.search(" compiling, 1 min 1[0-9] s<", shown._head.value) and left in shown._head.value
    assert "activation checkpointing on: compiling, 1 min 1" in shown._note.value
    (folder / "heartbeat.rank0").write_text(line.replace("compiling", "beating"))
    shown.refresh()
    assert "compiling" not in shown._head.value + shown._note.value


def test_a_validation_shows_what_the_model_makes_of_a_sample(folder):
    fields = np.random.default_rng(0).random((2, 1, 5, 1, 16)).astype(np.float32)
    eval_event = {"kind": "eval", "time": 2.0, "step": 20, "epoch": 1, "time_s": 1.0, "val_nrmse": {"waves": 0.1}}
    say(folder, START, step_event(20))
    shown = Panel(handle.Run.attach(folder))
    assert shown._sample.value == ""
    np.savez(folder / runfolder.GLANCE, **{"waves/truth": fields[0], "waves/forecast": fields[1], "waves/nrmse": [0.1]})
    say(folder, {**eval_event, "best": True})
    shown.refresh()
    before = shown._sample.value
    assert re.match(r'<img [^>]*alt="truth, prediction and error [^"]*" src="data:image/png;base64,', before)
    (folder / runfolder.GLANCE).write_bytes(b"damaged")
    say(folder, {**eval_event, "step": 30, "best": False})
    shown.refresh()
    assert shown._sample.value == ""


def test_notes_and_tags_are_kept_with_the_run_and_seen_by_others(folder):
    shown, other = Panel(handle.Run.attach(folder)), Panel(handle.Run.attach(folder))
    shown._notes["tags"].value = " wide,, for the paper "
    shown._notes["note"].value = "<twice> as wide"
    assert shown.run.notes["tags"] == ["wide", "for the paper"]
    other.refresh()
    assert other._notes["tags"].value == "wide, for the paper" and other._notes["note"].value == "<twice> as wide"
    (row,) = table(folder.parent).to_dict("records")
    assert (row["tags"], row["note"]) == ("wide, for the paper", "<twice> as wide")
    shown.run.annotate(tags=[])
    other.refresh()
    assert other._notes["tags"].value == "" and other._notes["note"].value == "<twice> as wide"


def test_price_is_of_the_time_that_was_held_and_a_setting_of_the_run(folder, monkeypatch):
    """An hour, a day without a machine, and another hour so far."""
    manifest = runfolder.read_manifest(folder)
    began = manifest["created"]
    launches = [{"number": 0, "started": began, "ended": began + 3600}, {"number": 1, "started": began + 90_000}]
    runfolder.update_manifest(folder, segments=launches)
    say(folder, flip_event(1, 20, time=began + 20))
    monkeypatch.setattr(cost, "time", SimpleNamespace(time=lambda: began + 90_000 + 3600))
    shown = Panel(handle.Run.attach(folder))
    shown.refresh()
    assert "2 h" in shown._head.value
    assert "$" not in shown._head.value
    runfolder.update_manifest(folder, applied={"revision": 1, "overlay": {"cost.price_per_hour": 2.5}})
    shown.refresh()
    field = shown._fields["cost.price_per_hour"]
    assert "<b>$5.00" in shown._head.value and field.text.value == "2.5"
    field.text.value = "-3"
    assert field._reason.value and field.is_edited


def test_thread_follows_the_run_and_close_leaves_a_still_figure(folder, browser):
    shown = Panel(handle.Run.attach(folder))
    shown.start()
    assert "application/vnd.jupyter.widget-view+json" in browser[0]
    say(folder, step_event(21), step_event(22))
    until(lambda: "<b>22</b>" in shown._head.value)
    assert shown._thread.is_alive()
    shown.close()
    shown.close()
    until(lambda: not shown._thread.is_alive())
    assert len(browser) == 2
    assert browser[1]._repr_png_()[0].startswith(b"\x89PNG") and shown.box.comm is None


def test_headless_watch_prints_lines_until_the_run_ends(folder, capsys, monkeypatch):
    for name in handle.INTERACTIVE:
        monkeypatch.delenv(name, raising=False)
    shown = Panel(handle.Run.attach(folder))
    assert asyncio.run(shown.watch(0)) == "running" and "step 1" in capsys.readouterr().out
    runfolder.update_manifest(folder, status="finished")
    assert asyncio.run(shown.watch()) == "finished"


def test_replies_to_clicks_are_not_tied_to_the_thread_that_made_the_widgets(folder):
    """ipykernel 7 sends a click to the thread named here, which may be busy with a cell for hours."""
    shown = Panel(handle.Run.attach(folder))

    class Comm:
        kernel = None

        def send(self, *args, **kwargs): ...
        def on_msg(self, callback): ...

    clickable = (ipywidgets.ToggleButton, ipywidgets.Button)
    for number, widget in enumerate(widget for widget in shown._widgets() if isinstance(widget, clickable)):
        comm = Comm()
        comm.comm_id, comm._reply_subshell_id = str(number), None
        widget.comm = comm
    shown.refresh()
    tied = [w for w in shown._widgets() if isinstance(w, clickable) and hasattr(w.comm, "_reply_subshell_id")]
    assert tied == []


def test_an_old_kernel_that_is_busy_handles_clicks_and_keeps_the_cells():
    """ipykernel 6 has one thread for both."""
    zmq, session = pytest.importorskip("zmq"), pytest.importorskip("jupyter_client.session").Session(key=b"k")
    context = zmq.Context()
    theirs, ours = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    ours.bind("inproc://shell"), theirs.connect("inproc://shell")
    handled, later, parents = [], [], []

    class Kernel:
        msg_queue, shell_stream, dispatch_shell = object(), type("Stream", (), {"socket": ours}), "dispatch"
        _parent_ident = {"shell": b"cell"}
        shell_handlers = {"comm_msg": lambda stream, idents, message: handled.append(message["content"])}

        def get_parent(self, channel):
            return "the running cell"

        def set_parent(self, ident, parent, channel):
            parents.append(parent)

        def _publish_status(self, status, channel):
            handled.append(status)

        def schedule_dispatch(self, dispatch, frames):
            later.append(json.loads(frames[-4].bytes)["msg_type"])

    kernel = Kernel()
    kernel.session = session
    for kind in ("execute_request", "comm_msg", "kernel_info_request"):
        session.send(theirs, kind, {"for": kind})
    busy_kernel.serve_clicks(kernel)
    assert handled == ["busy", {"for": "comm_msg"}, "idle"] and later == ["execute_request", "kernel_info_request"]
    assert parents[-1] == "the running cell"
    theirs.close(0), ours.close(0), context.term()
    assert busy_kernel.is_old(kernel) and not busy_kernel.is_old(None)


def test_a_measurement_is_asked_for_once_its_length_is_known(folder):
    shown = Panel(handle.Run.attach(folder))
    shown.refresh()
    names = [value for _, value in shown._measured.options]
    assert {"nothing", "compile", "bf16"} <= set(names) and not {"fsdp2", "nccl", "sparse_validation"} & set(names)
    shown._measured.value = "activation_checkpointing"
    shown._measure_button.click()
    assert not (folder / runfolder.CONTROL).exists() and "at most 1,000, about 8 min 20 s" in shown._note.value
    shown._yes.click()
    asked = runfolder.read_control(folder)
    assert asked.asked == {"measure": 1} and asked.measure["overlay"] == CHECKPOINTING
    say(folder, flip_event(1, 21, kind="measuring", **SWITCHED))
    shown.refresh()
    assert "activation checkpointing, in turns: measuring" in shown._note.value
    assert "off, as started" in shown._cards["activation_checkpointing"].value
    shown._measured.value = "optimizer_offload"
    shown._measure_button.click()
    assert "not sent: training.cpu_offload_optimizer" in shown._note.value
