"""Kafka transactions of one instance: messages and the ledger's record of them, together or not at all.

::

    take_over()     refuse an older owner; a producer with the instance's transactional id: the broker ends or undoes what an
                    earlier producer of that id has begun, and refuses that producer from now on; end likewise what other
                    instances' producers have left open, if it hides a part of the ledger, or if there is no such instance any
                    more; read the ledger
    perform()       read from the ledger whether anything is left to do; begin; send; record; commit

Whatever fails, the producer is thrown away, and :meth:`perform` begins again with :meth:`take_over`, which settles a
transaction of unknown outcome, and then reads in the ledger what has become of it. So nothing is sent twice.

The id alone does not fence by epoch, since the latest producer wins: an older owner that wakes up reads the newest owner before
it creates a producer. If it creates one all the same, since it was paused in between, the newer owner's next transaction is
refused, takes over again, and the older owner finds the newer one in the ledger.

Must not know where messages come from.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from dagster_checkpoints.sinks.engine import Plan, SinkScope
from dagster_checkpoints.sinks.kafka.cluster import KafkaCluster
from dagster_checkpoints.sinks.kafka.topics import KafkaTopic, LedgerBlocked, LedgerTopic, LedgerValues, ledger_key
from dagster_checkpoints.sinks.ledger import Change, Ledger, encode_ledger
from dagster_checkpoints.sinks.target import Guard
from dagster_checkpoints.systems.errors import SinkError, SinkFenced, SinkTransactionLost, SinkUnavailable

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Message, Producer

_PAUSE = 0.5
_ABORT_SECONDS = 5.0

Send = Callable[[Change, "Outbox"], None]
"""Sends the messages of a change; called again for another attempt."""


class Outbox:
    """The open transaction of a producer.

    Args:
        producer: the producer.
        topic: the target's name.
        failures: errors of messages, which the producer adds.
        patience: seconds to wait for brokers that accept nothing.
    """

    def __init__(self, producer: Producer, topic: str, failures: list[KafkaError], patience: float) -> None:
        self._producer = producer
        self._topic = topic
        self._failures = failures
        self._patience = patience

    def send(self, key: bytes | None, value: bytes | None, headers: list[tuple[str, str | bytes | None]]) -> None:
        """Hand a message to the producer; waits while its queue is full. Raises KafkaException."""
        try:
            self._producer.produce(self._topic, value, key, headers=headers)
        except BufferError:
            self._wait_for_space()
            self._producer.produce(self._topic, value, key, headers=headers)

    def record(self, ledger_topic: str, key: bytes, value: bytes) -> None:
        """Hand the ledger's record to the producer, and wait until every message is delivered. Raises KafkaException."""
        self._flush()  # the queue may be full
        self._producer.produce(ledger_topic, value, key)
        self._flush()

    def _flush(self) -> None:
        self._wait(lambda: not self._producer.flush(_PAUSE))

    def _wait_for_space(self) -> None:
        full = len(self._producer)
        self._wait(lambda: (self._producer.poll(0.05), len(self._producer) < full * 3 // 4)[1])

    def _wait(self, done: Callable[[], bool]) -> None:
        from confluent_kafka import KafkaError, KafkaException

        left, since = len(self._producer), time.monotonic()
        while not done():
            if self._failures:
                raise KafkaException(self._failures[0])
            if len(self._producer) < left:
                left, since = len(self._producer), time.monotonic()
            elif time.monotonic() > since + self._patience:
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "the brokers do not accept messages"))
        if self._failures:
            raise KafkaException(self._failures[0])


