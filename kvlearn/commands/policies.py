"""``kvlearn policies``: what can decide which tokens to forget."""

TRACKED = {"history": "history", "last_query": "last query", "static": "key features", "queries": "latest queries"}


def policies() -> None:
    """List the eviction policies: what they keep, where they come from, and what they cost the cache.

    A name takes options, as in ema:half_life=16 or snapkv:kernel=7:pooling=max. A scorer's folder or Hub id is a policy
    too.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from kvlearn.policies import POLICIES
    from kvlearn.policies.options import describe_options

    table = Table(box=None, pad_edge=False, leading=1)
    table.add_column("name", no_wrap=True)
    table.add_column("kind", no_wrap=True)
    table.add_column("what it keeps; source; what the cache tracks for it; options")
    for policy in POLICIES.values():
        reads = ", ".join(TRACKED[read] for read in sorted(policy.reads))
        facts = [policy.paper, reads, describe_options(policy)]
        lines = Text("\n").join([Text(policy.summary), Text("; ".join(filter(None, facts)), style="dim")])
        table.add_row(policy.name, policy.kind, lines)
    Console().print(table)
