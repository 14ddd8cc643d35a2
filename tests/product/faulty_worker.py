"""A worker of the demo that never gets to its messages: the demo must say why."""

import sys

from procession.demo import worker
from procession.flows.consume import Consume


async def fail(_: Consume) -> int:
    raise NameError("no such name")


Consume.step = fail

if __name__ == "__main__":
    worker.main(sys.argv[1:])
