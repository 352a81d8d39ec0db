"""Experiments that try to break the library: kills, damage, nonsense, malice, rivals, full disks.

`make chaos` runs all of them at full size and writes the table in docs/reliability.md;
`test_chaos.py` runs a sample. Every trial has a key such as `damage:7:123` (experiment, seed and
number), with which `python -m chaos --replay damage:7:123` repeats it.
"""
