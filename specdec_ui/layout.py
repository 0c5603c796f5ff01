"""The page: components in reading order, then which handler each event calls. No logic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import gradio as gr

from engines import (
    AUTO,
    BACKEND_CHOICES,
    BUNDLED,
    BUNDLED_DRAFT,
    DEFAULT_MIN_DRAFT_PROB,
    DEFAULT_NUM_DRAFT_TOKENS,
    DRAFT_KINDS,
    MAX_NUM_DRAFT_TOKENS,
    MAX_REPEATS,
    DraftKind,
    EngineSlot,
    distill,
    read_recording,
)
from specdec_ui import theme
from specdec_ui.api import CONCURRENCY_ID, add_endpoints
from specdec_ui.charts import latency_figure
from specdec_ui.handlers import (
    forget,
    on_build,
    on_fault,
    on_probe,
    on_run,
    on_stop,
    on_stopped,
    on_tune,
    on_wait,
)
from specdec_ui.highlight import legend_html
from specdec_ui.pair_part import on_check, pair_part
from specdec_ui.presets import EXAMPLES, FIRST_RECORDING, Example
from specdec_ui.state import DRAFTS, RunForm, RunState, Session, TuneForm
from specdec_ui.summary import (
    expectation_html,
    figures_html,
    phases_html,
    status_html,
    verdict_html,
)
from specdec_ui.tensorrt_part import LOOKING, choose_backend, commands_part, tensorrt_part
from specdec_ui.theme import own_html
from specdec_ui.views import View

TITLE = "SpecDec Playground"
# How events that need no engine are called: without the queue, unseen by API clients
AT_ONCE: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private", "queue": False}
LIVE = "(session) => { window.specdec.live(); return session; }"
# Looking for a back end takes long and needs no engine: a run that goes on does not hold it up
PROBING: dict[str, Any] = {
    "show_progress": "hidden",
    "api_visibility": "private",
    "concurrency_id": "probe",
    "concurrency_limit": 1,
}
CHECKING: dict[str, Any] = {**PROBING, "concurrency_id": "check", "trigger_mode": "multiple"}
CACHE_LIFE_S = (3600, 24 * 3600)  # how often exported files are looked through, how old they get
INTRODUCTION = (
    f"# {TITLE}\n"
    "A small **draft** guesses the next tokens, the large **target** checks all of them in one "
    "pass and keeps those it agrees with. The output stays the target's own; whether it comes "
    "faster is measured here, against a baseline that is really run."
)
TUNING_ADVICE = (
    "Makes a draft of a few of the target's own layers, taught on text that the target writes "
    "itself: no data set is needed.\n\n"
    "**Worth it** where there is a GPU, the target is a Llama, you use the pair for long, and\n"
    "- no small model with the target's tokenizer exists, or\n"
    "- one exists, and its drafts are often rejected on your own prompts.\n\n"
    "**Not worth it** where\n"
    "- a draft of the target's family is published: try that first;\n"
    "- there is only a CPU: that is for trying it out. The bundled draft, of a small target, read "
    "150 million tokens: twenty minutes of an H200, days of two CPU cores;\n"
    "- the text copies its prompt: the draft kind prompt_lookup is free."
)


@dataclass(frozen=True, slots=True)
class PageDefaults:
    """What the page starts with."""

    backend: str = AUTO
    target: str = BUNDLED
    draft: str = BUNDLED_DRAFT
    draft_kind: DraftKind = "model"


def build_app(slot: EngineSlot, defaults: PageDefaults | None = None) -> gr.Blocks:
    """Return the page over a slot of engines. Launch it with `launch_options()`."""
    defaults = defaults or PageDefaults()
    recorded = RunState.replayed(read_recording(FIRST_RECORDING))
    app = gr.Blocks(title=TITLE, analytics_enabled=False, delete_cache=CACHE_LIFE_S)
    with app:
        controls: dict[str, Any] = {}
        tuning: dict[str, Any] = {}
        outputs: dict[str, Any] = {}
        gr.Markdown(INTRODUCTION)
        outputs["verdict"] = own_html(verdict_html(recorded.record, whose="recorded run"))
        with gr.Row(equal_height=False):
            with gr.Column(scale=1, min_width=290, elem_classes="sd-side"):
                note, tensorrt, pair = _pair(controls, outputs, defaults)
                _tuning(tuning, outputs)
                _settings(controls)
            with gr.Column(scale=3, min_width=480):
                _prompt(controls, defaults)
                with gr.Row():
                    outputs["run"] = gr.Button("Run", variant="primary", elem_id="sd-run")
                    outputs["stop"] = gr.Button(
                        "Stop", variant="stop", interactive=False, elem_id="sd-stop"
                    )
                outputs["status"] = own_html(
                    status_html("Below is a recorded run. Run starts your own.")
                )
                _lanes(outputs, recorded)
        with gr.Row():
            with gr.Column(min_width=320):
                gr.Markdown("### Latency against the baseline")
                outputs["latency"] = gr.Plot(
                    latency_figure(recorded.record), show_label=False, elem_classes="sd-chart"
                )
            with gr.Column(min_width=320):
                gr.Markdown("### Figures")
                outputs["figures"] = own_html(figures_html(recorded.record))
                outputs["export"] = gr.DownloadButton(
                    "Export this run (JSON Lines)", value=str(FIRST_RECORDING)
                )
        commands, outputs["commands"] = commands_part(defaults.backend)
        # Shared: what is tuned is the pair's target, and the pair gets the draft.
        tuning["target"] = controls["target"]
        outputs |= {name: controls[name] for name in ("draft_kind", "draft")}
        outputs |= {name: tuning[name] for name in ("output", "resume")}
        _wire(slot, controls, tuning, outputs)
        looked_for = [controls["backend"], controls["python"]]
        _wire_backend(looked_for, note, tensorrt, commands)
        app.load(on_probe, looked_for, note, **PROBING)
        _wire_pair(
            app, [controls[name] for name in ("backend", "target", "draft_kind", "draft")], *pair
        )
        add_endpoints(slot)
        app.load(None, js="() => window.specdec.replay()")
    return app


def launch_options() -> dict[str, Any]:
    """Return what the page needs of `launch`: its looks, and nothing sent or kept elsewhere."""
    return {
        "css": theme.page_css(),
        "head": theme.page_script(),
        "theme": theme.page_theme(),
        "share": False,
        "run_history": False,
        "footer_links": ["api", "settings"],
        "show_error": True,
    }


def _pair(
    controls: dict[str, Any], outputs: dict[str, Any], defaults: PageDefaults
) -> tuple[gr.HTML, gr.Column, tuple[gr.HTML, gr.Button]]:
    gr.Markdown("### Pair and engine")
    controls["backend"] = gr.Dropdown(
        list(BACKEND_CHOICES),
        value=defaults.backend,
        label="Back end",
        info="What runs the models. auto chooses: onnxruntime for Llamas on a CPU; transformers, "
        "which is PyTorch, on CUDA and for other models. tensorrt_llm is NVIDIA's library.",
    )
    note = own_html(LOOKING, elem_id="sd-usable")  # whether the back end can be used here
    tensorrt = tensorrt_part(controls, defaults.backend)
    controls["target"] = gr.Textbox(
        defaults.target,
        label="Target",
        info=f"'{BUNDLED}' (SmolLM2-135M-Instruct), a folder, a .gguf file, or a Hub id: org/name.",
    )
    controls["draft_kind"] = gr.Radio(
        list(DRAFT_KINDS),
        value=defaults.draft_kind,
        label="Draft kind",
        info="model: a smaller model guesses. prompt_lookup: what followed the same words before. "
        "none: plain decoding.",
    )
    controls["draft"] = gr.Textbox(
        defaults.draft,
        label="Draft model",
        info=f"A smaller model with the target's tokenizer: '{BUNDLED_DRAFT}' (of the bundled "
        "target), a folder, a .gguf file or a Hub id.",
        visible=defaults.draft_kind == "model",
    )
    pair = pair_part(controls)
    outputs["build"] = gr.Button("Build", elem_id="sd-build")
    with gr.Accordion("Build log", open=False):
        outputs["build_log"] = own_html(
            "<p class='sd-note'>Building fetches, verifies and converts a pair once. "
            "Run does it by itself where it is needed.</p>"
        )
    return note, tensorrt, pair


def _tuning(tuning: dict[str, Any], outputs: dict[str, Any]) -> None:
    usual = distill.DistillSpec(output=DRAFTS)
    with gr.Accordion("Tune a draft for this target", open=False, elem_id="sd-tuning"):
        gr.Markdown(TUNING_ADVICE, elem_classes="sd-advice")
        with gr.Row():
            tuning["num_layers"] = gr.Number(
                usual.num_layers,
                label="num_layers",
                info="Layers of the draft. More guess better, fewer guess faster.",
                min_width=110,
            )
            tuning["minutes"] = gr.Number(
                usual.minutes,
                label="minutes",
                info="For writing and training. Measuring is extra.",
                min_width=110,
            )
        tuning["output"] = gr.Textbox(
            label="Output folder",
            placeholder=f"a new one in {DRAFTS}",
            info="Where the draft goes: new or empty.",
        )
        tuning["prompts"] = gr.Textbox(
            label="Prompt file",
            placeholder="none",
            info="What you will ask the target, a prompt a line: its text begins with them.",
        )
        with gr.Row():
            tuning["seed"] = gr.Number(
                usual.seed, label="tuning seed", info="Same seed, same text.", min_width=110
            )
            tuning["resume"] = gr.Checkbox(
                usual.resume,
                label="Resume",
                info="Go on with the stopped tuning in the output folder.",
                min_width=110,
            )
        outputs["tune"] = gr.Button("Tune", elem_id="sd-tune")
        own_html(
            "<p class='sd-note'>Stop, the button beside Run, ends it, and so does closing this "
            "page. What is done so far is kept.</p>"
        )
        outputs["phases"] = own_html(phases_html(None))
        outputs["curve"] = gr.Plot(
            visible=False, show_label=False, elem_classes="sd-chart", elem_id="sd-curve"
        )
        outputs["tune_log"] = own_html("", elem_id="sd-tune-log")


def _choose(example: Example) -> tuple[str, str]:
    return example.prompt, expectation_html(example)


def _choose_kind(kind: DraftKind, num_draft_tokens: float) -> tuple[Any, Any, Any]:
    """Show what is for a draft model where one drafts; a default number becomes the new kind's."""
    is_default = num_draft_tokens in DEFAULT_NUM_DRAFT_TOKENS.values() and kind != "none"
    number = DEFAULT_NUM_DRAFT_TOKENS[kind] if is_default else gr.skip()
    shown = gr.update(visible=kind == "model")
    return shown, shown, number


