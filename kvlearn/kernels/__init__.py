"""Operations of the cache runtime, one folder each.

A folder holds the public function (validates, then dispatches on ``impl``) and ``reference.py`` (plain PyTorch, which
defines the meaning). An explicit ``impl`` never falls back to another.
"""
