"""``kvlearn corpora``: the texts that --data takes by name."""


def corpora() -> None:
    """List the built-in texts that --data takes by name, and what to install for those not here yet."""
    from rich.console import Console
    from rich.table import Table

    from kvlearn.corpora import list_corpora

    table = Table(box=None, pad_edge=False)
    table.add_column("name", no_wrap=True)
    table.add_column("what it is")
    table.add_column("here")
    for corpus in list_corpora():
        table.add_row(corpus.name, corpus.summary, "yes" if corpus.available else f"no: {corpus.install}")
    Console(markup=False).print(table)  # or the brackets of a package extra would be read as a style
