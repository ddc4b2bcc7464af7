"""Stop strings, matched on text: token borders do not matter, and no character of a stop string gets out.

One automaton (Aho and Corasick) over all stop strings reads each character once. Its depth is the length of the
longest end of the text that may still become a stop string: exactly what must be held back, and no more. This module
does not know tokens.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence


class _Automaton:
    """Nodes are numbered; node 0 is the root. Built in time linear in the length of all stop strings."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.next: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.match = [""]  # the longest stop string that ends at this node; empty = none
        for stop in stops:
            self._insert(stop)
        self.fail = self._failure_links()
        self.first_character = re.compile("[" + "".join(re.escape(character) for character in self.next[0]) + "]")

    def _insert(self, stop: str) -> None:
        node = 0
        for character in stop:
            child = self.next[node].get(character)
            if child is None:
                child = len(self.next)
                self.next.append({})
                self.depth.append(self.depth[node] + 1)
                self.match.append("")
                self.next[node][character] = child
            node = child
        self.match[node] = stop

    def _failure_links(self) -> list[int]:
        """For each node, the node of its longest proper end that also begins a stop string."""
        fail = [0] * len(self.next)
        queue = deque(self.next[0].values())
        while queue:
            node = queue.popleft()
            for character, child in self.next[node].items():
                fallback = fail[node]
                while fallback and character not in self.next[fallback]:
                    fallback = fail[fallback]
                fail[child] = self.next[fallback].get(character, 0)
                self.match[child] = self.match[child] or self.match[fail[child]]
                queue.append(child)
        return fail

    def step(self, node: int, character: str) -> int:
        while node and character not in self.next[node]:
            node = self.fail[node]
        return self.next[node].get(character, 0)


class StopStringMatcher:
    """The stop strings of one request.

    The stop string that is complete first wins; of several that end at the same character, the longest. What comes
    after it is dropped. With `include_in_output` the stop string itself is sent, so nothing needs to be held back.
    """

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        """`stops` must not contain an empty string."""
        self._automaton = _Automaton(stops) if stops else None
        self._include_in_output = include_in_output
        self._node = 0
        self._held = ""
        self._is_stopped = False

    @property
    def matched(self) -> str | None:
        """The stop string that is complete; None as long as none is."""
        return self._automaton.match[self._node] if self._is_stopped and self._automaton is not None else None

    def push(self, text: str, counts: bool = True) -> tuple[str, bool]:
        """Take new text; return (text to send, whether a stop string is complete).

        With `counts` false a stop string that ends within `text` is passed over, as text before `min_tokens` is; it
        may still begin there. After a stop, everything pushed is dropped.
        """
        if self._is_stopped:
            return "", True
        if self._automaton is None:
            return text, False
        end = self._find(text, counts)
        pending = self._held + text
        if end is not None:
            self._is_stopped = True
            end += len(self._held)
            self._held = ""
            if not self._include_in_output:
                end -= len(self._automaton.match[self._node])
            return pending[:end], True
        if self._include_in_output:
            return pending, False
        num_sent = len(pending) - self._automaton.depth[self._node]
        self._held = pending[num_sent:]
        return pending[:num_sent], False

    def flush(self) -> str:
        """End of the output: the text still held back, which did not become a stop string. Nothing may follow."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str, counts: bool) -> int | None:
        """Read `text`; return the index in it after the first complete stop string, or None. Moves the node."""
        assert self._automaton is not None
        automaton, node, index = self._automaton, self._node, 0
        while index < len(text):
            if node == 0:
                # Most text begins no stop string: skip it at the speed of a character search.
                candidate = automaton.first_character.search(text, index)
                if candidate is None:
                    break
                index = candidate.start()
            node = automaton.step(node, text[index])
            index += 1
            if counts and automaton.match[node]:
                self._node = node
                return index
        self._node = node
        return None
