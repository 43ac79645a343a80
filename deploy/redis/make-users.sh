#!/bin/sh
# Prints an ACL file for a Redis or Valkey server that Leash uses: one user a role, each with a
# password of its own, and no default user.
#   deploy/redis/make-users.sh > users.acl
#   deploy/redis/make-users.sh --admin FILE > users.acl    also a user `admin` who may do everything,
#                                                          with the password in FILE
#   deploy/redis/make-users.sh --redis-7.0 > users.acl     without the commands that came with 7.2
# The passwords go to the standard error, once: keep them. The output holds only their hashes.
set -eu
here=$(dirname "$0")

hash() { printf %s "$1" | sha256sum | cut -d' ' -f1; }

newer=
admin=
while [ $# -gt 0 ]; do
    case $1 in
        --redis-7.0) newer='s/+waitaof//; s/+client|setinfo//' ;;
        --admin) admin=$2; shift ;;
        *) echo "make-users.sh: unknown argument $1" >&2; exit 2 ;;
    esac
    shift
done

echo "user default off"
if [ -n "$admin" ]; then
    echo "user admin on ~* &* +@all #$(hash "$(cat "$admin")")"
fi
for role in rollout trainer controller watcher; do
    password=$(head -c 24 /dev/urandom | od -An -v -tx1 | tr -d ' \n')
    rules=$(grep -v '^#' "$here/$role.acl" | tr '\n' ' ' | sed "$newer")
    echo "user leash-$role reset #$(hash "$password") $rules"
    echo "leash-$role $password" >&2
done
