#!/bin/sh
# Prints an ACL file for a Redis or Valkey server that Leash uses: one user a role, each with a
# password of its own, and no default user.
#   deploy/redis/make-users.sh > users.acl                 leash-ROLE, for all runs of the server
#   deploy/redis/make-users.sh --team night >> users.acl   night-ROLE, for runs whose names begin night-
#   deploy/redis/make-users.sh --admin FILE > users.acl    also a user `admin` who may do everything,
#                                                          with the password in FILE
#   deploy/redis/make-users.sh --redis-7.0 > users.acl     without the command that came with 7.2
# The passwords go to the standard error, once: keep them. The output holds only their hashes.
set -eu
here=$(dirname "$0")

hash() { printf %s "$1" | sha256sum | cut -d' ' -f1; }

newer=
admin=
team=
while [ $# -gt 0 ]; do
    case $1 in
        --redis-7.0) newer='s/+waitaof//' ;;
        --admin) admin=$2; shift ;;
        --team) team=$2; shift ;;
        *) echo "make-users.sh: unknown argument $1" >&2; exit 2 ;;
    esac
    shift
done

case $team in
    *[!A-Za-z0-9._]*) echo "make-users.sh: --team $team: use letters, digits, '.' and '_'" >&2; exit 2 ;;
esac
# No name of a team holds a '-', so no team's pattern takes in the runs of another.
runs=${team:+$team-}

[ -n "$team" ] || echo "user default off"
if [ -n "$admin" ]; then
    echo "user admin on ~* &* +@all #$(hash "$(cat "$admin")")"
fi
for role in rollout trainer controller watcher; do
    password=$(head -c 24 /dev/urandom | od -An -v -tx1 | tr -d ' \n')
    rules=$(grep -v '^#' "$here/$role.acl" | tr '\n' ' ' | sed "$newer; s/{leash:/{leash:$runs/g")
    echo "user ${team:-leash}-$role reset #$(hash "$password") $rules"
    echo "${team:-leash}-$role $password" >&2
done
