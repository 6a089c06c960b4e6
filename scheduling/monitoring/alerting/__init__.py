"""The main alerts through the house's own channels: what is looked at, when it is said, and by whom.

The watchman lives in beat, which is alive while workers are dead and needs no broker. Prometheus, where there is one,
knows more (`deploy/prometheus`); this is for houses that have none, and for a robot in the group of those on duty.
"""
