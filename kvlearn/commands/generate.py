"""``kvlearn generate``: text under a budget."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvlearn.commands import options
from kvlearn.errors import KvlearnError

if TYPE_CHECKING:
    from kvlearn.cache import EvictingCache
    from kvlearn.models import LoadedModel


def generate(
    model: options.Model,
    scorer: Annotated[
        str | None, typer.Option(help="A scorer's folder or Hub id, such as checkpoints/smollm2-135m.")
    ] = None,
    policy: Annotated[str | None, typer.Option(help="A policy's name (see `kvlearn policies`); else full.")] = None,
    budget: Annotated[int | None, typer.Option(help="The most slots each KV head of a layer may hold.")] = None,
    prompt: Annotated[str | None, typer.Option(help="The prompt; without it and --prompt-file, stdin.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A UTF-8 text file with the prompt.")] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Use the chat template, as instruction-tuned models expect; on a terminal, go on turn by turn.",
        ),
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate per answer.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="With a temperature, nucleus of this mass.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of sampling.")] = 0,
    allocation: options.SharedOut = "uniform",
    block: Annotated[int | None, typer.Option(help="Queries per observed block; 32, less for small budgets.")] = None,
    sinks: options.Sinks = 4,
    recent: options.Recent = None,
    dtype: options.Dtype = "bfloat16",
    device: options.Device = "cpu",
    threads: options.Threads = None,
) -> None:
    """Generate text with a bounded cache, then say what was held."""
    if scorer is not None and policy is not None:
        raise KvlearnError("give --scorer or --policy, not both.")
    if budget is not None and scorer is None and policy is None:
        raise KvlearnError("--budget says how much is held, but not by which choice; give --scorer or --policy too.")
    if scorer is not None:
        options.check_scorer(scorer)
    chosen = scorer or policy or "full"
    text = _first_prompt(prompt, prompt_file, chat)

    import torch

    from kvlearn import EvictingCache, attention
    from kvlearn.sharing import share_out

    loaded = options.load(model, dtype, device, threads)
    attention.enable(loaded.model)
    torch.manual_seed(seed)
    protect = options.protection(sinks, recent)
    shared = share_out(loaded.model, budget, allocation, block=block, protect=protect)
    cache = EvictingCache(loaded.model, chosen, **shared, block=block, protect=protect)
    settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
    if temperature > 0:
        settings |= {"temperature": temperature, "top_p": top_p}
    conversation = _Conversation(loaded, cache, chat, settings)
    conversation.answer(text)
    while chat and sys.stdin.isatty() and (text := _ask()):
        conversation.answer(text)
    print(conversation.summary(), file=sys.stderr)
    if not chat and getattr(loaded.tokenizer, "chat_template", None):
        print(f"{loaded.name} has a chat template: with --chat it answers instead of continuing.", file=sys.stderr)


def _first_prompt(prompt: str | None, file: Path | None, chat: bool) -> str:
    if prompt is not None and file is not None:
        raise KvlearnError("give --prompt or --prompt-file, not both.")
    if file is not None:
        text = options.text_of(file)
    elif prompt is not None:
        text = prompt
    elif chat and sys.stdin.isatty():
        text = _ask()
    else:
        text = _stdin()
    if any("\ud800" <= letter <= "\udfff" for letter in text):  # how Python passes on bytes that are no text
        raise KvlearnError("the prompt is not valid UTF-8; give text.")
    if not text.strip():
        raise KvlearnError("the prompt is empty; give --prompt TEXT, --prompt-file FILE, or text on stdin.")
    return text


def _stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise KvlearnError(f"cannot read the prompt from stdin: {error}.") from error


def _ask() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


class _Conversation:
    """One cache over any number of turns."""

    def __init__(self, loaded: LoadedModel, cache: EvictingCache, chat: bool, settings: dict[str, Any]) -> None:
        self.loaded, self.cache, self.chat, self.settings = loaded, cache, chat, settings
        self.ids: list[int] = []  # everything so far: generate() slices off what the cache has seen
        self.messages: list[dict[str, str]] = []
        self.new_tokens = 0
        self.seconds = 0.0

    def answer(self, text: str) -> None:
        """Feed the user's text and stream the model's answer to stdout."""
        import torch
        from transformers import TextStreamer

        from kvlearn.attention import cache_argument
        from kvlearn.models import encode

        model: Any = self.loaded.model
        tokenizer: Any = self.loaded.tokenizer
        if self.chat:
            if tokenizer.chat_template is None:
                raise KvlearnError(f"{self.loaded.name} has no chat template; leave --chat out.")
            before = self._render(generating=False) if self.messages else ""
            self.messages.append({"role": "user", "content": text})
            text = self._render(generating=True)[len(before) :]
        fresh = encode(tokenizer, text)
        if not fresh:
            raise KvlearnError("the prompt holds no tokens.")
        self.ids += fresh
        ids = torch.tensor([self.ids], device=model.device)
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        started = time.perf_counter()
        try:
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                streamer=streamer,
                pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
                **{cache_argument(model): self.cache},
                **self.settings,
            )
        except BaseException:  # Ctrl-C among them
            if streamer.token_cache:  # something was written: what is said next begins a line of its own
                streamer.end()
            raise
        self.seconds += time.perf_counter() - started
        new = output[0, len(self.ids) :].tolist()
        self.new_tokens += len(new)
        self.ids += new
        if self.chat:
            self.messages.append({"role": "assistant", "content": tokenizer.decode(new, skip_special_tokens=True)})

    def _render(self, *, generating: bool) -> str:
        rendered = self.loaded.tokenizer.apply_chat_template(
            self.messages, tokenize=False, add_generation_prompt=generating
        )
        assert isinstance(rendered, str)
        return rendered

    def summary(self) -> str:
        """What was held, in one line."""
        held = self.cache.stats()
        length = max(held["length"], default=0)
        speed = self.new_tokens / self.seconds
        return (
            f"{self.cache.policy.label}: {self.new_tokens} new tokens at {speed:.1f} tokens/s; "
            f"{held['mean_slots']:.0f} slots per KV head held of {length} tokens seen, "
            f"{held['evictions']:.0f} evicted; "
            f"cache {held['bytes'] / 2**20:.1f} MiB allocated ({held['kv_bytes'] / 2**20:.1f} keys and values, "
            f"{held['state_bytes'] / 2**20:.1f} scorer state)"
        )
