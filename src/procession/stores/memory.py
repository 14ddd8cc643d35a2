"""placeholder"""


class MemoryStore:
    def __init__(self, settings=None): ...
