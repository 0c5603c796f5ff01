"""The page over TensorRT-LLM: options, builds, runs and failures, on a machine with the fake."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, fields, replace
from html import unescape
from pathlib import Path
from typing import Any

import gradio as gr
import psutil
import pytest
from gradio_client import Client
from gradio_client.exceptions import AppError
from playwright.sync_api import expect

from engines import (
    BACKEND_CHOICES,
    BACKENDS,
    EngineConfig,
    EngineSlot,
    Finish,
    GenerationEvent,
    Prefill,
    RunEvent,
    RunRecord,
    Snippet,
    Step,
    TensorRTOptions,
    Token,
    read_recording,
)
from specdec_ui import handlers
from specdec_ui.api import CONCURRENCY_ID
from specdec_ui.handlers import on_build, on_probe, on_run, on_stop, on_stopped, on_wait
from specdec_ui.layout import PageDefaults
from specdec_ui.state import TENSORRT_FIELDS, RunForm, RunState, Session, tensorrt_options
from specdec_ui.summary import NOT_REPORTED, backend_note_html, commands_markdown, published_html
from specdec_ui.tensorrt_part import choose_backend
from tests.fake_tensorrt_llm.scenario import Scenario
from tests.fake_tensorrt_llm.site import FakeInstall, write_site
from tests.specdec_ui.conftest import WAIT_S, served, values_of
from tests.specdec_ui.test_browser import (
    browser as browser,
    kept_text,
    lane,
    open_page,
    page as page,
    set_number,
    status,
)
from tests.specdec_ui.test_handlers import IDLE, STAYS, Shown, buttons, last, shown
from tests.specdec_ui.test_highlight import HOSTILE
from tests.specdec_ui.test_layout import build_page, by_id, controls

OPTIONS = {"max_seq_len": 200}
PYTORCH = Scenario(version="1.3.0rc22")


@dataclass
class Machine:
    """This machine with an installation, and the page's events over a slot of its own."""

    install: FakeInstall
    folder: Path
    form: RunForm
    slot: EngineSlot

    def play(self, **changes: Any) -> None:
        """Let the installation behave otherwise from its next process on."""
        scenario = json.loads((self.folder / "scenario.json").read_text(encoding="utf-8"))
        (self.folder / "scenario.json").write_text(json.dumps(scenario | changes), encoding="utf-8")

    def click(
        self, handler: Callable[..., Iterator[tuple[Any, ...]]], session: Session, **changes: Any
    ) -> Generator[Shown, None, None]:
        """Yield what a click on Run or Build shows."""
        yield shown(on_wait(session))
        with closing(handler(self.slot, session, *values_of(replace(self.form, **changes)))) as it:  # type: ignore[type-var]
            for values in it:
                yield shown(values)

    def finished(self, session: Session | None = None, **changes: Any) -> Shown:
        """Return what is shown in the end of a run: the commands are the last of it."""
        everything: Shown = {}
        for view in self.click(on_run, session or Session(), **changes):
            everything |= {name: value for name, value in view.items() if value != STAYS}
        return everything

    def processes(self) -> set[int]:
        """Return the library's processes that are still there."""
        pids = {call["pid"] for call in self.install.read_calls()}
        return {pid for pid in pids if psutil.pid_exists(pid)}


@pytest.fixture
def make_machine(
    tiny_target: Path, tiny_draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Machine]]:
    slots = []

    def make(scenario: Scenario = Scenario()) -> Machine:  # noqa: B008
        install = write_site(tmp_path / "install", scenario)
        monkeypatch.setenv("PATH", f"{install.bin}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("SPECDEC_TRTLLM_PYTHON", str(install.python))
        monkeypatch.setenv("SPECDEC_STORE", str(tmp_path / "store"))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        (tmp_path / "exports").mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "exports"))
        form = RunForm(
            backend="tensorrt_llm",
            target=str(tiny_target),
            draft_kind="model",
            draft=str(tiny_draft),
            prompt="one two three one two three",
            chat_template=False,
            num_draft_tokens=3,
            max_new_tokens=24,
            temperature=0,
            top_k=0,
            top_p=1,
            seed=0,
            baseline=True,
            repeats=1,
            tensorrt_llm=OPTIONS,
        )
        slots.append(EngineSlot())
        return Machine(install, install.bin.parent, form, slots[-1])

    yield make
    for slot in slots:
        slot.close()


