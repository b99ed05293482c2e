"""A limit on thoughts that a server or a profile sets, whatever a request says: it leaves room for an answer."""

from __future__ import annotations

from dataclasses import dataclass

MOST_SHARE = 0.5
"""The share of an answer's tokens that thoughts may take if the limit is a number of tokens."""


@dataclass(frozen=True)
class ThinkingLimit:
    """tokens: of all thoughts of an answer; None if only the share counts. share: of the tokens that the answer may
    have."""

    tokens: int | None = None
    share: float = MOST_SHARE

    @classmethod
    def parse(cls, text: str) -> ThinkingLimit:
        """Reads "2048" or "40%". Raises ValueError."""
        number, percent, rest = text.strip().partition("%")
        try:
            if percent:
                share = float(number) / 100
                if rest or not 0 < share < 1:
                    raise ValueError
                return cls(share=share)
            tokens = int(number)
            if tokens < 1:
                raise ValueError
        except ValueError:
            message = "must be a number of tokens, at least 1, or a share above 0% and below 100%"
            raise ValueError(f"{message}, such as 2048 or 40%, got {text!r}") from None
        return cls(tokens)

    def of(self, max_tokens: int) -> int:
        """Most tokens of the thoughts of an answer that may have `max_tokens`, thoughts included."""
        most = int(self.share * max_tokens)
        return most if self.tokens is None else min(self.tokens, most)

    def __str__(self) -> str:
        return f"{self.share * 100:g}%" if self.tokens is None else str(self.tokens)
