"""A cache and every policy once more, slowly: one token, one head, one query at a time, in plain Python.

Written from the definitions, not from the code under test; only the one-byte rounding of mass is shared, because it is
part of the definition. What it is given are the queries, keys and values of a real run; attention, history, selection
and scores are its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from kvlearn.history import decode_mass, encode_mass

Vector = np.ndarray
HALF_LIVES = (16, 64, 256, 1024)


def as_half(number: float) -> float:
    return float(np.float16(number))


def code_of(mass: float) -> float:
    """Mass after its trip through one byte."""
    return float(decode_mass(encode_mass(torch.tensor([mass], dtype=torch.float32)))[0])


@dataclass
class Token:
    """One cached token of one head, with its history."""

    pos: int
    key: Vector
    value: Vector
    last_query: float = 0.0
    history: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(
            ("last", *(f"ema{h}" for h in HALF_LIVES), "mean", "peak", "hits", "idle", "gap"), 0.0
        )
    )

    def observe(self, mass: list[float], length: int) -> None:
        """Fold in one block: the mass that each of its queries gave; ``length`` tokens had come by its end."""
        old, new, n = self.history, {}, len(mass)
        mean, peak = code_of(sum(mass) / n), code_of(max(mass))
        age = length - self.pos
        new["last"] = mean
        for half_life in HALF_LIVES:
            keep = 0.5 ** (n / half_life)
            new[f"ema{half_life}"] = keep * old[f"ema{half_life}"] + (1 - keep) * mean
        new["mean"] = old["mean"] * (1 - min(n / age, 1.0)) + mean * n / age
        new["peak"] = max(old["peak"] * 0.5 ** (n / 512), peak)
        hit = peak >= 1 / 128
        new["hits"] = old["hits"] * 0.5 ** (n / 256) + hit
        idle = min(old["idle"] + n, age)
        new["idle"] = 0.0 if hit else idle
        new["gap"] = max(old["gap"], idle) if hit else old["gap"]
        self.history = {name: as_half(value) for name, value in new.items()}


@dataclass
class View:
    """What a slow policy may look at: all heads of one layer of one row."""

    layer: int
    heads: list[list[Token]]
    length: int
    prompt_length: int
    budget: int
    block: int
    asked: list[tuple[Vector, int]] = field(default_factory=list)  # queries of all heads and their positions
    known: dict[object, dict[int, float]] = field(default_factory=dict)  # by head: what was worked out, by position

    def age(self, token: Token) -> int:
        return self.length - token.pos

    def once(self, what: object, work: Callable[[], dict[int, float]]) -> dict[int, float]:
        if what not in self.known:
            self.known[what] = work()
        return self.known[what]


Score = Callable[[View, int, Token], float]


@dataclass
class SlowLayer:
    """One layer of one row, from the words of the cache's documentation.

    Up to a block of tokens overwrite slots one by one, in an order fixed when the block (or the call) began; more are
    attended in full and then cut. Queries are observed in blocks, aligned to the end of each call of several tokens.
    """

    layer: int
    score: Score
    budget: int
    block: int
    sinks: int
    recent: int
    scale: float

    def __post_init__(self) -> None:
        self.heads: list[list[Token]] = []
        self.plan: list[list[Token | None]] = []
        self.open: list[tuple[Vector, list[list[float]], int]] = []  # query heads, log-sum-exps by KV head, position
        self.length = self.prompt_length = 0
        self.calls = 0
        self.decoding = False
        self.asked: list[tuple[Vector, int]] = []

    def feed(self, query: Vector, key: Vector, value: Vector) -> Vector:
        """One call: ``[query heads, C, D]``, ``[KV heads, C, D]`` twice; returns the output like ``query``."""
        count = query.shape[1]
        if not self.heads:
            self.heads = [[] for _ in key]
            self.plan = [[] for _ in key]
        if count > 1:
            self.close_block()
        out = np.zeros_like(query)
        cut = not self.make_plan(count)
        for i in range(count):
            token = [Token(self.length, key[h, i], value[h, i]) for h in range(len(key))]
            for h, held in enumerate(self.heads):
                victim = None if cut else self.plan[h].pop(0)
                if victim is not None:
                    held.remove(victim)
                held.append(token[h])
            self.length += 1
            out[:, i] = self.attend(query[:, i])
            self.asked.append((query[:, i], self.length - 1))
        if count > 1 or len(self.open) == self.block:
            self.close_block()
        if count == 1 and self.calls:
            self.decoding = True
        if not self.decoding:
            self.prompt_length = self.length
        if cut:
            surplus = self.victims(len(self.heads[0]) - self.budget)
            self.heads = [[t for t in held if t not in gone] for held, gone in zip(self.heads, surplus, strict=True)]
        self.calls += 1
        return out

    def make_plan(self, count: int) -> bool:
        if len(self.plan[0]) >= count:
            return True
        free = self.budget - len(self.heads[0])
        want = count if count > 1 else self.block
        if free >= want:
            self.plan = [[None] * want for _ in self.heads]
        elif count <= self.block:
            self.plan = [[None] * free + gone for gone in self.victims(want - free)]
        else:
            return False
        return True

    def victims(self, count: int) -> list[list[Token]]:
        prompt_length = self.prompt_length if self.decoding else self.length
        view = View(self.layer, self.heads, self.length, prompt_length, self.budget, self.block, self.asked)
        chosen = []
        for h, held in enumerate(self.heads):
            free = [t for t in held if t.pos >= self.sinks and view.age(t) > self.recent]
            chosen.append(sorted(free, key=lambda t, h=h: (self.score(view, h, t), t.pos))[:count])
        return chosen

    def attend(self, query: Vector) -> Vector:
        """Attention of one query (all heads) over what is held; the query is kept for its block."""
        out = np.zeros_like(query)
        group = len(query) // len(self.heads)
        sums: list[list[float]] = []
        for h, held in enumerate(self.heads):
            sums.append([])
            for g in range(group):
                logits = [float(query[h * group + g] @ t.key) * self.scale for t in held]
                top = max(logits)
                lse = top + math.log(sum(math.exp(x - top) for x in logits))
                sums[h].append(lse)
                for x, t in zip(logits, held, strict=True):
                    out[h * group + g] += math.exp(x - lse) * t.value
        self.open.append((query, sums, self.length - 1))
        return out

    def mass(self, which: tuple[Vector, list[list[float]], int], head: int, token: Token) -> float:
        query, sums, pos = which
        if token.pos > pos:
            return 0.0
        group = len(query) // len(self.heads)
        each = [math.exp(float(query[head * group + g] @ token.key) * self.scale - sums[head][g]) for g in range(group)]
        return sum(each) / group

    def close_block(self) -> None:
        """Observe the queries kept, a short block first; drop what was planned."""
        if not self.open:
            return
        queries, self.open = self.open, []
        self.plan = [[] for _ in self.heads]
        first = len(queries) % self.block or self.block
        ends = range(first, len(queries) + 1, self.block)
        for head, held in enumerate(self.heads):
            for token in held:
                mass = [self.mass(query, head, token) for query in queries]
                token.last_query = mass[-1]
                for end in ends:
                    length = self.length - len(queries) + end
                    if token.pos < length:
                        token.observe(mass[max(0, end - self.block) : end], length)


# ---- policies ----------------------------------------------------------------------------------------------------


def mix(word: int) -> int:
    word = (word + 0x9E3779B9) % 2**32
    word = (word ^ word // 2**16) * 0x85EBCA6B % 2**32
    word = (word ^ word // 2**13) * 0xC2B2AE35 % 2**32
    return word ^ word // 2**16


def random(view: View, head: int, token: Token, seed: int = 0) -> float:
    word = 0
    for part in (seed % 2**32, seed // 2**32 % 2**32, view.layer, head, token.pos):
        word = mix(word ^ part)
    return word // 256 / 2**24


def protected_random(view: View, head: int, token: Token, seed: int = 0, ends: int = 32) -> float:
    ends = min(ends, view.budget // 4)
    at_start = token.pos < ends
    at_end = view.prompt_length - ends <= token.pos < view.prompt_length
    return math.inf if at_start or at_end else random(view, head, token, seed)


def streaming(view: View, head: int, token: Token) -> float:
    return token.pos


def h2o(view: View, head: int, token: Token, recent_share: float = 0.5) -> float:
    if view.age(token) <= int(recent_share * view.budget):
        return math.inf
    return token.history["mean"] * view.age(token)


def h2o_exposure(view: View, head: int, token: Token) -> float:
    return token.history["mean"]


def tova(view: View, head: int, token: Token) -> float:
    same = [t.last_query for held in view.heads for t in held if t.pos == token.pos]
    return sum(same) / len(same)


def snapkv(view: View, head: int, token: Token, kernel: int = 5, pooling: str = "avg") -> float:
    if view.age(token) <= view.block:
        return math.inf
    before = sorted((t for t in view.heads[head] if view.age(t) > view.block), key=lambda t: t.pos)
    at = before.index(token)
    near = [before[i].history["last"] for i in range(at - kernel // 2, at + kernel // 2 + 1) if 0 <= i < len(before)]
    return sum(near) / kernel if pooling == "avg" else max(near)


def ema(view: View, head: int, token: Token, half_life: int = 64) -> float:
    return token.history[f"ema{half_life}"] / (1 - 0.5 ** (view.age(token) / half_life))


def keynorm(view: View, head: int, token: Token) -> float:
    return -as_half(math.sqrt(sum(float(x) ** 2 for x in token.key)))


def keydiff(view: View, head: int, token: Token) -> float:
    anchor = np.mean([t.key / np.linalg.norm(t.key) for t in view.heads[head]], axis=0)
    return -float(token.key @ anchor / np.linalg.norm(token.key) / np.linalg.norm(anchor))


def scissorhands(view: View, head: int, token: Token) -> float:
    chances = (1 - 0.5 ** (view.age(token) / 256)) / (1 - 0.5 ** (view.block / 256))
    return token.history["hits"] - chances


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def lazy_eviction(view: View, head: int, token: Token) -> float:
    idle, gap = token.history["idle"], token.history["gap"]
    if gap == 0:
        return 1.0 if idle == 0 else 0.0
    return 2 * sigmoid(-idle / gap) + 2 * sigmoid(-1 / gap)


def g_kv(view: View, head: int, token: Token) -> float:
    return token.history["peak"]


def r_kv(view: View, head: int, token: Token, mix: float = 0.1, kernel: int = 7) -> float:
    if view.age(token) <= view.block:
        return math.inf
    held = sorted(view.heads[head], key=lambda t: t.pos)
    before = [t for t in held if view.age(t) > view.block]
    at = before.index(token)
    near = [before[i].history["last"] for i in range(at - kernel // 2, at + kernel // 2 + 1) if 0 <= i < len(before)]
    importance = max(near) / sum(t.history["last"] for t in before)
    redundancy = view.once(("redundancy", head), lambda: softmax(mean_cosines(held)))
    return mix * importance - (1 - mix) * redundancy[token.pos]


def mean_cosines(held: list[Token]) -> dict[int, float]:
    """By position: mean cosine with the other keys, the latest similar one of each key left out."""
    means = dict.fromkeys((t.pos for t in held), 0.0)
    for one in held:
        cosines = {t.pos: float(one.key @ t.key / np.linalg.norm(one.key) / np.linalg.norm(t.key)) for t in held}
        cosines[one.pos] = 0.0
        alike = [pos for pos, cosine in cosines.items() if cosine > 0.5]
        if alike:
            cosines[max(alike)] = 0.0
        for pos, cosine in cosines.items():
            means[pos] += cosine / len(held)
    return means


def softmax(numbers: dict[int, float]) -> dict[int, float]:
    total = sum(math.exp(x) for x in numbers.values())
    return {name: math.exp(x) / total for name, x in numbers.items()}


def caote(view: View, head: int, token: Token, inner: Score = h2o, fast: bool = False) -> float:
    scores = view.once(("inner", head), lambda: {t.pos: inner(view, head, t) for t in view.heads[head]})
    if scores[token.pos] == math.inf:
        return math.inf
    counted = [t for t in view.heads[head] if scores[t.pos] < math.inf]
    total = sum(scores[t.pos] for t in counted)
    weights = {t.pos: 1 / len(counted) if fast else scores[t.pos] / total for t in counted}
    output = sum(weights[t.pos] * t.value for t in counted)
    share = scores[token.pos] / total
    return share / max(1 - share, 1e-6) * float(np.linalg.norm(output - token.value))


def rotation(pos: int, dim: int) -> Vector:
    """Matrix of Llama's rotary embedding at a position: pairs ``(i, i + D / 2)`` turned by their angle."""
    turn, half = np.zeros((dim, dim)), dim // 2
    for i in range(half):
        angle = pos * 10000.0 ** (-i / half)
        turn[i, i] = turn[i + half, i + half] = math.cos(angle)
        turn[i, i + half], turn[i + half, i] = -math.sin(angle), math.sin(angle)
    return turn


