#!/bin/sh
# sh deploy/with_metrics.sh PROGRAM …: becomes the program, and leaves beside it what serves /metrics of this container at port 9102.
# In the same container, because only there the counts of the program can be read (/run/aftertouch) and is known which of its processes
# live. It is begun again when it dies, and goes with the container when the program ends, which alone is told to stop.
(
    while :; do
        python manage.py serve_metrics --address 0.0.0.0
        sleep 2
    done
) &
exec "$@"
