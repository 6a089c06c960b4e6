#!/bin/sh
# sh with_users.sh redis-server …: starts Redis with the users of users.acl and the password REDISCLI_AUTH.
# Uses only shell builtins, because every user of the machine can read the command line of a process.
set -eu
: "${REDISCLI_AUTH:?set the password of the Redis users}"
case $REDISCLI_AUTH in
    *[!0-9A-Za-z_-]*) echo "REDISCLI_AUTH: only letters, digits, - and _ fit into users.acl and into an address" >&2; exit 1 ;;
esac
umask 077
acl=${TMPDIR:-/tmp}/users.acl
while IFS= read -r line; do
    case $line in
        "user "*PASSWORD*) printf '%s\n' "${line%%PASSWORD*}$REDISCLI_AUTH${line#*PASSWORD}" ;;
        "user "*) printf '%s\n' "$line" ;;
    esac
done < "${0%/*}/users.acl" > "$acl"
exec "$@" --aclfile "$acl"