def with_options(**options: Any) -> RunForm:
    return RunForm(
        "tensorrt_llm",
        "org/target",
        "model",
        "org/draft",
        "a prompt",
        True,
        4,
        64,
        0,
        0,
        1,
        0,
        True,
        1,
        tensorrt_llm=options,
    )


# -- the form


def test_the_options_of_the_page_become_those_of_the_engine():
    form = with_options(
        flow="pytorch",
        quantization="fp8",
        max_draft_len=8.0,
        max_seq_len=4096.0,
        acceptance="logits",
        tensor_parallel_size=2.0,
        devices=" 0, 1 ",
        draft_devices="1",
        python=" /opt/python ",
        launcher=" mpirun -n 1 ",
    )
    assert replace(form, dtype="float16").config() == EngineConfig(
        "tensorrt_llm",
        "org/target",
        "org/draft",
        dtype="float16",
        tensorrt_llm=TensorRTOptions(
            python="/opt/python",
            flow="pytorch",
            max_draft_len=8,
            max_seq_len=4096,
            quantization="fp8",
            acceptance="logits",
            tensor_parallel_size=2,
            devices=(0, 1),
            draft_devices=(1,),
            launcher="mpirun -n 1",
        ),
    )


def test_untouched_options_are_the_usual_ones():
    values = values_of(with_options())
    assert RunForm.read(*values).config() == EngineConfig("tensorrt_llm", "org/target", "org/draft")


def test_what_another_back_end_hides_counts_for_nothing():
    values = values_of(replace(with_options(flow="magic", devices="x"), dtype="float16"))
    values[RunForm.names().index("backend")] = "transformers"
    assert RunForm.read(*values).config() == EngineConfig("transformers", "org/target", "org/draft")


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("flow", "magic", "flow is 'magic': use one of auto, engine, pytorch"),
        ("quantization", None, "quantization is None: use one of auto"),
        ("acceptance", ["x"], "acceptance is ['x']: use one of tokens"),
        ("max_draft_len", 0, "max_draft_len is 0: use 1 to 32"),
        ("max_draft_len", 2.5, "max_draft_len is 2.5: use 1 to 32"),
        ("max_seq_len", None, "max_seq_len is None: use 1 to"),
        ("tensor_parallel_size", "x", "tensor_parallel_size is 'x': use 1 to"),
        ("draft_tensor_parallel_size", -1, "draft_tensor_parallel_size is -1: use 1 to"),
        ("devices", "a", "devices is 'a': type the numbers of GPUs with commas, as in 0,1"),
        ("devices", "0;1", "devices is '0;1': type the numbers"),
        ("devices", "-1", "devices is '-1': type the numbers"),
        ("devices", "0,1", "devices is (0, 1): name 1 different GPU(s), or none"),
        ("devices", 0, "devices is 0: name 1 different GPU(s), or none"),
        ("draft_devices", ["x"], "draft_devices is ('x',): name 1 different GPU(s)"),
        ("python", 5, "python is 5: type some text"),
        ("launcher", "mpirun 'x", 'launcher is "mpirun \'x": close its quotes'),
        ("magic", 1, "tensorrt_llm has no option 'magic': use some of python, flow"),
    ],
)
def test_an_unusable_option_is_named(name: str, value: Any, sentence: str):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}") as raised:
        with_options(**{name: value}).check()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("given", ["flow", ["flow"], 5])
def test_options_that_are_no_names_and_values_are_refused(given: Any):
    with pytest.raises(
        ValueError, match=r"^tensorrt_llm is .*: name options, some of python, flow"
    ):
        tensorrt_options(given)


@pytest.mark.parametrize("value", ["", " ", None, [], ()])
def test_no_gpus_named_are_the_first_ones(value: Any):
    assert tensorrt_options({"devices": value}).devices == ()


