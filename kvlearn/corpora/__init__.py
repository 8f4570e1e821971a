"""Text by name: built-in offline corpora, files and folders, Hugging Face data sets, and mixtures of them.

A corpus is named by a spec: one or more sources, separated by commas::

    SOURCE[*WEIGHT][?KEY=VALUE[&KEY=VALUE...]]

SOURCE is a built-in corpus (`list_corpora`), a text, JSONL or Parquet file, a folder of such files, or a Hugging Face
data set, ``name`` or ``name:config``. WEIGHT is how many documents (or windows) it gives per turn. Keys: ``column``
(of JSONL, Parquet and data sets; by default the first of text, content, messages), ``domain`` (in place of the source's
own name), ``split`` (of a data set; by default train) and ``filler`` (of ``retrieval``: the built-in corpora, joined by
``+``, whose text lies between its facts). A path with a comma, star or question mark in it works as the
whole spec. Examples: ``stdlib``, ``stdlib*2,notes/``, ``logs.jsonl?column=body&domain=logs``.
"""

from kvlearn.corpora.base import Document
from kvlearn.corpora.builtin import CorpusInfo, list_corpora
from kvlearn.corpora.mixture import Split, corpus_windows, documents, split_of
from kvlearn.corpora.windows import Window, windows

__all__ = [
    "CorpusInfo",
    "Document",
    "Split",
    "Window",
    "corpus_windows",
    "documents",
    "list_corpora",
    "split_of",
    "windows",
]
