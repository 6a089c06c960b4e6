#!/bin/sh
# sh deploy/with_metrics.sh PROGRAM …: runs the program, and a metrics server of this container at port 9102 beside it.
# Only the same container can read the program's metric files (/run/aftertouch) and check which of its processes run.
# The server restarts if it exits. Only the program gets SIGTERM; the container and the server end with it.
(
    while :; do
        python manage.py serve_metrics --address 0.0.0.0
        sleep 2
    done
) &
exec "$@"