def test_options_of_a_back_end_that_is_not_asked_for_are_refused():
    form = replace(with_options(flow="engine"), backend="transformers")
    with pytest.raises(ValueError, match=r"^tensorrt_llm is given for the back end 'transformers'"):
        form.config()


# -- the page


def test_every_option_but_the_time_limits_has_a_control():
    names = {item.name for item in fields(TensorRTOptions)}
    assert {name for name in names if not name.endswith("_timeout_s")} == set(TENSORRT_FIELDS)


@pytest.mark.parametrize("name", ["dtype", *TENSORRT_FIELDS])
def test_an_option_has_the_label_that_its_errors_name(name: str):
    assert controls(build_page())[name].label == name


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_options_are_in_view_where_their_back_end_is_chosen(backend: str):
    is_shown = backend == "tensorrt_llm"
    page = build_page(PageDefaults(backend))
    for element in ("sd-tensorrt", "sd-commands"):
        assert by_id(page, element).visible == is_shown
    panel, commands, note = choose_backend(backend)
    assert panel == commands == gr.update(visible=is_shown)
    assert "Looking whether it can be used here" in note


def probes(page: gr.Blocks) -> list[Any]:
    return [function for function in page.fns.values() if function.fn is on_probe]


def test_a_back_end_is_looked_for_when_it_is_chosen_and_holds_up_no_run():
    found = probes(build_page())
    assert found
    for probe in found:
        assert probe.queue
        assert probe.concurrency_id != CONCURRENCY_ID
        assert probe.show_progress == "hidden"
        assert probe.api_visibility == "private"


@pytest.mark.parametrize("backend", BACKEND_CHOICES)
def test_a_page_looks_at_once_for_the_back_end_that_it_starts_with(backend: str):
    page = build_page(PageDefaults(backend))
    loads = [probe for probe in probes(page) if any(name == "load" for _, name in probe.targets)]
    assert len(loads) == 1


@pytest.mark.parametrize("backend", ["auto", "onnxruntime"])
def test_another_back_end_is_looked_for_too(backend: str):
    assert "Usable here: onnxruntime" in on_probe(backend, "")
    assert "Usable here: torch" in on_probe("transformers", "/not/looked/at")


def test_what_is_missing_is_said_with_its_remedy(make_machine):
    make_machine(Scenario(gpus=()))
    assert "Not usable here: the NVIDIA driver shows no GPU" in on_probe("tensorrt_llm", "")


def test_what_can_be_used_is_said_with_its_version_and_gpu(make_machine):
    make_machine()
    note = on_probe("tensorrt_llm", "")
    assert "Usable here: TensorRT-LLM 1.2.1" in note
    assert "NVIDIA H200" in note
    assert "sd-unusable" not in note


def test_the_interpreter_that_is_named_is_the_one_that_is_asked(make_machine):
    make_machine()
    note = on_probe("tensorrt_llm", "/none/python")
    assert "Not usable here: the option names &#x27;/none/python&#x27;, which is no program" in note


@pytest.mark.parametrize("text", HOSTILE)
def test_a_note_that_quotes_markup_stays_text(text: str):
    note = backend_note_html(text, is_error=True)
    assert note.count("<") == 2
    assert unescape(note.partition(">")[2].removesuffix("</p>")) == text


# -- the commands to take away


def test_the_commands_have_a_block_each():
    snippets = (
        Snippet("Build", "shell", "build --all\n"),
        Snippet("speculative.yaml", "yaml", "a: b"),
    )
    text = commands_markdown(snippets, "model", 3)
    assert "(a draft model, num_draft_tokens 3)" in text
    assert "**Build**\n\n```bash\nbuild --all\n```" in text
    assert "**speculative\\.yaml**\n\n```yaml\na: b\n```" in text


def test_a_command_cannot_leave_its_block():
    text = commands_markdown((Snippet("x", "shell", "a\n```\n<b>````\n"),), "none", 0)
    assert text.endswith("`````bash\na\n```\n<b>````\n`````")
    assert "(nothing drafted)" in text


