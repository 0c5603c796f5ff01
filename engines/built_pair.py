"""BuiltPair: the checkpoints of a pair, found and judged before any weights are read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from engines.checkpoints import Reference, built_path, commits_of, parse_reference
from engines.config import EngineConfig
from engines.pairs.compatibility import check_pair
from engines.pairs.profile import ModelProfile
from engines.store import EngineStore
from engines.tokenizer import Text


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """A model as the user named it, and the folder that it is loaded from."""

    reference: Reference
    path: Path

    @classmethod
    def find(cls, name: str, store: EngineStore) -> Self:
        """Return that of a name.

        Raises:
            EngineError: It names nothing, or what is not built.
        """
        reference = parse_reference(name)
        return cls(reference, built_path(reference, store))

    @property
    def name(self) -> str:
        """Return its name for people."""
        return self.reference.name


@dataclass(frozen=True, slots=True)
class BuiltPair:
    """A target, and a draft where there is one."""

    target: BuiltModel
    draft: BuiltModel | None

    @classmethod
    def find(cls, config: EngineConfig, store: EngineStore) -> Self:
        """Return that of a config; raises as `BuiltModel.find`."""
        target = BuiltModel.find(config.target, store)
        return cls(target, None if config.draft is None else BuiltModel.find(config.draft, store))

    @property
    def commits(self) -> dict[str, str]:
        """Return the commits of those from the Hub, by their role."""
        roles = {"target": self.target, "draft": self.draft}
        return commits_of(
            {role: (model.reference, model.path) for role, model in roles.items() if model}
        )

    def load_text(self) -> tuple[Text, tuple[str, ...]]:
        """Return the target's tokenizer, and what a reader must know of the pair.

        Raises:
            EngineError: A small file cannot be read, or the draft cannot propose for the target.
        """
        text = Text.load(self.target.path, name=self.target.name)
        if self.draft is None:
            return text, ()
        target = ModelProfile.of(self.target.path, text.tokenizer, name=self.target.name)
        draft = ModelProfile.load(self.draft.path, name=self.draft.name)
        return text, check_pair(target, draft).require()