def _prompt(controls: dict[str, Any], defaults: PageDefaults) -> None:
    controls["prompt"] = gr.Textbox(
        EXAMPLES[0].prompt,
        label="Prompt",
        info="What the target is asked. The examples below differ in how well they can be guessed.",
        lines=3,
        max_lines=12,
        elem_id="sd-prompt",
    )
    with gr.Row():
        buttons = [gr.Button(example.kind, size="sm", min_width=70) for example in EXAMPLES]
    expectation = own_html(expectation_html(EXAMPLES[0]))
    controls["prompt"].input(str, outputs=expectation, **AT_ONCE)
    for button, example in zip(buttons, EXAMPLES, strict=True):
        button.click(
            partial(_choose, example),
            outputs=[controls["prompt"], expectation],
            api_visibility="private",
            queue=False,
        )
    with gr.Row():
        number = DEFAULT_NUM_DRAFT_TOKENS
        controls["num_draft_tokens"] = gr.Number(
            number[defaults.draft_kind] or number["model"],
            label="num_draft_tokens",
            info=f"Tokens guessed per step, 1 to {MAX_NUM_DRAFT_TOKENS}. More can be kept at once, "
            f"and more can be wasted. {number['model']} is the default by measurement, with the "
            "bundled pair on two CPU cores.",
        )
        controls["min_draft_prob"] = gr.Textbox(  # a number's field cannot be empty
            label="min_draft_prob",
            placeholder="as suits the back end",
            info="A draft ends early, behind the first token to which the draft gives less "
            f"than this, 0 to 1. 0: never. Empty: {DEFAULT_MIN_DRAFT_PROB} on a CPU, else 0.",
            visible=defaults.draft_kind == "model",
        )
        controls["max_new_tokens"] = gr.Number(
            64, label="max_new_tokens", info="Where the answer is cut, in tokens."
        )