def test_commands_that_cannot_be_had_spoil_no_run(make_machine, monkeypatch):
    machine = make_machine()

    def refuse(*_: Any) -> None:
        raise ValueError("device 7 is <not> here")

    monkeypatch.setattr("specdec_ui.views.take_away", refuse)
    view = machine.finished()
    assert "Done." in view["status"]
    assert "output identical" in view["verdict"]
    assert view["commands"] == "They cannot be written: device 7 is \\<not\\> here"


# -- published figures

PUBLISHED = "Llama-3.1-70B: published by NVIDIA, not measured here"


def record_of(*, finish: bool = True, **settings: Any) -> RunRecord:
    usual = {
        "backend": "tensorrt_llm",
        "target": "Llama-3.1-70B-Instruct",
        "draft": "org/Llama-3.2-1B",
        "draft_kind": "model",
        "repeats": 1,
        "dtype": "bfloat16",
        "device": "NVIDIA H200",
    }
    record = RunRecord("a prompt", usual | settings, {})
    for side, step_s in (("speculative", 0.5), ("baseline", 1.0)):
        events: list[GenerationEvent] = [
            Prefill(3, 2, 1.0),
            Step((Token(5, "a", "target"),), (), 0, 0.0, step_s, 1.0 + step_s),
        ]
        for event in events + [Finish("length", 1.0 + step_s)] * finish:
            record.apply(RunEvent(side, 0, event))  # type: ignore[arg-type]
    return record


def test_published_figures_stand_beside_the_run_counted_alike():
    html = published_html(record_of())
    assert PUBLISHED in html
    assert "FP8 on NVIDIA H200" in html
    assert "the time to the first token included" in " ".join(html.split())
    assert "href='https://developer.nvidia.com/blog/" in html
    rows = [re.findall(r"<td>(.*?)</td>", row) for row in html.split("<tr")[2:]]
    assert rows[0] == ["146.1", "51.1", "2.86×"]
    assert rows[-1] == ["0.7", "0.5", "1.33×"]  # one token in 1.5 s, and in 2 s
    assert "this run, bfloat16 on NVIDIA H200" in html


@pytest.mark.parametrize(
    "settings", [{"backend": "transformers"}, {"target": "org/another"}, {"target": None}]
)
def test_nothing_is_shown_where_nothing_is_published(settings: dict[str, Any]):
    assert published_html(record_of(**settings)) == ""


def test_a_run_that_was_stopped_is_not_counted_beside_published_figures():
    html = published_html(record_of(finish=False))
    assert PUBLISHED in html
    assert "this run, " not in html


@pytest.mark.parametrize("text", HOSTILE)
def test_published_figures_quote_a_run_as_text(text: str):
    html = published_html(record_of(draft=text, device=text))
    assert text.rpartition("/")[2] in unescape(html)
    assert re.findall(r"<(script|img)", html) == []


# -- builds and runs


def test_a_build_streams_the_engines_and_ends_with_the_commands(make_machine, monkeypatch):
    monkeypatch.setattr(handlers, "LOG_INTERVAL_S", 0)
    machine = make_machine(Scenario(build="slow"))
    views = list(machine.click(on_build, Session()))
    statuses = [view["status"] for view in views if view["status"] != STAYS]
    assert any("build the target engine (stage 2 of 3)" in text for text in statuses)
    assert "The pair is built" in statuses[-1]
    logs = [view["build_log"] for view in views if view["build_log"] != STAYS]
    assert "stored as" in logs[-1]
    assert buttons(views[-2]) == IDLE
    assert "trtllm-build" in views[-1]["commands"]
    assert set(views[-1]) - {"commands"} == {k for k, v in views[-1].items() if v == STAYS}


def test_a_run_of_the_engine_flow_shows_everything(make_machine):
    view = make_machine().finished()
    assert "output identical" in view["verdict"]
    assert "engine flow" in view["verdict"]
    assert "class='a'" in view["speculative"]
    assert "class='m'" not in view["speculative"]
    assert NOT_REPORTED not in view["figures"]
    assert len(view["latency"].data) == 6
    assert "DraftTargetDecodingConfig" in view["commands"]
    assert "Loading" not in view["status"]


