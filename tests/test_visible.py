"""Text from a target is made safe to look at."""

from __future__ import annotations

from keyhole.core.text import legible, visible


def test_what_cannot_be_seen_is_spelled_out():
    hidden = "a\x1b[31m\x00\u202eb\ud800\r"
    assert legible(hidden) == visible(hidden) == r"a\x1b[31m\x00\u202eb\ud800\r"
    joined = "\u0646\u200c\u0647 \U0001f468\u200d\U0001f469\n\t"
    assert legible(joined) == joined
    assert "\\u200c" in visible(joined)
    assert visible("plain text") == "plain text"
