"""From documents to windows of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

from kvlearn.corpora.base import Document, seeded_hash
from kvlearn.errors import KvlearnError

SEPARATOR = "\n\n"  # between the documents packed into one window


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens that a model reads in one go.

    Attributes:
        input_ids: Token ids, T of them.
        domain: Of its document or documents.
        doc: Id of the document, or of the first of those packed together.
        start: Position of the first token within that document, in tokens.
        documents: Ids of all documents in the window, in order; only ``doc`` unless short ones were packed.
    """

    input_ids: tuple[int, ...] = field(repr=False)
    domain: str
    doc: str
    start: int
    documents: tuple[str, ...]

    def __len__(self) -> int:
        """How many tokens the window holds."""
        return len(self.input_ids)


def windows(
    docs: Iterable[Document],
    tokenizer: PreTrainedTokenizerBase,
    *,
    tokens: int | None,
    window: int,
    min_window: int | None = None,
    pack: bool = True,
    max_windows_per_document: int | None = 2,
) -> Iterator[Window]:
    """Cut documents into windows of exactly ``window`` tokens.

    A document of at least ``window`` tokens gives windows of its own, at multiples of ``window``. If it holds more
    than ``max_windows_per_document`` of them, some are chosen by a fixed hash of its id, so that not every window is
    the head of a file (licences, imports). A shorter document is joined with the next short ones of its domain, a
    blank line between them, until a window is full; what is left over starts the next one.

    Args:
        docs: Documents; the order of the windows follows theirs.
        tokenizer: Of the model that will read the windows.
        tokens: Stop once this many tokens were given (the last window counts in full); None for all there are.
        window: Tokens per window.
        min_window: If given, a document of at least this many tokens but fewer than ``window`` is a shorter window of
            its own instead of being packed, and so is an unfinished pack at the end.
        pack: Join short documents; otherwise they are left out.
        max_windows_per_document: Keeps one long document from dominating; None for no limit.

    Returns:
        Windows, made as they are asked for.

    Raises:
        KvlearnError: For impossible sizes at once; while iterating, if not a single window could be made.
    """
    for name, value in {"tokens": tokens, "max_windows_per_document": max_windows_per_document}.items():
        if value is not None and value < 1:
            raise KvlearnError(f"{name} is {value}, must be at least 1")
    if window < 2:
        raise KvlearnError(f"window is {window}, must be at least 2 tokens")
    if min_window is not None and not 2 <= min_window <= window:
        raise KvlearnError(f"min_window is {min_window}, must be between 2 and the window of {window} tokens")
    cutter = _Cutter(tokenizer, window, min_window, pack, max_windows_per_document)
    return until(cutter.cut(docs), tokens)


def until(made: Iterator[Window], tokens: int | None) -> Iterator[Window]:
    """Pass windows on until they hold ``tokens`` tokens in all; None passes everything."""
    given = 0
    for window in made:
        yield window
        given += len(window)
        if tokens is not None and given >= tokens:
            return


@dataclass
class _Pack:
    """Short documents of one domain, waiting until they fill a window."""

    ids: list[int] = field(default_factory=list)
    documents: list[str] = field(default_factory=list)
    start: int = 0  # of the first token, within the first document


@dataclass
class _Cutter:
    tokenizer: PreTrainedTokenizerBase
    window: int
    min_window: int | None
    pack: bool
    limit: int | None

    def cut(self, docs: Iterable[Document]) -> Iterator[Window]:
        from kvlearn.models.text import encode

        packs: dict[str, _Pack] = {}
        separator = encode(self.tokenizer, SEPARATOR)
        count = longest = made = 0
        for doc in docs:
            ids = encode(self.tokenizer, doc.text)
            count, longest = count + 1, max(longest, len(ids))
            for window in self._windows_of(doc, ids, packs, separator):
                made += 1
                yield window
        if self.min_window is not None:
            for domain, pack in packs.items():
                if len(pack.ids) >= self.min_window:
                    made += 1
                    yield Window(tuple(pack.ids), domain, pack.documents[0], pack.start, tuple(pack.documents))
        if not count:
            raise KvlearnError("the corpus is empty: not a single document to cut into windows")
        if not made:
            packed = f", {sum(len(pack.ids) for pack in packs.values())} tokens in all" if self.pack else ""
            raise KvlearnError(
                f"no window of {self.min_window or self.window} tokens can be made: the longest of {count} documents "
                f"has {longest} tokens{packed}; ask for shorter windows or give more text"
            )

    def _windows_of(
        self, doc: Document, ids: list[int], packs: dict[str, _Pack], separator: list[int]
    ) -> Iterator[Window]:
        if len(ids) >= self.window:
            for start in self._starts(doc, len(ids)):
                yield Window(tuple(ids[start : start + self.window]), doc.domain, doc.id, start, (doc.id,))
        elif self.min_window is not None and len(ids) >= self.min_window:
            yield Window(tuple(ids), doc.domain, doc.id, 0, (doc.id,))
        elif self.pack and ids:
            yield from self._packed(doc, ids, packs.setdefault(doc.domain, _Pack()), separator)

    def _starts(self, doc: Document, length: int) -> list[int]:
        """Where a document's windows start, in order, chosen by a hash if there are more than the limit."""
        starts = [i * self.window for i in range(length // self.window)]
        if self.limit is not None and len(starts) > self.limit:
            starts = sorted(sorted(starts, key=lambda start: seeded_hash(f"{doc.id}\0{start}", 0))[: self.limit])
        return starts

    def _packed(self, doc: Document, ids: list[int], pack: _Pack, separator: list[int]) -> Iterator[Window]:
        """Add a short document to its pack; at most one window comes of it, as both were shorter than one."""
        offset = len(pack.ids) + len(separator) if pack.ids else 0  # where this document begins in the pack
        pack.ids += [*separator, *ids] if pack.ids else ids
        pack.documents.append(doc.id)
        if len(pack.ids) < self.window:
            return
        # The cut may fall into the separator: this document is then in the next window only.
        inside = pack.documents if offset < self.window else pack.documents[:-1]
        yield Window(tuple(pack.ids[: self.window]), doc.domain, inside[0], pack.start, tuple(inside))
        kept_from = max(self.window, offset)
        pack.ids = pack.ids[kept_from:]
        pack.documents = [doc.id] if pack.ids else []
        pack.start = kept_from - offset if pack.ids else 0
