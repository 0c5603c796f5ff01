"""check_pair: whether a draft can propose for a target, rule by rule.

Verification keeps the output the target's own whatever a draft proposes. So a pair is refused only
where drafts would mean something else by their ids, or a model cannot take part at all; what merely
costs acceptance is a warning.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, Literal

from engines.errors import IncompatibleModelsError
from engines.pairs.profile import PROBE, SPECIAL_TOKENS, ModelProfile

Outcome = Literal["ok", "warning", "refused"]
OUTCOMES: tuple[Outcome, ...] = ("ok", "warning", "refused")  # from best to worst
NUM_DIFFERENCES_SHOWN = 5
OTHER_DRAFT = (
    "choose a draft of the target's family, or the draft kind 'prompt_lookup', which needs none; "
    "pairs with different tokenizers are not supported"
)
FITTING = "the draft can propose for the target"
TARGETS_COUNTS = "the prompt is prepared by the target's alone, for both"


@dataclass(frozen=True, slots=True)
class Difference:
    """An id that two tokenizers spell differently; None: one does not have it."""

    id: int
    target: str | None
    draft: str | None


@dataclass(frozen=True, slots=True)
class RuleResult:
    """What one rule says of a pair."""

    rule: str
    outcome: Outcome
    text: str  # a sentence without its full stop
    remedy: str = ""  # what would make it work, where something would
    differences: tuple[Difference, ...] = ()  # the first of them

    @property
    def advice(self) -> str:
        """Return the text with its remedy."""
        return f"{self.text}; {self.remedy}" if self.remedy else self.text


@dataclass(frozen=True, slots=True)
class PairReport:
    """What all rules say of a pair."""

    target: str
    draft: str
    results: tuple[RuleResult, ...]

    @property
    def outcome(self) -> Outcome:
        """Return the worst of the outcomes."""
        return max((result.outcome for result in self.results), key=OUTCOMES.index)

    def of(self, outcome: Outcome) -> list[RuleResult]:
        return [result for result in self.results if result.outcome == outcome]

    def require(self) -> tuple[str, ...]:
        """Return the warnings as sentences, for the record of a run.

        Raises:
            IncompatibleModelsError: A rule refuses the pair; the text has all that do.
        """
        if refused := self.of("refused"):
            reasons = "; ".join(result.text for result in refused)
            remedies = "; ".join(
                dict.fromkeys(result.remedy for result in refused if result.remedy)
            )
            raise IncompatibleModelsError(
                f"'{self.draft}' cannot draft for '{self.target}': {reasons}"
                + (f"; {remedies}" if remedies else "")
            )
        return tuple(result.text for result in self.of("warning"))

    def to_dict(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "draft": self.draft,
            "outcome": self.outcome,
            "rules": [asdict(result) for result in self.results],
        }


def check_pair(target: ModelProfile, draft: ModelProfile) -> PairReport:
    """Return what every rule says of a pair. No weights are read."""
    return PairReport(target.name, draft.name, tuple(rule(target, draft) for rule in RULES))


# -- the rules


def token_texts(target: ModelProfile, draft: ModelProfile) -> RuleResult:
    """Every id means the same text, but for those that no text is made of."""
    rule = "token_texts"
    theirs, ours = target.tokenizer.texts, draft.tokenizer.texts
    if theirs == ours:
        return RuleResult(rule, "ok", f"all {len(theirs)} ids mean the same text on both sides")
    ids = [id_ for id_ in sorted(theirs.keys() | ours.keys()) if theirs.get(id_) != ours.get(id_)]
    differences = [Difference(id_, theirs.get(id_), ours.get(id_)) for id_ in ids]
    clashes = [item for item in differences if _is_clash(item, target, draft)]
    if clashes:
        return RuleResult(
            rule,
            "refused",
            f"their tokenizers differ at {len(ids)} of {len(theirs)} ids ({_shown(clashes)})",
            OTHER_DRAFT,
            tuple(clashes[:NUM_DIFFERENCES_SHOWN]),
        )
    return RuleResult(
        rule,
        "warning",
        f"{len(ids)} id(s) differ of which no common text is made ({_shown(differences)}): drafts "
        "are rejected there, the output is the target's own",
        differences=tuple(differences[:NUM_DIFFERENCES_SHOWN]),
    )


def _is_clash(item: Difference, target: ModelProfile, draft: ModelProfile) -> bool:
    if item.target is None or item.draft is None:
        return False
    return not (item.id in target.tokenizer.free_ids and item.id in draft.tokenizer.free_ids)


def _shown(differences: list[Difference]) -> str:
    def spelled(text: str | None) -> str:
        return "nothing" if text is None else repr(text)

    return "; ".join(
        f"id {item.id} is {_sides(spelled(item.target), spelled(item.draft))}"
        for item in islice(differences, NUM_DIFFERENCES_SHOWN)
    )


def padded_sizes(target: ModelProfile, draft: ModelProfile) -> RuleResult:
    """The draft can read whatever the target says. Rows behind a vocabulary are padding."""
    rule = "padded_sizes"
    if target.num_rows is None or draft.num_rows is None:
        return RuleResult(rule, "warning", "a configuration does not say its vocab_size")
    num_ids = max(target.tokenizer.texts, default=-1) + 1
    num_said = min(num_ids, target.num_rows)
    if draft.num_rows < num_said:
        return RuleResult(
            rule,
            "refused",
            f"the target can say {num_said} ids, and the draft has rows for {draft.num_rows}",
            OTHER_DRAFT,
        )
    if target.num_rows < num_ids:
        return RuleResult(
            rule,
            "warning",
            f"the target's tokenizer has {num_ids} ids and its embeddings {target.num_rows} rows: "
            "what lies behind is never said",
        )
    padding = " and ".join(
        f"{rows - num_ids} of {side}"
        for rows, side in ((target.num_rows, "the target"), (draft.num_rows, "the draft"))
        if rows > num_ids
    )
    sizes = f"{target.num_rows} and {draft.num_rows} rows for {num_ids} ids"
    return RuleResult(rule, "ok", f"{sizes}, padding ignored: {padding}" if padding else sizes)


def tokenizer_kinds(target: ModelProfile, draft: ModelProfile) -> RuleResult:
    """Both find the same ids in a text, though only the target's are used."""
    rule = "tokenizer_kinds"
    theirs, ours = target.tokenizer, draft.tokenizer
    differing = []
    if theirs.kind != ours.kind:
        differing.append(f"the model is {_sides(theirs.kind, ours.kind)}")
    for name, before, after in (
        ("normalizer", theirs.normalizer, ours.normalizer),
        ("pre-tokenizer", theirs.pre_tokenizer, ours.pre_tokenizer),
    ):
        if before != after:
            kinds = [_kind(written) for written in (before, after)]
            is_same = kinds[0] == kinds[1]
            differing.append(
                f"the {name} is {kinds[0]} on both sides, set otherwise"
                if is_same
                else f"the {name} is {_sides(*kinds)}"
            )
    if differing:
        return RuleResult(
            rule,
            "warning",
            f"they split text differently ({'; '.join(differing)}): {TARGETS_COUNTS}",
        )
    return RuleResult(rule, "ok", f"{theirs.kind}, with the same normalizer and pre-tokenizer")


