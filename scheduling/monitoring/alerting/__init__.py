"""Send the main alerts through Aftertouch's own channels.

A thread of beat evaluates them, so they need neither workers nor a broker. Prometheus rules (`deploy/prometheus`) cover
more conditions.
"""
