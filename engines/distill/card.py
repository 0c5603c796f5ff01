"""The model card of a draft: how it was made, and what it measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engines.distill.evaluation import (
    ALL,
    ANSWER_TOKENS,
    MAX_PROMPT_TOKENS,
    NUMS_DRAFT_TOKENS,
    SAMPLINGS,
)
from engines.distill.spec import DEFAULT_SEQUENCE_LENGTH, RECORD, DistillSpec
from engines.distill.workspace import Workspace


def write_card(workspace: Workspace, record: Mapping[str, Any]) -> None:
    """Write `README.md` for people and `distill.json` for programs."""
    card, values = card_text(record), json.dumps(record, indent=1)
    workspace.replace("README.md", lambda path: path.write_text(card, encoding="utf-8"))
    workspace.replace(RECORD, lambda path: path.write_text(values, encoding="utf-8"))


def card_text(record: Mapping[str, Any]) -> str:
    """Return the card in Markdown.

    Args:
        record: As `Distillation` keeps it: target, layers, command, device, environment, and what
            each phase measured.
    """
    generate, train = record["generate"], record["train"]
    best = train["best"]
    versions = record["environment"]["versions"]
    lines = [
        f"# A draft for {record['target']}",
        "",
        f"A Llama of {len(record['layers'])} layers that guesses ahead of {record['target']} in "
        "speculative decoding. It began as the target's own layers "
        f"{', '.join(map(str, record['layers']))} (counted from 0) and was distilled on text that "
        "the target wrote by itself; embeddings and head are the target's, in bfloat16. It is of "
        "no use alone.",
        "",
        "| | |",
        "| --- | --- |",
        f"| made with | `{record['command']}` |",
        f"| seed | {record['spec']['seed']} |",
        f"| text | {generate['num_tokens']:,} tokens written by the target in "
        f"{generate['elapsed_s'] / 60:.1f} minutes |",
        f"| training | {train['num_tokens']:,} tokens read in {train['elapsed_s'] / 60:.1f} "
        f"minutes, {train['num_steps']:,} steps; kept is the state after "
        f"{best['elapsed_s'] / 60:.1f} minutes |",
        f"| device | {record['device']} |",
        f"| versions | {', '.join(f'{name} {value}' for name, value in versions.items())} |",
        "",
        *evaluation_lines(record["evaluate"]["results"], record["spec"]["evaluation"]),
        "",
        "## Licence",
        "",
        f"A derivative of {record['target']}'s weights; the target's licence applies. No other "
        "data went into it.",
        "",
    ]
    return "\n".join(lines)


def command_of(spec: DistillSpec) -> str:
    """Return the command of a run, files by their names alone.

    Given again it makes an equal text, chunk by chunk, and a draft that is alike: time ends both.
    """
    target = spec.without_paths()["target"]
    words = ["python -m engines distill", f"--target {target}", f"--layers {spec.num_layers}"]
    if spec.layers is not None:
        words.append(f"--take {','.join(map(str, spec.layers))}")
    words += [f"--minutes {spec.minutes:g}", f"--seed {spec.seed}"]
    if spec.sequence_length != DEFAULT_SEQUENCE_LENGTH:
        words.append(f"--sequence-length {spec.sequence_length}")
    if spec.max_tokens is not None:
        words.append(f"--max-tokens {spec.max_tokens}")
    if spec.device != "auto":
        words.append(f"--device {spec.device}")
    for option, file in (("prompts", spec.prompts), ("evaluate", spec.evaluation)):
        if file is not None:
            words.append(f"--{option} {Path(file).name}")
    return " ".join([*words, f"--output {spec.folder.name}"])


def evaluation_lines(results: Mapping[str, Any], file: str | None) -> list[str]:
    """Return what was measured on which prompts, and a table for each kind of sampling."""
    where = "What users said in a part of the text that was kept apart from training"
    if file is not None:
        where = f"The prompts of `{Path(file).name}`, never trained on"
    left_out = results["num_left_out"]
    rest = f" ({left_out} longer than {MAX_PROMPT_TOKENS} tokens left out)" if left_out else ""
    lines = [
        "## Evaluation",
        "",
        f"{where}{rest}; up to {ANSWER_TOKENS} tokens of the target's answers, both models in "
        "float32. Agreement is greedy and position by position: the share of the target's tokens "
        "that are the draft's first choice too. Under K draft tokens a step stands the mean "
        "acceptance length: tokens a step, the target's own one included. At temperature 1 the "
        "acceptance rate is the mean of Σ min(target, draft), the chance that a draft token is "
        "kept where those before it are.",
    ]
    for sampling in SAMPLINGS:
        share = "agreement" if sampling == "greedy" else "acceptance rate"
        heads = " | ".join(f"K = {number}" for number in NUMS_DRAFT_TOKENS)
        lines += [
            "",
            f"### {sampling.capitalize()}",
            "",
            f"| category | prompts | tokens | {share} | {heads} |",
            "| --- | --- | --- | --- |" + " --- |" * len(NUMS_DRAFT_TOKENS),
        ]
        categories = results[sampling]
        names = [ALL, *sorted(name for name in categories if name != ALL)]
        for name in names:
            figures = categories[name]
            lengths = " | ".join(
                f"{part['mean_acceptance_length']:.2f}"
                for part in figures["num_draft_tokens"].values()
            )
            lines.append(
                f"| {name} | {figures['num_prompts']} | {figures['num_tokens']:,} | "
                f"{figures['agreement']:.3f} | {lengths} |"
            )
    return lines
