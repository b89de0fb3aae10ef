"""Keyed MessagePack: maps whose repeated keys are stored once in the log's key table, and as small integers in the records.

**Format.** MessagePack, in which each map, at every depth, has keys of three kinds:

- an unsigned integer: the index of a key in the log's key table;
- a string: itself; it is not in the table, because that is full or the string is long;
- an array of one element: that element, which is not a string: an integer, float, bool, nil, bytes, array, timestamp or extension.

Any other key is an error. Values are plain MessagePack. So an integer that really was a key stays one, and so does `True`, which Python
treats as equal to 1.

**Limits.** Only strings of at most 64 bytes are added to the table, and only those of maps with at most 256 keys: a larger map is assumed
to be keyed by data. Values other than dict, list or tuple of plain values are encoded by MessagePack once more, which is slower.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import msgspec

LONGEST_KEY = 64  # bytes of a key in the table
WIDEST_MAP = 256  # most keys of a map that may add to the table
MOST_SHAPES = 1024  # that are cached; then the cache is cleared

_LEAVES = frozenset({str, int, float, bool, type(None), bytes, datetime, msgspec.msgpack.Ext})  # written unchanged
_KEYS = frozenset({str, int, float, bool, type(None), bytes})
_CONTAINERS = frozenset({dict, list})  # results of decoding MessagePack
_INTEGER = frozenset({int})
_STRING = frozenset({str})
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode

Intern = Callable[[list[str]], Mapping[str, int]]


class Keys(msgspec.Struct, dict=True):
    """The lookup of keys in a log's keyed values; each record refers to it.

    It is not part of the record's value: all compare equal, they have no fields to encode, and a pickled one is a copy of its `names`. era:
    of the log when its table was read. A recovery may lose keys, so an index can refer to another key in a later era.
    """

    def __post_init__(self) -> None:
        self.era = 0
        self.names: dict[int, str] = {}
        self.refresh: Callable[[], None] | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Keys) or other is msgspec.UNSET

    def __hash__(self) -> int:
        return hash(msgspec.UNSET)

    def __reduce__(self) -> tuple[Any, ...]:
        return keys_of, (dict(self.names),)

    def name(self, index: int) -> str:
        """Return the key with this index; ValueError if there is none, even after rereading the table."""
        name = self.names.get(index)
        if name is None and self.refresh is not None:
            self.refresh()
            name = self.names.get(index)
        if name is None:
            raise ValueError(f"key {index} is not in the log's key table")
        return name


def keys_of(names: dict[int, str]) -> Keys:
    """Return Keys that know only these names, and no table."""
    keys = Keys()
    keys.names = names
    return keys


class Packer:
    """Encodes values for one log. `intern(keys)` adds keys to its table if possible, and returns the indexes of all keys in the table.

    keys: the names of these indexes.
    """

    def __init__(self, intern: Intern, keys: Keys | None = None) -> None:
        self.keys = Keys() if keys is None else keys
        self.era = self.keys.era
        self._intern = intern
        self._known: Mapping[str, int] = {}
        self._shapes: dict[tuple[Any, ...], tuple[Any, ...]] = {}  # of maps with only string keys: their keys, and the encoded ones

    def pack(self, value: Any) -> bytes:
        """Return the bytes of a value. Raises the errors of `msgspec.msgpack.encode` and `intern`."""
        return _encode(self._walk(value))

    def _walk(self, value: Any) -> Any:
        """Return the value with encoded keys of its maps."""
        kind = value.__class__
        if kind is dict:
            return self._map(value)
        if kind is list or kind is tuple:
            return value if _LEAVES.issuperset(map(type, value)) else [self._walk(item) for item in value]
        if kind in _LEAVES:
            return value
        return self._plain(value)

    def _plain(self, value: Any) -> Any:
        """Convert a Struct, a dataclass, an Enum, a set ... by MessagePack: to a dict, a list or a leaf."""
        value = _decode(_encode(value))
        return self._rename(value, tuple(value)) if value.__class__ is dict else self._walk(value)

    def _map(self, value: dict[Any, Any]) -> Any:
        keys = tuple(value)
        if keys not in self._shapes and not _KEYS.issuperset(map(type, keys)):
            return self._plain(value)
        return self._rename(value, keys)

    def _rename(self, value: dict[Any, Any], keys: tuple[Any, ...]) -> dict[Any, Any]:
        shape = self._shapes.get(keys)
        if shape is None:
            shape = self._shape(keys)
        values: Any = value.values()
        if not _LEAVES.issuperset(map(type, values)):
            values = [self._walk(item) for item in values]
        return dict(zip(shape, values, strict=True))

    def _shape(self, keys: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the encoded keys of a map."""
        is_narrow = len(keys) <= WIDEST_MAP
        if is_narrow:
            new = [key for key in keys if key.__class__ is str and key not in self._known and len(key.encode()) <= LONGEST_KEY and key]
            if new:
                self._known = self._intern(new)
        known = self._known
        shape = tuple(known.get(key, key) if key.__class__ is str else (key,) for key in keys)
        if is_narrow and _STRING.issuperset(map(type, keys)):
            if len(self._shapes) >= MOST_SHAPES:
                self._shapes.clear()
            self._shapes[keys] = shape
        return shape


def unpack(value: bytes, keys: Keys) -> Any:
    """Decode a packed value. Raises ValueError or RecursionError for bytes that no `Packer` of this log writes."""
    return _restore(_decode(value), keys)


def _restore(value: Any, keys: Keys) -> Any:
    kind = value.__class__
    if kind is list:
        return value if _CONTAINERS.isdisjoint(map(type, value)) else [_restore(item, keys) for item in value]
    if kind is not dict:
        return value
    values: Any = value.values()
    if not _CONTAINERS.isdisjoint(map(type, values)):
        values = [_restore(item, keys) for item in values]
    if _INTEGER.issuperset(map(type, value)):
        try:
            return dict(zip(map(keys.names.__getitem__, value), values, strict=True))
        except KeyError:
            pass  # the table has grown, or the value is invalid
    return dict(zip([_key(key, keys) for key in value], values, strict=True))


def _key(key: Any, keys: Keys) -> Any:
    """Decode a key."""
    kind = key.__class__
    if kind is int:
        return keys.name(key)
    if kind is str:
        return key
    if kind is tuple and len(key) == 1:
        return key[0]
    raise ValueError(f"a map has a key that is neither an index, nor a string, nor an array of one element: {kind.__name__}")