def expected_attention(
    view: View, head: int, token: Token, future: int = 512, covariance: bool = True, value_norm: bool = True
) -> float:
    if token.pos < 4:
        return math.inf
    group, dim = len(view.asked[0][0]) // len(view.heads), len(token.key)
    counted = [t for t in view.heads[head] if t.pos >= 4]

    def shares() -> dict[int, float]:
        ahead = np.mean([rotation(view.length + n, dim) for n in range(future)], axis=0)
        total = dict.fromkeys((t.pos for t in counted), 0.0)
        for g in range(group):
            plain = [rotation(pos, dim).T @ query[head * group + g] for query, pos in view.asked[-128:] if pos >= 4]
            mean = np.mean(plain, axis=0)
            spread = np.mean([np.outer(q - mean, q - mean) for q in plain], axis=0)
            mean, spread = ahead @ mean, ahead @ spread @ ahead.T
            logits = {}
            for t in counted:
                logits[t.pos] = float(t.key @ mean) / math.sqrt(dim)
                if covariance:
                    logits[t.pos] += float(t.key @ spread @ t.key) / dim / 2
            for pos, share in softmax(logits).items():
                total[pos] += share / group
        return total

    share = view.once(("expected", head), shares)[token.pos]
    return share * float(np.linalg.norm(token.value)) if value_norm else share


def q_filters(view: View, head: int, token: Token, filters: Vector) -> float:
    return float(token.key @ filters[view.layer, head])


SLOW: dict[str, Score] = {
    "random": random,
    "protected-random": protected_random,
    "streaming": streaming,
    "h2o": h2o,
    "h2o-exposure": h2o_exposure,
    "tova": tova,
    "snapkv": snapkv,
    "ema": ema,
    "keynorm": keynorm,
    "keydiff": keydiff,
    "scissorhands": scissorhands,
    "lazy-eviction": lazy_eviction,
    "g-kv": g_kv,
    "r-kv": r_kv,
    "caote": caote,
    "expected-attention": expected_attention,
}