def special_tokens(target: ModelProfile, draft: ModelProfile) -> RuleResult:
    """Both name the same ids for beginning, end, padding and unknown."""
    rule = "special_tokens"
    differing = []
    for name in SPECIAL_TOKENS:
        theirs, ours = (side.tokenizer.special.get(name) for side in (target, draft))
        if theirs != ours:
            differing.append(f"{name} is {_sides(_token(theirs), _token(ours))}")
    if differing:
        return RuleResult(
            rule, "warning", f"{'; '.join(differing)}: the target's decide, when to stop as well"
        )
    return RuleResult(rule, "ok", "beginning, end, padding and unknown are the same")


def beginnings(target: ModelProfile, draft: ModelProfile) -> RuleResult:
    """Both put the same around a plain text."""
    theirs, ours = target.tokenizer.framed_ids, draft.tokenizer.framed_ids
    if theirs == ours:
        added = f"'{PROBE}' becomes {list(theirs)} on both sides" if theirs else "neither adds any"
        return RuleResult("beginnings", "ok", f"tokens around a text: {added}")
    shown = [str(list(ids)) if ids else "nothing around it" for ids in (theirs, ours)]
    return RuleResult(
        "beginnings",
        "warning",
        f"'{PROBE}' becomes {_sides(*shown)}: {TARGETS_COUNTS}",
    )