class KafkaTransactions:
    """The transactions of one instance.

    Args:
        cluster: the cluster.
        target: the topic that messages are sent to.
        ledger_topic: its ledger topic, which exists.
        scope: the instance.
        guard: refuses a ledger that names a newer owner.
        retry_for: how long a transaction is repeated while brokers are away, in seconds.
        sink: the sink as errors name it.
    """

    def __init__(
        self,
        cluster: KafkaCluster,
        target: KafkaTopic,
        ledger_topic: LedgerTopic,
        scope: SinkScope,
        guard: Guard,
        retry_for: float,
        sink: str,
    ) -> None:
        self._cluster = cluster
        self._target = target
        self._ledger_topic = ledger_topic
        self._scope = scope
        self._guard = guard
        self._retry_for = retry_for
        self._sink = sink
        self._producer: Producer | None = None
        self._failures: list[KafkaError] = []
        self.values = LedgerValues()

    @property
    def ledger(self) -> Ledger:
        """The instance's ledger, as it was read or written last."""
        return self.values.ledger(self._scope) or Ledger()

    def take_over(self) -> None:
        """Become the instance's newest owner.

        Raises:
            SinkFenced: there is a newer one.
            SinkUnavailable: the cluster does not answer.
        """
        self._retried(lambda: None, "taking over the topic")

    def check_owner(self) -> None:
        """Refuse an older owner, as far as the ledger topic can be read without waiting for transactions that are open.

        Raises:
            SinkFenced: there is a newer one.
            SinkUnavailable: the cluster does not answer.
        """
        found = self._ledger_topic.read_committed().ledger(self._scope)
        if found is not None:  # not kept: its own newest record may be behind an open transaction
            self._guard(found)

    def perform(self, plan: Plan, send: Send) -> Change | None:
        """Change the instance's ledger, and send messages, in one Kafka transaction.

        Args:
            plan: the change, planned from the newest ledger.
            send: sends the messages of the change.

        Returns:
            The change; None if nothing was to be done.

        Raises:
            SinkFenced: a newer run writes to the topic.
            SinkRowsRefused: the topic does not accept a message.
            SinkTargetChanged: the topic does not exist any more.
            SinkUnavailable: the cluster does not answer.
        """
        done: Change | None = None

        def change() -> None:
            nonlocal done
            planned = plan(self.ledger)
            if planned is not None:
                done = planned
                self._transact(planned, send)

        self._retried(change, "committing a transaction")
        return done

    def close(self) -> None:
        """Release the producer. Idempotent."""
        producer, self._producer = self._producer, None
        if producer is not None:
            with suppress(Exception):  # it is of no use any more, whatever state it is in
                producer.purge(blocking=False)
                producer.abort_transaction(_ABORT_SECONDS)
            del producer

    def _retried(self, work: Callable[[], None], doing: str) -> None:
        until: float | None = None
        while (failed := self._attempt(work, doing)) is not None:
            until = until or time.monotonic() + self._retry_for
            if not isinstance(failed, SinkUnavailable) or time.monotonic() > until:
                raise failed
            time.sleep(_PAUSE)

    def _attempt(self, work: Callable[[], None], doing: str) -> SinkError | None:
        from confluent_kafka import KafkaException

        try:
            if self._producer is None:
                self._take_over()
            work()
            return None
        except SinkFenced:
            self.close()
            raise
        except SinkTransactionLost:
            self.close()
            self._accept(self._ledger_topic.read())  # a newer owner has deleted the files
            raise
        except SinkError as error:
            self.close()
            return error
        except (KafkaException, TimeoutError, SystemError) as error:
            failed = self._cluster.failed(self._failures[0] if self._failures else error, doing)
            self.close()
            if not self._scope.owner.epoch and "_FENCED" in str(error):
                return SinkFenced(f"{self._sink}: expected no other run to write to this topic, found one: {failed}")
            return failed

    def _take_over(self) -> None:
        self._accept(self._ledger_topic.read_committed())  # its own earlier transaction may be open
        self._failures = []
        self._producer = self._new_producer(self._scope.index)
        if self._scope.index == 0:
            self._end_transactions(lambda index: index >= self._scope.parallelism)
        self._accept(self._settled_ledger())

    def _settled_ledger(self) -> LedgerValues:
        """The ledger as all transactions have left it that began before the call.

        A run that was killed may have left a transaction of any of the stage's instances open, and whatever is behind it cannot
        be read. It is not waited for: instances may start one after the other, and some may not be there any more. One that
        runs, and has been slow, takes over again.
        """
        try:
            return self._ledger_topic.read()
        except LedgerBlocked:
            if not self._scope.owner.epoch:  # an instance that runs would stop
                raise
            self._end_transactions(lambda _index: True)
            return self._ledger_topic.read()

    def _end_transactions(self, of: Callable[[int], bool]) -> None:
        """End open transactions of other instances of the stage, which earlier runs may have left."""
        indices = {*range(self._scope.parallelism), *self.values.of_stage(self._scope)} - {self._scope.index}
        for index in filter(of, sorted(indices)):
            self._new_producer(index)

    def _new_producer(self, index: int) -> Producer:
        """A producer with an instance's transactional id: the broker ends what an earlier one of that id has begun."""
        scope = self._scope
        name = f"dagster-checkpoints/{scope.pipeline}/{scope.stage}/{index}/{self._target.name}"
        producer = self._cluster.producer(name, self._target.message_bytes, self._delivered)
        producer.init_transactions(self._cluster.request_seconds)
        return producer

    def _accept(self, values: LedgerValues) -> None:
        """Keep what the ledger topic holds; refuses an older owner."""
        self.values = values
        self._guard(self.ledger)

    def _transact(self, change: Change, send: Send) -> None:
        assert self._producer is not None
        producer = self._producer
        outbox = Outbox(producer, self._target.name, self._failures, self._retry_for)
        producer.begin_transaction()
        send(change, outbox)
        key, value = ledger_key(self._scope), encode_ledger(change.ledger)
        outbox.record(self._ledger_topic.name, key, value)
        producer.commit_transaction(max(self._retry_for, self._cluster.request_seconds))
        self.values = LedgerValues({**self.values.values, key: value}, self._ledger_topic.name)

    def _delivered(self, error: KafkaError | None, _message: Message) -> None:
        if error is not None:
            self._failures.append(error)
