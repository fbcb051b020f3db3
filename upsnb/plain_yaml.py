"""YAML as plain data, whoever wrote it: what is wrong with it is told in one sentence, in bounded time and memory."""

from __future__ import annotations

import functools

import yaml
from yaml.composer import ComposerError

from upsnb.errors import ConfigError

MOST_BYTES = 2**16  # a second of reading; the longest file in params/ has 2 KiB
MOST_VALUES = 2000  # with all that aliases repeat
MOST_LEVELS = 20
MOST_SAID = 200  # characters of what YAML's reader says
TAG = "tag:yaml.org,2002:"
PLAIN = {TAG + name for name in ("null", "bool", "int", "float", "str", "seq", "map", "merge")}


class _Loader(yaml.SafeLoader):
    """Numbers, texts, lists and mappings; a date is the text that it was, and no key is there twice."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in pairs if tag in PLAIN]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    level = 0

    def compose_node(self, parent, index):
        event = self.peek_event()
        self.level += 1
        if self.level > MOST_LEVELS:
            raise ComposerError(None, None, f"more than {MOST_LEVELS} levels, one inside the other", event.start_mark)
        node = super().compose_node(parent, index)
        self.level -= 1
        if not isinstance(event, yaml.AliasEvent):
            node.extent = _extent(node)
        elif not hasattr(node, "extent"):
            raise ComposerError(None, None, "an alias inside of what it stands for", event.start_mark)
        return node


def _extent(node: yaml.Node) -> tuple[int, int]:
    """How many values a node has, itself one, and how many levels; aliases count as what they stand for.

    Raises:
        ComposerError: too many, a key that is there twice, or what is no plain data.
    """
    if node.tag not in PLAIN:
        raise ComposerError(None, None, f"the tag {node.tag.replace(TAG, '!!')} makes no plain data", node.start_mark)
    parts, seen = [] if isinstance(node, yaml.ScalarNode) else node.value, set()
    if isinstance(node, yaml.MappingNode):
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ComposerError(None, None, "a key that is no text", key.start_mark)
            if key.value in seen and key.tag != TAG + "merge":
                raise ComposerError(None, None, f"the key {key.value!r} is there twice", key.start_mark)
            seen.add(key.value)
        parts = [value for _, value in node.value]
    sizes, levels = zip(*(part.extent for part in parts)) if parts else ((), ())
    size, level = 1 + sum(sizes), 1 + max(levels, default=0)
    if size > MOST_VALUES or level > MOST_LEVELS:
        found = f"more than {MOST_VALUES} values, or {MOST_LEVELS} levels, once its aliases are written out"
        raise ComposerError(None, None, found, node.start_mark)
    return size, level


def parse(content: bytes | str, where: str):
    """The plain data of a YAML document.

    Raises:
        ConfigError: it is too long, no text, no YAML, or more than plain data; `where` is named.
    """

    def refuse(found: str, remedy: str) -> ConfigError:
        return ConfigError([f"{found} -> {remedy}"], where)

    if len(content) > MOST_BYTES:
        raise refuse(f"longer than {MOST_BYTES} bytes", "settings are a page of text, is this another file?")
    try:
        return yaml.load(content.decode("utf-8-sig") if isinstance(content, bytes) else content, Loader=_Loader)
    except UnicodeDecodeError as error:
        raise refuse(f"not UTF-8 (byte {error.object[error.start]:#x} at {error.start})", "save it as UTF-8") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark or error.context_mark
        found = " ".join(f"{error.context or ''} {error.problem or ''}".split())[:MOST_SAID]
        raise refuse(f"not YAML: {found}", f"correct line {line.line + 1 if line else 1}") from None
    except yaml.YAMLError as error:
        raise refuse(f"not YAML: {' '.join(str(error).split())[:MOST_SAID]}", "write it as plain text") from None
    except (ValueError, ArithmeticError, LookupError, TypeError, AttributeError) as error:  # `!!int abc`, 5000 digits
        found = " ".join(str(error).split())[:MOST_SAID]
        raise refuse(f"a value is not what it seems ({found})", "plain digits, or quotes around a text") from None


def mapping(content: bytes | str, where: str) -> dict:
    """A document that is one mapping, or empty."""
    values = parse(content, where)
    if values is not None and not isinstance(values, dict):
        found = f"got {type(values).__name__} at the top"
        raise ConfigError([f"{found} -> write `section:` and its settings"], where)
    return values or {}


@functools.lru_cache(maxsize=8)
def lines(content: bytes) -> dict[str, int]:
    """The line of every key of a document that `parse` takes, by its dotted path."""
    found: dict[str, int] = {}

    def visit(node: yaml.Node | None, above: str) -> None:
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            found[above + str(key.value)] = key.start_mark.line + 1
            visit(value, f"{above}{key.value}.")

    visit(yaml.compose(content.decode("utf-8-sig"), Loader=_Loader), "")
    return found
