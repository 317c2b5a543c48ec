"""Finding stop strings in a stream of text, whatever pieces the text comes in.

The search is an Aho-Corasick automaton (Aho & Corasick, 1975, "Efficient string matching"): its state is
the longest suffix of the text that begins some stop string, which is exactly the text that must be held
back. The answer therefore depends on the characters alone, never on how they were cut into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStringMatcher:
    """Passes text through until one of several stop strings is complete.

    No character of a stop string that ends the text is ever emitted. Of several stop strings the one that
    is *completed* first wins; of those completed by the same character, the longest one.

    Args:
        stop_strings: non-empty strings; none at all makes every text pass unchanged.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        if not all(stop_strings):
            raise ValueError("a stop string must not be empty")
        self._children: list[dict[str, int]] = [{}]
        self._depth: list[int] = [0]
        self._fail: list[int] = [0]
        self._matched: list[int] = [0]
        """Length of the longest stop string that ends in this state; 0 = none."""
        for stop_string in stop_strings:
            self._insert(stop_string)
        self._link()
        self._state = 0
        self._held = ""
        self._stopped = False

    def _insert(self, stop_string: str) -> None:
        node = 0
        for character in stop_string:
            child = self._children[node].get(character)
            if child is None:
                child = len(self._children)
                self._children[node][character] = child
                self._children.append({})
                self._depth.append(self._depth[node] + 1)
                self._fail.append(0)
                self._matched.append(0)
            node = child
        self._matched[node] = len(stop_string)

    def _link(self) -> None:
        level = list(self._children[0].values())
        while level:
            following = []
            for node in level:
                self._matched[node] = self._matched[node] or self._matched[self._fail[node]]
                for character, child in self._children[node].items():
                    self._fail[child] = self._next(self._fail[node], character)
                    following.append(child)
            level = following

    def _next(self, state: int, character: str) -> int:
        while state and character not in self._children[state]:
            state = self._fail[state]
        return self._children[state].get(character, 0)

    @property
    def stopped(self) -> bool:
        """A stop string was completed; nothing is emitted any more."""
        return self._stopped

    def feed(self, text: str, *, armed: bool = True) -> tuple[str, bool]:
        """Take the next piece of text.

        Args:
            armed: False lets stop strings that are completed within this piece pass.

        Returns:
            What is certain not to be part of a stop string, and whether one was completed.
        """
        if self._stopped:
            return "", True
        if len(self._children) == 1:
            return text, False
        joined = self._held + text
        for index, character in enumerate(text, start=len(self._held)):
            self._state = self._next(self._state, character)
            matched = self._matched[self._state]
            if matched and armed:
                self._stopped = True
                self._held = ""
                return joined[: index + 1 - matched], True
        keep = len(joined) - self._depth[self._state]
        self._held = joined[keep:]
        return joined[:keep], False

    def flush(self) -> str:
        """The text ends here: what was held back turns out not to begin a stop string."""
        held, self._held, self._state = self._held, "", 0
        return held