def test_what_the_worker_says_while_loading_is_logged(make_machine, monkeypatch):
    monkeypatch.setattr(handlers, "LOG_INTERVAL_S", 0)
    views = list(make_machine().click(on_run, Session()))
    statuses = [view["status"] for view in views if view["status"] != STAYS]
    assert any(re.search(r"Loading the models ….*: ", text) for text in statuses)
    logs = [view["build_log"] for view in views if view["build_log"] != STAYS]
    assert "TensorRT-LLM" in logs[-1]


@pytest.mark.parametrize("draft_kind", ["model", "prompt_lookup", "none"])
def test_a_run_of_the_pytorch_flow_says_what_is_not_reported(make_machine, draft_kind: str):
    session = Session()
    view = make_machine(PYTORCH).finished(session, draft_kind=draft_kind)
    assert "output identical" in view["verdict"]
    assert "PyTorch flow" in view["verdict"]
    assert len(view["latency"].data) == 6
    assert ("class='m'" in view["speculative"]) == (draft_kind == "model")
    assert (NOT_REPORTED in view["figures"]) == (draft_kind != "none")
    record = read_recording(Path(view["export"]["value"]))
    assert session.run is not None
    assert record == session.run.record
    replayed = RunState.replayed(record)
    assert [lane.html for lane in replayed.lanes.values()] == [
        view["speculative"],
        view["baseline"],
    ]


# -- failures


def test_a_worker_that_dies_is_reported_and_the_next_run_works(make_machine):
    machine = make_machine(Scenario(generate="die", generate_after=8))
    session = Session()
    view = last(machine.click(on_run, session, baseline=False, max_new_tokens=100))
    assert "role='alert'>generating failed: " in view["status"]
    assert view["speculative"] != ""
    assert "Ended early" in view["verdict"]
    assert buttons(view) == IDLE
    assert machine.processes() == set()
    machine.play(generate="")
    assert "output identical" in machine.finished(session)["verdict"]


def test_a_built_engine_that_does_not_fit_is_refused_until_another_is_built(make_machine):
    machine = make_machine()
    session = Session()
    list(machine.click(on_build, session))
    longer = {**OPTIONS, "max_seq_len": 240}
    view = last(machine.click(on_run, session, tensorrt_llm=longer))
    assert "role='alert'>the target engine" in view["status"]
    assert "press Build" in view["status"]
    assert buttons(view) == IDLE
    assert "Done." in machine.finished(session)["status"]
    list(machine.click(on_build, session, tensorrt_llm=longer))
    assert "Done." in machine.finished(session, tensorrt_llm=longer)["status"]


@pytest.mark.parametrize(
    ("handler", "scenario", "words"),
    [
        pytest.param(on_build, {"build": "hang"}, "build the target engine", id="building"),
        pytest.param(on_run, {"load": "hang"}, "Loading the models … [1-9]", id="loading"),
    ],
)
def test_stop_ends_a_silent_library_and_the_next_run_works(
    make_machine, handler: Any, scenario: dict[str, Any], words: str
):
    machine = make_machine(Scenario(**scenario))
    session = Session()
    with closing(machine.click(handler, session)) as views:
        while True:
            view = next(views)
            if re.search(words, str(view["status"])) and machine.processes():
                break
        on_stop(session)
    assert machine.processes() == set()
    assert "Stopped." in shown(on_stopped(session))["status"]
    machine.play(build="", load="")
    assert "output identical" in machine.finished(session)["verdict"]


@pytest.mark.parametrize("scenario", [Scenario(), PYTORCH], ids=["engine", "pytorch"])
def test_stop_in_the_baseline_keeps_what_came_and_the_next_run_works(
    make_machine, monkeypatch, scenario: Scenario
):
    monkeypatch.setattr(handlers, "UPDATE_INTERVAL_S", 0)
    machine = make_machine(scenario)
    session = Session()
    with closing(machine.click(on_run, session)) as views:
        for _ in views:
            if session.run is not None and session.run.lanes["baseline"].html:
                break
        on_stop(session)
    view = shown(on_stopped(session))
    assert "What came so far is kept" in view["status"]
    assert "Ended early" in view["verdict"]
    assert view["baseline"] != ""
    assert "output identical" in machine.finished(session)["verdict"]