def chat_templates(target: ModelProfile, draft: ModelProfile) -> RuleResult:
    """The target has a chat template, and the draft was taught the same."""
    rule = "chat_templates"
    theirs, ours = target.tokenizer.chat_template, draft.tokenizer.chat_template
    if theirs is None:
        return RuleResult(
            rule,
            "warning",
            "the target has no chat template",
            "switch 'chat template' off: the prompt is then given as it stands",
        )
    if theirs == ours:
        return RuleResult(rule, "ok", "the chat template is the same")
    other = "no" if ours is None else "another"
    return RuleResult(
        rule, "warning", f"the draft has {other} chat template: {TARGETS_COUNTS}; drafts may suffer"
    )


def context_lengths(target: ModelProfile, draft: ModelProfile) -> RuleResult:
    """The draft reads as far as the target."""
    rule = "context_lengths"
    theirs, ours = target.context_length, draft.context_length
    if theirs is None or ours is None:
        return RuleResult(rule, "ok", "a configuration names no limit")
    if ours < theirs:
        return RuleResult(
            rule,
            "warning",
            f"the draft reads {ours} tokens and the target {theirs}: a run ends at {ours}",
        )
    return RuleResult(rule, "ok", f"{theirs} tokens, and {ours} for the draft")


def rollback(target: ModelProfile, draft: ModelProfile) -> RuleResult:
    """Both decode, and can forget rejected tokens."""
    rule = "rollback"
    for model, side in ((target, "target"), (draft, "draft")):
        if not model.is_decoder:
            return RuleResult(
                rule,
                "refused",
                f"the {side} is an encoder with a decoder ('{model.config.get('model_type')}')",
                "choose a model that only decodes",
            )
        if model.kept_state is not None:
            return RuleResult(
                rule,
                "refused",
                f"the {side} has {model.kept_state}, which cannot forget rejected tokens",
                "choose a model of attention alone",
            )
    return RuleResult(rule, "ok", "both caches can be rolled back")


def size_order(target: ModelProfile, draft: ModelProfile) -> RuleResult:
    """The draft is the smaller model."""
    rule = "size_order"
    theirs, ours = target.num_params, draft.num_params
    if theirs is None or ours is None:
        unknown = target if theirs is None else draft
        kind = unknown.config.get("model_type")
        return RuleResult(rule, "ok", f"the size of a '{kind}' is not known before it is loaded")
    share = f"{ours / 1e6:.3g} million weights, {ours / theirs:.2f} of the target's"
    if ours >= theirs:
        return RuleResult(
            rule,
            "warning",
            f"the draft is no smaller than the target ({share}): it cannot pay",
            "choose a smaller draft",
        )
    return RuleResult(rule, "ok", f"the draft has {share}")


RULES: tuple[Callable[[ModelProfile, ModelProfile], RuleResult], ...] = (
    token_texts,
    padded_sizes,
    rollback,
    tokenizer_kinds,
    special_tokens,
    beginnings,
    chat_templates,
    context_lengths,
    size_order,
)


def _sides(target: str, draft: str) -> str:
    return f"{target} in the target, {draft} in the draft"


def _kind(written: str) -> str:
    """Return the kind of a normalizer or pre-tokenizer."""
    return str(json.loads(written)["type"]) if written else "none"


def _token(token: tuple[int, str] | None) -> str:
    return "none" if token is None else f"{token[1]!r} (id {token[0]})"
