#!/bin/sh
# Stands for docker, podman and kubectl, by the name that it is called by. A container is a folder
# below $CONTAINERS, and an image is absent if it is called so.
program=$(basename "$0")
echo "$program $*" >>"$CONTAINERS/log"
verb=$1
shift
case $verb in
run)
    name=$1 # kubectl's
    for word; do
        case $before in --name) name=$word ;; esac
        before=$word
        case $word in absent | --image=absent) echo "no image $word" >&2 && exit 125 ;; esac
    done
    mkdir "$CONTAINERS/$name"
    ;;
wait) [ -d "$CONTAINERS/${3#pod/}" ] ;;
exec)
    [ "$program" = kubectl ] && [ "$3" != -- ] && exit 1
    cd "$CONTAINERS/$2" || exit 1
    shift 2
    [ "$program" != kubectl ] || shift
    exec "$@"
    ;;
rm) rm -r "$CONTAINERS/$3" ;;
delete) rm -rf "$CONTAINERS/$2" ;;
ps | get) echo a warning >&2 && ls "$CONTAINERS" ;;
esac
