"""Checks an installation: `python -m deep_ep.selftest intranode|low_latency|internode`.

Starts one process for each rank, runs every case on all of them, prints a line for each, then the figures. The exit
status is 0 only if every case passed.
"""
