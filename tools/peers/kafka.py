"""Kafka: one broker, which is its own controller, and librdkafka's client."""

from __future__ import annotations

import base64
import os
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peers.jars import classpath, java
from peers.peer import PATIENCE, Peer, Place, Writer, free_port, library, names, server

PAGE = 1000  # records of one answer
PROPERTIES = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
controller.listener.names=CONTROLLER
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
log.dirs={folder}
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
{further}
"""
FURTHER = {"process": "", "disk": "log.flush.interval.messages=1"}


class _TopicWriter:
    def __init__(self, address: str, name: str) -> None:
        self._name = name
        # Each record is its own request when it is awaited; a batch waits 1 ms for more records, as it does by default.
        self._producer = _library().Producer({"bootstrap.servers": address, "acks": "all", "linger.ms": 0})

    def append(self, value: bytes) -> None:
        """Produce, and wait for the acknowledgement."""
        self.append_many([value])

    def append_many(self, values: list[bytes]) -> None:
        """Produce all values, then wait for their acknowledgements."""
        for value in values:
            self._producer.produce(self._name, value)
        if self._producer.flush(PATIENCE):
            raise TimeoutError(f"Kafka did not acknowledge records within {PATIENCE:g} s")


class Kafka(Peer):
    """A topic with one partition, without replicas."""

    @contextmanager
    def serve(self, folder: Path, level: str) -> Iterator[Callable[[], Place]]:
        """Format the storage, and start the broker."""
        _library()
        run = [*java(), "-Xmx1g", "-cp", classpath("kafka")]
        port, found = free_port(), names()
        file = folder / "server.properties"
        file.write_text(PROPERTIES.format(port=port, controller=free_port(), folder=folder / "kafka", further=FURTHER[level]))
        cluster = base64.urlsafe_b64encode(os.urandom(16)).decode().rstrip("=")
        subprocess.run([*run, "kafka.tools.StorageTool", "format", "-t", cluster, "-c", str(file)], check=True, capture_output=True)
        address = f"127.0.0.1:{port}"

        def create() -> Place:
            place = Place(address, next(found), level)
            topic = _admin().NewTopic(place.name, num_partitions=1, replication_factor=1)
            admin = _admin().AdminClient({"bootstrap.servers": address})
            admin.create_topics([topic])[place.name].result(PATIENCE)
            return place

        command = [*run, "kafka.Kafka", str(file)]
        with server(command, lambda: _answers(address), "Kafka", cwd=folder, stderr=subprocess.DEVNULL):
            yield create

    @contextmanager
    def write(self, place: Place) -> Iterator[Writer]:
        """Connect."""
        yield _TopicWriter(place.address, place.name)

    def replay(self, place: Place, count: int) -> Iterable[object]:
        """Consume from offset 0, a thousand records at a time."""
        with _consumer(place, _library().OFFSET_BEGINNING) as consumer:
            read = 0
            while read < count and (messages := consumer.consume(PAGE, PATIENCE)):
                read += len(messages)
                yield from messages

    @contextmanager
    def follow(self, place: Place) -> Iterator[Iterator[bytes]]:
        """Poll for new records."""
        with _consumer(place, _library().OFFSET_BEGINNING) as consumer:
            partition = _library().TopicPartition(place.name, 0)
            _, end = consumer.get_watermark_offsets(partition, timeout=PATIENCE)
            consumer.assign([_library().TopicPartition(place.name, 0, end)])
            consumer.poll(0.5)  # the first fetch has been sent

            def values() -> Iterator[bytes]:
                while (message := consumer.poll(PATIENCE)) is not None:
                    if message.error() is None:
                        yield message.value()

            yield values()


@contextmanager
def _consumer(place: Place, offset: int) -> Iterator[Any]:
    consumer = _library().Consumer({"bootstrap.servers": place.address, "group.id": "bench", "enable.auto.commit": False})
    try:
        consumer.assign([_library().TopicPartition(place.name, 0, offset)])
        yield consumer
    finally:
        consumer.close()


def _library() -> Any:
    return library("confluent_kafka", "confluent-kafka")


def _admin() -> Any:
    import confluent_kafka.admin

    return confluent_kafka.admin


def _answers(address: str) -> bool:
    try:
        _admin().AdminClient({"bootstrap.servers": address, "log_level": 0}).list_topics(timeout=1)
    except _library().KafkaException:
        return False
    return True


PEERS = {"kafka": Kafka("kafka", "Kafka, one broker")}