# -- served


def test_the_endpoints_take_its_options(make_machine):
    machine = make_machine(PYTORCH)
    pair = {"target": machine.form.target, "draft": machine.form.draft, "backend": "tensorrt_llm"}
    with served(machine.slot) as url:
        client = Client(url, verbose=False)
        options = {"max_seq_len": 200, "devices": [0], "flow": "pytorch"}
        built = client.predict(**pair, tensorrt_llm=options, dtype="float16", api_name="/build")
        assert built["state"] == "built"
        result = client.predict(
            **pair,
            prompt="one two",
            max_new_tokens=8,
            chat_template=False,
            tensorrt_llm=options,
            dtype="float16",
            api_name="/compare",
        )
        assert result["identical"] is True
        assert result["effective_settings"]["context_length"] == 200
        assert result["effective_settings"]["dtype"] == "float16"
        for api_name in ("/run", "/compare", "/build"):
            arguments = {} if api_name == "/build" else {"prompt": "hello"}
            for changes, sentence in (
                ({**pair, "tensorrt_llm": {"magic": 1}}, "^tensorrt_llm has no option 'magic'"),
                ({**pair, "tensorrt_llm": ["flow"]}, "^tensorrt_llm is"),
                ({"tensorrt_llm": {"flow": "engine"}}, "^tensorrt_llm is given for the back end"),
                ({**pair, "dtype": "int1"}, "^dtype is 'int1': use one of"),
            ):
                with pytest.raises(AppError, match=sentence):
                    client.predict(**arguments, **changes, api_name=api_name)


@pytest.mark.browser
def test_the_engine_flow_from_the_page(page, make_machine):
    machine = make_machine()
    defaults = PageDefaults(target=machine.form.target, draft=machine.form.draft)
    with served(machine.slot, defaults) as url:
        open_page(page, url)
        expect(page.locator("#sd-tensorrt")).to_be_hidden()
        page.get_by_label("Back end").click()
        page.get_by_role("option", name="tensorrt_llm").click()
        expect(page.locator("#sd-usable")).to_contain_text("Usable here: TensorRT-LLM 1.2.1")
        page.locator("#sd-tensorrt").get_by_text("TensorRT-LLM", exact=True).click()
        set_number(page, "max_seq_len", 480)
        set_number(page, "max_new_tokens", 32)
        page.click("#sd-build")
        expect(status(page)).to_contain_text("The pair is built")
        page.click("#sd-run")
        expect(status(page)).to_contain_text("Done")
        expect(page.locator(".sd-verdict h2")).to_contain_text("output identical")
        assert lane(page, "speculative").locator(".a").count() > 0
        assert kept_text(page, "speculative") == kept_text(page, "baseline") != ""
        page.get_by_text("Commands to take away").click()
        blocks = page.locator("#sd-commands pre")
        expect(blocks).to_have_count(5)
        expect(blocks.nth(2)).to_contain_text("DraftTargetDecodingConfig")
        expect(page.locator("#sd-commands button[title=copy]")).to_have_count(5)
        page.get_by_label("Back end").click()
        page.get_by_role("option", name="transformers").click()
        for element in ("#sd-tensorrt", "#sd-commands"):
            expect(page.locator(element)).to_be_hidden()


@pytest.mark.browser
def test_the_pytorch_flow_at_400_pixels(page, make_machine):
    machine = make_machine(PYTORCH)
    defaults = PageDefaults("tensorrt_llm", machine.form.target, machine.form.draft)
    with served(machine.slot, defaults) as url:
        page.set_viewport_size({"width": 400, "height": 900})
        open_page(page, url, theme="dark")
        expect(page.locator("#sd-usable")).to_contain_text("Usable here")
        page.click("#sd-run")
        expect(status(page)).to_contain_text("Done", timeout=WAIT_S * 1000)
        expect(lane(page, "speculative").locator(".m").first).to_be_visible()
        expect(page.locator(".sd-of-m")).to_be_visible()
        page.get_by_text("Commands to take away").click()
        expect(page.locator("#sd-commands pre")).to_have_count(3)
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
