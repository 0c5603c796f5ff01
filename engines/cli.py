"""The command line `python -m engines`: what the page does, without the page.

With `--json`, the last line of standard output is one JSON object. Progress goes to standard
error. Exit codes: 0, 1 (failed, with a sentence), 2 (bad arguments), 130 (stopped by Ctrl-C).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args

from engines.backends import BACKEND_CHOICES, create_backend
from engines.base import LOADING, BuildProgress, Engine
from engines.benchmark import MAX_REPEATS, RunEvent, RunRecord, Side, WarmUp, run, settings_of
from engines.checkpoints import built_path, parse_reference
from engines.child import child_lines, own_module
from engines.config import (
    AUTO,
    BUNDLED,
    BUNDLED_DRAFT,
    DEFAULT_MIN_DRAFT_PROB,
    DEFAULT_NUM_DRAFT_TOKENS,
    DRAFT_KINDS,
    MAX_NUM_DRAFT_TOKENS,
    Acceptance,
    DeviceName,
    DTypeName,
    EngineConfig,
    Flow,
    GenerationRequest,
    Quantization,
    SamplingParams,
    TensorRTOptions,
    check_prompt,
    resolve_draft,
)
from engines.distill import RECORD, DistillSpec, check_output, distill
from engines.distill.output_folder import STATE, WORK
from engines.distill.spec import DEFAULT_NUM_LAYERS, DEFAULT_SEQUENCE_LENGTH
from engines.doctor import doctor
from engines.environment import gigabytes
from engines.errors import EngineError
from engines.events import GenerationEvent, Step
from engines.generators import finished
from engines.pairs.reading import check_references
from engines.recording import check_place, read_recording, write_recording
from engines.replay import MAX_SPEED, MIN_SPEED, replay_events
from engines.self_test import self_test
from engines.slot import EngineSlot
from engines.stats import typical
from engines.store import EngineStore
from engines.tensorrt_llm_backend.commands import take_away
from engines.terminal import (
    bytes_text,
    distill_text,
    printable,
    report_lines,
    stats_lines,
    step_text,
)

Value = TypeVar("Value")
REPORT_INTERVAL_S = 5.0  # of a distillation's reports that carry no message
STOPPED_BY_USER = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    if isinstance(sys.stdout, TextIOWrapper):  # a model may say what the terminal cannot show
        sys.stdout.reconfigure(errors="replace")
    args = _parser().parse_args(argv)
    try:
        result: dict[str, Any] = args.command(args)
        exit_code = int(result.pop("exit_code", 0))
        if args.json:
            print(json.dumps(result))
        sys.stdout.flush()
    except EngineError as exc:
        _say(f"error: {exc}")
        return 1
    except ValueError as exc:
        _say(f"error: {exc}")
        return 2
    except KeyboardInterrupt:
        _say("stopped")
        return STOPPED_BY_USER
    except BrokenPipeError:
        # The reader has gone, `head` for example. Nothing more may be written on the way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return exit_code


# -- commands: each prints for people unless --json asks otherwise, and returns its JSON object


def _doctor(args: argparse.Namespace) -> dict[str, Any]:
    report = doctor(python=args.python)
    if args.self_test:
        show = _Progress()
        usable = [name for name, backend in report["backends"].items() if backend["usable"]]
        tests = self_test(usable, EngineSlot(), show, args.python)
        report["self_test"] = {test.backend: asdict(test) for test in tests}
        report["exit_code"] = 0 if all(test.passed for test in tests) else 1
    if not args.json:
        for name, backend in report["backends"].items():
            state = "usable" if backend["usable"] else "not usable"
            devices = f"; devices: {', '.join(backend['devices'])}" if backend["devices"] else ""
            print(f"back end {name}: {state} ({backend['detail']}){devices}")
        bundled, store, machine = report["bundled"], report["store"], report["environment"]
        print(f"bundled target {bundled['target']}: {bundled['state']}")
        print(f"bundled draft {bundled['draft']}: {bundled['draft_state']}")
        print(
            f"engine store {store['folder']}: {len(store['engines'])} built, "
            f"{gigabytes(store['free_bytes'])} free"
        )
        print(
            f"machine: {machine['cpu']}, {machine['num_cpus']} processors, "
            f"{gigabytes(report['memory_available_bytes'])} of "
            f"{gigabytes(machine['memory_bytes'])} available"
        )
        for name, test in report.get("self_test", {}).items():
            print(
                f"self-test {name}: {'passed' if test['passed'] else 'failed'} ({test['detail']})"
            )
    return report


def _build(args: argparse.Namespace) -> dict[str, Any]:
    args.draft, _ = resolve_draft(args.target, args.draft, None)
    config = _config(args)
    show = _Progress()
    for progress in EngineSlot().build(config):
        show(progress)
    built = [name for name in (config.target, config.draft) if name]
    if not args.json:
        print(printable(f"built: {' and '.join(built)}"))
    return {"built": built}


def _check(args: argparse.Namespace) -> dict[str, Any]:
    draft, _ = resolve_draft(args.target, args.draft, None)
    if draft is None:
        raise ValueError("draft is missing: name a draft model with --draft")
    report = finished(check_references(args.target, draft, EngineStore()), on_message=_say)
    config = EngineConfig(args.backend, args.target, draft, args.dtype, args.device)
    need = create_backend(args.backend).memory_need(config)
    if not args.json:
        for line in report_lines(report):
            print(line)
        print(f"memory: {'not known before it is built' if need is None else need.text}")
    return {
        **report.to_dict(),
        "memory": None if need is None else need.to_dict(),
        "exit_code": 1 if report.outcome == "refused" else 0,
    }


def _commands(args: argparse.Namespace) -> dict[str, Any]:
    args.draft, draft_kind = resolve_draft(args.target, args.draft, args.draft_kind)
    number = args.num_draft_tokens
    if number is None:
        number = DEFAULT_NUM_DRAFT_TOKENS[draft_kind]
    snippets = take_away(_config(args), draft_kind, number)
    if not args.json:
        for snippet in snippets:
            print(f"# {snippet.title}\n\n{snippet.text}")
    return {"commands": [asdict(snippet) for snippet in snippets]}


def _run(args: argparse.Namespace) -> dict[str, Any]:
    slot = EngineSlot()
    prompt = _prompt(args)
    if args.record:
        check_place(args.record)
    sampling = SamplingParams(args.temperature, args.top_k, args.top_p, args.seed)
    args.draft, draft_kind = resolve_draft(args.target, args.draft, args.draft_kind)
    num_draft_tokens = args.num_draft_tokens
    if num_draft_tokens is None:
        num_draft_tokens = DEFAULT_NUM_DRAFT_TOKENS[draft_kind]
    # Made before anything is loaded, so that a bad number is told at once.
    request = GenerationRequest(
        (0,),
        draft_kind,
        num_draft_tokens,
        args.max_new_tokens,
        sampling,
        min_draft_prob=args.min_draft_prob,
    )
    try:
        engine = slot.load(_config(args), _Progress())
        token_ids = engine.encode(prompt, chat_template=args.chat_template)
        request = replace(request, prompt_token_ids=token_ids)
        record = RunRecord(
            prompt,
            settings_of(engine, request, chat_template=args.chat_template, repeats=args.repeats),
        )
        is_stopped = _stream(args, engine, request, record)
    finally:
        slot.close()
    result = record.to_dict()
    if not args.json:
        _print_summary(record, result)
    if args.record:
        write_recording(record, args.record)
        _say(f"recorded to {args.record}")
    return {**result, "exit_code": STOPPED_BY_USER} if is_stopped else result


def _replay(args: argparse.Namespace) -> dict[str, Any]:
    record = read_recording(args.file)
    if not args.json:
        for side, repeats in record.runs.items():
            for repeat, events in enumerate(repeats):
                _heading(side, repeat, len(repeats))
                for event in replay_events(events, speed=args.speed):
                    _show(event)
                print()
    result = record.to_dict()
    if not args.json:
        _print_summary(record, result)
    return result


def _distill(args: argparse.Namespace) -> dict[str, Any]:
    num_layers = len(args.take) if args.take else DEFAULT_NUM_LAYERS
    spec = DistillSpec(
        output=args.output,
        target=args.target,
        num_layers=num_layers if args.layers is None else args.layers,
        minutes=args.minutes,
        layers=args.take,
        prompts=args.prompts,
        evaluation=args.evaluate,
        seed=args.seed,
        device=args.device,
        sequence_length=args.sequence_length,
        max_tokens=args.max_tokens,
        resume=args.resume,
    )
    check_output(spec.folder, resume=spec.resume)
    show = _Progress()
    # PyTorch trains it, so the target is built for that back end, which says where it is missing.
    for progress in EngineSlot().build(EngineConfig("transformers", spec.target)):
        show(progress)
    shown_at = -math.inf
    try:
        for report in distill(spec):
            is_due = time.monotonic() - shown_at >= REPORT_INTERVAL_S
            if report is not None and (report.message or is_due):
                shown_at = time.monotonic()
                _say(distill_text(report))
    except KeyboardInterrupt:
        is_begun = (spec.folder / WORK / STATE).is_file()
        kept = f"; what is done is in {spec.folder}, and --resume goes on with it"
        _say(f"stopped{kept if is_begun else ' before anything was done'}")
        return {"output": str(spec.folder), "exit_code": STOPPED_BY_USER}
    record = json.loads((spec.folder / RECORD).read_text(encoding="utf-8"))
    if not args.json:
        print(printable(f"the draft is in {spec.folder}: use it with --draft {spec.folder}"))
    return {"output": str(spec.folder), **record}


def _pack(args: argparse.Namespace) -> dict[str, Any]:
    reference = parse_reference(args.target)
    if reference.path is not None:
        raise ValueError(
            f"target is '{args.target}': name it as others can, by a Hub id or '{BUNDLED}'; the "
            "packed draft says which it needs"
        )
    show = _Progress()
    for progress in EngineSlot().build(EngineConfig("transformers", args.target)):
        show(progress)
    folders = (args.draft, str(built_path(reference, EngineStore())), args.target, args.output)
    for line in child_lines(
        own_module("engines.distill.packing", *folders),
        action="packing",
    ):
        if line is not None:
            _say(line)
    num_bytes = sum(path.stat().st_size for path in Path(args.output).iterdir())
    if not args.json:
        print(printable(f"packed into {args.output}, {num_bytes / 1e6:.1f} MB"))
    return {"output": args.output, "num_bytes": num_bytes}


def _engines_list(args: argparse.Namespace) -> dict[str, Any]:
    entries = [entry.to_dict() for entry in EngineStore().entries()]
    if not args.json:
        for entry in entries:
            name = printable(entry["name"])
            print(f"{entry['key']}  {gigabytes(entry['num_bytes'])}  {entry['created']}  {name}")
        if not entries:
            print("no engine is built yet: 'python -m engines build' builds the bundled target")
    return {"engines": entries}


def _engines_remove(args: argparse.Namespace) -> dict[str, Any]:
    num_bytes = EngineStore().remove(args.key)
    if not args.json:
        print(f"removed {args.key}, {gigabytes(num_bytes)}")
    return {"removed": args.key, "num_bytes": num_bytes}


# -- what they share


def _stream(
    args: argparse.Namespace, engine: Engine, request: GenerationRequest, record: RunRecord
) -> bool:
    """Run, print as it comes, keep every event; return whether the user stopped it."""
    shown: tuple[Side, int] | None = None
    try:
        for item in run(engine, request, baseline=args.baseline, repeats=args.repeats):
            record.apply(item)
            if isinstance(item, WarmUp) and item.message:
                _say(f"  {item.message}")
            if args.json or not isinstance(item, RunEvent):
                continue
            if shown != (item.side, item.repeat):
                shown = (item.side, item.repeat)
                _heading(item.side, item.repeat, args.repeats)
            _show(item.event)
    except KeyboardInterrupt:
        _say("stopped")
        return True
    finally:
        if shown is not None:
            print()
    return False


def _show(event: GenerationEvent) -> None:
    if isinstance(event, Step):
        sys.stdout.write(step_text(event, colour=sys.stdout.isatty()))
        sys.stdout.flush()


def _heading(side: Side, repeat: int, repeats: int) -> None:
    of_repeats = f", run {repeat + 1} of {repeats}" if repeats > 1 else ""
    print(f"\n[{side}{of_repeats}]")


def _print_summary(record: RunRecord, result: dict[str, Any]) -> None:
    print()
    for side in record.runs:
        for line in stats_lines(side, typical(record.stats(side))):
            print(line)
    if result.get("speedup") is not None:
        low, high = result["speedup_range"]
        spread = f" ({low:.2f} to {high:.2f})" if len(record.runs["speculative"]) > 1 else ""
        same = {True: ", output identical", False: ", output differs", None: ""}
        print(f"speedup {result['speedup']:.2f}x{spread}{same[result['identical']]}")
    for note in record.settings.get("notes", []):
        print(printable(f"note: {note}"))


class _Progress:
    """Prints a build's stages and log lines to standard error."""

    def __init__(self) -> None:
        self._shown: tuple[int, str] | None = None
        self._told: tuple[tuple[int, str], int] | None = None  # of a stage: tenths of its download

    def __call__(self, progress: BuildProgress) -> None:
        stage = (progress.stage, progress.name)
        if progress.name != LOADING and stage != self._shown:
            self._shown = stage
            _say(f"[{progress.stage}/{progress.num_stages}] {progress.name}")
        if progress.message:
            _say(f"  {progress.message}")
        if progress.total_bytes:
            tenth = (progress.done_bytes or 0) * 10 // progress.total_bytes
            if (stage, tenth) != self._told:
                self._told = (stage, tenth)
                _say(f"  {bytes_text(progress)}")


