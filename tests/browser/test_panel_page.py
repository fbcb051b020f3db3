"""The panel as a person uses it: clicks, reloads, busy kernels, broken runs, narrow windows and dark themes."""

import contextlib
import os
import signal
from functools import partial

import pytest
from jupyterlab_page import SHOTS, Lab
from waiting import until

from upsnb.runs import handle, runfolder

SHOW = (
    "from upsnb.runs.handle import Run\nfrom upsnb.widgets.panel import Panel\n"
    "shown = Panel(Run.attach({!r}))\nshown.start()"
)
BUSY = {  # cells that end when a file is there
    "sleeping": "import pathlib, time\nwhile not pathlib.Path('sleeping').exists():\n    time.sleep(0.2)",
    "computing": "while not pathlib.Path('computing').exists():\n    sum(range(100_000))",
}
SWITCHED = ("activation_checkpointing", "loss_frequency", "bf16")
STATE = """() => ({
    on: [...document.querySelectorAll('.ups-toggle.mod-active')].map(e => e.textContent.trim()).sort(),
    flips: [...document.querySelectorAll('.ups-table tr')].map(row =>
        [...row.querySelectorAll('td')].slice(0, 3).map(cell => cell.textContent).join(' ')),
    markers: document.querySelectorAll('.ups-over > i').length,
})"""
# Texts that stand on each other, end outside the panel, or are cut by what holds them: should be none.
COLLISIONS = """() => {
    const panel = document.querySelector('.ups-panel'), edge = panel.getBoundingClientRect(), texts = [], found = [];
    const walker = document.createTreeWalker(panel, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const node = walker.currentNode, parent = node.parentElement;
        if (!node.data.trim() || !parent.checkVisibility({visibilityProperty: true}) || parent.closest('style, option'))
            continue;
        const range = document.createRange();
        range.selectNodeContents(node);
        for (const box of range.getClientRects())
            if (box.width > 1) texts.push({text: node.data.trim(), box, parent});
    }
    for (const {text, box, parent} of texts) {
        if (box.left < edge.left - 1 || box.right > edge.right + 1) found.push(`outside the panel: ${text}`);
        for (let e = parent; e !== panel; e = e.parentElement)
            if (getComputedStyle(e).overflowX !== 'visible' && box.right > e.getBoundingClientRect().right + 1)
                found.push(`cut: ${text}`);
    }
    texts.forEach((a, i) => texts.slice(i + 1).forEach(b => {
        const width = Math.min(a.box.right, b.box.right) - Math.max(a.box.left, b.box.left);
        const height = Math.min(a.box.bottom, b.box.bottom) - Math.max(a.box.top, b.box.top);
        if (a.parent !== b.parent && width > 1 && height > 3) found.push(`${a.text} on ${b.text}`);
    }));
    for (const list of panel.querySelectorAll('select')) {  // a choice that is cut is no text on its own
        const whole = list.cloneNode(true);
        whole.style.cssText = 'position: absolute; flex: none; width: max-content';
        list.after(whole);
        if (whole.offsetWidth > list.offsetWidth + 1) found.push(`cut: a choice of ${list.labels[0]?.textContent}`);
        whole.remove();
    }
    return {found, count: texts.length};
}"""

# What a person sets or presses and a screen reader cannot name: should be none.
UNNAMED = """() => [...document.querySelectorAll('.ups-panel :is(input, select, textarea, button)')]
    .filter(e => e.checkVisibility() && !(e.getAttribute('aria-label') || e.labels?.[0]?.textContent.trim()
        || (e.tagName === 'BUTTON' && e.textContent.trim())))
    .map(e => e.outerHTML.slice(0, 200))"""


@pytest.fixture
def run(tmp_path, tiny_config):
    """`run(**overlay)`: a live run that trains until the test ends."""
    started = []

    def start(**overlay) -> handle.Run:
        config = tiny_config(**{"stages.operator.epochs": 100_000, "evaluation.every_epochs": 50, **overlay})
        started.append(handle.start(config, tmp_path / "run", attached=True))
        started[-1].wait_for("step", step=20)
        return started[-1]

    yield start
    for live in started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(live.manifest["supervisor"].partition(":")[0]), signal.SIGTERM)
        until(partial(has_ended, live), "it does not end")


def has_ended(live: handle.Run) -> bool:
    return live.status() not in runfolder.ALIVE


def show(lab: Lab, live: handle.Run) -> None:
    """Open the run's panel in a new cell of the notebook in the page."""
    lab.run(SHOW.format(str(live.folder)))
    lab.page.wait_for_selector(".ups-plots")


def revision(live: handle.Run) -> int:
    return runfolder.read_control(live.folder).revision


def acknowledged(live: handle.Run, button) -> dict:
    """The flip event that answers what a click on a button asks for."""
    return live.wait_for("flip", arrived(live, button))


def arrived(live: handle.Run, button) -> int:
    """The revision in control.json that a click on a button asks for."""
    before = revision(live)
    button.click()
    return until(lambda: revision(live) > before and revision(live), "the click never arrived")


