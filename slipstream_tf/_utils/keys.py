"""Keys with a special meaning. Hashes of text and keys of ids are never equal to them."""

PADDING_KEY = -1
"""Default key that marks a place without a key in a dense bag."""

MISSING_KEY = -2
"""Key of a missing categorical value in a batch. In prepared folders it is null."""

RESERVED_KEYS = (PADDING_KEY, MISSING_KEY)
