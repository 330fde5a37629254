"""Text from a target is made safe to look at."""

from __future__ import annotations

from keyhole.core.text import legible, visible


def test_what_cannot_be_seen_is_spelled_out():
    hidden = "a\x1b[31m\x00\u202eb\ud800\r"
    assert legible(hidden) == visible(hidden) == r"a\x1b[31m\x00\u202eb\ud800\r"
    joined = "\u0646\u200c\u0647 \U0001f468\u200d\U0001f469\n\t"
    assert legible(joined) == joined
    assert "\\u200c" in visible(joined)
    tags = "".join(chr(0xE0000 + ord(letter)) for letter in "gbeng")
    flag = f"\U0001f3f4{tags}\U000e007f"
    assert legible(flag) == flag
    assert legible(tags) == visible(tags)
    assert (
        legible(f"\U0001f3f4{tags}{tags}")
        == f"\U0001f3f4{visible(tags)}{visible(tags)}"
    )
    assert (
        legible("a\xad\u180e\u200b\u2060\u2064b") == r"a\xad\u180e\u200b\u2060\u2064b"
    )
    assert visible("plain text") == "plain text"
