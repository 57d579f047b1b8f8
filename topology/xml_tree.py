"""XML as a small tree, from text that nobody vouches for.

No document type, so no entities; and limits on all that can grow. Expat calls back as it reads, so
a hostile text is refused before it costs anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from xml.parsers import expat

from linkweave.topology.errors import TopologyError

DEEPEST = 64
MOST_ELEMENTS = 50_000
MOST_ATTRIBUTES = 64
LONGEST_VALUE = 255  # as in NCCL


@dataclass
class Element:
    """A tag, its attributes and children, and where it stands in the text."""

    tag: str
    attributes: dict[str, str]
    line: int
    children: list[Element] = field(default_factory=list)

    def all(self, tag: str) -> Iterator[Element]:
        """The children with this tag."""
        return (child for child in self.children if child.tag == tag)

    def walk(self) -> Iterator[Element]:
        """This element and all below it."""
        todo = [self]
        while todo:
            element = todo.pop()
            yield element
            todo += reversed(element.children)


def parse_xml(text: str, name: str) -> Element:
    """The root element. Raises TopologyError, with line and column, for anything but plain XML."""
    parser = expat.ParserCreate("utf-8")  # whatever the text says it was
    roots: list[Element] = []
    stack: list[Element] = []
    count = 0

    def fail(what: str) -> None:
        place = f"line {parser.CurrentLineNumber} column {parser.CurrentColumnNumber + 1}"
        raise TopologyError(f"{name}: {place}: {what}")

    def start(tag: str, attributes: dict[str, str]) -> None:
        nonlocal count
        count += 1
        if len(stack) >= DEEPEST:
            fail(f"elements lie more than {DEEPEST} deep")
        if count > MOST_ELEMENTS:
            fail(f"more than {MOST_ELEMENTS} elements")
        if len(attributes) > MOST_ATTRIBUTES:
            fail(f"an element with {len(attributes)} attributes; at most {MOST_ATTRIBUTES}")
        for key, value in attributes.items():
            if max(len(key), len(value)) > LONGEST_VALUE:
                fail(f"an attribute of more than {LONGEST_VALUE} characters: {key[:40]}")
        element = Element(tag, attributes, parser.CurrentLineNumber)
        (stack[-1].children if stack else roots).append(element)
        stack.append(element)

    def end(_: str) -> None:
        stack.pop()

    def doctype(*_: object) -> None:
        fail("a document type (DTD) is not allowed here")

    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.StartDoctypeDeclHandler = doctype
    try:
        parser.Parse(text.encode("utf-8", "surrogatepass"), True)
    except expat.ExpatError as error:
        raise TopologyError(
            f"{name}: line {error.lineno} column {error.offset + 1}: not well-formed XML: "
            f"{expat.ErrorString(error.code)}"
        ) from None
    return roots[0]
