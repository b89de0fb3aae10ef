"""Log messages of many processes in one log, as structured records.

    logging.getLogger().addHandler(kvspool.logging.Handler("logs/app"))

A message survives SIGKILL of its process as soon as the call of the logger returns. `kvspool tail --logs -f logs/app` shows the messages.
"""

from kvspool.logging.handler import Handler
from kvspool.logging.structured import StructlogProcessor

__all__ = ["Handler", "StructlogProcessor"]
