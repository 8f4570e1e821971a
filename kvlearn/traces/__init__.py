"""Traces: what is logged from a model over a text, enough to rebuild features and targets offline.

A trace is a folder: Arrow shards that ``datasets.load_from_disk`` opens, and ``trace.json``, which says where they come
from. It holds raw observations (attention codes, keys before rotation, values), not features, so features and targets
can change without a new trace.
"""

from kvlearn.traces.collect import Feed, MakeFeed, TextWindow, WindowRecorder, collect
from kvlearn.traces.dataset import Trace, Window, replay
from kvlearn.traces.format import Manifest, Shard, TraceWriter
from kvlearn.traces.layout import Layout

__all__ = [
    "Feed",
    "Layout",
    "MakeFeed",
    "Manifest",
    "Shard",
    "TextWindow",
    "Trace",
    "TraceWriter",
    "Window",
    "WindowRecorder",
    "collect",
    "replay",
]
