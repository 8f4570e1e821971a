"""``kvlearn corpora``: the texts that need no download."""


def corpora() -> None:
    """List the built-in texts that --data takes by name."""
    from rich.console import Console
    from rich.table import Table

    from kvlearn.corpora import list_corpora

    table = Table(box=None, pad_edge=False)
    for title in ("name", "domain", "text"):
        table.add_column(title)
    for corpus in list_corpora():
        table.add_row(corpus.name, corpus.domain, corpus.description)
    Console().print(table)