def _prompt(args: argparse.Namespace) -> str:
    prompt = args.prompt
    if prompt is None:
        try:
            prompt = Path(args.prompt_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as exc:
            raise ValueError(f"the prompt file '{args.prompt_file}' cannot be read: {exc}") from exc
    check_prompt(prompt)
    return str(prompt)


def _config(args: argparse.Namespace) -> EngineConfig:
    options = {item.name: getattr(args, item.name) for item in fields(TensorRTOptions)}
    return EngineConfig(
        args.backend,
        args.target,
        args.draft,
        args.dtype,
        args.device,
        TensorRTOptions(**options) if args.backend == "tensorrt_llm" else TensorRTOptions(),
    )


def _say(line: str) -> None:
    print(printable(line), file=sys.stderr, flush=True)


# -- arguments


class _Parser(argparse.ArgumentParser):
    """Ends in one sentence instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, printable(f"error: {message}; '{self.prog} --help' lists what there is\n"))


def _number(kind: Callable[[str], Value], name: str, remedy: str) -> Callable[[str], Value]:
    def parse(text: str) -> Value:
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{name} is {text!r}: {remedy}") from None

    return parse


def _whole_numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _speed(text: str) -> float:
    speed = float(text)
    if not MIN_SPEED <= speed <= MAX_SPEED:
        raise ValueError
    return speed


def _add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    model = "a folder, a .gguf file, a Hub id such as org/name"
    parser.add_argument(
        "--backend",
        default=AUTO,
        choices=BACKEND_CHOICES,
        help="auto (default): onnxruntime on a CPU, transformers on CUDA and for what onnxruntime "
        "cannot run",
    )
    parser.add_argument("--target", default=BUNDLED, help=f"{model}, or '{BUNDLED}' (default)")
    parser.add_argument(
        "--draft", help=f"{model}, or '{BUNDLED_DRAFT}' (default for the bundled target)"
    )
    parser.add_argument(
        "--dtype", default="auto", choices=get_args(DTypeName), help="default: %(default)s"
    )
    parser.add_argument(
        "--device", default="auto", choices=get_args(DeviceName), help="default: %(default)s"
    )
    _add_tensorrt_arguments(parser)


def _add_tensorrt_arguments(parser: argparse.ArgumentParser) -> None:
    usual, whole = TensorRTOptions(), "use a whole number"
    group = parser.add_argument_group("for the back end tensorrt_llm")

    def add(name: str, kind: Callable[[str], Any], remedy: str, text: str) -> None:
        group.add_argument(
            f"--{name.replace('_', '-')}",
            type=_number(kind, name, remedy),
            default=getattr(usual, name),
            help=f"{text} (default: %(default)s)",
        )

    _add_python_argument(group)
    for name, kind, text in (
        ("flow", Flow, "engine: built engines; pytorch: the library's own loop, no build"),
        ("quantization", Quantization, "of the weights; auto: as the checkpoint is"),
        ("acceptance", Acceptance, "logits: also for sampling; both engines gather theirs"),
    ):
        group.add_argument(
            f"--{name}",
            default=getattr(usual, name),
            choices=get_args(kind),
            help=f"{text} (default: %(default)s)",
        )
    add("max_draft_len", int, whole, "the most drafts a step that the target is built for")
    add("max_seq_len", int, whole, "prompt and output together, in tokens")
    add("tensor_parallel_size", int, whole, "GPUs that share the target")
    add("draft_tensor_parallel_size", int, whole, "GPUs that share the draft")
    numbers = "use numbers with commas, as in 0,1"
    for name, role in (("devices", "target"), ("draft_devices", "draft")):
        group.add_argument(
            f"--{name.replace('_', '-')}",
            type=_number(_whole_numbers, name, numbers),
            default=(),
            metavar="I,J,…",
            help=f"numbers of the {role}'s GPUs (default: the first ones)",
        )
    group.add_argument(
        "--launcher",
        default=usual.launcher,
        metavar="COMMAND",
        help="put before the worker's command in the PyTorch flow, as in 'mpirun -n 16 --hostfile "
        "hosts trtllm-llmapi-launch'; rank 0 must be on this machine",
    )
    for name, text in (
        ("build_timeout_s", "seconds that an engine's build may take"),
        ("start_timeout_s", "seconds that loading may take"),
        ("step_timeout_s", "seconds that a step may take"),
    ):
        add(name, float, "use seconds", text)


def _add_python_argument(to: Any) -> None:
    to.add_argument(
        "--trtllm-python",
        dest="python",
        metavar="PATH",
        help="the Python that has TensorRT-LLM (default: SPECDEC_TRTLLM_PYTHON, else this one, "
        "else what make trtllm made)",
    )


def _add_drafting_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--draft-kind",
        choices=DRAFT_KINDS,
        help="default: model with --draft and for the bundled target, else prompt_lookup",
    )
    parser.add_argument(
        "--num-draft-tokens",
        type=_number(int, "num_draft_tokens", f"use 1 to {MAX_NUM_DRAFT_TOKENS}"),
        help=f"drafted per step, 1 to {MAX_NUM_DRAFT_TOKENS} (default: "
        f"{DEFAULT_NUM_DRAFT_TOKENS['model']} by a model, "
        f"{DEFAULT_NUM_DRAFT_TOKENS['prompt_lookup']} by prompt_lookup)",
    )


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    whole = "use a whole number"
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", help="the prompt itself")
    prompt.add_argument("--prompt-file", help="a file that holds the prompt, in UTF-8")
    _add_drafting_arguments(parser)
    parser.add_argument(
        "--min-draft-prob",
        type=_number(float, "min_draft_prob", "use a number from 0 to 1"),
        help="a draft ends behind the first token to which the draft model gives less than this; "
        f"0: never (default: {DEFAULT_MIN_DRAFT_PROB} on a CPU, 0 elsewhere)",
    )

    parser.add_argument(
        "--max-new-tokens",
        type=_number(int, "max_new_tokens", whole),
        default=64,
        help="default: 64",
    )
    parser.add_argument(
        "--temperature",
        type=_number(float, "temperature", "use a number from 0 to 10"),
        default=0.0,
        help="0 is greedy (default)",
    )
    parser.add_argument(
        "--top-k", type=_number(int, "top_k", whole), default=0, help="0 keeps all (default)"
    )
    parser.add_argument(
        "--top-p",
        type=_number(float, "top_p", "use a number above 0, up to 1"),
        default=1.0,
        help="1 keeps all (default)",
    )
    parser.add_argument("--seed", type=_number(int, "seed", whole), default=0, help="default: 0")
    parser.add_argument(
        "--no-chat-template",
        dest="chat_template",
        action="store_false",
        help="give the prompt to the model as it stands",
    )
    parser.add_argument("--baseline", action="store_true", help="run the target alone as well")
    parser.add_argument(
        "--repeats",
        type=_number(int, "repeats", f"use 1 to {MAX_REPEATS}"),
        choices=range(1, MAX_REPEATS + 1),
        metavar="N",
        default=1,
        help=f"runs of each side, in alternating order, 1 to {MAX_REPEATS} (default: 1)",
    )
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the run to a file")


def _add_distill_arguments(parser: argparse.ArgumentParser) -> None:
    whole = "use a whole number"
    parser.add_argument(
        "--target",
        default=BUNDLED,
        help=f"a Llama: a folder, a .gguf file, a Hub id, or '{BUNDLED}' (default)",
    )
    parser.add_argument("--output", required=True, help="a new or empty folder for the draft")
    parser.add_argument(
        "--layers",
        type=_number(int, "layers", whole),
        metavar="N",
        help=f"how many of the target's layers the draft has (default: {DEFAULT_NUM_LAYERS})",
    )
    parser.add_argument(
        "--take",
        type=_number(_whole_numbers, "take", "use numbers with commas, as in 0,1,28,29"),
        metavar="I,J,…",
        help="which layers, from 0 (default: two of either end, the others evenly between)",
    )
    parser.add_argument(
        "--minutes",
        type=_number(float, "minutes", "use a number above 0"),
        default=10.0,
        metavar="M",
        help="for writing text and training together (default: 10)",
    )
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="conversations begin with these prompts: one a line, or .jsonl with 'prompt', "
        "'turns' or 'beginning' (default: beginnings of common requests, and whatever the target "
        "asks itself)",
    )
    parser.add_argument(
        "--evaluate",
        metavar="FILE",
        help="prompts to measure the draft on, likewise; with 'category' for a table by category "
        "(default: text kept apart from training)",
    )
    parser.add_argument("--seed", type=_number(int, "seed", whole), default=0, help="default: 0")
    parser.add_argument(
        "--sequence-length",
        type=_number(int, "sequence_length", whole),
        default=DEFAULT_SEQUENCE_LENGTH,
        help="tokens of a conversation (default: %(default)s)",
    )
    parser.add_argument(
        "--max-tokens",
        type=_number(int, "max_tokens", whole),
        help="write so many tokens instead of what the minutes allow",
    )
    parser.add_argument(
        "--device", default="auto", choices=get_args(DeviceName), help="default: %(default)s"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on with the interrupted run in the folder"
    )


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m engines", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)

    def add(
        to: Any, name: str, command: Callable[[argparse.Namespace], dict[str, Any]], text: str
    ) -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = to.add_parser(name, help=text, description=text)
        added.set_defaults(command=command)
        added.add_argument("--json", action="store_true", help="print one JSON object, last")
        return added

    diagnosis = add(commands, "doctor", _doctor, "say what is installed and usable")
    _add_python_argument(diagnosis)
    diagnosis.add_argument(
        "--self-test",
        action="store_true",
        help="build and run the bundled pair on every usable back end, and compare what they say",
    )
    build = add(commands, "build", _build, "fetch, convert and build a pair into the store")
    _add_engine_arguments(build)
    check = add(
        commands, "check", _check, "say whether a draft can propose for a target, rule by rule"
    )
    _add_engine_arguments(check)
    run_parser = add(commands, "run", _run, "generate once, or compare with the baseline")
    _add_engine_arguments(run_parser)
    _add_run_arguments(run_parser)
    commands_parser = add(
        commands, "commands", _commands, "print a TensorRT-LLM pair as that library's own commands"
    )
    _add_engine_arguments(commands_parser)
    commands_parser.set_defaults(backend="tensorrt_llm")
    _add_drafting_arguments(commands_parser)
    replay = add(commands, "replay", _replay, "print a recorded run as a run")
    replay.add_argument("file", type=Path)
    replay.add_argument(
        "--speed",
        type=_number(_speed, "speed", f"use {MIN_SPEED} to {MAX_SPEED}"),
        help=f"times the recorded speed, {MIN_SPEED} to {MAX_SPEED} (default: at once)",
    )
    distill_parser = add(commands, "distill", _distill, "make a draft model for a target")
    _add_distill_arguments(distill_parser)
    pack = add(commands, "pack", _pack, "write a draft without what its target holds too")
    pack.add_argument("--draft", required=True, help="a folder that distill has filled")
    pack.add_argument("--target", default=BUNDLED, help="its target (default: %(default)s)")
    pack.add_argument("--output", required=True, help="a new or empty folder")
    engines = commands.add_parser("engines", help="list or remove built engines")
    actions = engines.add_subparsers(required=True, metavar="ACTION", parser_class=_Parser)
    add(actions, "list", _engines_list, "list the built engines")
    remove = add(actions, "remove", _engines_remove, "delete a built engine")
    remove.add_argument("key", help="as 'engines list' prints it")
    return parser
