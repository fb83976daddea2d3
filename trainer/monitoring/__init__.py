"""Metrics and tracking, the watchdog, stop signals, profiling."""
