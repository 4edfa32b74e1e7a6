"""Pictures of charts, written again for a page: only shapes and their looks stay, and ids are
unique."""

from xml.parsers import expat
from xml.sax.saxutils import escape, quoteattr

#: Elements of a picture.
_SHAPES = {
    "circle",
    "clipPath",
    "defs",
    "g",
    "line",
    "linearGradient",
    "path",
    "rect",
    "stop",
    "svg",
    "text",
    "title",
    "tspan",
}


def rewrite_picture(picture: str, prefix: str) -> str:
    """Write a picture again.

    Parameters
    ----------
    picture : str
        A picture as SVG.
    prefix : str
        Begins each id, and is unique in the page.

    Returns
    -------
    picture : str
        The same picture without scripts, links and handlers.

    Raises
    ------
    xml.parsers.expat.ExpatError
        For what is no XML.

    Examples
    --------
    >>> rewrite_picture('<svg><g id="a" onclick="x"/><script>x</script></svg>', "figure1")
    '<svg><g id="figure1-0"></g></svg>'
    """
    writer = _Writer(prefix)
    parser = expat.ParserCreate()
    parser.StartElementHandler = writer.start_element
    parser.EndElementHandler = writer.end_element
    parser.CharacterDataHandler = writer.write_text
    parser.Parse(picture, True)
    return "".join(writer.parts)


class _Writer:
    """Writes elements and texts as the parser meets them."""

    def __init__(self, prefix: str) -> None:
        self.parts: list[str] = []
        self._prefix = prefix
        self._ids: dict[str, str] = {}
        self._dropped = 0  # depth inside an element that is left out

    def start_element(self, tag: str, attributes: dict[str, str]) -> None:
        """Write the beginning of a shape; anything else is left out with all that is in it."""
        if self._dropped or tag not in _SHAPES:
            self._dropped += 1
            return
        self.parts.append(f"<{tag}")
        for name, value in attributes.items():
            if not name.startswith("on") and not name.endswith("href"):
                self.parts.append(f" {name}={quoteattr(self._rename(name, value))}")
        self.parts.append(">")

    def end_element(self, tag: str) -> None:
        """Write the end of a shape."""
        if self._dropped:
            self._dropped -= 1
            return
        self.parts.append(f"</{tag}>")

    def write_text(self, text: str) -> None:
        """Write the text of a shape."""
        if not self._dropped:
            self.parts.append(escape(text, {'"': "&quot;"}))

    def _rename(self, name: str, value: str) -> str:
        """The value of an attribute, with the new name of an id."""
        if name == "id":
            return self._find_id(value)
        if value.startswith("url(#") and value.endswith(")"):
            return f"url(#{self._find_id(value[5:-1])})"
        return value

    def _find_id(self, old: str) -> str:
        return self._ids.setdefault(old, f"{self._prefix}-{len(self._ids)}")
