"""From a target to a draft: prepare, generate, train, evaluate, save, one after the other.

Each phase yields how far it is and keeps what it has done, so that the process may end at any
moment and a later one goes on from there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from engines.checkpoints import built_path, parse_reference
from engines.distill.card import command_of, write_card
from engines.distill.clock import Clock
from engines.distill.conversations import Conversations
from engines.distill.evaluation import ALL, evaluate
from engines.distill.output_folder import check_output
from engines.distill.plan import make_plan, require_room
from engines.distill.prompts import BEGINNINGS, Prompt, read_prompts
from engines.distill.script import script_of
from engines.distill.spec import (
    DEFAULT_SEQUENCE_LENGTH,
    GENERATE_SHARE,
    DistillProgress,
    DistillSpec,
    Phase,
    chosen_layers,
)
from engines.distill.student import (
    check_architecture,
    make_student,
    save_student,
    trained_parameters,
)
from engines.distill.text_set import TextSet
from engines.distill.training import Trainer
from engines.distill.workspace import Workspace
from engines.distill.writing import Text
from engines.environment import environment, gigabytes
from engines.errors import translate_errors
from engines.store import EngineStore
from engines.tokenizer import load_tokenizer, vocabulary_of
from engines.transformers_backend.device import device_name, device_of
from engines.transformers_backend.engine import GENERATION_ERRORS
from engines.transformers_backend.model import context_length, load_config, load_model

VALIDATE_S = 40.0  # of training between two validations; less in a short one
MIN_VALIDATIONS = 10
# Where no prompts to evaluate on are given, what users said in the text kept apart is asked again.
MAX_KEPT_PROMPTS, MAX_KEPT_PROMPT_TOKENS = 64, 256


class Distillation:
    """One run, or what is left of one."""

    def __init__(self, spec: DistillSpec, store: EngineStore | None = None) -> None:
        """Load the target and open the output folder.

        Raises:
            ValueError: The specification does not suit the target, or a prompt file is unusable.
            EngineError: The target cannot be loaded or handled, the folder is not free, or there
                is no room.
        """
        self.spec = spec
        self.device = device_of(spec.device)
        reference = parse_reference(spec.target)
        self._name = reference.name
        self._path = built_path(reference, store or EngineStore())
        config = load_config(self._path, name=self._name)
        check_architecture(config, self._name)
        self.layers = chosen_layers(spec, config.num_hidden_layers)
        if spec.sequence_length > (length := context_length(config)):
            if spec.sequence_length != DEFAULT_SEQUENCE_LENGTH:
                raise ValueError(
                    f"sequence_length is {spec.sequence_length}, and the target's context holds "
                    f"{length} tokens: use fewer"
                )
            spec = self.spec = replace(spec, sequence_length=length)  # nobody asked for more
        self._tokenizer = load_tokenizer(self._path, name=self._name)
        stop_ids = vocabulary_of(self._tokenizer, self._path).stop_token_ids
        self._script = script_of(self._tokenizer, stop_ids)
        self._conversations = Conversations.prepare(
            self._tokenizer, self._script, spec.prompts, length=spec.sequence_length
        )
        self._evaluation, self._num_known = self._read_evaluation()
        self.plan = make_plan(spec, config, self.device)
        self.workspace = Workspace(spec.folder)
        check_output(spec.folder, resume=spec.resume)
        require_room(self.plan, spec.folder, self.device)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self._target = load_model(self._path, name=self._name, dtype=dtype, device=self.device)
        self._target.requires_grad_(False)
        self._state = self.workspace.open(self._identity())

    def run(self) -> Generator[DistillProgress, None, None]:
        """Do what is left to do.

        Raises:
            EngineError: The device or the disk failed; what is done so far is kept.
        """
        with translate_errors("PyTorch failed", GENERATION_ERRORS):
            yield from self._prepare()
            for phase, work in (
                ("generate", self._generate),
                ("train", self._train),
                ("evaluate", self._evaluate),
                ("save", self._save),
            ):
                if not self._phase(phase).get("is_done"):
                    with closing(work()) as reports:
                        yield from reports
                    self._phase(phase)["is_done"] = True
                    self.workspace.write_state(self._state)
            self.workspace.finish()

    # -- phases

    def _prepare(self) -> Generator[DistillProgress, None, None]:
        plan = self.plan
        kind = "questions and answers" if len(self._script.turns) > 1 else "plain text"
        messages = [
            f"target {self._name}, its layers {', '.join(map(str, self.layers))} to begin as",
            f"{plan.num_sequences} sequences of {self.spec.sequence_length} tokens at once, {kind}",
            f"needs {gigabytes(plan.device_bytes)} of {device_name(self.device)} and up to "
            f"{gigabytes(plan.disk_bytes)} on disk",
        ]
        if left_out := self._conversations.num_left_out:
            messages.append(f"{left_out} prompts are too long and left out")
        if self.spec.prompts is not None and not self._conversations.apart:
            messages.append(
                "there are too few prompts to keep some apart: the text that the draft is measured "
                "on while it learns begins like what it learns from"
            )
        if self._num_known:
            messages.append(
                f"{self._num_known} prompts to evaluate on are among those trained on, and left out"
            )
        for message in messages:
            yield DistillProgress("prepare", 0.0, message=message)

    def _generate(self) -> Generator[DistillProgress, None, None]:
        """Write whole chunks of text until the time for it is over, at least one."""
        phase = self._phase("generate")
        clock = Clock(phase)
        seconds, limit = self._seconds("generate"), self.spec.max_tokens
        num_sequences = self.plan.num_sequences
        chunk_tokens = num_sequences * self.spec.sequence_length
        num_chunks = phase.setdefault("num_chunks", 0)
        num_tokens = num_chunks * chunk_tokens

        def share(num_tokens: int) -> float:
            return clock.elapsed_s / seconds if limit is None else num_tokens / limit

        while num_chunks == 0 or share(num_tokens) < 1:
            chunk = self._conversations.write_chunk(
                self._target, num_chunks, num_sequences=num_sequences, seed=self.spec.seed
            )
            for position, item in enumerate(chunk, start=1):
                if isinstance(item, Text):
                    self.workspace.write_chunk(
                        num_chunks, item.token_ids.cpu(), item.is_answer.cpu()
                    )
                elif clock.is_time_to_report():
                    written = num_tokens + position * num_sequences
                    yield self._report(
                        "generate",
                        clock,
                        share(written),
                        num_tokens=written,
                        tokens_per_second=clock.rate(written),
                    )
            num_chunks += 1
            num_tokens += chunk_tokens
            phase.update(num_chunks=num_chunks, num_tokens=num_tokens)
            clock.store()
            self.workspace.write_state(self._state)
        yield self._report(
            "generate",
            clock,
            1.0,
            num_tokens=num_tokens,
            message=f"{num_tokens:,} tokens written",
        )

    def _train(self) -> Generator[DistillProgress, None, None]:
        """Train for the rest of the minutes, keeping the student that agrees most."""
        yield DistillProgress("train", 0.0, message="reading the text")
        text = TextSet(self.workspace, self._phase("generate")["num_chunks"])
        trainer = Trainer(
            self._target,
            make_student(self._target, self.layers),
            num_positions=self.plan.num_positions,
        )
        phase = self._phase("train")
        if checkpoint := self.workspace.read_checkpoint(self.device):
            trainer.student.load_state_dict(checkpoint["student"], strict=False)
            trainer.load_state_dict(checkpoint["optimizers"])
            phase.update(checkpoint["phase"])
            if phase["best"] == phase["curve"][-1]:  # the last run may have ended before this
                self._write_draft(trainer.student)
            yield from (
                DistillProgress(
                    "train",
                    point["elapsed_s"],
                    num_tokens=point["num_tokens"],
                    loss=point["loss"],
                    agreement=point["agreement"],
                    overlap=point["overlap"],
                )
                for point in phase["curve"]
            )
        clock = Clock(phase)
        seconds = self._seconds("train")
        validate_s = min(VALIDATE_S, seconds / MIN_VALIDATIONS)
        if not phase.get("curve"):  # before the first step: what the layers are worth untrained
            phase.update(num_steps=0, num_tokens=0, curve=[])
            with self.workspace.writing():
                self._tokenizer.save_pretrained(self.spec.folder)
            yield self._validate(clock, trainer, text, loss=None)
        losses: list[torch.Tensor] = []
        is_over = False
        while not is_over:
            token_ids, is_answer = text.batch(
                phase["num_steps"], self.plan.num_train_sequences, seed=self.spec.seed
            )
            share = min(clock.elapsed_s / seconds, 1.0)
            losses.append(trainer.step(token_ids.to(self.device), is_answer.to(self.device), share))
            phase["num_steps"] += 1
            phase["num_tokens"] += token_ids.numel()
            is_over = clock.elapsed_s >= seconds
            if is_over or clock.elapsed_s - phase["curve"][-1]["elapsed_s"] >= validate_s:
                loss = float(torch.stack(losses).mean())
                losses.clear()
                yield self._validate(clock, trainer, text, loss=loss)
            elif clock.is_time_to_report():
                yield self._report(
                    "train",
                    clock,
                    share,
                    num_tokens=phase["num_tokens"],
                    tokens_per_second=clock.rate(phase["num_tokens"]),
                    loss=float(torch.stack(losses[-10:]).mean()),
                )

    def _validate(
        self, clock: Clock, trainer: Trainer, text: TextSet, *, loss: float | None
    ) -> DistillProgress:
        """Measure the student on the text kept apart, and keep it where it is the best so far."""
        phase = self._phase("train")
        result = trainer.validate(
            (token_ids.to(self.device), is_answer.to(self.device))
            for token_ids, is_answer in text.validation(self.plan.num_train_sequences)
        )
        clock.store()
        point = {
            "elapsed_s": clock.elapsed_s,
            "num_tokens": phase["num_tokens"],
            "loss": loss,
            "agreement": result.agreement,
            "overlap": result.overlap,
            "mean_acceptance_length": result.acceptance.mean_acceptance_length,
        }
        is_best = all(result.agreement > earlier["agreement"] for earlier in phase["curve"])
        phase["curve"].append(point)
        if is_best:
            phase["best"] = point
        self.workspace.write_checkpoint(
            {
                "student": trained_parameters(trainer.student),
                "optimizers": trainer.state_dict(),
                "phase": phase,
            }
        )
        if is_best:
            self._write_draft(trainer.student)
        self.workspace.write_state(self._state)
        return self._report(
            "train",
            clock,
            clock.elapsed_s / self._seconds("train"),
            num_tokens=phase["num_tokens"],
            loss=loss,
            agreement=result.agreement,
            overlap=result.overlap,
            message=f"greedy agreement {result.agreement:.3f}, acceptance rate at temperature 1 "
            f"{result.overlap:.3f} on text kept apart",
        )

    def _evaluate(self) -> Generator[DistillProgress, None, None]:
        """Measure the best draft, as it was saved, in float32."""
        phase = self._phase("evaluate")
        clock = Clock(phase)
        self._target = None  # its memory is needed
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        target, draft = (
            load_model(path, name=name, dtype=torch.float32, device=self.device)
            for path, name in ((self._path, self._name), (self.spec.folder, "the draft"))
        )
        prompts = self._evaluation or self._kept_prompts()
        with closing(
            evaluate(target, draft, self._tokenizer, self._script, prompts, seed=self.spec.seed)
        ) as items:
            for item in items:
                if isinstance(item, dict):
                    phase["results"] = item
                elif clock.is_time_to_report():
                    yield self._report("evaluate", clock, item)
        clock.store()
        everything = phase["results"]["greedy"][ALL]
        length = everything["num_draft_tokens"]["4"]["mean_acceptance_length"]
        yield self._report(
            "evaluate",
            clock,
            1.0,
            agreement=everything["agreement"],
            message=f"greedy agreement {everything['agreement']:.3f}, {length:.2f} tokens a step "
            "at 4 draft tokens",
        )

    def _save(self) -> Generator[DistillProgress, None, None]:
        """Write what belongs to a checkpoint besides its weights and its tokenizer: the card."""
        record = {
            "target": self._name,
            "layers": list(self.layers),
            "command": command_of(self.spec),
            "spec": self.spec.without_paths(),
            "device": device_name(self.device),
            "environment": environment(),
            **self._state["phases"],
        }
        write_card(self.workspace, record)
        yield DistillProgress("save", 0.0, fraction=1.0, message=f"saved in {self.spec.folder}")

    # -- what they share

    def _phase(self, name: str) -> dict[str, Any]:
        phase: dict[str, Any] = self._state["phases"].setdefault(name, {})
        return phase

    def _seconds(self, phase: Phase) -> float:
        """Return how long a phase is to take; 0 where the minutes do not count it."""
        share = {"generate": GENERATE_SHARE, "train": 1 - GENERATE_SHARE}.get(phase, 0.0)
        return self.spec.minutes * 60 * share

    def _report(self, phase: Phase, clock: Clock, share: float, **values: Any) -> DistillProgress:
        share = min(share, 1.0)
        remaining_s = None
        if phase == "evaluate" or (phase == "generate" and self.spec.max_tokens is not None):
            if share > 0:  # no clock ends it
                remaining_s = clock.elapsed_s * (1 - share) / share
        else:
            remaining_s = self._seconds(phase) * (1 - share)
        if phase == "generate" and remaining_s is not None:
            remaining_s += self._seconds("train")
        return DistillProgress(
            phase, clock.elapsed_s, fraction=share, remaining_s=remaining_s, **values
        )

    def _identity(self) -> dict[str, Any]:
        """Return what makes the text and the student what they are."""
        prompts = Path(self.spec.prompts or BEGINNINGS).expanduser()
        return {
            "target": self.spec.target,
            "layers": list(self.layers),
            "seed": self.spec.seed,
            "sequence_length": self.spec.sequence_length,
            "minutes": self.spec.minutes,
            "max_tokens": self.spec.max_tokens,
            "device": self.device.type,
            "num_sequences": self.plan.num_sequences,
            "prompts": hashlib.sha256(prompts.read_bytes()).hexdigest(),
        }

    def _read_evaluation(self) -> tuple[list[Prompt] | None, int]:
        """Return the prompts to evaluate on, and how many are left out as they are trained on."""
        if self.spec.evaluation is None:
            return None, 0
        prompts = read_prompts(self.spec.evaluation)
        if not all(prompt.is_whole for prompt in prompts):
            raise ValueError(
                f"'{self.spec.evaluation}' holds beginnings: a draft is evaluated on whole prompts"
            )
        known: set[str] = set()
        if self.spec.prompts is not None:
            known = {prompt.text for prompt in read_prompts(self.spec.prompts)}
        unknown = [prompt for prompt in prompts if prompt.text not in known]
        if not unknown:
            raise ValueError(
                f"every prompt of '{self.spec.evaluation}' is trained on: evaluate on others"
            )
        return unknown, len(prompts) - len(unknown)

    def _kept_prompts(self) -> list[Prompt]:
        """Return the users' first turns in the text kept apart."""
        text = TextSet(self.workspace, 1)
        start = len(self._script.opening)
        prompts = []
        for token_ids, _ in text.validation(1):
            content = token_ids[0, start:].tolist()
            stop_ids = self._script.stop_ids
            end = next((index for index, id_ in enumerate(content) if id_ in stop_ids), None)
            words = self._tokenizer.decode(content[:end][:MAX_KEPT_PROMPT_TOKENS])
            if words.strip():
                prompts.append(Prompt(words))
        return list(dict.fromkeys(prompts))[:MAX_KEPT_PROMPTS]

    def _write_draft(self, student: Any) -> None:
        """Write the student as a checkpoint that any library loads."""
        aside = self.workspace.work / "draft"
        with self.workspace.writing():
            save_student(student, aside)
        for path in sorted(aside.iterdir()):
            self.workspace.replace(path.name, path.rename)