def _settings(controls: dict[str, Any]) -> None:
    with gr.Accordion("Sampling and comparison", open=False):
        with gr.Row():
            controls["temperature"] = gr.Number(
                0, label="temperature", info="0 is greedy; 1 is the model's own distribution."
            )
            controls["top_k"] = gr.Number(
                0, label="top_k", info="Draw from the k likeliest; 0 keeps all."
            )
            controls["top_p"] = gr.Number(
                1, label="top_p", info="Draw from the likeliest with this share; 1 keeps all."
            )
            controls["seed"] = gr.Number(0, label="seed", info="Same seed, same draws.")
        with gr.Row():
            controls["repeats"] = gr.Slider(
                1,
                MAX_REPEATS,
                value=1,
                step=1,
                label="Repeats",
                info="Runs of each side in alternating order; the spread shows the noise.",
            )
            controls["baseline"] = gr.Checkbox(
                True, label="Run the baseline", info="The target alone, really run."
            )
            controls["chat_template"] = gr.Checkbox(
                True, label="Chat template", info="Wrap the prompt as the model was taught."
            )


def _lanes(outputs: dict[str, Any], recorded: RunState) -> None:
    own_html(legend_html())
    with gr.Row(equal_height=True):
        for side, name in theme.SIDE_NAMES.items():
            with gr.Column(min_width=280):
                # The wrapper lives in the template, so that the value itself only ever grows.
                outputs[side] = own_html(
                    recorded.lanes[side].html,
                    html_template=(
                        f"<section class='sd-lane sd-{side}'><h3>{name}</h3>"
                        "<div class='sd-text' tabindex='0' role='region' "
                        f"aria-label='{name} output'>${{value}}</div></section>"
                    ),
                    elem_id=f"sd-lane-{side}",
                )
    with gr.Row(equal_height=False):
        replay = gr.Button(
            "Replay side by side", size="sm", elem_id="sd-replay", scale=0, min_width=170
        )
        hide = gr.Checkbox(
            False, label="Hide what was dropped", container=False, scale=0, min_width=200
        )
    replay.click(None, js="() => window.specdec.replay()")
    hide.change(None, inputs=hide, js="(hide) => window.specdec.hideDropped(hide)")


