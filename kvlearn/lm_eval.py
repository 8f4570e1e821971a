"""kvlearn as a model of lm-evaluation-harness, so that any of its tasks runs under a budget.

The harness finds models in a registry of its own, which no package can enter from outside before its command starts;
``kvlearn lm-eval ARGUMENTS`` enters this one and hands all arguments on::

    kvlearn lm-eval --model kvlearn --model_args pretrained=smollm2-135m,policy=ema,budget=256 --tasks lambada_openai

In Python: :func:`register`, then ``lm_eval.simple_evaluate(model="kvlearn", ...)``.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import model_registry
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from kvlearn import attention
from kvlearn.cache import EvictingCache
from kvlearn.errors import KvlearnError
from kvlearn.models import encode, load_model
from kvlearn.shapes import Protection
from kvlearn.sharing import share_out
from kvlearn.tasks.base import Case, Question, Run
from kvlearn.tasks.questions import ask

NAME = "kvlearn"
_GREEDY_ONLY = ("temperature", "top_p", "top_k")


class KvlearnLM(TemplateLM):
    """A model under a budget of cache slots, one request at a time.

    A request's context is fed at once and cut to the budget, as in generation. Continuations are teacher-forced block
    by block, each on a copy of the cache, so that the answers of a multiple-choice question share one context.

    Args:
        pretrained: a Hub id, a folder, a .gguf file or an alias (see :func:`kvlearn.models.load_model`).
        policy: a policy's name with options, or a scorer's folder.
        budget: slots per KV head and layer; none needed for policy ``full``.
        block: queries per observed block.
        sinks: first tokens that no policy may evict.
        recent: latest tokens that no policy may evict; one block by default.
        allocation: how slots are shared among layers and heads (:func:`kvlearn.sharing.share_out`).
        dtype: of the weights.
        device: where the model runs.
        max_length: longest text in tokens, longer contexts lose their beginning; the model's own by default.
        max_gen_toks: tokens to generate where a task does not say.
        batch_size: 1; more is refused.
        max_batch_size: not used.

    Raises:
        KvlearnError: the model, the policy or the budget cannot be had.
    """

    def __init__(
        self,
        pretrained: str,
        policy: str = "full",
        budget: int | None = None,
        block: int | None = None,
        sinks: int = 4,
        recent: int | None = None,
        allocation: str = "uniform",
        dtype: Any = "bfloat16",
        device: str | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        batch_size: int | str | None = 1,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        if batch_size not in (None, 1, "1"):
            raise KvlearnError(f"batch_size is {batch_size}; kvlearn takes one request at a time, leave it out.")
        if device is None or (device.startswith("cuda") and not torch.cuda.is_available()):
            device = "cpu"  # the harness says cuda:0 unless it is told something else
        loaded = load_model(str(pretrained), dtype=dtype, device=device)
        self.model = attention.enable(loaded.model)
        self.tokenizer: Any = loaded.tokenizer
        how: dict[str, Any] = {"block": block, "protect": Protection(sinks=sinks, recent=recent)}
        shared = share_out(self.model, budget, str(allocation), **how)
        self.options: dict[str, Any] = {"policy": str(policy), **shared, **how}
        self.max_length = max_length or loaded.context_length or sys.maxsize
        self.max_gen_toks = max_gen_toks
        self._device = self.model.device
        self._name = loaded.name
        self._run()  # what cannot be done is refused before a task is loaded

    def _run(self) -> Run:
        return Run(self.model, self.tokenizer, EvictingCache(self.model, **self.options))

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        end = self.tokenizer.eos_token_id
        if end is None:
            raise KvlearnError(f"the tokenizer of {self._name} has no token that ends a text.")
        return int(end)

    @property
    def tokenizer_name(self) -> str:
        """Names the tokenizer in the harness's caches."""
        return self._name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Tokens of a text, and nothing else (see :func:`kvlearn.models.encode`)."""
        return encode(self.tokenizer, string)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as the model was trained on it."""
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Sum of the log-likelihoods of each continuation in nats, and whether greedy decoding would give it."""
        by_context: dict[tuple[int, ...], list[int]] = {}
        for number, (_, context, continuation) in enumerate(requests):
            kept = context[-max(1, self.max_length - len(continuation)) :]
            by_context.setdefault(tuple(kept), []).append(number)
        found: dict[int, tuple[float, bool]] = {}
        for context, numbers in tqdm(by_context.items(), desc="contexts", disable=disable_tqdm):
            questions = tuple(_forced(requests[number][2]) for number in numbers)
            case = Case("", "", torch.tensor(context), prompt=len(context), questions=questions)
            (scores,) = ask(self._run(), [case])
            for number, score in zip(numbers, scores, strict=True):
                found[number] = (-score.nll * score.tokens, bool(score.right))
                if requests[number][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[number][0], found[number])
        return [found[number] for number in range(len(requests))]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, fed as if token by token; longer ones than the model takes in windows."""
        totals = []
        for (text,) in tqdm([request.args for request in requests], desc="texts", disable=disable_tqdm):
            windows: Iterable[Any] = get_rolling_token_windows(
                encode(self.tokenizer, text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            pairs = [(None, *make_disjoint_window(window)) for window in windows]
            totals.append(sum(total for total, _ in self._loglikelihood_tokens(pairs, disable_tqdm=True)))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), totals[-1])
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Text after each context, up to the first of its stop sequences."""
        texts = []
        for context, wanted in tqdm([request.args for request in requests], desc="generating", disable=disable_tqdm):
            settings: dict[str, Any] = dict(normalize_gen_kwargs(wanted, self.max_gen_toks))
            until = handle_stop_sequences(settings.pop("until", None), eos=self.tokenizer.eos_token)
            texts.append(self._generate(context, settings, [stop for stop in until if stop]))
            self.cache_hook.add_partial("generate_until", (context, wanted), texts[-1])
        return texts

    def _generate(self, context: str, settings: dict[str, Any], until: list[str]) -> str:
        count = settings.pop("max_gen_toks")
        if not settings.get("do_sample"):
            settings = {name: value for name, value in settings.items() if name not in _GREEDY_ONLY}
        room = max(1, self.max_length - count)
        ids = torch.tensor([(encode(self.tokenizer, context) or [self.prefix_token_id])[-room:]], device=self.device)
        model: Any = self.model
        run = self._run()
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            stop_strings=until or None,
            tokenizer=self.tokenizer,
            pad_token_id=self.eot_token_id,
            **{attention.cache_argument(self.model): run.cache},
            **settings,
        )
        text = self.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=False)
        return postprocess_generated_text(str(text), until, None)


def _forced(continuation: list[int]) -> Question:
    return Question(torch.tensor(continuation), torch.ones(len(continuation), dtype=torch.bool))


def register() -> None:
    """Make ``kvlearn`` known to the harness; twice does no harm."""
    if NAME not in model_registry:
        model_registry.register(NAME, target=KvlearnLM)


def main(arguments: Sequence[str] | None = None) -> None:
    """The harness's own command line, with ``--model kvlearn`` in it.

    Args:
        arguments: as ``lm-eval`` takes them; those of this process by default.
    """
    from lm_eval.__main__ import cli_evaluate

    register()
    if arguments is not None:
        sys.argv = ["lm-eval", *arguments]  # the harness reads nothing else
    logging.getLogger("lm_eval").setLevel(logging.WARNING)
    cli_evaluate()


if __name__ == "__main__":
    main()