@pytest.mark.long
def test_clicks_are_obeyed_by_two_ranks_and_seen_again_after_a_reload(lab: Lab, run):
    live = run(**{"training.num_gpus": 2})
    lab.open("live.ipynb", "")
    show(lab, live)
    for phase in SWITCHED:
        flip = acknowledged(live, lab.page.locator(f".ups-{phase}"))
        assert flip["applied"] and flip["phases"] == {phase: True}
        lab.page.wait_for_selector(f".ups-{phase}.mod-active:not(.ups-asked)")
        live.wait_for("flip_effect", flip["revision"])
    lab.page.select_option(".ups-preset select", "baseline")
    flip = acknowledged(live, lab.page.get_by_role("button", name="Apply preset"))
    for phase in SWITCHED:
        lab.page.wait_for_selector(f".ups-{phase}:not(.mod-active):not(.ups-asked)")
    live.wait_for("flip_effect", flip["revision"])
    effects = lab.page.locator(".ups-table")
    until(lambda: effects.inner_text().count("[") == 4, "not every effect is there with its interval")
    before = revision(live)
    assert lab.page.evaluate(UNNAMED) == []
    lab.page.get_by_label("effect of").select_option("activation checkpointing")
    lab.page.get_by_role("button", name="Measure").click()
    lab.page.get_by_text("at most 1,000").wait_for()
    assert revision(live) == before, "it asks first"
    lab.page.get_by_role("button", name="Yes").click()
    lab.page.wait_for_selector(".ups-over > b", state="attached")
    seen = lab.page.evaluate(STATE)
    assert len(seen["flips"]) == 1 + 5 and seen["markers"] == 5
    layouts(lab)

    lab.reload()
    assert lab.page.locator(".ups-plots").count() == 0, "the page had not been saved"
    show(lab, live)
    assert lab.page.evaluate(STATE) == seen
    assert lab.errors() == []


def layouts(lab: Lab) -> None:
    """No text on another or cut off, at two widths and in both themes; a picture of each."""
    for theme in ("JupyterLab Light", "JupyterLab Dark"):
        lab.page.evaluate("theme => window.jupyterapp.commands.execute('apputils:change-theme', {theme})", theme)
        for width in (1000, 1400):
            lab.page.set_viewport_size({"width": width, "height": 1500})
            until(partial(settled, lab), f"{theme}, {width} px: texts collide or are missing")
            shot = lab.page.locator(".ups-panel").screenshot(path=SHOTS / f"panel_{theme[11:].lower()}_{width}.png")
            assert len(shot) > 20_000


def settled(lab: Lab) -> dict | None:
    """What COLLISIONS says once all texts are there and none collide: a redraw or a style sheet may be on its way."""
    seen = lab.page.evaluate(COLLISIONS)
    return None if seen["found"] or seen["count"] <= 60 else seen


def test_a_reloaded_page_finds_its_panel_again_while_a_cell_awaits_the_runs_end(lab: Lab, run):
    live = run()
    lab.open("awaiting.ipynb", "")
    show(lab, live)
    lab.run("await shown.watch()", wait=False)
    lab.page.wait_for_selector(".jp-Notebook-ExecutionIndicator[data-status=busy]")
    lab.save()
    lab.reload()
    lab.page.wait_for_selector(".ups-plots")
    shown = lab.page.locator(".ups-head").inner_text()
    until(lambda: lab.page.locator(".ups-head").inner_text() != shown, "it stands still")
    arrived(live, lab.page.locator(".ups-bf16"))
    assert not has_ended(live), "all this while it trains"


def test_click_is_a_request_while_a_cell_is_busy(lab: Lab, run):
    live = run()
    lab.open("busy.ipynb", "")
    show(lab, live)
    for busy, phase in zip(BUSY, SWITCHED):  # a widget's first click is the slow one, so each time another
        lab.run(BUSY[busy], wait=False)
        lab.page.wait_for_selector(".jp-Notebook-ExecutionIndicator[data-status=busy]")
        arrived(live, lab.page.locator(f".ups-{phase}"))
        assert not lab.page.evaluate("() => window.ran"), f"{busy}: the cell ended too early to tell"
        (lab.folder / busy).touch()
        lab.page.wait_for_function("() => window.ran")
    assert lab.errors() == []


@pytest.mark.long
def test_killed_run_shows_its_cause_in_the_page(lab: Lab, run):
    live = run()
    lab.open("killed.ipynb", "")
    show(lab, live)
    os.kill(runfolder.read_heartbeats(live.folder)[0]["pid"], signal.SIGKILL)
    lab.page.wait_for_function("() => document.querySelector('.ups-pill')?.textContent.includes('failed')")
    said = lab.page.locator(".ups-note").all_inner_texts()
    assert any("rank 0" in text and "SIGKILL" in text for text in said), said
    # Nothing can be asked of a run that has ended.
    lab.page.wait_for_function("() => document.querySelectorAll('.ups-toggle:not([disabled])').length === 0")