def _wire(
    slot: EngineSlot,
    controls: dict[str, Any],
    tuning: dict[str, Any],
    outputs: dict[str, Any],
) -> None:
    session = gr.State(Session(), delete_callback=forget)
    run_inputs = [session, *(controls[name] for name in RunForm.names())]
    tune_inputs = [session, *(tuning[name] for name in TuneForm.names())]
    view = [outputs[name] for name in View.names()]
    queued: dict[str, Any] = {
        "concurrency_id": CONCURRENCY_ID,
        "concurrency_limit": 1,
        "show_progress": "hidden",
        "api_visibility": "private",
    }
    work = []
    for name, handler, inputs, js in (
        ("run", on_run, run_inputs, LIVE),
        ("build", on_build, run_inputs, None),
        ("tune", on_tune, tune_inputs, None),
    ):
        working = (
            outputs[name]
            .click(on_wait, session, view, js=js, **AT_ONCE)
            .then(partial(handler, slot), inputs, view, **queued)
        )
        working.failure(on_fault, session, view, **AT_ONCE)
        work.append(working)
    outputs["stop"].click(
        on_stop,
        session,
        view,
        cancels=work,
        **AT_ONCE,
    ).then(on_stopped, session, view, **AT_ONCE)
    controls["draft_kind"].change(
        _choose_kind,
        [controls["draft_kind"], controls["num_draft_tokens"]],
        [controls[name] for name in ("draft", "min_draft_prob", "num_draft_tokens")],
        **AT_ONCE,
    )


def _wire_pair(app: gr.Blocks, chosen: list[Any], shown: gr.HTML, button: gr.Button) -> None:
    backend, target, draft_kind, draft = chosen
    look = partial(on_check, may_fetch=False)
    for event in (
        app.load,
        backend.change,
        draft_kind.change,
        *(box.submit for box in (target, draft)),
        *(box.blur for box in (target, draft)),
    ):
        event(look, chosen, shown, **CHECKING)
    button.click(on_check, chosen, shown, **CHECKING)


def _wire_backend(
    looked_for: list[Any], note: gr.HTML, tensorrt: gr.Column, commands: gr.Accordion
) -> None:
    backend, python = looked_for
    shown = [tensorrt, commands, note]
    for chosen in (backend.change, python.submit, python.blur):
        chosen(choose_backend, backend, shown, **AT_ONCE).then(
            on_probe, looked_for, note, **PROBING
        )
