"""The one error type users see."""


class KvlearnError(ValueError):
    """A mistake the caller can put right: bad input, a missing file, a request that cannot be honoured.

    The message is one clear sentence: what went wrong, with which value, and what to do about it. The command line
    prints it on one line and exits with status 2. Anything else that escapes is a bug in kvlearn.
    """
