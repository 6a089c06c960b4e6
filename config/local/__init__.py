"""Run Aftertouch on one machine: `python -m config.local run`, and `isolated.running_stack()` for demo and tests."""
