"""What the page has for TensorRT-LLM alone: its options, the commands to take away. No logic."""

from __future__ import annotations

from typing import Any, get_args

import gradio as gr

from engines import (
    MAX_NUM_DRAFT_TOKENS,
    Acceptance,
    DTypeName,
    Flow,
    Quantization,
    TensorRTOptions,
)
from specdec_ui.state import TENSORRT_LLM
from specdec_ui.summary import backend_note_html

LOOKING = backend_note_html("Looking whether it can be used here …")
NO_COMMANDS = "Build or Run fills this in."


def tensorrt_part(controls: dict[str, Any], backend: str) -> gr.Column:
    """Add the options, in view where the page starts with that back end."""
    panel = gr.Column(visible=backend == TENSORRT_LLM, elem_id="sd-tensorrt")
    with panel, gr.Accordion("TensorRT-LLM", open=False):
        _build_options(controls)
        _device_options(controls)
        _process_options(controls)
    return panel


def _build_options(controls: dict[str, Any]) -> None:
    usual = TensorRTOptions()
    controls["flow"] = gr.Dropdown(
        list(get_args(Flow)),
        value=usual.flow,
        label="flow",
        info="engine: Build compiles both models for this GPU, minutes to hours, and this page's "
        "own loop drafts and verifies. pytorch: nothing is compiled; the library's loop runs, and "
        "reports less. auto: engine where the installed version has it.",
    )
    controls["dtype"] = gr.Dropdown(
        list(get_args(DTypeName)),
        value="auto",
        label="dtype",
        info="Number format of weights that are not quantised. auto is bfloat16; float16 where "
        "the models were made for it. TensorRT-LLM verifies no drafts in float32.",
    )
    controls["quantization"] = gr.Dropdown(
        list(get_args(Quantization)),
        value=usual.quantization,
        label="quantization",
        info="Smaller weights for both models. fp8 is fast on Ada, Hopper and newer GPUs; int8 "
        "and int4 save memory. auto: as the checkpoint is.",
    )
    with gr.Row():
        controls["max_draft_len"] = gr.Number(
            usual.max_draft_len,
            label="max_draft_len",
            info="The most num_draft_tokens that the target's engine is built for, 1 to "
            f"{MAX_NUM_DRAFT_TOKENS}. More needs a new build.",
            min_width=110,
        )
        controls["max_seq_len"] = gr.Number(
            usual.max_seq_len,
            label="max_seq_len",
            info="Prompt and answer together, in tokens. Longer takes more GPU memory.",
            min_width=110,
        )
    controls["acceptance"] = gr.Dropdown(
        list(get_args(Acceptance)),
        value=usual.acceptance,
        label="acceptance",
        info="How the engine flow verifies. tokens: exact match, for temperature 0. logits: by "
        "probabilities, which sampling needs; slower, and needs a new build.",
    )


def _device_options(controls: dict[str, Any]) -> None:
    usual = TensorRTOptions()
    for role, name, place, advice in (
        ("target", "tensor_parallel_size", "devices", "More where it does not fit into one."),
        ("draft", "draft_tensor_parallel_size", "draft_devices", "One is best for a small model."),
    ):
        controls[name] = gr.Number(
            usual.tensor_parallel_size, label=name, info=f"GPUs that share the {role}. {advice}"
        )
        controls[place] = gr.Textbox(
            label=place,
            placeholder="the first ones",
            info=f"Numbers of the {role}'s GPUs, such as 0,1, as nvidia-smi lists them.",
        )


def _process_options(controls: dict[str, Any]) -> None:
    controls["python"] = gr.Textbox(
        label="python",
        placeholder="SPECDEC_TRTLLM_PYTHON, or what make trtllm made",
        info="Path of the Python that has TensorRT-LLM.",
    )
    controls["launcher"] = gr.Textbox(
        label="launcher",
        placeholder="none",
        info="A command put before the worker's in the PyTorch flow: mpirun with its options, then "
        "trtllm-llmapi-launch. Several machines need it; one does not.",
    )


def commands_part(backend: str) -> tuple[gr.Accordion, gr.Markdown]:
    """Add the commands to take away, in view where the page starts with that back end."""
    with gr.Accordion(
        "Commands to take away",
        open=False,
        visible=backend == TENSORRT_LLM,
        elem_id="sd-commands",
    ) as part:
        commands = gr.Markdown(NO_COMMANDS, latex_delimiters=[], elem_classes="sd-commands")
    return part, commands


def choose_backend(backend: str) -> tuple[Any, Any, str]:
    """Show what belongs to a back end, and that it is being looked for."""
    shown = gr.update(visible=backend == TENSORRT_LLM)
    return shown, shown, LOOKING
