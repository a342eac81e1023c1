"""A workflow of agents that announces its next uses to the server."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvlinker.base.errors import InvalidRequestError
from kvlinker.doors.client.calls import HasId

MOST_STEPS = 8
"""How many requests ahead hints look."""

MOST_IDS = 1000
"""The most context caches that a request may name; of more, the nearest ones are."""


class Workflow:
    """A small graph of agents: whose turn follows whose, and the context caches in the prompt of
    each. ``link`` makes a request's field ``link`` of it."""

    def __init__(self, name: str, follows: Mapping[str, Sequence[str]]) -> None:
        """``name`` is the workflow's, the caller's own; ``follows`` has the agents that each agent
        hands on to. Loops are allowed."""
        self.name = name
        self._follows = {agent: tuple(others) for agent, others in follows.items()}
        agents = [*follows, *(other for others in self._follows.values() for other in others)]
        self._caches: dict[str, dict[str, None]] = {agent: {} for agent in agents}

    def uses(self, agent: str, *caches: HasId | str) -> None:
        """Add context caches, or their ids, to those in an agent's prompts; kept answers, too.
        Raises InvalidRequestError for an agent that the workflow does not have."""
        ids = self._of(agent)
        ids |= dict.fromkeys(each if isinstance(each, str) else each.id for each in caches)

    def ids(self, agent: str) -> list[str]:
        """Return the ids of the context caches in an agent's prompts, in the order in which they
        were added. Raises InvalidRequestError as ``uses`` does."""
        return list(self._of(agent))

    def link(self, agent: str, **options: Any) -> dict[str, Any]:
        """Return the field ``link`` of a request of this agent: with the ``options``, such as
        ``keep="answer"``, and the context caches that later agents use, by the number of hand-overs
        until then. Beyond 1,000 of them, the ones that are furthest or were added first are left
        out."""
        ahead, room = [], MOST_IDS
        for steps, agents in enumerate(self._behind(agent), 1):
            ids = list(dict.fromkeys(id for each in agents for id in self._caches[each]))[-room:]
            if ids and room:
                ahead.append({"ids": ids, "steps": steps})
                room -= len(ids)
        return {**options, "workflow": self.name, "next": ahead}

    def _behind(self, agent: str) -> Iterable[list[str]]:
        """Yield the agents that are one hand-over away, then those that are two, and so on, each
        once."""
        self._of(agent)
        seen: set[str] = set()
        agents = [agent]
        for _ in range(MOST_STEPS):
            following = dict.fromkeys(o for each in agents for o in self._follows.get(each, ()))
            agents = [each for each in following if each not in seen]
            seen.update(agents)
            if not agents:
                return
            yield agents

    def _of(self, agent: str) -> dict[str, None]:
        if agent not in self._caches:
            raise InvalidRequestError(
                f"The workflow {self.name!r} has no agent {agent!r}, but"
                f" {', '.join(map(repr, self._caches))}.",
                param="agent",
            )
        return self._caches[agent]
