"""Figures for Prometheus, read from the engine and the sessions whenever they are asked for."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from txl_jax.serving.engine import Engine

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Metrics:
    """The metrics of one server, in a registry of its own."""

    def __init__(self, engine: Engine):
        """Registers the engine's figures."""
        self._registry = CollectorRegistry()
        self._registry.register(_EngineFigures(engine))
        self.requests = Counter("txl_requests", "Requests, by status.", ["status"], registry=self._registry)
        self.seconds = Histogram(
            "txl_request_seconds", "Time of completions.", buckets=_SECONDS, registry=self._registry
        )

    def text(self) -> bytes:
        """Returns the text format of Prometheus."""
        return generate_latest(self._registry)


class _EngineFigures(Collector):
    """Figures of rows, tokens and sessions."""

    def __init__(self, engine: Engine):
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        """Yields the figures as they are now."""
        engine, counters = self._engine, self._engine.counters
        yield GaugeMetricFamily("txl_rows", "Rows of the compiled step.", engine.step.batch_size)
        yield GaugeMetricFamily("txl_rows_busy", "Rows in use.", engine.num_busy)
        yield GaugeMetricFamily("txl_choices_waiting", "Choices that wait for a row.", engine.num_waiting)
        yield GaugeMetricFamily("txl_sessions", "Sessions kept.", engine.store.num_sessions)
        yield GaugeMetricFamily("txl_ready", "Whether requests are taken.", engine.ready)
        yield CounterMetricFamily("txl_tokens_read", "Tokens of prompts that were read.", counters.read)
        yield CounterMetricFamily("txl_tokens_written", "Tokens that were written.", counters.written)
        yield CounterMetricFamily("txl_step_calls", "Calls of the compiled step.", counters.calls)
        yield CounterMetricFamily("txl_row_steps", "Tokens drawn, discarded ones included.", counters.steps)
        ended = CounterMetricFamily("txl_choices_ended", "Choices that have ended, by reason.", labels=["reason"])
        for reason, count in list(counters.ended.items()):
            ended.add_metric([reason], count)
        yield ended
