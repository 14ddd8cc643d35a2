"""Turns payloads into bodies and back.

Bodies of our own are canonical: equal payloads are equal bytes and have one fingerprint.
"""

from procession.codecs.json import JsonCodec

__all__ = ["JsonCodec"]
