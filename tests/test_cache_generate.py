"""What else ``generate`` offers works on a bounded cache: streamers, stopping, processors, pipelines, embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cache_helpers import BLOCK, assert_bounded, feed, generate, left_pad, policy, prompt
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    pipeline,
)
from transformers.generation.streamers import BaseStreamer

import kvlearn
from kvlearn.attention import cache_argument

BUDGET = 16


@pytest.fixture(scope="module")
def model(tiny_llama: Callable[..., Any]) -> Any:
    return kvlearn.enable(tiny_llama())


def new_cache(model: Any, name: str = "learned") -> Any:
    return kvlearn.EvictingCache(model, policy(name, model), BUDGET, block=BLOCK)


def test_a_streamer_gets_every_token_in_order(model: Any) -> None:
    class Tokens(BaseStreamer):
        def __init__(self) -> None:
            self.got: list[int] = []
            self.ended = False

        def put(self, value: Tensor) -> None:
            self.got += value.flatten().tolist()

        def end(self) -> None:
            self.ended = True

    streamer = Tokens()
    result = generate(model, prompt(30), 20, new_cache(model), streamer=streamer)
    assert streamer.got == result.sequences[0].tolist()
    assert streamer.ended


def test_stopping_early_leaves_a_cache_to_go_on_with(model: Any) -> None:
    class AfterLength(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
            return torch.full((len(input_ids),), input_ids.shape[1] >= 37)

    whole = generate(model, prompt(30), 20, new_cache(model)).sequences
    cache = new_cache(model)
    stopped = generate(model, prompt(30), 20, cache, stopping_criteria=StoppingCriteriaList([AfterLength()]))
    assert stopped.sequences.tolist() == whole[:, :37].tolist()
    assert generate(model, stopped.sequences, 13, cache).sequences.tolist() == whole.tolist()


def test_the_result_holds_the_cache_scores_and_logits(model: Any) -> None:
    cache = new_cache(model)
    result = generate(model, prompt(30), 5, cache, output_scores=True, output_hidden_states=True)
    assert result[cache_argument(model)] is cache
    assert len(result.scores) == len(result.logits) == len(result.hidden_states) == 5


def test_logits_processors_see_what_a_loop_by_hand_sees(model: Any) -> None:
    class NoEven(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            scores = scores.clone()
            scores[:, ::2] = -torch.inf
            return scores

    ids = prompt(30)
    tokens = generate(model, ids, 20, new_cache(model), logits_processor=LogitsProcessorList([NoEven()])).sequences
    assert all(token % 2 for token in tokens[0, 30:].tolist())
    logits = feed(model, new_cache(model), tokens[:, :-1], [30, *[1] * 19])[0, 29:]
    logits[:, ::2] = -torch.inf
    assert logits.argmax(-1).tolist() == tokens[0, 30:].tolist()
    penalised = generate(model, ids, 30, new_cache(model), repetition_penalty=5.0, no_repeat_ngram_size=1).sequences
    assert len(set(penalised[0].tolist())) == 60


def test_rows_that_end_early_do_not_disturb_the_others(model: Any) -> None:
    rows = [prompt(20, seed=1), prompt(30, seed=2)]
    free = [generate(model, row, 20, new_cache(model)).sequences[0, -20:].tolist() for row in rows]
    end = free[0][6]  # the first row stops here at the latest; the second goes on
    ids, mask = left_pad(*rows)
    result = generate(model, ids, 20, new_cache(model), mask, eos_token_id=end, pad_token_id=0).sequences[:, 30:]
    for row, alone in zip(result.tolist(), free, strict=True):
        stop = alone.index(end) + 1 if end in alone else 20
        assert row[:stop] == alone[:stop]
        assert set(row[stop:]) <= {0}


@pytest.mark.parametrize("name", ["h2o", "learned", "tova"])
def test_beams_over_a_padded_batch_are_those_of_each_row(model: Any, name: str) -> None:
    rows = [prompt(9, seed=1), prompt(20, seed=2)]
    ids, mask = left_pad(*rows)
    beams: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.0, "output_scores": True}
    cache = new_cache(model, name)
    batch = generate(model, ids, 14, cache, mask, **beams)
    assert_bounded(cache, BUDGET)
    for i, row in enumerate(rows):
        alone = generate(model, row, 14, new_cache(model, name), **beams)
        ours = batch.sequences[2 * i : 2 * i + 2, -14:]
        assert ours.tolist() == alone.sequences[:, -14:].tolist()
        torch.testing.assert_close(batch.sequences_scores[2 * i : 2 * i + 2], alone.sequences_scores, atol=1e-3, rtol=0)


def test_beams_that_are_sampled_run_within_the_bound(model: Any) -> None:
    cache = new_cache(model)
    result = generate(model, prompt(20), 14, cache, num_beams=3, do_sample=True)
    assert result.sequences.shape == (1, 34)
    assert_bounded(cache, BUDGET)


def test_embeddings_in_place_of_tokens(model: Any) -> None:
    ids = prompt(30)
    tokens = generate(model, ids, 15, new_cache(model)).sequences[:, 30:]
    embedded = model.generate(
        inputs_embeds=model.get_input_embeddings()(ids),
        attention_mask=torch.ones_like(ids),
        max_new_tokens=15,
        do_sample=False,
        **{cache_argument(model): new_cache(model)},
    )
    assert embedded.tolist() == tokens.tolist()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A word for every token of the tiny model."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{i}": i for i in range(200)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w2"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="w0", padding_side="left")


def test_the_text_generation_pipeline(model: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    ids = prompt(30)
    cache = new_cache(model)
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    (answer,) = pipe(
        " ".join(f"w{i}" for i in ids[0].tolist()),
        max_new_tokens=12,
        do_sample=False,
        return_full_text=False,
        **{cache_argument(model): cache},
    )
    expected = generate(model, ids, 12, new_cache(model)).sequences[0, 30:]
    assert answer["generated_text"].split() == [f"w{i}" for i in expected.tolist()]
    assert_bounded(cache, BUDGET)


def test_another_cache_beside_ours_is_untouched_by_it(model: Any, tiny_llama: Callable[..., Any]) -> None:
    ids = prompt(30)
    cache = new_cache(model)
    generate(model, ids, 5, cache)
    plain, stock = generate(model, ids, 10), generate(tiny_llama(), ids, 10)
    assert all(torch.equal(a, b) for a, b in zip(plain.logits, stock.logits, strict=True))
